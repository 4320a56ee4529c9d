# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the images that kubeadm names, from the lab's own binaries, as archives that nodes import."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lab import archive, build
from lab.paths import cache_root, made_once
from lab.shell import LabError, output, run, step

HERE = Path(__file__).resolve().parent
# For the pods of tests: Debian with Python, and nothing about GPUs.
BASE_IMAGE = "localhost/kubegpu-lab/base:1"
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True)
class Archives:
    """The archives that each kind of node imports, and the name of the sandbox image."""

    control_plane: Path
    every_node: Path
    pause: str


def references(listed: str, etcd_version: str) -> dict[str, str]:
    """Map components to images from `kubeadm config images list`; etcd's tag becomes that of the lab's etcd."""
    found: dict[str, str] = {}
    for line in listed.split():
        name = line.rpartition(":")[0].rpartition("/")[2]
        found[name] = line
    if not {*CONTROL_PLANE, "kube-proxy", "pause", "etcd"} <= set(found):
        raise LabError(f"kubeadm names other images than expected: {', '.join(sorted(found))}.")
    found["etcd"] = f"{found['etcd'].rpartition(':')[0]}:{etcd_version}-0"
    return found


def archives(kubernetes: Path, etcd: Path, base: Path, version: str) -> Archives:
    """Return the archives for these binaries of Kubernetes ``version``, writing them on first use."""
    kubeadm = str(kubernetes / "kubeadm")
    listed = output([kubeadm, "config", "images", "list", "--kubernetes-version", f"v{version}"])
    names = references(listed, build.SETS["etcd"].version)
    source = (HERE / "pause.c").read_text()
    wanted = repr((str(kubernetes), str(etcd), str(base), sorted(names.items()), source, _stamps(kubernetes, etcd)))
    target = cache_root() / "images" / f"components-{version}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    with made_once(target) as fresh:
        if fresh:
            with step("writing the images of the Kubernetes components"):
                _write(fresh, kubernetes, etcd, base, names)
    return Archives(target / "control-plane.tar", target / "every-node.tar", names["pause"])


def _stamps(*folders: Path) -> list[tuple[str, int, int]]:
    """Identify folders outside the cache (LAB_BIN) by the sizes and times of their files."""
    files = [folder / name for folder in folders for name in (*CONTROL_PLANE, "kube-proxy", "etcd")]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]


def _write(folder: Path, kubernetes: Path, etcd: Path, base: Path, names: dict[str, str]) -> None:
    architecture = output(["dpkg", "--print-architecture"])
    pause = folder / "pause"
    run(["gcc", "-Os", "-static", "-s", "-o", str(pause), str(HERE / "pause.c")])

    def layer(name: str, binary: Path) -> Path:
        return archive.layer_of({f"usr/local/bin/{name}": binary}, folder / f"{name}.layer")

    control_plane = [archive.Image(names[name], (layer(name, kubernetes / name),)) for name in CONTROL_PLANE]
    control_plane.append(archive.Image(names["etcd"], (layer("etcd", etcd / "etcd"),)))
    everywhere = [
        archive.Image(names["pause"], (layer("pause", pause),), entrypoint=("/usr/local/bin/pause",)),
        # kube-proxy calls iptables.
        archive.Image(names["kube-proxy"], (base, layer("kube-proxy", kubernetes / "kube-proxy"))),
        archive.Image(BASE_IMAGE, (base,)),
    ]
    archive.write(control_plane, folder / "control-plane.tar", architecture)
    archive.write(everywhere, folder / "every-node.tar", architecture)
    for path in [*folder.glob("*.layer"), pause]:
        path.unlink()
