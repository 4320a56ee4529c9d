# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the nodes' image: the cached root filesystem with containerd, kubeadm's tools and the units."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from lab.engine import LABEL, Engine
from lab.paths import cache_root
from lab.shell import step

HERE = Path(__file__).resolve().parent / "node"
BINARIES = {
    "containerd": ("containerd", "containerd-shim-runc-v2", "ctr"),
    "kubernetes": ("kubeadm", "kubelet", "kubectl"),
}


def imported(engine: Engine, name: str, rootfs: Path) -> str:
    """Return the tag of a root filesystem in the engine, importing it on first use."""
    tag = f"kubegpu-lab/{name}:{rootfs.parent.name.rpartition('-')[2]}"
    if not engine.has_image(tag):
        with step(f"importing the {name} system into the engine"):
            change = (f"--change=LABEL {LABEL}", '--change=CMD ["/bin/bash"]')
            engine.docker("import", *change, str(rootfs), tag, tied=True)
    return tag


def node_image(engine: Engine, rootfs: Path, folders: dict[str, Path]) -> str:
    """Return the tag of the nodes' image, building it on first use."""
    base = imported(engine, "system", rootfs)
    tag = f"kubegpu-lab/node:{_key(rootfs, folders)}"
    if engine.has_image(tag):
        return tag
    # A fixed name, so that this run removes what a killed one left; only one `lab` command runs at a time.
    context = cache_root() / "node-context"
    shutil.rmtree(context, ignore_errors=True)
    with step("building the nodes' image"):
        shutil.copytree(HERE, context, ignore=shutil.ignore_patterns("__pycache__"))
        (context / "bin").mkdir()
        for name, binaries in BINARIES.items():
            for binary in binaries:
                shutil.copy2(folders[name] / binary, context / "bin" / binary)
        arguments = ("--network=none", f"--build-arg=BASE={base}", f"--label={LABEL}", f"--tag={tag}")
        engine.docker("build", "--quiet", "--force-rm", *arguments, str(context), tied=True)
        shutil.rmtree(context)
    return tag


def _key(rootfs: Path, folders: dict[str, Path]) -> str:
    digest = hashlib.sha256(str(rootfs).encode())
    # Without what tests of the nodes' programs leave.
    for path in sorted(path for path in HERE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{path.relative_to(HERE)} {os.access(path, os.X_OK)}\n".encode() + path.read_bytes())
    for name, binaries in BINARIES.items():
        for binary in binaries:
            found = (folders[name] / binary).stat()
            digest.update(f"{binary} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
