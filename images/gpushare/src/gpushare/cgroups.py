# SPDX-License-Identifier: GPL-3.0-or-later
"""The door to the node's cgroups: in which folder a container is.

Seen under one root, the node's own /sys/fs/cgroup: containerd, CRI-O and Docker (cri-dockerd) name a container's folder
by its ID, below the pod's. With systemd as driver it is a scope, with cgroupfs a plain folder; kubelet may have a root
of its own above all. The tree is searched by the ID alone, so that none of this has to be configured::

    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope
    kubepods.slice/…/crio-<id>.scope[/container]            crun puts the processes one level lower
    kubepods/burstable/pod<uid>/<id>
    kubepods-….slice:cri-containerd:<id>                    kubelet told "systemd", containerd "cgroupfs"
"""

from __future__ import annotations

import logging
import os
import re
import typing as t
from pathlib import Path

log = logging.getLogger("gpushare.cgroups")

CONTAINER = re.compile(
    r"(?:(?:cri-containerd|crio|docker)-|[^/]*:(?:cri-containerd|crio|docker):)?([0-9a-f]{64})(?:\.scope)?"
)
# No pod is in these, and they are large.
FOREIGN = frozenset(("system.slice", "user.slice", "init.scope", "machine.slice"))
# Of version 1, any hierarchy that kubelet puts every container into.
VERSION_1 = ("memory", "pids", "systemd")
DEPTH = 10


class Cgroups(t.Protocol):
    """The door; none of its calls raises."""

    @property
    def root(self) -> str: ...

    def version(self) -> int: ...

    def own(self) -> str | None: ...

    def folder(self, container_id: str) -> str | None: ...


class NodeCgroups:
    """The real one.

    :param root: where the node's own /sys/fs/cgroup is seen.
    """

    def __init__(self, root: str = "/sys/fs/cgroup") -> None:
        self.root = root
        self._known: dict[str, str] = {}

    def version(self) -> int:
        """2, 1 (a hybrid of both too, as limits need version 2 at the root), or 0 where there are no cgroups."""
        if os.path.exists(os.path.join(self.root, "cgroup.controllers")):
            return 2
        return 1 if self._version_1() else 0

    def own(self) -> str | None:
        """The folder of this very process; None where the root doesn't show it below itself.

        By its ID in cgroup.procs, which shows processes of other PID namespaces as 0: in a cgroup namespace, which
        most containers have, /proc/self/cgroup says nothing.
        """
        if self.version() != 2:
            return None
        mine = str(os.getpid())
        told = _text("/proc/self/cgroup")
        places = [self.root + line[len("0::") :] for line in told.splitlines() if line.startswith("0::/")]
        for folder in (*places, *_walk(self.root, DEPTH, frozenset())):
            if mine in _text(f"{folder}/cgroup.procs").split():
                return None if os.path.normpath(folder) == os.path.normpath(self.root) else os.path.normpath(folder)
        return None

    def folder(self, container_id: str) -> str | None:
        """The folder that holds a container's processes; None where there is none (any more)."""
        if not CONTAINER.fullmatch(container_id):
            return None
        known = self._known.get(container_id)
        if known is None or not os.path.isdir(known):
            self._look()
            known = self._known.get(container_id)
        return None if known is None else _inner(known)

    def _look(self) -> None:
        top = self.root if self.version() == 2 else self._version_1()
        self._known = {}
        for folder in _walk(top, DEPTH, FOREIGN) if top else ():
            found = CONTAINER.fullmatch(os.path.basename(folder))
            if found:
                self._known[found.group(1)] = folder

    def _version_1(self) -> str | None:
        folders = (os.path.join(self.root, one) for one in VERSION_1)
        return next((one for one in folders if os.path.isdir(one)), None)


def _inner(folder: str) -> str:
    """crun's own child of a container's scope, where the processes are."""
    child = f"{folder}/container"
    inside = (
        os.path.isdir(child) and _text(f"{child}/cgroup.procs").strip() and not _text(f"{folder}/cgroup.procs").strip()
    )
    return child if inside else folder


def _walk(top: str, depth: int, without: t.Container[str]) -> t.Iterator[str]:
    """All folders below (not the top itself); what is in a container's own folder is the container's affair."""
    try:
        with os.scandir(top) as entries:
            folders = [one.path for one in entries if one.name not in without and one.is_dir(follow_symlinks=False)]
    except OSError as error:
        # A cgroup may go at any moment.
        log.debug("%s can't be read: %s", top, error)
        return
    for folder in folders:
        yield folder
        if depth > 1 and not CONTAINER.fullmatch(os.path.basename(folder)):
            yield from _walk(folder, depth - 1, without)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
