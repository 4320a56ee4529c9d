# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Images by skopeo into one OCI layout, with all their platforms, under the digests that they have in their registry.

skopeo writes manifests of OCI's types into a layout and refuses a list of Docker's, whose digest it would have to
change. Those go through its ``dir`` form, which keeps every byte, into the same layout.
"""

from __future__ import annotations

import hashlib
import os
import typing as t

from ...module_utils._host.system import Done
from .archive import IMAGES, Entry
from .artifacts import Artifact, Held, entry, sorted_files
from .layout import blob_path
from .manifests import MANIFESTS, OCI, Descriptor, Document, document, typed_document
from .needed import Item
from .programs import NOT_INSTALLED, TIMED_OUT, Run, Watch, last_words
from .store import SPARE, Failed, Store

# Seconds: a manifest, and a whole image.
MANIFEST_SECONDS, IMAGE_SECONDS = 300.0, 6 * 3600.0
# The name of an image in the layout while it is copied; one that is complete has its own.
COPYING = "kubegpu.share-copying"
# Beginning of the names of skopeo's unfinished files in a layout.
UNFINISHED = f"{IMAGES}/oci-put-blob"
# Bytes of what skopeo writes beside blobs: manifests that it writes again, and the layout's index.
MARGIN = 16 << 20


class Registry:
    """What skopeo reads of registries; each manifest once in a run.

    :param auth_file: credentials, as docker's config.json; empty for those of the user who runs this.
    """

    def __init__(self, program: Run, auth_file: str = "", skopeo: str = "skopeo") -> None:
        self._program = program
        self._skopeo = skopeo
        self._auth = ["--authfile", auth_file] if auth_file else []
        self._known: dict[str, bytes] = {}

    def manifest(self, reference: str) -> bytes:
        """Return the index or manifest of an image, byte for byte.

        :raises Failed: the registry doesn't give it, or skopeo is missing.
        """
        if reference not in self._known:
            done = self._run(["inspect", "--raw", *self._auth, f"docker://{reference}"], MANIFEST_SECONDS)
            self._known[reference] = done.out.encode()
        return self._known[reference]

    def copy(self, source: str, target: str, watch: Watch | None = None) -> None:
        """Copy an image with all its platforms, whose digests stay.

        :param watch: is told how far it is.

        :raises Failed: it can't be copied.
        """
        options = ["--all", "--preserve-digests", "--remove-signatures", "--retry-times", "3"]
        credentials = ["--src-authfile", *self._auth[1:]] if self._auth else []
        self._run(["copy", "--quiet", *options, *credentials, source, target], IMAGE_SECONDS, watch)

    def _run(self, arguments: list[str], seconds: float, watch: Watch | None = None) -> Done:
        done = self._program([self._skopeo, *arguments], timeout=seconds, watch=watch)
        if done.rc == NOT_INSTALLED:
            raise Failed(
                "no_skopeo",
                "this machine has no skopeo, which copies images: install it, or name it by airgap_skopeo",
                stop=True,
            )
        if done.rc == TIMED_OUT:
            raise Failed("timeout", f"skopeo didn't finish within {seconds:g} s")
        if done.rc != 0:
            raise Failed("skopeo", f"skopeo can't copy it: {last_words(done, 1)}")
        return done


def unpinned(reference: str) -> tuple[str, str]:
    """Return an image's name without its digest, and the digest, which may be empty."""
    name, _at, digest = reference.partition("@")
    return name, digest


class Image(Artifact):
    """An image of the list; items of the same source are one.

    :param architectures: those that it has to have.
    """

    def __init__(self, registry: Registry, items: t.Sequence[Item]) -> None:
        self.items = tuple(items)
        self.source = items[0]["source"]
        self.name = f"image {self.source}"
        digests = {item["digest"] for item in items} | {unpinned(self.source)[1]}
        self.pinned = sorted(digests - {""})
        self.architectures = sorted({each for item in items for each in item["architectures"]})
        self._registry = registry

    @property
    def size(self) -> int | None:
        """Bytes of all platforms that the list knows: all are copied."""
        sizes = {name: row.get("bytes") for item in self.items for name, row in item["platforms"].items()}
        known = [int(size) for size in sizes.values() if size is not None]
        return sum(known) if known else None

    def request(self) -> t.Sequence[str]:
        return [self.source, *self.pinned]

    def held(self, store: Store, state: Held) -> list[Entry]:
        image = store.images().get(self.source)
        if not image or not any(entry["request_sha256"] == self.request_sha256 for entry in state.contents.items):
            return []
        try:
            parts = store.layout.parts(image.digest)
            # A tag may have moved.
            if image.digest != (self.pinned[0] if self.pinned else self._digest(self._registry.manifest(self.source))):
                return []
            self._examine(store, image.digest)
        except (ValueError, Failed):
            # Fetching it says why.
            return []
        return self._entries(image, parts)

    def fetch(self, store: Store, work: str) -> list[Entry]:
        if len(self.pinned) > 1:
            raise Failed("two_digests", f"the list has two digests for it: {' and '.join(self.pinned)}")
        name, _digest = unpinned(self.source)
        repository = name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name
        content = self._registry.manifest(f"{repository}@{self.pinned[0]}" if self.pinned else self.source)
        digest = self._digest(content)
        if self.pinned and digest != self.pinned[0]:
            raise Failed("other_digest", f"the registry has {digest}, and the list {self.pinned[0]}")
        try:
            known = typed_document(content)
        except ValueError as error:
            raise Failed("type", f"its manifest {error}") from error
        in_layout = {known.media, *(row.media for row in known.manifests)} <= set(OCI)
        missing = self._missing(store, repository, known, in_layout)
        limit = (
            f"{missing} bytes of its parts that its manifests name, so skopeo was stopped: its registry sends "
            "something else; run again, and where it is so again, take the image from another registry"
        )
        watch = store.bounded(missing + MARGIN, limit, self.watch)
        source = f"docker://{repository}@{digest}"
        images = store.images()
        if in_layout:
            # Blobs that are there already aren't fetched again, those of a killed run as well.
            store.write_images(images)
            try:
                self._registry.copy(source, f"oci:{store.at(IMAGES)}:{COPYING}", watch)
            except Failed:
                _remove_unfinished(store)
                raise
        else:
            self._registry.copy(source, f"dir:{work}", watch)
            for file in sorted_files(work):
                _absorb(store, work, file)
        image = Descriptor(known.media, digest, len(content))
        try:
            parts = store.layout.parts(digest)
        except ValueError as error:
            store.write_images(images)
            raise Failed("incomplete", f"what skopeo has copied isn't complete: {error}") from error
        try:
            self._examine(store, digest)
        except Failed:
            store.write_images(images)
            raise
        store.write_images({**images, self.source: image})
        return self._entries(image, parts)

    def _missing(self, store: Store, repository: str, known: Document, in_layout: bool) -> int:
        """Return the bytes of an image's parts that skopeo has to bring.

        :param in_layout: those that are there already aren't brought again.
        :raises Failed: there is no space for them, which skopeo says in words only, when it leaves none of them.
        """
        try:
            rows = list(known.blobs)
            for row in known.manifests:
                if row.media in MANIFESTS:
                    rows += document(self._registry.manifest(f"{repository}@{row.digest}")).blobs
        except ValueError as error:
            raise Failed("type", f"its manifest {error}") from error
        missing = {row.digest: row.size for row in rows if not (in_layout and store.layout.has(row))}
        total = sum(missing.values())
        needed, free = total + SPARE, store.free()
        if needed > free:
            space = f"{needed >> 20} MiB are needed, {free >> 20} are free"
            raise Failed("full", f"the disk of {store.folder} is full: {space}", stop=True)
        return total

    @staticmethod
    def _digest(content: bytes) -> str:
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    def _examine(self, store: Store, digest: str) -> None:
        lacking = sorted(set(self.architectures) - store.layout.architectures(digest))
        if lacking:
            raise Failed("architecture", f"it has no {' and no '.join(lacking)}, which machines of the inventory have")

    def _entries(self, image: Descriptor, parts: t.Mapping[str, int]) -> list[Entry]:
        known = [t.cast(Item, {**item, "digest": image.digest}) for item in self.items]
        return [entry(self, item, IMAGES, sum(parts.values()), "", self.source) for item in known]


def _remove_unfinished(store: Store) -> None:
    """Remove what skopeo leaves where it is ended: it may be what has filled the disk."""
    for name in os.listdir(store.at(IMAGES)):
        if f"{IMAGES}/{name}".startswith(UNFINISHED):
            store.remove(f"{IMAGES}/{name}")


def _absorb(store: Store, folder: str, name: str) -> None:
    """Move a file of skopeo's ``dir`` form to the blobs under its digest; its own name isn't believed."""
    if name == "version" or name.startswith("signature-"):
        return
    path = os.path.join(folder, name)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    store.take(path, blob_path(digest.hexdigest()))


def images(registry: Registry, items: t.Iterable[Item]) -> list[Image]:
    """Return the images of a list, each once."""
    together: dict[str, list[Item]] = {}
    for item in items:
        together.setdefault(item["source"], []).append(item)
    return [Image(registry, own) for own in together.values()]
