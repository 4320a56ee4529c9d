# SPDX-License-Identifier: GPL-3.0-or-later
"""Archives that tests make: of the things of a list of needed ones, with small contents in their real formats."""

from __future__ import annotations

import gzip
import hashlib
import json
import typing as t
from pathlib import Path

import served
from ansible_collections.kubegpu.share.plugins.module_utils._core.paths import safe_name
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import archive

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
REF = "org.opencontainers.image.ref.name"
KEY = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n"
CREATED = "2026-11-29T12:00:00Z"


class Maker:
    """Fills the folder of an archive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[dict[str, t.Any]] = []
        self._index: list[dict[str, t.Any]] = []

    def file(self, path: str, content: bytes) -> dict[str, t.Any]:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "image": ""}

    def _blob(self, content: bytes, kind: str, **more: t.Any) -> dict[str, t.Any]:
        digest = hashlib.sha256(content).hexdigest()
        self.file(f"images/blobs/sha256/{digest}", content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content), **more}

    def image(self, name: str) -> dict[str, t.Any]:
        """Add an image for two platforms to the layout; returns the fields of its entry."""
        rows = []
        for architecture in ("amd64", "arm64"):
            layer = self._blob(gzip.compress(f"{name} {architecture}".encode(), mtime=0), LAYER)
            difference = f"sha256:{hashlib.sha256(f'{name} {architecture}'.encode()).hexdigest()}"
            config = {
                **{"architecture": architecture, "os": "linux", "config": {}},
                "rootfs": {"type": "layers", "diff_ids": [difference]},
            }
            document = {
                **{"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer]},
                "config": self._blob(json.dumps(config).encode(), CONFIG),
            }
            platform = {"architecture": architecture, "os": "linux"}
            rows.append(self._blob(json.dumps(document, indent=1).encode(), MANIFEST, platform=platform))
        # The digest is that of these very bytes, which no program would write again like this.
        index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}, indent=3).encode()
        found = self._blob(index, INDEX)
        self._index.append({**found, "annotations": {REF: name}})
        return {"path": "images", "bytes": found["size"], "sha256": "", "image": name, "digest": found["digest"]}

    def take(self, items: t.Sequence[t.Mapping[str, t.Any]]) -> None:
        """Add what an inventory needs, as far as an archive has it."""
        repositories: dict[str, list[t.Mapping[str, t.Any]]] = {}
        for item in items:
            kind, name, version = item["kind"], item["name"], item["version"]
            if kind == "image":
                self.entries.append({**item, **self.image(name)})
            elif kind == "chart":
                content = served.chart(name, version)
                self.entries.append({**item, **self.file(f"charts/{name}-{version}.tgz", content)})
            elif item["id"].startswith("files/key/"):
                self.entries.append({**item, **self.file(f"files/{safe_name(item['source'])}", KEY)})
            elif kind == "wheel" and item["variables"]:
                path = f"wheels/{name.replace('-', '_')}-{version.removeprefix('==')}-py3-none-any.whl"
                self.entries.append({**item, **self.file(path, name.encode())})
            elif kind in ("apt", "rpm") and item["source"]:
                path = f"packages/{kind}/{safe_name(item['source'])}"
                self.entries.append({**item, "path": path, "bytes": 0, "sha256": "", "image": ""})
                repositories.setdefault(path, []).append(item)
        for path, rows in repositories.items():
            self._repository(path, rows)

    def _repository(self, path: str, rows: t.Sequence[t.Mapping[str, t.Any]]) -> None:
        versions = {row["name"]: row["version"].replace("*", "1") or "1" for row in rows}
        if rows[0]["kind"] == "apt":
            text = "".join(f"Package: {name}\nVersion: {version}\n\n" for name, version in versions.items())
            self.file(f"{path}/Packages.gz", gzip.compress(text.encode(), mtime=0))
            self.file(f"{path}/InRelease", b"signed")
            return
        text = "".join(
            f'<package><name>{name}</name><arch>x86_64</arch><version epoch="0" ver="{version.partition("-")[0]}" '
            f'rel="{version.partition("-")[2]}"/></package>'
            for name, version in versions.items()
        )
        self.file(f"{path}/repodata/1-primary.xml.gz", gzip.compress(text.encode(), mtime=0))
        listed = b'<repomd><data type="primary"><location href="repodata/1-primary.xml.gz"/></data></repomd>'
        self.file(f"{path}/repodata/repomd.xml", listed)

    def close(self) -> str:
        """Write the lists; returns the folder."""
        if self._index:
            self.file("images/index.json", json.dumps({"schemaVersion": 2, "manifests": self._index}).encode())
            self.file("images/oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        text = archive.render(archive.Contents(CREATED, tuple(self.entries)))
        self.file("contents.json", text.encode())
        found, _faults = archive.files_of(str(self.folder))
        sums = {path: archive.sha256_of(str(self.folder / path))[0] for path in found}
        (self.folder / archive.SUMS).write_text(archive.render_sums(sums))
        return str(self.folder)
