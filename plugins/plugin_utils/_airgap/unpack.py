# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Unpack an archive's file: only what its signed SHA256SUMS lists, each file compared when it is written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tarfile
import typing as t

from ...module_utils._core import tar_headers
from ...module_utils._core.errors import BadInput
from ...module_utils._core.untrusted import line
from . import archive
from .archive import CHUNK, CONTENTS, LARGEST, PART, SIGNATURE, SUMS, Broken, Contents
from .programs import Run, run

# Ends the name of the folder beside an archive's file into which it is unpacked.
FOLDER = ".unpacked"
# Bytes that stay free.
SPARE = 64 << 20
Accept = t.Callable[[Contents], None]
_DAMAGED = (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError)


def unpack(path: str, folder: str, key_file: str, program: Run = run, accept: Accept = lambda _contents: None) -> None:
    """Unpack an archive's file; a file that is there already, whole, is kept. Afterwards all of it has been compared.

    :param key_file: as ``archive.signed``.
    :param accept: raises ``BadInput`` for contents that aren't to be taken, before a file changes.
    :raises Broken: the file isn't as it was signed, or isn't complete.
    :raises BadInput: it can't be read, there is no room for it, or another run unpacks it.
    """
    try:
        # As it was packed: a compressed one would have no bound before its signature is read.
        with tarfile.open(path, "r:", tarinfo=tar_headers.Header) as tar:
            members = _members(tar, path)
            content, detached = (_small(tar, members.pop(name, None), path) for name in (SUMS, SIGNATURE))
            if content is None:
                raise Broken("incomplete", f"{path} has no {SUMS}, so it isn't a complete archive")
            archive.signed(content, detached, key_file, path, program)
            sums = archive.parse_sums(content, f"{path}: {SUMS}")
            found = [archive.Fault(archive.UNLISTED, name) for name in members if name not in sums]
            archive.refuse(path, found + [archive.Fault(archive.MISSING, name) for name in sums if name not in members])
            listed = _small(tar, members[CONTENTS], path) or b""
            if hashlib.sha256(listed).hexdigest() != sums[CONTENTS]:
                archive.refuse(path, [archive.Fault(archive.OTHER, CONTENTS)])
            accept(archive.parse(listed, f"{path}: {CONTENTS}"))
            foreign = _foreign(folder, sums)
            missing = [name for name in sums if not _is(os.path.join(folder, name), sums[name])]
            _require_room(path, folder, sum(members[name].size for name in missing))
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with _alone(folder):
                # What an archive before had, and this one hasn't.
                for name in foreign:
                    os.unlink(os.path.join(folder, name))
                # They come first: what a killed run leaves is theirs, so the next one may replace it.
                for name, text in ((SIGNATURE, detached), (SUMS, content)):
                    _place(os.path.join(folder, name), text)
                for name in missing:
                    _write(tar, members[name], os.path.join(folder, name), sums[name], path)
    except _DAMAGED as error:
        raise Broken(
            "truncated",
            f"{path} isn't a whole archive ({line(error, 200)}): decompress it if it is compressed, or copy it again",
        ) from error
    except OSError as error:
        name = line(error.filename or path, 300)
        raise BadInput(
            f"airgap_archive: {name}: {error.strerror or line(error, 200)}; no machine was changed, and the next run "
            "goes on"
        ) from error


def _members(tar: tarfile.TarFile, path: str) -> dict[str, tarfile.TarInfo]:
    """Return the files by their paths.

    :raises Broken: something is no file, or is there twice.
    """
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar_headers.members(tar):
        name = member.name.removeprefix("./")
        if member.isdir():
            continue
        # Links and devices could lead out of the folder.
        if not member.isreg() or member.issparse() or name in members:
            raise Broken("damaged", f"{path}: {line(name, 200)} is no file, or is in it twice")
        members[name] = member
    return members


def _small(tar: tarfile.TarFile, member: tarfile.TarInfo | None, path: str) -> bytes | None:
    if member is None:
        return None
    opened = tar.extractfile(member) if member.size <= LARGEST else None
    if not opened:
        raise Broken("too_large", f"{path}: {line(member.name)} has more than {LARGEST >> 20} MiB")
    return opened.read()


def _is(path: str, sha256: str) -> bool:
    with contextlib.suppress(OSError):
        return archive.sha256_of(path)[0] == sha256
    return False


def _foreign(folder: str, sums: t.Mapping[str, str]) -> list[str]:
    """Return the files of a folder that this archive hasn't.

    :raises BadInput: they aren't those of an archive before.
    """
    if not os.path.isdir(folder):
        return []
    there, faults = archive.files_of(folder)
    found = [name for name in there if name not in sums]
    before: t.Mapping[str, str] = {}
    if os.path.lexists(os.path.join(folder, SUMS)):
        with contextlib.suppress(Broken):
            before = archive.parse_sums(archive.small(folder, SUMS), os.path.join(folder, SUMS))
    # Only what an archive has listed is removed: other folders have a SHA256SUMS, too.
    strange = [fault.path for fault in faults] + [name for name in found if name not in before]
    if strange:
        shown = line(strange[0], 200)
        raise BadInput(f"airgap_folder: {folder} has files that aren't an archive's, such as {shown}: name another one")
    return found


def _require_room(path: str, folder: str, size: int) -> None:
    place = os.path.abspath(folder)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if size + SPARE > free:
        raise BadInput(
            f"airgap_archive: unpacking {path} needs {size + SPARE >> 20} MiB in {place}, where {free >> 20} MiB are "
            "free: make room, or set airgap_folder to another place; nothing was changed",
            code="archive_full",
        )


@contextlib.contextmanager
def _alone(folder: str) -> t.Iterator[None]:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(os.path.join(folder, f".unpacking{PART}"), flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BadInput(f"airgap_archive: another run unpacks it into {folder}: wait for its end") from error
    finally:
        os.close(lock)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: str, sha256: str, path: str) -> None:
    """Write one file under another name, compare it, and rename it."""
    source = tar.extractfile(member)
    if source is None:
        raise Broken("damaged", f"{path}: {line(member.name, 200)} can't be read")
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    digest = hashlib.sha256()
    with archive.new_file(f"{target}{PART}") as file:
        for chunk in iter(lambda: source.read(CHUNK), b""):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != sha256:
        os.unlink(f"{target}{PART}")
        archive.refuse(path, [archive.Fault(archive.OTHER, member.name)])
    os.replace(f"{target}{PART}", target)


def _place(path: str, content: bytes | None) -> None:
    if content is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    with archive.new_file(f"{path}{PART}") as file:
        file.write(content)
    os.replace(f"{path}{PART}", path)
