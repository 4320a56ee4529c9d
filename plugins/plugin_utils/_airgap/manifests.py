# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Indexes and manifests of images, as registries and OCI layouts have them. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES, MANIFESTS, OCI = (OCI_INDEX, DOCKER_INDEX), (OCI_MANIFEST, DOCKER_MANIFEST), (OCI_INDEX, OCI_MANIFEST)
# Bytes of one; registries take none that is larger.
LARGEST_MANIFEST = 4 << 20
# Descriptors that one has at most.
MOST_DESCRIPTORS = 500
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """What an index or a manifest says of a blob.

    :param size: bytes.
    :param architecture: of a manifest in an index, and ``system`` its operating system; empty where it has none.
    """

    media: str
    digest: str
    size: int
    architecture: str = ""
    system: str = ""


@dataclasses.dataclass(frozen=True)
class Document:
    """An index or a manifest.

    :param media: its own type; empty where it is neither Docker's nor OCI's.
    :param manifests: of an index.
    :param layers: of a manifest; ``config`` is None where it has none.
    """

    media: str
    manifests: tuple[Descriptor, ...]
    layers: tuple[Descriptor, ...]
    config: Descriptor | None

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """All that it names."""
        return (*self.manifests, *self.layers, *([self.config] if self.config else []))


def mapping(content: bytes) -> JsonObject:
    """Return the JSON object that a blob has.

    :raises ValueError: it has none.
    """
    try:
        known = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("isn't JSON") from error
    if not isinstance(known, dict):
        raise ValueError("isn't a mapping")
    return known


def document(content: bytes) -> Document:
    """Return what an index or a manifest says.

    :raises ValueError: it isn't one; the message continues a sentence that names it.
    """
    known = mapping(content)
    media = known.get("mediaType")
    if not media and known.get("schemaVersion") == 2:
        # OCI lets both leave it out.
        media = OCI_INDEX if "manifests" in known else OCI_MANIFEST
    config = _descriptors({"config": [known["config"]]}, "config") if "config" in known else ()
    return Document(
        str(media) if media in (*INDEXES, *MANIFESTS) else "",
        _descriptors(known, "manifests"),
        _descriptors(known, "layers"),
        config[0] if config else None,
    )


def typed_document(content: bytes) -> Document:
    """Return what an index or a manifest of Docker's or OCI's says.

    :raises ValueError: it is of another type, or as ``document``.
    """
    known = document(content)
    if not known.media:
        raise ValueError(f"is of type {line(mapping(content).get('mediaType'), 80)}, which isn't supported")
    return known


def descriptor(row: t.Any) -> Descriptor | None:
    """Return a descriptor of an index or a manifest; None where it isn't one."""
    if not isinstance(row, dict) or type(row.get("size")) is not int or not isinstance(row.get("mediaType"), str):
        return None
    digest, platform = row.get("digest"), row.get("platform") or {}
    if row["size"] < 0 or not isinstance(digest, str) or not DIGEST.fullmatch(digest) or not isinstance(platform, dict):
        return None
    words = [platform.get(name) or "" for name in ("architecture", "os")]
    return Descriptor(row["mediaType"], digest, row["size"], *(str(word) for word in words))


def _descriptors(known: JsonObject, field: str) -> tuple[Descriptor, ...]:
    rows = known.get(field) or []
    parsed = [descriptor(row) for row in rows] if isinstance(rows, list) else [None]
    if None in parsed or len(parsed) > MOST_DESCRIPTORS:
        raise ValueError(f"has {field} that aren't descriptors")
    return tuple(t.cast("list[Descriptor]", parsed))
