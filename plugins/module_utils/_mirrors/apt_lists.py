# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What apt's files say of a repository: Release, its lists of packages, and the package files that apt names. Pure."""

from __future__ import annotations

import re
import typing as t

from .._core.errors import ShareError

# The forms of a list, most wanted first: apt asks for the first that Release names and the server has.
FORMS = (".xz", ".gz", ".bz2", ".zst", ".lzma", "")
# Two forms are enough for every version of apt.
ENOUGH = 2
BY_HASH = "by-hash/SHA256"
# What apt-get prints of a package that it would download: address, name of the file, bytes, digest.
_URI = re.compile(r"^'([^']+)' (\S+_\S+_\S+\.deb) (\d+) ?(\S*)$", re.MULTILINE)
_FILENAME = re.compile(r"^Filename: *(\S+)", re.MULTILINE)
_FIELD = re.compile(r"^([A-Za-z0-9-]+): *(.*)$", re.MULTILINE)
_SUM = re.compile(r"^ ([0-9a-f]{64}) +(\d+) +(\S+)$", re.MULTILINE)


class Index(t.NamedTuple):
    """One list of packages.

    :param repository: the address above ``dists`` and ``pool``, which ends in a slash.
    :param folder: of Release below it: ``dists/bookworm/``; empty where lists and packages are in one folder.
    :param suite: as a source names it; ``key``: as Release does (``main/binary-amd64/Packages``).
    :param file: where apt has the list.
    :param start: what the names of this Release's files begin with in apt's folder.
    """

    repository: str
    folder: str
    suite: str
    component: str
    key: str
    file: str
    start: str


class Stanza(t.NamedTuple):
    """A package of a list; ``source``: the package that it is built from."""

    name: str
    version: str
    architecture: str
    source: str
    path: str
    sha256: str
    size: int


INDEX_FORM = "$(REPO_URI)\t$(URI)\t$(RELEASE)\t$(COMPONENT)\t$(METAKEY)\t$(FILENAME)\t$(CREATED_BY)\t$(ARCHITECTURE)"


def indexes(text: str, architecture: str) -> list[Index]:
    """Return the lists of packages that ``apt-get indextargets`` prints in ``INDEX_FORM``.

    :param architecture: dpkg's name; lists of another one are left out.
    :raises ShareError: an address isn't below that of its repository.
    """
    found = []
    for line in text.splitlines():
        # Of a flat repository apt doesn't replace the words for what it has not.
        fields = ["" if field.startswith("$(") else field for field in line.split("\t")]
        if len(fields) != 8 or fields[6] != "Packages" or fields[7] not in (architecture, "all", ""):
            continue
        repository, address, suite, component, key, file = fields[:6]
        if not address.startswith(repository) or not address.endswith(key):
            raise ShareError(f"apt names the list {address}, which isn't below {repository}")
        folder = address[len(repository) : len(address) - len(key)].replace("./", "").lstrip("/")
        found.append(Index(repository, folder, suite or "/", component, key, file, _list_start(file, key)))
    return found


def _list_start(file: str, key: str) -> str:
    name = key.replace("/", "_")
    at = file.rfind(name)
    return file[:at] if at > 0 else file


def uris(text: str) -> list[str]:
    """Return the addresses of package files that ``apt-get --print-uris`` names."""
    return [match[0] for match in _URI.findall(text)]


def sums(release: str) -> dict[str, tuple[str, int]]:
    """Return SHA-256 and bytes of each file that Release or InRelease names."""
    section = re.search(r"^SHA256:[ \t]*\n((?: .*\n?)+)", release, re.MULTILINE)
    return {path: (digest, int(size)) for digest, size, path in _SUM.findall(section.group(1) if section else "")}


def by_hash(release: str) -> bool:
    """Return whether clients ask for lists by their digest first."""
    return bool(re.search(r"^Acquire-By-Hash:\s*yes", release, re.MULTILINE | re.IGNORECASE))


def stanzas(text: str, wanted: t.Container[str] | None = None) -> t.Iterator[Stanza]:
    """Yield the packages of a list.

    :param wanted: paths below the repository; None takes all.
    """
    for match in _FILENAME.finditer(text):
        path = re.sub(r"^(?:\./)+", "", match.group(1))
        if wanted is not None and path not in wanted:
            continue
        start, end = text.rfind("\n\n", 0, match.start()), text.find("\n\n", match.end())
        fields = dict(_FIELD.findall(text[max(start, 0) : end if end >= 0 else len(text)]))
        if not fields.get("Size", "").isdigit() or not {"Package", "Version", "Architecture"} <= fields.keys():
            continue
        source = (fields.get("Source") or fields["Package"]).partition(" ")[0]
        row = (fields["Package"], fields["Version"], fields["Architecture"], source, path)
        yield Stanza(*row, fields.get("SHA256", ""), int(fields["Size"]))
