# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The archive's layout of images: which are in it, whether each is whole, and a view of one for skopeo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from .archive import IMAGES, Archive, Broken, compared

NAME = "org.opencontainers.image.ref.name"
INDEX, LAYOUT = f"{IMAGES}/index.json", "oci-layout"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Manifests that one image has at most, and levels of an index in an index.
MOST_MANIFESTS, DEEPEST = 500, 3


class Layout:
    """The images of an archive that was read.

    :raises Broken: it has no index, or one that nobody understands.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._rows: dict[str, JsonObject] = {}
        for row in self._document(INDEX).get("manifests") or []:
            name = (row.get("annotations") or {}).get(NAME) if isinstance(row, dict) else None
            if isinstance(name, str):
                self._rows[name] = row

    def _document(self, path: str) -> JsonObject:
        if path not in self._archive.sums:
            raise Broken("layout", f"{self._archive.folder} has no {path}, which an image of it needs", path=path)
        try:
            found = json.loads(compared(self._archive.folder, path, self._archive.sums))
        except (ValueError, RecursionError) as error:
            raise Broken("layout", f"{self._archive.folder}/{path} isn't JSON") from error
        if not isinstance(found, dict):
            raise Broken("layout", f"{self._archive.folder}/{path} isn't an index or a manifest")
        return found

    def require(self, name: str, digest: str) -> int:
        """Return the bytes of an image, all of whose parts are there.

        :param digest: that the archive's list has.
        :raises Broken: it isn't in the index, has another digest, or a part is missing.
        """
        row = self._rows.get(name)
        if not row or row.get("digest") != digest:
            found = f"has {line(row.get('digest'), 80)} under this name" if row else "has none of this name"
            raise Broken("layout", f"{self._archive.folder}/{INDEX} {found}: {line(name)} {digest}", image=name)
        blobs: dict[str, int] = {}
        self._collect(digest, blobs, 0)
        return sum(blobs.values())

    def _collect(self, digest: str, blobs: dict[str, int], depth: int) -> None:
        """Collect bytes by digest of a manifest or an index, and all that it names."""
        document = self._document(_blob(digest))
        rows = [row for field in ("manifests", "layers") for row in _rows_of(document, field)]
        config = document.get("config")
        manifests = {str(row.get("digest")) for row in _rows_of(document, "manifests")}
        if depth >= DEEPEST or len(manifests) > MOST_MANIFESTS:
            raise Broken("layout", f"{self._archive.folder}: image {digest} has too many manifests")
        for row in [*rows, *([config] if isinstance(config, dict) else [])]:
            name = row.get("digest")
            if not isinstance(name, str) or not _DIGEST.fullmatch(name) or _blob(name) not in self._archive.sums:
                text = f"{self._archive.folder} lacks {line(name, 80)}, a part of image {digest}"
                raise Broken("layout", text, path=line(name, 80))
            size = row.get("size")
            blobs[name] = size if type(size) is int else 0
            if name in manifests:
                self._collect(name, blobs, depth + 1)

    @contextlib.contextmanager
    def view(self, name: str) -> t.Iterator[str]:
        """Yield a folder that skopeo reads as a layout with this image alone, whatever its name is."""
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
            row = {field: value for field, value in self._rows[name].items() if field != "annotations"}
            documents = {
                "index.json": {"schemaVersion": 2, "manifests": [row]},
                LAYOUT: {"imageLayoutVersion": "1.0.0"},
            }
            for file, document in documents.items():
                with open(os.path.join(folder, file), "w", encoding="utf-8") as opened:
                    json.dump(document, opened)
            os.symlink(os.path.abspath(os.path.join(self._archive.folder, IMAGES, "blobs")), f"{folder}/blobs")
            yield folder


def _rows_of(document: JsonObject, field: str) -> list[JsonObject]:
    rows = document.get(field) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Broken("layout", f"{field} of an image's manifest isn't a list of descriptors")
    return rows


def _blob(digest: str) -> str:
    return f"{IMAGES}/blobs/{digest.replace(':', '/', 1)}"
