# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pods and containers by the names of their cgroups. Standard library only, no I/O; the servers' image takes this file.

Covers cgroup v1, v2 and hybrid, kubelet's two cgroup drivers, containerd, CRI-O, Docker behind cri-dockerd, and
kubelets that run inside a container (kind) or below ``--cgroup-root``. Kubernetes promises none of these names, so a
name that isn't recognised is reported as "unknown". Source: kubernetes/kubernetes v1.36.0,
pkg/kubelet/cm/cgroup_manager_linux.go and pod_container_manager_linux.go.
"""

from __future__ import annotations

import dataclasses
import re

# The v1 hierarchies into which every runtime puts a container, most reliable first. The empty name is v2.
HIERARCHIES = ("memory", "devices", "pids", "name=systemd", "")
# The prefix of a container's cgroup name, and the runtime that sets it.
RUNTIMES = {"cri-containerd": "containerd", "nerdctl": "containerd", "crio": "cri-o", "docker": "docker"}
# The kernel appends this to the path of a removed cgroup.
REMOVED = " (deleted)"

# A pod's UID, or the hash of a static pod's file. systemd unit names have underscores in place of a UID's dashes.
_POD = re.compile(
    r"[/-]pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|(?P<hash>[0-9a-f]{32}))(?:\.slice)?(?=[/:]|$)"
)
# Also "slice:cri-containerd:ID": kubelet is configured for systemd and the runtime for cgroupfs.
_CONTAINER = re.compile(r"[/:](?:(?P<prefix>[a-z]+(?:-[a-z]+)*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?(?=[/:]|$)")
# kubelet's own cgroups, and a path that leaves the reader's cgroup namespace.
_KUBEPODS = re.compile(r"[/-]kubepods(?=[-./:]|$)")
_OUTSIDE = re.compile(r"/\.\.(?=/|$)")
# Containers whose cgroups are named after the container instead of its ID.
_NAMED = re.compile(r"/(?:lxc\.payload[./]|lxc/|systemd-nspawn@)")


@dataclasses.dataclass(frozen=True)
class ProcessOwner:
    """The pod, container or host that a process belongs to.

    :param where: ``pod``; ``container`` (one that no kubelet created); ``host``; ``unknown``.
    :param pod_uid: the pod's UID; for a static pod the hash that its mirror pod carries as annotation
        ``kubernetes.io/config.hash``. Empty outside pods.
    :param container_id: 64 hexadecimal digits, or empty: some processes are in the pod's cgroup itself.
    :param runtime: ``containerd``, ``cri-o`` or ``docker``; empty where the name lacks it (cgroup driver cgroupfs).
    :param static: ``pod_uid`` is such a hash.
    :param path: the cgroup path that decided, without the kernel's suffix for removed cgroups.
    """

    where: str = "unknown"
    pod_uid: str = ""
    container_id: str = ""
    runtime: str = ""
    static: bool = False
    path: str = ""


def process_owner(cgroup_text: str) -> ProcessOwner:
    """Find the owner of a process by the text of its ``/proc/<pid>/cgroup``; never raises.

    A pod in any hierarchy takes precedence over a container, and a container over the host: with v1 and v2 mounted
    side by side, one of them may carry no information (``0::/``).
    """
    owners = [_path_owner(path) for path in _paths(cgroup_text)]
    for where in ("pod", "container", "unknown"):
        for owner in owners:
            if owner.where == where:
                return owner
    return owners[0] if owners else ProcessOwner()


def container_id(name: str) -> str:
    """Return the container ID in the name of a cgroup's directory; empty if it isn't that of a kubelet's container.

    :param name: the last element of a cgroup's path, or a bare container ID.
    """
    match = _CONTAINER.search(f"/{name}")
    if not match or match.end() != len(name) + 1:
        return ""
    prefix = match.group("prefix")
    # "scope:ID", without a runtime's name, is no container's cgroup.
    known = prefix in RUNTIMES if prefix else match.start() == 0
    return match.group("id") if known else ""


def pod_uid(name: str) -> str:
    """Return the UID in the name of a cgroup's directory; empty if it isn't that of a pod, or of a static one.

    :param name: the last element of a cgroup's path.
    """
    match = _POD.search(f"/{name}")
    return match.group("uid").replace("_", "-") if match and match.end() == len(name) + 1 and not match["hash"] else ""


def _paths(text: str) -> list[str]:
    """Return the cgroup paths, most reliable hierarchy first."""
    ranked: list[tuple[int, str]] = []
    for line in text.split("\n"):
        parts = line.split(":", 2)
        if len(parts) != 3 or not parts[2].startswith("/"):
            continue
        path = parts[2][: -len(REMOVED)] if parts[2].endswith(REMOVED) else parts[2]
        ranks = [HIERARCHIES.index(name) for name in parts[1].split(",") if name in HIERARCHIES]
        ranked.append((min(ranks, default=len(HIERARCHIES)), path))
    # Hierarchies of the other controllers come last, in the order of the file.
    return [path for _rank, path in sorted(ranked, key=lambda row: row[0])]


def _path_owner(path: str) -> ProcessOwner:
    # The outermost pod: a privileged container can create cgroups below its own with another pod's name.
    # A container around the pod (a node of kind) is no pod of this node's kubelet.
    pod = _POD.search(path)
    # Below kubelet's cgroups without a pod, or outside of the reader's cgroup namespace.
    unclear = None if pod else _KUBEPODS.search(path) or _OUTSIDE.match(path)
    parent = pod or unclear
    container = _CONTAINER.match(path, pod.end()) if pod else _CONTAINER.search(path, parent.end() if parent else 0)
    prefix = (container.group("prefix") or "") if container else ""
    # conmon monitors a container, from the pod's cgroup or beside it, and belongs to the host.
    if prefix.endswith("conmon"):
        return ProcessOwner(where="host", path=path)
    identity = container.group("id") if container else ""
    runtime = RUNTIMES.get(prefix, "")
    if pod:
        uid = pod.group("uid").replace("_", "-")
        return ProcessOwner("pod", uid, identity, runtime, pod.group("hash") is not None, path)
    if unclear:
        return ProcessOwner("unknown", "", identity, runtime, False, path)
    if container:
        if not prefix and path[: container.start()].endswith("/docker"):
            runtime = "docker"
        return ProcessOwner("container", "", identity, runtime, False, path)
    return ProcessOwner("container" if _NAMED.search(path) else "host", path=path)
