# SPDX-License-Identifier: GPL-3.0-or-later
"""Find containers' cgroups in the node's own /sys/fs/cgroup, mounted at one path.

The tree is searched by the container's ID alone, so that neither kubelet's cgroup driver nor its root nor the runtime
has to be configured::

    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope
    kubepods.slice/…/crio-<id>.scope[/container]            crun puts the processes one level lower
    kubepods/burstable/pod<uid>/<id>
    kubepods-….slice:cri-containerd:<id>                    kubelet with systemd's driver, containerd with cgroupfs
"""

from __future__ import annotations

import logging
import os
import typing as t
from pathlib import Path

from gpushare.shared._contracts.cgroup import container_id, pod_uid

log = logging.getLogger("gpushare.cgroups")

# No pod is in these, and they are large.
FOREIGN = frozenset(("system.slice", "user.slice", "init.scope", "machine.slice"))
# Version 1 hierarchies into which kubelet puts every container.
VERSION_1 = ("memory", "pids", "systemd")
DEPTH = 10


class Cgroups(t.Protocol):
    """The cgroups of a node; no method raises."""

    @property
    def root(self) -> str: ...

    def version(self) -> int: ...

    def own(self) -> str | None: ...

    def folders(self, containers: t.Collection[str]) -> dict[str, str]: ...

    def populated(self, folder: str) -> bool: ...


class PodCgroups(Cgroups, t.Protocol):
    """The cgroups of a node's pods; no method raises."""

    def pods(self, uids: t.Collection[str]) -> dict[str, str]: ...

    def containers(self, pod: str) -> list[str]: ...


class NodeCgroups:
    """Cgroups read from the file system.

    :param root: where the node's own /sys/fs/cgroup is mounted.
    """

    def __init__(self, root: str = "/sys/fs/cgroup") -> None:
        self.root = root
        self._known: dict[str, str] = {}
        self._known_pods: dict[str, str] = {}

    def version(self) -> int:
        """Return 2, 1 (also for a hybrid of both, since limits need version 2 at the root), or 0 without cgroups."""
        if os.path.exists(os.path.join(self.root, "cgroup.controllers")):
            return 2
        return 1 if self._version_1() else 0

    def own(self) -> str | None:
        """Return this process's cgroup, or None if the root doesn't contain it.

        Found by the process ID in cgroup.procs, which shows processes of other PID namespaces as 0: inside a cgroup
        namespace, which most containers have, /proc/self/cgroup doesn't contain the path.
        """
        if self.version() != 2:
            return None
        mine = str(os.getpid())
        lines = _text("/proc/self/cgroup").splitlines()
        places = [self.root + line[len("0::") :] for line in lines if line.startswith("0::/")]
        for folder in (*places, *_walk(self.root, DEPTH, frozenset())):
            if mine in _text(f"{folder}/cgroup.procs").split():
                return None if os.path.normpath(folder) == os.path.normpath(self.root) else os.path.normpath(folder)
        return None

    def folders(self, containers: t.Collection[str]) -> dict[str, str]:
        """Return the cgroups that hold these containers' processes, by the containers' IDs; some may have none.

        However many are unknown, the tree is searched once.
        """
        if not all(container in self._known and os.path.isdir(self._known[container]) for container in containers):
            self._scan()
        return {container: _inner(self._known[container]) for container in containers if container in self._known}

    def pods(self, uids: t.Collection[str]) -> dict[str, str]:
        """Return the cgroups of pods by their UIDs; some may have none (any more).

        However many are unknown, the tree is searched once.
        """
        if not all(uid in self._known_pods and os.path.isdir(self._known_pods[uid]) for uid in uids):
            self._scan()
        return {uid: self._known_pods[uid] for uid in uids if uid in self._known_pods}

    def containers(self, pod: str) -> list[str]:
        """Return the cgroups that hold processes of a pod's containers, its sandbox among them.

        :param pod: the pod's cgroup.
        """
        return sorted(_inner(path) for path in _walk(pod, 1, frozenset()) if container_id(os.path.basename(path)))

    def populated(self, folder: str) -> bool:
        """Return whether there are processes in a container's cgroup or below it; false if it is gone."""
        # Version 1 hasn't this file, and hides processes of other PID namespaces: the runtime removes the cgroup after
        # their end.
        events = _text(f"{folder}/cgroup.events")
        return "populated 1" in events if events else os.path.isdir(folder)

    def _scan(self) -> None:
        top = self.root if self.version() == 2 else self._version_1()
        folders = list(_walk(top, DEPTH, FOREIGN) if top else ())
        self._known = {
            identifier: folder for folder in folders if (identifier := container_id(os.path.basename(folder)))
        }
        self._known_pods = {
            identifier: folder for folder in folders if (identifier := pod_uid(os.path.basename(folder)))
        }

    def _version_1(self) -> str | None:
        folders = (os.path.join(self.root, name) for name in VERSION_1)
        return next((folder for folder in folders if os.path.isdir(folder)), None)


def _inner(folder: str) -> str:
    """Return crun's child of a container's scope if the processes are there."""
    child = f"{folder}/container"
    inside = (
        os.path.isdir(child) and _text(f"{child}/cgroup.procs").strip() and not _text(f"{folder}/cgroup.procs").strip()
    )
    return child if inside else folder


def _walk(top: str, depth: int, without: t.Container[str]) -> t.Iterator[str]:
    """Yield all directories below, without the top itself and without those inside a container's own cgroup."""
    try:
        with os.scandir(top) as entries:
            folders = [
                entry.path for entry in entries if entry.name not in without and entry.is_dir(follow_symlinks=False)
            ]
    except OSError as error:
        # A cgroup may be removed at any moment.
        log.debug("%s can't be read: %s", top, error)
        return
    for folder in folders:
        yield folder
        if depth > 1 and not container_id(os.path.basename(folder)):
            yield from _walk(folder, depth - 1, without)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
