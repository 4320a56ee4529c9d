# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's folder while it is made: digests of what is there, its layout of images, and complete writes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from . import archive
from .archive import CONTENTS, FOLDERS, IMAGES, INSTALLER, PACKAGES, PART, SIGNATURE, SUMS, Contents

NAME = "org.opencontainers.image.ref.name"
INDEX, LAYOUT, BLOBS = f"{IMAGES}/index.json", f"{IMAGES}/oci-layout", f"{IMAGES}/blobs/sha256"
# What is being written, and the lock of the run that writes.
WORK, LOCK = f"work{PART}", f"lock{PART}"
# What an archive's folder has at most, beside unfinished files.
TOP = {*(path.partition("/")[0] for path in FOLDERS.values()), PACKAGES, CONTENTS, SUMS, SIGNATURE, INSTALLER}
# Bytes below which a program that failed has failed for want of space.
SPARE = 32 << 20
# Bytes of a manifest, levels of an index in an index, and manifests of an image.
LARGEST_MANIFEST, DEEPEST, MOST_MANIFESTS = 4 << 20, 3, 500
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES, MANIFESTS, OCI = (OCI_INDEX, DOCKER_INDEX), (OCI_MANIFEST, DOCKER_MANIFEST), (OCI_INDEX, OCI_MANIFEST)
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class Failed(Exception):
    """An artifact can't be fetched; the message continues a sentence that names it.

    :ivar code: such as ``unreachable``, ``other_digest``.
    :ivar stop: nothing else is worth trying: a program is missing, or the disk is full.
    """

    def __init__(self, code: str, message: str, stop: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.stop = stop


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """One row of the layout's index."""

    media: str
    digest: str
    size: int


class Store:
    """An archive's folder.

    :param folder: absolute; it may not be there yet.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}

    def at(self, path: str) -> str:
        return os.path.join(self.folder, path)

    def examine(self) -> None:
        """Refuse a folder that has something else, of which a run would remove what it doesn't know.

        :raises BadInput: it isn't an archive's, or can't be one.
        """
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        except OSError as error:
            raise BadInput(f"airgap_folder: {self.folder} can't be read: {error.strerror}") from error
        others = [name for name in names if name not in TOP and not name.endswith(PART)]
        if others:
            raise BadInput(
                f"airgap_folder: {self.folder} has {line(others[0], 100)}, which is no part of an archive: name a new "
                "folder, or that of an archive",
                code="foreign_folder",
            )

    @contextlib.contextmanager
    def alone(self) -> t.Iterator[None]:
        """Make the folder, and let no other run write into it.

        :raises BadInput: it can't be made, or another run does.
        """
        try:
            os.makedirs(self.folder, mode=0o755, exist_ok=True)
            handle = os.open(self.at(LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.not_written(self.folder, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise BadInput(f"airgap_folder: another run writes into {self.folder}: wait for its end") from error
        finally:
            os.close(handle)

    # ------------------------------------------------------------------ files

    def files(self) -> tuple[dict[str, str], list[str]]:
        """Return the SHA-256 of each file by its path, and the paths of what is no file.

        A file is read again only where its times, size or inode have changed since.
        """
        if not os.path.isdir(self.folder):
            return {}, []
        found, faults = archive.files_of(self.folder)
        return {path: self.sha256(path) for path in found}, [fault.path for fault in faults]

    def sha256(self, path: str) -> str:
        """Return a file's SHA-256; empty where it can't be read."""
        try:
            state = os.lstat(self.at(path))
            stamp = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = stamp, archive.sha256_of(self.at(path))[0]
            return self._known[path][1]
        except OSError:
            return ""

    def size(self, path: str) -> int:
        return os.lstat(self.at(path)).st_size

    def put(self, path: str, content: bytes) -> None:
        """Write a file completely or not at all.

        :raises Failed: it can't be written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.new_file(f"{target}{PART}") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{target}{PART}", target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(f"{target}{PART}")
            raise self._failed(target, error) from error

    def take(self, source: str, path: str) -> None:
        """Move a file into the folder.

        :raises Failed: it can't be written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(source, target)
        except OSError as error:
            raise self._failed(target, error) from error

    def copy(self, source: str, path: str) -> None:
        """Copy a file of this machine into the folder.

        :raises Failed: it can't be read or written.
        """
        target = self.at(path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(source, "rb") as opened, archive.new_file(f"{target}{PART}") as file:
                shutil.copyfileobj(opened, file)
            os.replace(f"{target}{PART}", target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(f"{target}{PART}")
            raise self._failed(error.filename or target, error) from error

    def remove(self, path: str) -> None:
        """Remove a file or a link, and the folders that it leaves empty.

        :raises BadInput: it can't be removed.
        """
        try:
            os.unlink(self.at(path))
            while path := os.path.dirname(path):
                os.rmdir(self.at(path))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise BadInput(f"{self.at(path)} can't be removed: {error.strerror}") from error

    @contextlib.contextmanager
    def work(self) -> t.Iterator[str]:
        """Yield an empty folder on the same file system, which is removed at the end; what a killed run left is, too.

        :raises Failed: it can't be made.
        """
        place = self.at(WORK)
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.mkdir(place, mode=0o700)
        except OSError as error:
            raise self._failed(place, error) from error
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def free(self) -> int:
        """Return the bytes that are free."""
        return shutil.disk_usage(self.folder).free

    def is_full(self) -> bool:
        """Return whether there is no space, of which a program says in words only."""
        try:
            return self.free() < SPARE
        except OSError:
            return False

    def has(self, row: Descriptor) -> bool:
        """Return whether a blob is there."""
        try:
            return bool(self._present(row.digest, row.size))
        except ValueError:
            return False

    def _failed(self, path: str, error: OSError) -> Failed:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Failed("full", f"the disk of {self.folder} is full", stop=True)
        return Failed("not_written", f"{line(path, 300)}: {error.strerror}", stop=True)

    def not_written(self, path: str, error: OSError) -> BadInput:
        return BadInput(f"airgap_folder: {path} can't be written: {error.strerror}", code="not_written")

    # ------------------------------------------------------------------ contents.json and the layout

    def contents(self) -> Contents:
        """Return what contents.json of a former run says; nothing where there is none, or one that nobody reads."""
        try:
            return archive.parse(archive.small(self.folder, CONTENTS), self.at(CONTENTS))
        except BadInput:
            return Contents("", ())

    def images(self) -> dict[str, Descriptor]:
        """Return the images of the layout by name; none where it isn't one."""
        try:
            rows = json.loads(archive.small(self.folder, INDEX))["manifests"]
            found = {
                row["annotations"][NAME]: descriptor(row) for row in rows if NAME in (row.get("annotations") or {})
            }
        except (BadInput, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return {name: each for name, each in found.items() if each and isinstance(name, str)}

    def write_images(self, images: t.Mapping[str, Descriptor]) -> None:
        """Write the layout's index.

        :raises Failed: it can't be written.
        """
        rows = [
            {"mediaType": row.media, "digest": row.digest, "size": row.size, "annotations": {NAME: name}}
            for name, row in sorted(images.items())
        ]
        self.put(LAYOUT, b'{"imageLayoutVersion":"1.0.0"}')
        self.put(INDEX, json.dumps({"schemaVersion": 2, "manifests": rows}).encode())

    def parts(self, digest: str) -> dict[str, int]:
        """Return the blobs of an image, with their bytes: its index or manifest and all that it names.

        :raises ValueError: one is missing, isn't complete, or has another content than its name says.
        """
        found: dict[str, int] = {}
        self._collect(digest, None, found, 0)
        return found

    def _collect(self, digest: str, size: int | None, found: dict[str, int], depth: int) -> None:
        if digest in found:
            return
        content = self._blob(digest, size, LARGEST_MANIFEST)
        found[digest] = len(content)
        document = _document(content)
        manifests = _rows(document, "manifests")
        if depth > DEEPEST or len(found) > 100 * MOST_MANIFESTS:
            raise ValueError(f"{digest} names too many manifests")
        for row in manifests:
            self._collect(row.digest, row.size, found, depth + 1)
        for row in _parts(document):
            self._present(row.digest, row.size)
            found[row.digest] = row.size

    def _present(self, digest: str, size: int | None) -> str:
        path = f"{BLOBS}/{digest.removeprefix('sha256:')}"
        if self.sha256(path) != digest.removeprefix("sha256:"):
            raise ValueError(f"{digest} isn't there")
        if size is not None and self.size(path) != size:
            raise ValueError(f"{digest} has another size than its manifest says")
        return path

    def _blob(self, digest: str, size: int | None, largest: int) -> bytes:
        path = self._present(digest, size)
        if self.size(path) > largest:
            raise ValueError(f"{digest} is no manifest: it has more than {largest >> 20} MiB")
        with open(self.at(path), "rb") as file:
            return file.read()

    def architectures(self, digest: str) -> set[str]:
        """Return the architectures of an image whose parts are there.

        :raises ValueError: as ``parts``.
        """
        document = _document(self._blob(digest, None, LARGEST_MANIFEST))
        if "manifests" in document:
            rows = [row.get("platform") or {} for row in document["manifests"] if isinstance(row, dict)]
            return {str(row.get("architecture")) for row in rows if row.get("os") == "linux"}
        config = str((document.get("config") or {}).get("digest"))
        return {str(_document(self._blob(config, None, LARGEST_MANIFEST)).get("architecture"))}


def descriptor(row: t.Any) -> Descriptor | None:
    """Return a descriptor of an index or a manifest; None where it isn't one."""
    if not isinstance(row, dict) or type(row.get("size")) is not int or not isinstance(row.get("mediaType"), str):
        return None
    digest = row.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        return None
    return Descriptor(row["mediaType"], digest, row["size"])


def _document(content: bytes) -> JsonObject:
    try:
        found = json.loads(content)
    except RecursionError as error:
        raise ValueError("a manifest isn't JSON") from error
    if not isinstance(found, dict):
        raise ValueError("a manifest isn't a mapping")
    return found


def _rows(document: JsonObject, field: str) -> list[Descriptor]:
    rows = document.get(field) or []
    found = [descriptor(row) for row in rows] if isinstance(rows, list) else [None]
    if None in found or len(found) > MOST_MANIFESTS:
        raise ValueError(f"{field} of a manifest aren't descriptors")
    return t.cast(list[Descriptor], found)


def _parts(document: JsonObject) -> list[Descriptor]:
    config = [document["config"]] if "config" in document else []
    return [*_rows(document, "layers"), *_rows({"config": config}, "config")]


def named_by(content: bytes) -> list[Descriptor]:
    """Return what an index or a manifest names.

    :raises ValueError: it isn't one.
    """
    document = _document(content)
    return [*_rows(document, "manifests"), *_parts(document)]


def media_of(content: bytes) -> tuple[str, set[str]]:
    """Return the type of an index or a manifest, and those of the manifests that an index names.

    :raises ValueError: it isn't one of a type that is known.
    """
    document = _document(content)
    media = document.get("mediaType")
    if not media and document.get("schemaVersion") == 2:
        # OCI lets both leave it out.
        media = OCI_INDEX if "manifests" in document else OCI_MANIFEST
    if media not in (*INDEXES, *MANIFESTS):
        raise ValueError(f"is of type {line(media, 80)}, which isn't supported")
    return str(media), {row.media for row in _rows(document, "manifests")}
