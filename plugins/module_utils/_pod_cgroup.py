# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Whose a process is: its pod and container, told by the text of ``/proc/<pid>/cgroup``. No I/O.

Works for cgroup v1, v2 and both at once, kubelet's two cgroup drivers, containerd, CRI-O, Docker behind cri-dockerd,
and kubelets that run inside a container (kind) or below ``--cgroup-root``. The names are those that kubelet's
container manager and the runtimes give; none of them promises to keep them, so what isn't recognised is "unknown".
"""

from __future__ import annotations

import dataclasses
import re

# With separate hierarchies: where every runtime puts a container, the surest first. The empty name is version 2.
HIERARCHIES = ("memory", "devices", "pids", "name=systemd", "")
# A prefix of a container's cgroup, and the runtime that gives it.
RUNTIMES = {"cri-containerd": "containerd", "nerdctl": "containerd", "crio": "cri-o", "docker": "docker"}
# What the kernel puts behind the path of a cgroup that was removed while the process was in it.
REMOVED = " (deleted)"

# A UID of the API, or the hash of a static pod's file. systemd's names have underscores where a UID has dashes.
_POD = re.compile(
    r"[/-]pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|(?P<hash>[0-9a-f]{32}))(?:\.slice)?(?=[/:]|$)"
)
# Also "slice:cri-containerd:ID": kubelet names cgroups for systemd, and the runtime makes them without it.
_CONTAINER = re.compile(r"[/:](?:(?P<prefix>[a-z]+(?:-[a-z]+)*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?(?=[/:]|$)")
# kubelet's own cgroups, and the way out of a cgroup namespace that isn't the host's.
_KUBEPODS = re.compile(r"[/-]kubepods(?=[-./:]|$)")
_OUTSIDE = re.compile(r"/\.\.(?=/|$)")
# Containers whose cgroups carry a name and no ID.
_NAMED = re.compile(r"/(?:lxc\.payload[./]|lxc/|systemd-nspawn@)")


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose a process is.

    :param where: ``pod``; ``container`` (one that no kubelet made); ``host``; ``unknown`` where the text doesn't tell.
    :param pod_uid: the pod's UID; of a static pod the hash that its mirror pod has as annotation
        ``kubernetes.io/config.hash``. Empty where it is in no pod.
    :param container_id: 64 hexadecimal digits, or empty: some processes are in the pod's cgroup itself.
    :param runtime: ``containerd``, ``cri-o`` or ``docker``; empty where the name doesn't say (cgroup driver cgroupfs).
    :param static: ``pod_uid`` is such a hash.
    :param path: the path that this was read from, without the kernel's remark of a removed cgroup.
    """

    where: str = "unknown"
    pod_uid: str = ""
    container_id: str = ""
    runtime: str = ""
    static: bool = False
    path: str = ""


def owner(cgroup_text: str) -> Owner:
    """Whose the process is that ``/proc/<pid>/cgroup`` says this of; never raises.

    A pod in any hierarchy counts before a container, and that before the host: with both versions of cgroups mounted,
    one of them may know nothing (``0::/``).
    """
    found = [_of_path(path) for path in _paths(cgroup_text)]
    for where in ("pod", "container", "unknown"):
        for one in found:
            if one.where == where:
                return one
    return found[0] if found else Owner()


def _paths(text: str) -> list[str]:
    """The paths in the order in which they are asked."""
    ranked: list[tuple[int, str]] = []
    for line in text.split("\n"):
        parts = line.split(":", 2)
        if len(parts) != 3 or not parts[2].startswith("/"):
            continue
        path = parts[2][: -len(REMOVED)] if parts[2].endswith(REMOVED) else parts[2]
        ranks = [HIERARCHIES.index(one) for one in parts[1].split(",") if one in HIERARCHIES]
        ranked.append((min(ranks, default=len(HIERARCHIES)), path))
    # Hierarchies of the other controllers come last, as they stand.
    return [path for _rank, path in sorted(ranked, key=lambda one: one[0])]


def _of_path(path: str) -> Owner:
    # The outermost pod: a privileged container can make cgroups inside its own that are named like another's pod.
    # What is around it (the container that is a node of kind) is no pod of this node's kubelet.
    pod = _POD.search(path)
    # No pod as we know them: below kubelet's cgroups all the same, or seen from inside another cgroup namespace.
    strange = None if pod else _KUBEPODS.search(path) or _OUTSIDE.match(path)
    known = pod or strange
    container = _CONTAINER.match(path, pod.end()) if pod else _CONTAINER.search(path, known.end() if known else 0)
    prefix = (container.group("prefix") or "") if container else ""
    # conmon watches over a container, from beside it or from the pod's own cgroup: it is the host's.
    if prefix.endswith("conmon"):
        return Owner(where="host", path=path)
    identity = container.group("id") if container else ""
    runtime = RUNTIMES.get(prefix, "")
    if pod:
        uid = pod.group("uid").replace("_", "-")
        return Owner("pod", uid, identity, runtime, pod.group("hash") is not None, path)
    if strange:
        return Owner("unknown", "", identity, runtime, False, path)
    if container:
        if not prefix and path[: container.start()].endswith("/docker"):
            runtime = "docker"
        return Owner("container", "", identity, runtime, False, path)
    return Owner("container" if _NAMED.search(path) else "host", path=path)
