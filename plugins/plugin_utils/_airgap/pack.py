# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the archive's folder as one tar file: SHA256SUMS, its signature and contents.json first, then what it lists."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tarfile
import typing as t

from ...module_utils._core import tar_headers
from ...module_utils._core.errors import BadInput
from . import archive
from .archive import CONTENTS, LARGEST, PART, SIGNATURE, SUMS

# Bytes that stay free.
SPARE = 16 << 20
# What tar adds to each file, at most: two headers of a long name, and what fills the last block.
HEADERS = 4 << 10


def members(folder: str) -> list[str]:
    """Return the paths of what an archive's file has, in its order.

    :raises Broken: the folder has no SHA256SUMS.
    """
    sums = archive.parse_sums(archive.small(folder, SUMS), os.path.join(folder, SUMS))
    signed = os.path.lexists(os.path.join(folder, SIGNATURE))
    return [SUMS, *([SIGNATURE] if signed else []), CONTENTS, *sorted(path for path in sums if path != CONTENTS)]


def is_packed(folder: str, target: str) -> bool:
    """Return whether a tar file has a folder's files already: by SHA256SUMS, its signature, names and sizes.

    :raises Broken: as ``members``.
    """
    names = members(folder)
    try:
        with tarfile.open(target, "r:", tarinfo=tar_headers.Header) as tar:
            rows = list(tar_headers.members(tar))
            sizes = [os.lstat(os.path.join(folder, name)).st_size for name in names]
            if [(row.name, row.size) for row in rows] != list(zip(names, sizes, strict=True)):
                return False
            first = [row for row in rows if row.name in (SUMS, SIGNATURE, CONTENTS)]
            return all(_content(tar, row) == archive.small(folder, row.name) for row in first)
    except (OSError, EOFError, tarfile.TarError, ValueError, RecursionError):
        return False


def _content(tar: tarfile.TarFile, row: tarfile.TarInfo) -> bytes | None:
    file = tar.extractfile(row) if row.isreg() and row.size <= LARGEST else None
    return file.read() if file else None


def pack(folder: str, target: str) -> None:
    """Write a folder as one tar file; the same content gives the same bytes.

    :raises Broken: as ``members``.
    :raises BadInput: the file can't be written; an older one is as it was.
    """
    names = members(folder)
    part = f"{target}{PART}"
    try:
        needed = sum(os.lstat(os.path.join(folder, name)).st_size + HEADERS for name in names) + SPARE
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(target))).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it needs {needed >> 20} MiB, and {free >> 20} MiB are free")
        with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                _add(tar, folder, name)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        code = "full" if error.errno == errno.ENOSPC else "not_written"
        raise BadInput(
            f"airgap_archive: {target} can't be written: {error.strerror}; the folder {folder} is complete, and "
            "the next run goes on",
            code=f"archive_{code}",
        ) from error


def _add(tar: tarfile.TarFile, folder: str, name: str) -> None:
    member = tarfile.TarInfo(name)
    # Neither a link nor a device: what is packed is what SHA256SUMS was made of.
    handle = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        member.size, member.mode = os.fstat(handle).st_size, 0o644
        tar.addfile(member, t.cast(t.IO[bytes], file))
