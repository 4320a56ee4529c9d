# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's OCI layout: which images are in it, whether each is whole, and a view of one for skopeo.

It reads for the run that makes an archive and for the one that takes it inside: whatever is read is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import typing as t

from ...module_utils._core.untrusted import line
from .archive import IMAGES, LARGEST, Broken, small
from .manifests import LARGEST_MANIFEST, Descriptor, Document, descriptor, document, mapping

NAME = "org.opencontainers.image.ref.name"
INDEX, LAYOUT, BLOBS = f"{IMAGES}/index.json", f"{IMAGES}/oci-layout", f"{IMAGES}/blobs/sha256"
VERSION = b'{"imageLayoutVersion":"1.0.0"}'
# Levels of an index in an index, and blobs of one image, at most.
DEEPEST, MOST_BLOBS = 3, 50_000


class Layout:
    """The images of an archive's folder.

    :param folder: the archive's.
    :param sha256_of: returns the SHA-256 of a file by its path: what it is compared with when it is read. None or an
        empty text where there is no such file.
    """

    def __init__(self, folder: str, sha256_of: t.Callable[[str], str | None]) -> None:
        self._folder = folder
        self._sha256_of = sha256_of

    def images(self) -> dict[str, Descriptor]:
        """Return the images by their names.

        :raises ValueError: there is no index, or one that nobody understands.
        """
        try:
            rows = mapping(self._content(INDEX, LARGEST)).get("manifests")
            named = [(row["annotations"][NAME], descriptor(row)) for row in rows or [] if NAME in _annotations(row)]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{INDEX} isn't the index of a layout") from error
        if not all(row and isinstance(name, str) for name, row in named):
            raise ValueError(f"{INDEX} names images that aren't descriptors")
        return {name: row for name, row in named if row}

    def has(self, row: Descriptor) -> bool:
        """Return whether a blob is there, whole."""
        try:
            self._require_blob(row.digest, row.size)
        except ValueError:
            return False
        return True

    def parts(self, digest: str) -> dict[str, int]:
        """Return the bytes of an image's blobs by digest: its index or manifest, and all that it names.

        :raises ValueError: one is missing, isn't complete, or has another content than its name says.
        """
        parts: dict[str, int] = {}
        self._collect(digest, None, parts, 0)
        return parts

    def _collect(self, digest: str, size: int | None, parts: dict[str, int], depth: int) -> None:
        if digest in parts:
            return
        known, parts[digest] = self._document(digest, size)
        if depth > DEEPEST or len(parts) > MOST_BLOBS:
            raise ValueError(f"{digest} names too many manifests")
        for row in known.manifests:
            self._collect(row.digest, row.size, parts, depth + 1)
        for row in (*known.layers, *([known.config] if known.config else [])):
            self._require_blob(row.digest, row.size)
            parts[row.digest] = row.size

    def architectures(self, digest: str) -> set[str]:
        """Return the architectures of an image whose parts are there.

        :raises ValueError: as ``parts``.
        """
        known, _size = self._document(digest)
        if known.manifests:
            return {row.architecture for row in known.manifests if row.system == "linux"}
        if not known.config:
            raise ValueError(f"{digest} has no configuration")
        return {str(mapping(self._blob(known.config.digest, known.config.size)).get("architecture"))}

    def require(self, name: str, digest: str) -> int:
        """Return the bytes of an image, all of whose parts are there.

        :param digest: that the archive's list has.
        :raises Broken: it isn't in the index, has another digest, or a part is missing.
        """
        try:
            row = self.images().get(name)
            if not row or row.digest != digest:
                other = f"has {line(row.digest, 80)} under this name" if row else "has none of this name"
                raise ValueError(f"{INDEX} {other}")
            return sum(self.parts(digest).values())
        except ValueError as error:
            text = f"{self._folder}: image {line(name)} {line(digest, 80)} isn't complete: {error}"
            raise Broken("layout", text, image=name) from error

    @contextlib.contextmanager
    def view(self, name: str) -> t.Iterator[str]:
        """Yield a folder that skopeo reads as a layout with this image alone, whatever its name is.

        :raises ValueError: as ``images``.
        :raises KeyError: there is no such image.
        """
        row = self.images()[name]
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
            files = {"index.json": index_content([(row, None)]), "oci-layout": VERSION}
            for file, content in files.items():
                with open(os.path.join(folder, file), "wb") as opened:
                    opened.write(content)
            os.symlink(os.path.abspath(os.path.join(self._folder, IMAGES, "blobs")), f"{folder}/blobs")
            yield folder

    # ------------------------------------------------------------------ files

    def _document(self, digest: str, size: int | None = None) -> tuple[Document, int]:
        content = self._blob(digest, size)
        try:
            return document(content), len(content)
        except ValueError as error:
            raise ValueError(f"{digest} {error}") from error

    def _require_blob(self, digest: str, size: int | None) -> str:
        path = blob_path(digest)
        if self._sha256_of(path) != digest.removeprefix("sha256:"):
            raise ValueError(f"{line(digest, 80)} isn't there")
        if size is not None and os.lstat(os.path.join(self._folder, path)).st_size != size:
            raise ValueError(f"{digest} has another size than its manifest says")
        return path

    def _blob(self, digest: str, size: int | None) -> bytes:
        return self._content(self._require_blob(digest, size), LARGEST_MANIFEST)

    def _content(self, path: str, largest: int) -> bytes:
        """Return what a file has, as it was read and compared.

        :raises ValueError: it isn't there, is too large, or has another content.
        """
        sha256 = self._sha256_of(path)
        if not sha256:
            raise ValueError(f"{path} isn't there")
        try:
            content = small(self._folder, path, largest)
        except Broken as error:
            raise ValueError(str(error)) from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{path} has another content")
        return content


def _annotations(row: t.Any) -> t.Mapping[str, t.Any]:
    return row.get("annotations") or {}


def blob_path(digest: str) -> str:
    """Return the path of a blob in the archive."""
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


def index_content(rows: t.Iterable[tuple[Descriptor, str | None]]) -> bytes:
    """Return the content of a layout's index.

    :param rows: images, each with its name; None for one without.
    """
    manifests = [
        {
            **{"mediaType": row.media, "digest": row.digest, "size": row.size},
            **({} if name is None else {"annotations": {NAME: name}}),
        }
        for row, name in rows
    ]
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()
