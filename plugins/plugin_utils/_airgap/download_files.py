# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and charts: from their addresses, registries or this machine, held to the digests that the list has."""

from __future__ import annotations

import hashlib
import os
import re
import typing as t
import urllib.parse

from ...module_utils._core.errors import BadInput
from ...module_utils._core.paths import safe_name
from ...module_utils._core.untrusted import line
from ...module_utils._packages.options import fingerprint
from .._pins import index
from .archive import Entry
from .artifacts import Artifact, download, entry, path_of
from .download_images import MARGIN, Registry
from .manifests import document
from .needed import CHART, FILE, Item
from .store import Failed, Store
from .web import LARGEST, Fetch

# Bytes of a list of charts, of which a tree is made.
LARGEST_INDEX = 16 << 20
CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
OCI_SCHEME, TLS = "oci://", "https://"
_WORD = re.compile(r"[\w.+-]+", re.ASCII)


class File(Artifact):
    """A file of an address: a key, a program, a package.

    :param architecture: what ``{architecture}`` in the address means: amd64 or arm64.
    :param key: fingerprint of an OpenPGP key; empty for another file.
    :param unverified: take it without TLS, too, where nothing else says that it is the right one.
    """

    def __init__(self, fetch: Fetch, item: Item, architecture: str, key: str, unverified: bool = False) -> None:
        self.items = (item,)
        self.url = item["source"].replace("{architecture}", architecture)
        self.name = f"file {item['name']}"
        of_architecture = item["platforms"].get(architecture) if self.url != item["source"] else None
        self.digest = item["digest"] or str((of_architecture or {}).get("digest") or "")
        self._fetch = fetch
        self._key = key
        self._unverified = unverified

    def request(self) -> t.Sequence[str]:
        [item] = self.items
        return [self.url, self.digest, self._key, item["name"], *self._allowance]

    @property
    def verified(self) -> bool:
        """Whether anything but the server's certificate says that it is the right one."""
        return bool(self.digest or self._key)

    @property
    def _allowance(self) -> list[str]:
        """What was taken because the user allowed it isn't kept when the user no longer does."""
        return [] if self.verified or self.url.startswith(TLS) else [str(self._unverified)]

    def fetch(self, store: Store, work: str) -> list[Entry]:
        [item] = self.items
        folder, _slash, name = self.url.partition("?")[0].rpartition("/")
        # Files of the same name are those of several repositories.
        path = path_of(FILE, f"{safe_name(folder)}/{urllib.parse.unquote(name)}")
        if not self.verified and not self.url.startswith(TLS) and not self._unverified:
            raise Failed(
                "unverified",
                f"{line(self.url, 300)}: neither a digest nor TLS says that it is the right file; where you take it as "
                "it comes, set airgap_unverified: true",
            )
        content = download(self._fetch, self.url)
        sha256 = hashlib.sha256(content).hexdigest()
        compare(self.digest, sha256)
        found = fingerprint(content.decode("utf-8", "replace")) if self._key and not self.digest else self._key
        if found != self._key:
            raise Failed("other_key", f"it has fingerprint {found or 'of no single key'}, and the list {self._key}")
        store.put(path, content)
        return [entry(self, item, path, len(content), sha256)]


class Local(Artifact):
    """A file of this machine that a variable names: NVIDIA's .run file, an archive of the servers' image."""

    def __init__(self, item: Item, path: str) -> None:
        self.items = (item,)
        self.path = os.path.abspath(os.path.expanduser(path))
        self.name = f"file {item['name']}"

    def request(self) -> t.Sequence[str]:
        try:
            state = os.stat(self.path)
            # Another file of the same name is another request.
            return [self.path, self.items[0]["digest"], str(state.st_size), str(state.st_mtime_ns)]
        except OSError:
            return [self.path, self.items[0]["digest"]]

    def fetch(self, store: Store, work: str) -> list[Entry]:
        [item] = self.items
        path = path_of(FILE, os.path.basename(self.path))
        if not os.path.isfile(self.path):
            variables = " or ".join(item["variables"][:1])
            raise Failed("no_file", f"{line(self.path, 300)} ({variables}) isn't a file of this machine")
        store.copy(self.path, path)
        sha256 = store.sha256(path)
        try:
            compare(item["digest"], sha256)
        except Failed:
            store.remove(path)
            raise
        return [entry(self, item, path, store.size(path), sha256)]


class Chart(Artifact):
    """A chart of a repository of charts, or of a registry.

    It is held to the list's digest; without that, to the digest in its repository's index, which has to come by TLS.

    :param unverified: take it where neither is there.
    """

    def __init__(self, fetch: Fetch, registry: Registry, item: Item, unverified: bool = False) -> None:
        self.items = (item,)
        self.name = f"chart {item['name']} {item['version']}"
        self._fetch = fetch
        self._registry = registry
        self._unverified = unverified

    @property
    def verified(self) -> bool:
        """Whether it is held to a digest, or its registry's TLS; where anything is taken, only the list's counts."""
        return bool(self.items[0]["digest"]) or not self._unverified

    def request(self) -> t.Sequence[str]:
        [item] = self.items
        allowed = [] if item["digest"] else [str(self._unverified)]
        return [item["source"], item["name"], item["version"], item["digest"], *allowed]

    def fetch(self, store: Store, work: str) -> list[Entry]:
        [item] = self.items
        if not _WORD.fullmatch(item["version"]):
            raise Failed("version", f"{line(item['version'], 80) or 'none'} isn't the version of a chart")
        of_registry = item["source"].startswith(OCI_SCHEME)
        content = self._of_registry(item, store, work) if of_registry else self._of_repository(item)
        sha256 = hashlib.sha256(content).hexdigest()
        compare(item["digest"], sha256)
        path = path_of(CHART, f"{item['name']}-{item['version']}.tgz")
        store.put(path, content)
        return [entry(self, item, path, len(content), sha256)]

    def _of_repository(self, item: Item) -> bytes:
        folder = item["source"].rstrip("/") + "/"
        listed = download(self._fetch, f"{folder}index.yaml", LARGEST_INDEX)
        try:
            rows = index.entries(listed, item["name"])
        except BadInput as error:
            raise Failed("index", f"{folder}index.yaml {error}") from error
        version = item["version"].removeprefix("v")
        own = [row for row in rows if str(row["version"]).removeprefix("v") == version]
        urls = own[0].get("urls") if own else None
        if not own or not isinstance(urls, list) or not urls or not isinstance(urls[0], str):
            raise Failed("no_chart", f"{folder}index.yaml has no version {item['version']} of it")
        url = urllib.parse.urljoin(folder, urls[0])
        if not url.startswith(("https://", "http://")):
            raise Failed("index", f"{folder}index.yaml names {line(url, 200)}, which isn't fetched")
        digest = own[0].get("digest")
        if not item["digest"] and not self._unverified and not (digest and folder.startswith(TLS)):
            reason = "has no digest of it" if folder.startswith(TLS) else "comes without TLS"
            variable = next((f"{name.removesuffix('_ref')}_sha256" for name in item["variables"][1:2]), "")
            raise Failed(
                "unverified",
                f"the list has no digest of it, and {line(folder, 300)}index.yaml {reason}, so nothing says that it is "
                f"the right chart: set {variable or 'its digest'} to its archive's SHA-256, or airgap_unverified: true",
            )
        content = download(self._fetch, url)
        if digest and digest != hashlib.sha256(content).hexdigest():
            raise Failed("other_digest", f"{line(url, 300)} isn't the file that its repository's index.yaml lists")
        return content

    def _of_registry(self, item: Item, store: Store, work: str) -> bytes:
        # As helm has it: a registry's tags have no plus sign.
        name = item["source"].removeprefix(OCI_SCHEME).rstrip("/")
        reference = f"{name}:{item['version'].replace('+', '_')}"
        manifest = self._registry.manifest(reference)
        try:
            [layer] = [row for row in document(manifest).layers if row.media == CHART_LAYER]
        except ValueError as error:
            raise Failed("type", f"{line(reference, 300)} is no chart") from error
        size = sum(row.size for row in document(manifest).blobs)
        if size > LARGEST:
            raise Failed("type", f"{line(reference, 300)} has more than {LARGEST >> 20} MiB, so it is no chart")
        # By its digest: a tag may move meanwhile.
        source = f"docker://{name}@sha256:{hashlib.sha256(manifest).hexdigest()}"
        limit = f"{size} bytes that its manifest names, so skopeo was stopped: take the chart from another registry"
        self._registry.copy(source, f"dir:{work}", store.bounded(size + MARGIN, limit, self.watch))
        with open(os.path.join(work, layer.digest.removeprefix("sha256:")), "rb") as file:
            content = file.read()
        if layer.digest != f"sha256:{hashlib.sha256(content).hexdigest()}":
            raise Failed("other_digest", f"{line(reference, 300)} isn't the file that its manifest names")
        return content


def compare(digest: str, sha256: str) -> None:
    """Compare a file with the list.

    :param digest: ``sha256:...``; empty for any.
    :raises Failed: it is another one.
    """
    if digest and digest != f"sha256:{sha256}":
        raise Failed("other_digest", f"it has SHA-256 {sha256}, and the list {digest.removeprefix('sha256:')}")
