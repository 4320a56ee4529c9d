# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the metadata of an rpm repository says: the files of repomd.xml and the packages of the primary list. Pure."""

from __future__ import annotations

import re
import typing as t
import xml.etree.ElementTree as ET

from .._core.errors import ShareError

# Without these no client can work with the repository; dnf asks for zchunk's form first where there is one.
NEEDED = re.compile(r"(?:primary|filelists|group|group_gz|modules|updateinfo)(?:_zck)?")
_COMMON, _RPM = "{http://linux.duke.edu/metadata/common}", "{http://linux.duke.edu/metadata/rpm}"
_REPO = "{http://linux.duke.edu/metadata/repo}"
# Names of ours for digests that hashlib has under another one.
_DIGESTS = {"sha": "sha1"}
# Those that a repository may name; others of hashlib have no length, or aren't known everywhere.
_KNOWN = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512")


class Data(t.NamedTuple):
    """A file that repomd.xml names; ``digest`` is of the algorithm that hashlib calls ``algorithm``.

    :param size: bytes; 0 where repomd.xml doesn't name them.
    """

    type: str
    path: str
    algorithm: str
    digest: str
    size: int


class Rpm(t.NamedTuple):
    """A package of the primary list; ``version`` has its epoch where that isn't 0, ``source`` is a package's name."""

    name: str
    version: str
    architecture: str
    source: str
    path: str
    algorithm: str
    digest: str
    size: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.version, self.architecture


def data(text: str, where: str) -> list[Data]:
    """Return the files that repomd.xml names.

    :param where: the repository, for the message.
    :raises ShareError: it isn't such a file.
    """
    _no_entities(text, where)
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ShareError(f"{where}: repomd.xml isn't XML: {error}") from error
    found = []
    for row in root.iter(f"{_REPO}data"):
        location, checksum = row.find(f"{_REPO}location"), row.find(f"{_REPO}checksum")
        if location is None or checksum is None:
            raise ShareError(f"{where}: repomd.xml names a file without place or digest")
        size = _octets(row.findtext(f"{_REPO}size"), f"{where}: repomd.xml names a file")
        found.append(Data(str(row.get("type")), str(location.get("href")), *_digest(checksum, where), size))
    if not any(row.type == "primary" for row in found):
        raise ShareError(f"{where}: repomd.xml names no primary list")
    return found


def rpms(stream: t.IO[bytes], where: str) -> t.Iterator[Rpm]:
    """Yield the packages of a primary list, which is read as it comes.

    :raises ShareError: it isn't one.
    """
    try:
        for _event, row in ET.iterparse(stream, events=("end",)):
            if row.tag == f"{_COMMON}package":
                yield _rpm(row, where)
                row.clear()
    except ET.ParseError as error:
        raise ShareError(f"{where}: the primary list isn't XML: {error}") from error


def _rpm(row: ET.Element, where: str) -> Rpm:
    version, location = row.find(f"{_COMMON}version"), row.find(f"{_COMMON}location")
    checksum, size = row.find(f"{_COMMON}checksum"), row.find(f"{_COMMON}size")
    if version is None or location is None or checksum is None or size is None:
        raise ShareError(f"{where}: the primary list has a package without version, place, digest or size")
    # Of another server's package the address is in the list, so no mirror can have it: it is refused as a path.
    elsewhere = location.get("{http://www.w3.org/XML/1998/namespace}base")
    built = row.findtext(f"{_COMMON}format/{_RPM}sourcerpm") or ""
    return Rpm(
        row.findtext(f"{_COMMON}name") or "",
        evr(version.get("epoch") or "0", version.get("ver") or "", version.get("rel") or ""),
        row.findtext(f"{_COMMON}arch") or "",
        source_name(built),
        f"{elsewhere.rstrip('/')}/{location.get('href')}" if elsewhere else str(location.get("href")),
        *_digest(checksum, where),
        _octets(size.get("package"), f"{where}: the primary list has a package"),
    )


def _octets(text: str | None, what: str) -> int:
    """Return a number of bytes; 0 where there is none.

    :raises ShareError: it isn't a number.
    """
    octets = (text or "0").strip()
    if not re.fullmatch(r"[0-9]{1,15}", octets):
        raise ShareError(f"{what} of {octets[:40]!r} bytes")
    return int(octets)


def evr(epoch: str, version: str, release: str) -> str:
    return f"{epoch}:{version}-{release}" if epoch not in ("0", "", "(none)") else f"{version}-{release}"


def source_name(file: str) -> str:
    """Return the name of a source package's file: ``gcc-11.5.0-5.el9.src.rpm`` is of gcc."""
    match = re.fullmatch(r"(.+)-[^-]+-[^-]+\.(?:no)?src\.rpm", file)
    return match.group(1) if match else ""


def _digest(checksum: ET.Element, where: str) -> tuple[str, str]:
    algorithm = str(checksum.get("type")).lower()
    algorithm = _DIGESTS.get(algorithm, algorithm)
    if algorithm not in _KNOWN:
        raise ShareError(f"{where}: its metadata has the digest {algorithm[:40]!r}, which isn't one of a repository")
    return algorithm, (checksum.text or "").strip().lower()


def _no_entities(text: str, where: str) -> None:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ShareError(f"{where}: repomd.xml declares entities, which no repository does")


# --------------------------------------------------------------------------- what the programs print


def zypper_plan(text: str) -> list[tuple[str, str, str]]:
    """Return name, version and architecture of what ``zypper --xmlout install --dry-run`` would install."""
    section = re.search(r"<to-install>(.*?)</to-install>", text, re.DOTALL)
    found = []
    for attributes in re.findall(r"<solvable ([^>]*)>", section.group(1) if section else ""):
        fields = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        if fields.get("type") == "package":
            found.append((fields["name"], re.sub(r"^0:", "", fields["edition"]), fields["arch"]))
    return found


def urls(text: str) -> list[str]:
    """Return the addresses that ``dnf download --url`` prints."""
    return [line.strip() for line in text.splitlines() if re.match(r"[a-z+]+:/.*\.rpm\s*$", line)]


class Section(t.NamedTuple):
    """A repository of a ``.repo`` file, as written."""

    id: str
    fields: t.Mapping[str, str]


def sections(text: str) -> list[Section]:
    """Return the sections of a ``.repo`` file or of dnf.conf; a value goes on in lines that begin with a blank."""
    found: list[tuple[str, dict[str, str]]] = []
    last = ""
    for line in text.splitlines():
        head = re.match(r"\[([^\]]+)\]", line)
        if head:
            found.append((head.group(1), {}))
            last = ""
        elif not found or not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        elif line[0] in " \t" and last:
            found[-1][1][last] += f" {line.strip()}"
        elif "=" in line:
            last = line.partition("=")[0].strip().lower()
            found[-1][1][last] = line.partition("=")[2].strip()
    return [Section(name, fields) for name, fields in found]


def on(value: str | None, default: bool) -> bool:
    """Return what a boolean option of a ``.repo`` file says."""
    return default if value is None or not value.strip() else value.strip().lower() in ("1", "yes", "true", "on")


def filled(text: str, variables: t.Mapping[str, str]) -> str:
    """Return a text of a ``.repo`` file with its variables, ``$releasever`` or ``${releasever}``, replaced."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: variables.get((m[1] or m[2]).lower(), m[0]), text)
