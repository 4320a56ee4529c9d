# SPDX-License-Identifier: GPL-3.0-or-later
"""Container images as files, in the format of `docker save`, which containerd imports; written without an engine."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Image:
    """An image of one or more layers, each an uncompressed tar file."""

    reference: str
    layers: tuple[Path, ...]
    environment: tuple[str, ...] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    entrypoint: tuple[str, ...] = field(default=())


def layer_of(binaries: dict[str, Path], target: Path) -> Path:
    """Write a layer with programs at the given paths; the same programs give the same bytes."""
    with tarfile.open(target, "w") as tar:
        folders: set[str] = set()
        for name in binaries:
            parts = name.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                folders.add("/".join(parts[:depth]))
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, source in sorted(binaries.items()):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, source.stat().st_size
            with source.open("rb") as file:
                tar.addfile(entry, file)
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(images: list[Image], target: Path, architecture: str) -> None:
    """Write one archive with all images; a shared layer is written once."""
    digests = {layer: _digest(layer) for image in images for layer in image.layers}
    manifest = []
    with tarfile.open(target, "w") as tar:
        for digest, layer in {digest: layer for layer, digest in digests.items()}.items():
            entry = tarfile.TarInfo(f"{digest}/layer.tar")
            entry.size = layer.stat().st_size
            with layer.open("rb") as file:
                tar.addfile(entry, file)
        for image in images:
            config = {
                "architecture": architecture,
                "os": "linux",
                "config": {"Env": list(image.environment), "Entrypoint": list(image.entrypoint) or None},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digests[each]}" for each in image.layers]},
                "history": [{"created_by": "kubegpu-lab"} for _layer in image.layers],
            }
            name = hashlib.sha256(json.dumps(config).encode()).hexdigest() + ".json"
            _add(tar, name, config)
            manifest.append(
                {
                    "Config": name,
                    "RepoTags": [image.reference],
                    "Layers": [f"{digests[each]}/layer.tar" for each in image.layers],
                }
            )
        _add(tar, "manifest.json", manifest)


def _add(tar: tarfile.TarFile, name: str, content: object) -> None:
    raw = json.dumps(content).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(raw)
    tar.addfile(entry, io.BytesIO(raw))
