# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's folder: what is in it (contents.json), whether it is whole (SHA256SUMS), and who says so (a signature).

``read`` is the boundary: what it returns has been compared with SHA256SUMS, and that with the user's key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.paths import LONGEST, file_path
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from . import signature
from .needed import CHART, COLLECTION, FILE, IMAGE, KINDS, OPERATOR, WHEEL, Item
from .programs import Run, run

FORMAT = 1
CONTENTS, SUMS, SIGNATURE, INSTALLER = "contents.json", "SHA256SUMS", "SHA256SUMS.asc", "install-controller.sh"
IMAGES, PACKAGES, CHARTS, FILES, WHEELS, COLLECTIONS = "images", "packages", "charts", "files", "wheels", "collections"
# Where the artifacts of a kind are; an operator's come with the catalogue's own program.
FOLDERS: t.Mapping[str, str] = {
    IMAGE: IMAGES,
    CHART: CHARTS,
    "apt": f"{PACKAGES}/apt",
    "rpm": f"{PACKAGES}/rpm",
    FILE: FILES,
    WHEEL: WHEELS,
    COLLECTION: COLLECTIONS,
}
# What is being written ends with it, and is no part of the archive.
PART = ".part"
# Bytes of contents.json and of SHA256SUMS, and how many files an archive has at most.
LARGEST = 64 << 20
MOST_FILES = 500_000
CHUNK = 1 << 20
# Paths in an error; all are in its details.
MOST_TO_SHOW = 5
# Why a file isn't as SHA256SUMS has it.
MISSING, OTHER, UNLISTED, IRREGULAR = "missing", "other_content", "unlisted", "not_a_file"
_FAULTS = {
    MISSING: "is missing",
    OTHER: "has another content, or isn't complete",
    UNLISTED: f"isn't listed in {SUMS}",
    IRREGULAR: "is a link or a device, and no file",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
_BLOB = re.compile(rf"{IMAGES}/blobs/sha256/([^/]*)")


class Entry(Item):
    """An item that is in the archive.

    :ivar path: of its file, or of the folder that has it: ``images`` for an image, for a package its repository's,
        ``packages/apt/<repository>``, or the package itself.
    :ivar bytes: of the file; of an image, all that its index names.
    :ivar sha256: of the file; empty for a folder.
    :ivar image: the image's name in the layout's index; empty for other kinds. ``digest`` is that of its index.
    :ivar request_sha256: of the request that brought it; where that is the same, nothing has to be fetched again.
    """

    path: str
    bytes: int
    sha256: str
    image: str
    request_sha256: str


class LeftOut(Item):
    """An item that is needed, and that the archive hasn't.

    :ivar reason: ``operator``, ``made_elsewhere``, ``no_address``, ``not_resolved`` or ``not_selected``.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class Contents:
    """What contents.json says.

    :param created: when it was made, in UTC, as 2026-11-29T12:00:00Z.
    """

    created: str
    items: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()


@dataclasses.dataclass(frozen=True)
class Archive:
    """A folder that is as it was when it was signed.

    :param sums: SHA-256 of each file by its path.
    :param signed_by: fingerprint of the key; empty where no key was given.
    """

    folder: str
    contents: Contents
    sums: t.Mapping[str, str]
    signed_by: str


class Fault(t.NamedTuple):
    """:param code: ``missing``, ``other_content``, ``unlisted`` or ``not_a_file``."""

    code: str
    path: str


class Broken(BadInput):
    """An archive isn't as its maker signed it, or isn't one; nothing of it is used.

    :param code: what is wrong; the details have fields beside it.
    """

    def __init__(self, code: str, message: str, **details: t.Any) -> None:
        super().__init__(message, code=f"archive_{code}", **details)


# --------------------------------------------------------------------------- contents.json


def render(contents: Contents) -> str:
    """Return the text of contents.json."""
    items, left_out = list(contents.items), list(contents.left_out)
    known = {"format": FORMAT, "created": contents.created, "items": items, "left_out": left_out}
    return json.dumps(known, indent=1, sort_keys=True) + "\n"


def parse(content: bytes, where: str) -> Contents:
    """Return what contents.json says.

    :param where: for errors.
    :raises Broken: it isn't one, or is of another format.
    """
    try:
        known = json.loads(content)
        if not isinstance(known, dict) or not isinstance(known.get("items"), list):
            raise ValueError("it has no list of items")
        if known.get("format") != FORMAT:
            raise Broken(
                "format",
                f"{where} has format {line(known.get('format'), 20)}, and this version of the collection reads format "
                f"{FORMAT}: use the version that made the archive, or a newer one",
                found=line(known.get("format"), 20),
            )
        items = [_entry(row) for row in known["items"]]
        left_out = [_left_out(row) for row in known.get("left_out") or []]
        return Contents(line(known.get("created"), 40), tuple(items), tuple(left_out))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Broken("contents", f"{where} isn't the list of an archive: {line(error, 200)}") from error


# pip and ansible-galaxy take options, addresses and paths where these stand.
_SPECS: t.Mapping[str, t.Pattern[str]] = {
    WHEEL: re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII),
    COLLECTION: re.compile(r"[A-Za-z]\w*\.[A-Za-z]\w*", re.ASCII),
}
_VERSIONS = re.compile(r"(?:(?:[=~!]=|[<>]=?)[\w.+*-]+,?)*", re.ASCII)
_TEXTS = ("kind", "id", "name", "version", "digest", "source", "key", "place", "licence")
_LISTS = ("architectures", "indexes", "variables", "hosts")


def item_of(row: t.Any) -> Item:
    """Return an item of the list that came from a file.

    :raises ValueError: it isn't one.
    """
    if not isinstance(row, dict):
        raise ValueError("an item isn't a mapping")
    if row.get("kind") not in KINDS:
        raise ValueError(f"an item has the unknown kind {row.get('kind')!r}")
    found: JsonObject = {}
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} of an item isn't a text")
        found[name] = str(line(row[name]))
    spec = _SPECS.get(found["kind"])
    if spec and not (spec.fullmatch(found["name"]) and _VERSIONS.fullmatch(found["version"])):
        raise ValueError(f"{found['id']} is named {found['name']}{found['version']}, which is no name with versions")
    for name in _LISTS:
        values = row.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{name} of {found['id']} isn't a list of texts")
        found[name] = [str(line(value)) for value in values]
    platforms = row.get("platforms")
    if not isinstance(platforms, dict) or not all(map(_platform, platforms.values())):
        raise ValueError(f"platforms of {found['id']} aren't digests and bytes")
    fields = ("digest", "bytes")
    found["platforms"] = {
        str(line(name)): {field: value[field] for field in fields if field in value}
        for name, value in platforms.items()
    }
    return t.cast(Item, found)


def _platform(value: t.Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("digest"), str)
        and bool(_SHA256.fullmatch(value["digest"].removeprefix("sha256:")))
        and type(value.get("bytes", 0)) is int
    )


def _entry(row: t.Any) -> Entry:
    item = item_of(row)
    where, kind = item["id"], item["kind"]
    if kind == OPERATOR:
        raise ValueError(f"{where} is an operator, of which an archive has none")
    path, sha256, image = file_path(row.get("path")), row.get("sha256"), row.get("image")
    if path != FOLDERS[kind] if kind == IMAGE else not path.startswith(f"{FOLDERS[kind]}/"):
        raise ValueError(f"{where} isn't in folder {FOLDERS[kind]}")
    if type(row.get("bytes")) is not int or row["bytes"] < 0:
        raise ValueError(f"bytes of {where} isn't a number")
    if sha256 != "" and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise ValueError(f"sha256 of {where} isn't a SHA-256")
    if not isinstance(image, str) or bool(image) != (kind == IMAGE) or line(image) != image:
        raise ValueError(f"image of {where} isn't the name of an image")
    if kind == IMAGE and not _SHA256.fullmatch(item["digest"].removeprefix("sha256:")):
        raise ValueError(f"digest of {where} isn't an image's")
    if not sha256 and kind in (CHART, FILE, WHEEL, COLLECTION):
        raise ValueError(f"{where} has no SHA-256")
    request_sha256 = row.get("request_sha256", "")
    if request_sha256 != "" and not (isinstance(request_sha256, str) and _SHA256.fullmatch(request_sha256)):
        raise ValueError(f"request_sha256 of {where} isn't a SHA-256")
    # The types of TypedDict's fields can't be told of a mapping that is unpacked.
    known = {"path": path, "bytes": row["bytes"], "sha256": sha256, "image": image, "request_sha256": request_sha256}
    return t.cast(Entry, {**item, **known})


def _left_out(row: t.Any) -> LeftOut:
    item = item_of(row)
    if not isinstance(row.get("reason"), str):
        raise ValueError(f"{item['id']} isn't there, without a reason")
    return t.cast(LeftOut, {**item, "reason": str(line(row["reason"], 40))})


# --------------------------------------------------------------------------- SHA256SUMS


def render_sums(sums: t.Mapping[str, str]) -> str:
    """Return the text of SHA256SUMS, as sha256sum --check reads it."""
    return "".join(f"{sums[path]}  {path}\n" for path in sorted(sums))


def parse_sums(content: bytes, where: str) -> dict[str, str]:
    """Return SHA-256 by path.

    :raises Broken: it isn't as ``render_sums`` writes it, or lists nothing.
    """
    sums: dict[str, str] = {}
    try:
        rows = content.decode("ascii").removesuffix("\n").split("\n")
        if not content.endswith(b"\n") or len(rows) > MOST_FILES:
            raise ValueError("it isn't complete" if len(rows) <= MOST_FILES else f"more than {MOST_FILES} lines")
        for row in rows:
            match = _SUM.fullmatch(row)
            if not match or match.group(2) in sums or match.group(2) in (SUMS, SIGNATURE):
                raise ValueError(f"line {len(sums) + 1}")
            sums[file_path(match.group(2))] = match.group(1)
        if CONTENTS not in sums:
            raise ValueError(f"it doesn't list {CONTENTS}")
    except ValueError as error:
        raise Broken("sums", f"{where} isn't a list of SHA-256 with paths: {line(error, 200)}") from error
    return sums


def files_of(folder: str) -> tuple[dict[str, int], list[Fault]]:
    """Return the bytes of each file below a folder by its path, and what no archive has there; follows no link.

    Unfinished files (``.part``), SHA256SUMS and its signature aren't among them.

    :raises BadInput: the folder can't be read, or has too many files.
    """
    found: dict[str, int] = {}
    faults: list[Fault] = []
    waiting = [""]
    try:
        while waiting:
            inner = waiting.pop()
            with os.scandir(os.path.join(folder, inner)) as rows:
                for row in rows:
                    path = f"{inner}/{row.name}" if inner else row.name
                    if row.name.endswith(PART) or path in (SUMS, SIGNATURE):
                        continue
                    if row.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    elif not row.is_file(follow_symlinks=False):
                        faults.append(Fault(IRREGULAR, path))
                    elif _is_path(path):
                        found[path] = row.stat(follow_symlinks=False).st_size
                    else:
                        faults.append(Fault(UNLISTED, path))
                    if len(found) + len(waiting) > MOST_FILES:
                        raise BadInput(f"{folder} has more than {MOST_FILES} files, so it is no archive")
    except OSError as error:
        raise BadInput(f"{folder} can't be read: {error.strerror}") from error
    return found, faults


def _is_path(path: str) -> bool:
    try:
        return bool(file_path(path))
    except ValueError:
        return False


def sha256_of(path: str) -> tuple[str, int]:
    """Return SHA-256 and bytes of a file; follows no link.

    :raises OSError: it can't be read, or is no file.
    """
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(0, "it is no file")
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def new_file(path: str) -> t.IO[bytes]:
    """Open a file for writing that is new: a file or a link of this name is removed, so no link is followed.

    :raises OSError: it can't be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return t.cast("t.IO[bytes]", os.fdopen(os.open(path, flags, 0o644), "wb"))


def faults(folder: str, sums: t.Mapping[str, str], contents: t.Collection[str] | None = None) -> list[Fault]:
    """Compare a folder with SHA256SUMS: what is missing, has another content, isn't listed, or is a link.

    :param contents: paths of the files whose contents are compared; by default those of all.
    :raises BadInput: the folder can't be read.
    """
    found, wrong = files_of(folder)
    irregular = {fault.path for fault in wrong}
    wrong += [Fault(UNLISTED, path) for path in found if path not in sums]
    wrong += [Fault(MISSING, path) for path in sums if path not in found and path not in irregular]
    for path in (path for path in sums if path in found):
        blob = _BLOB.fullmatch(path)
        compared = contents is None or path in contents
        if (blob and blob.group(1) != sums[path]) or (compared and _other(os.path.join(folder, path), sums[path])):
            wrong.append(Fault(OTHER, path))
    return sorted(wrong, key=lambda fault: fault.path)


def _other(path: str, sha256: str) -> bool:
    try:
        return sha256_of(path)[0] != sha256
    except OSError:
        return True


def refuse(where: str, found: t.Sequence[Fault]) -> None:
    """Raise ``Broken`` for faults, if there are any."""
    if not found:
        return
    shown = [f"{line(fault.path, 200)} {_FAULTS[fault.code]}" for fault in found[:MOST_TO_SHOW]]
    more = f", and {len(found) - MOST_TO_SHOW} more" if len(found) > MOST_TO_SHOW else ""
    raise Broken(
        "damaged",
        f"{where} isn't as it was made ({len(found)} of its files): {', '.join(shown)}{more}; nothing was changed: "
        "copy it again, or make it again by playbook kubegpu.share.airgap_download",
        faults=[{"code": fault.code, "path": line(fault.path, LONGEST)} for fault in found],
    )


# --------------------------------------------------------------------------- the whole


def small(folder: str, name: str, largest: int = LARGEST) -> bytes:
    """Return the content of a small file of the archive, such as contents.json or SHA256SUMS.

    :param largest: bytes.
    :raises Broken: it isn't there, is a link, or is too large.
    """
    path = os.path.join(folder, name)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Broken("no_file", f"{path} is no file")
            content = file.read(largest + 1)
    except FileNotFoundError as error:
        raise Broken("incomplete", f"{folder} has no {name}, so it isn't a complete archive") from error
    except OSError as error:
        raise Broken("unreadable", f"{path} can't be read: {error.strerror}") from error
    if len(content) > largest:
        raise Broken("too_large", f"{path} has more than {largest >> 20} MiB")
    return content


def compared(folder: str, name: str, sums: t.Mapping[str, str]) -> bytes:
    """Return the content of a small file of the archive, as it was read and compared: not what it was at another time.

    :param sums: SHA-256 of each file by its path; has this one.
    :raises Broken: it has another content, or as ``small``.
    """
    content = small(folder, name)
    if hashlib.sha256(content).hexdigest() != sums[name]:
        refuse(folder, [Fault(OTHER, name)])
    return content


def signed(content: bytes, detached: bytes | None, key_file: str, where: str, program: Run = run) -> str:
    """Return the fingerprint of the key that signed SHA256SUMS; empty where no key is given.

    :param detached: the signature; None where the archive has none.
    :param key_file: public keys, armoured or not; empty to compare none.
    :raises Broken: it isn't signed, or not by a key of the file.
    :raises BadInput: the file has no key, or gpgv is missing.
    """
    if not key_file:
        return ""
    if detached is None:
        raise Broken("unsigned", f"{where} has no signature ({SIGNATURE}), and {key_file} is the key to verify it by")
    try:
        return signature.verify(content, detached, key_file, program)
    except signature.Refused as error:
        raise Broken(
            f"signature_{error.code}",
            f"{where}: the signature of {SUMS} {error}; nothing was changed",
            key_file=key_file,
        ) from error


def read(folder: str, key_file: str, program: Run = run, whole: bool = True) -> Archive:
    """Return an archive's folder after all of it was compared with SHA256SUMS, and that with the user's key.

    :param key_file: as ``signed``.
    :param whole: whether all files are compared; otherwise only contents.json and that no file is missing.
    :raises Broken: something isn't as it was made; nothing of it is to be used.
    :raises BadInput: as ``signed``.
    """
    content = small(folder, SUMS)
    detached = small(folder, SIGNATURE) if key_file and os.path.lexists(os.path.join(folder, SIGNATURE)) else None
    by = signed(content, detached, key_file, folder, program)
    sums = parse_sums(content, os.path.join(folder, SUMS))
    refuse(folder, faults(folder, sums, None if whole else []))
    contents = parse(compared(folder, CONTENTS, sums), os.path.join(folder, CONTENTS))
    folders = {path.rpartition("/")[0] for path in sums}
    for entry in contents.items:
        path = entry["path"]
        inside = path in sums if entry["sha256"] else any(f"{each}/".startswith(f"{path}/") for each in folders)
        if not inside or entry["sha256"] not in ("", sums.get(path)):
            raise Broken("contents", f"{folder}/{CONTENTS} lists {line(path)}, which {SUMS} has not, or has otherwise")
    return Archive(folder, contents, sums, by)
