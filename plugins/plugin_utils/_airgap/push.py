# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an archive's images are called in the user's registry, and OpenShift's objects that redirect there. Pure."""

from __future__ import annotations

import re
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from ...module_utils._images.names import full_reference
from .archive import Entry
from .needed import IMAGE, LOCAL

HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
PATH = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REGISTRY = re.compile(rf"({HOST})((?:/{PATH})*)/?")
_REFERENCE = re.compile(rf"({HOST})((?:/{PATH})+)(?::(\w[\w.-]{{0,127}}))?(?:@(sha256:[0-9a-f]{{64}}))?", re.ASCII)
# Name of OpenShift's objects.
MIRRORS = "kubegpu-share-airgap"
API = "config.openshift.io/v1"


class Registry(t.NamedTuple):
    """:param folder: path below the host, without slashes around it; empty for none."""

    host: str
    folder: str

    @property
    def name(self) -> str:
        return f"{self.host}/{self.folder}" if self.folder else self.host


class Target(t.NamedTuple):
    """An image of the archive, and where it goes.

    :param image: its name in the archive's layout.
    :param source: where it is public: repository, without tag and digest; empty where it is made by the user.
    :param digest: of its index.
    :param repository: below the registry's host.
    :param tag: empty where it is named by its digest alone.
    """

    image: str
    source: str
    digest: str
    repository: str
    tag: str

    @property
    def reference(self) -> str:
        """What a manifest is asked for by."""
        return self.tag or self.digest


def registry(text: str) -> Registry:
    """Return the registry that a variable names.

    :raises BadInput: it isn't a host with a path.
    """
    match = _REGISTRY.fullmatch(text)
    host = match.group(1) if match else ""
    # Without a dot, a colon or this name, programs look for a repository of Docker Hub.
    if not match or not ("." in host or ":" in host or host == "localhost"):
        raise BadInput(
            f"airgap_registry: {line(text, 200)!r} isn't a registry's host, and a folder in small letters, such as "
            "registry.example.org:5000/gpu"
        )
    return Registry(host, match.group(2).strip("/"))


def source_of(entry: Entry) -> tuple[str, str, str]:
    """Return repository, tag and digest by which an image is named; the last two may be empty.

    :raises BadInput: it isn't the name of an image.
    """
    text = entry["name"]
    match = _REFERENCE.fullmatch(full_reference(text))
    if not match:
        raise BadInput(f"the archive's {line(entry['id'])} is no image's name: {line(text, 300)}")
    host, path, tag, digest = match.groups()
    return f"{host}{path}", tag or "", digest or ""


def targets(entries: t.Iterable[Entry], where: Registry) -> list[Target]:
    """Return where each image goes: to the path that it has in its own registry, below the user's folder.

    :raises BadInput: two different images would get one name.
    """
    found: dict[tuple[str, str], Target] = {}
    for entry in entries:
        if entry["kind"] != IMAGE:
            continue
        source, tag, _digest = source_of(entry)
        path = source.partition("/")[2]
        repository = f"{where.folder}/{path}" if where.folder else path
        public = "" if source.startswith(LOCAL) else source
        target = Target(entry["image"], public, entry["digest"], repository, tag)
        other = found.setdefault((repository, target.reference), target)
        if other.digest != target.digest:
            raise BadInput(
                f"the archive's {other.image} and {target.image} would both be {where.host}/{repository}:{tag}: push "
                "them by two archives, into two folders"
            )
    return sorted(found.values())


def mirror_sets(found: t.Sequence[Target], where: Registry) -> list[JsonObject]:
    """Return OpenShift's objects by which nodes ask the user's registry first for the images of an archive.

    An ImageDigestMirrorSet is for images that are named by a digest, an ImageTagMirrorSet for those by a tag: neither
    does the other's work.
    """
    rows: dict[str, set[str]] = {}
    for target in found:
        if target.source:
            rows.setdefault(target.source, set()).add(f"{where.host}/{target.repository}")
    kinds = (("ImageDigestMirrorSet", "imageDigestMirrors"), ("ImageTagMirrorSet", "imageTagMirrors"))
    return [
        {
            "apiVersion": API,
            "kind": kind,
            "metadata": {"name": MIRRORS, "labels": {"app.kubernetes.io/managed-by": "kubegpu-share"}},
            "spec": {field: [{"source": source, "mirrors": sorted(rows[source])} for source in sorted(rows)]},
        }
        for kind, field in kinds
    ]
