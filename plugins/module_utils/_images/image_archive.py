# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read an image archive on the controller: its SHA-256 and the images in it."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tarfile
import typing as t
import zlib

from .._core import tar_headers
from .._core.errors import BadInput
from .names import full_reference

# Bytes; those of an image of 127 layers have less than 64 KiB.
LARGEST_MANIFEST = 4 << 20
# The annotations from which containerd takes the names of an OCI layout's images.
_NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


def sha256(archive: str) -> str:
    """Return the archive's SHA-256, in hexadecimal.

    It is cached in the user's cache folder, because archives are large and every host of a run needs it.

    :raises BadInput: the file can't be read.
    """
    try:
        stat = os.stat(archive)
    except OSError as error:
        raise BadInput(f"image_archive: {archive} can't be read: {error.strerror}") from error
    identity = f"{os.path.abspath(archive)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    entry = os.path.join(cache, "kubegpu-share", "archives", hashlib.sha256(identity.encode()).hexdigest())
    try:
        with open(entry, encoding="ascii") as file:
            remembered = file.read()
        if len(remembered) == 64:
            return remembered
    except OSError:
        pass
    computed = _digest(archive)
    try:
        os.makedirs(os.path.dirname(entry), exist_ok=True)
        with open(f"{entry}.{os.getpid()}", "w", encoding="ascii") as file:
            file.write(computed)
        os.replace(f"{entry}.{os.getpid()}", entry)
    except OSError:
        # Without a cache the digest is computed each time.
        pass
    return computed


def _digest(archive: str) -> str:
    try:
        with open(archive, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"image_archive: {archive} can't be read: {error.strerror}") from error


def sha256_of(archive: str, expected: str) -> str:
    """Return the archive's SHA-256.

    :param expected: what it has to be; empty for anything.
    :raises BadInput: it is another one, or the file can't be read.
    """
    actual = sha256(archive)
    if expected and expected.lower() != actual:
        raise BadInput(
            f"image_archive: {archive} has SHA-256 {actual}, and gpushare_image_archive_sha256 is {expected}: nothing "
            "was imported; take the archive again from where its SHA256SUMS is, or set the variable to the new one's"
        )
    return actual


def require(archive: str, reference: str) -> None:
    """Validate that an archive contains an image.

    :raises BadInput: it doesn't, or isn't an image archive.
    """
    names = _names(archive)
    if full_reference(reference) not in names:
        raise BadInput(
            f"image_archive: {archive} contains {', '.join(sorted(names)) or 'no named image'}, not {reference}"
        )


def _names(archive: str) -> set[str]:
    try:
        with tarfile.open(archive, "r:*", tarinfo=tar_headers.Header) as tar:
            rows = list(tar_headers.members(tar))
            docker = _member(tar, rows, "manifest.json")
            layout = _member(tar, rows, "index.json")
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, RecursionError) as error:
        raise BadInput(f"image_archive: {archive} isn't an image archive: {error}") from error
    if docker is None and layout is None:
        raise BadInput(f"image_archive: {archive} isn't an image archive: it has neither manifest.json nor index.json")
    try:
        names = {full_reference(tag) for image in docker or [] for tag in image.get("RepoTags") or []}
        for manifest in (layout or {}).get("manifests") or []:
            annotations = manifest.get("annotations") or {}
            names |= {full_reference(annotations[key]) for key in _NAME_ANNOTATIONS if key in annotations}
    except (AttributeError, TypeError) as error:
        raise BadInput(f"image_archive: {archive} isn't an image archive: its manifest isn't one") from error
    return names


def _member(tar: tarfile.TarFile, rows: t.Sequence[tarfile.TarInfo], name: str) -> t.Any:
    """Return a file's JSON; None where there is none.

    :raises ValueError: the archive has it twice, as something else than a file, or larger than any manifest: what is
        read here has to be what the container runtime reads.
    """
    members = [member for member in rows if member.name.removeprefix("./") == name]
    if not members:
        return None
    if len(members) > 1 or not members[0].isreg():
        raise ValueError(f"{name} is there {len(members)} times" if len(members) > 1 else f"{name} isn't a file")
    if members[0].size > LARGEST_MANIFEST:
        raise ValueError(f"{name} has {members[0].size} bytes")
    file = tar.extractfile(members[0])
    return json.load(file) if file is not None else None
