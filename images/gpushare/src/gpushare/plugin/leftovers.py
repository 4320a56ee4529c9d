# SPDX-License-Identifier: GPL-3.0-or-later
"""Find containers that outlived their pod, and the device IDs whose memory they may still use.

kubelet frees a pod's IDs once it doesn't know the pod any more. After a forced deletion that is before its processes
have ended: one that ignores SIGTERM may hold the memory for as long as its grace period. Until its cgroup is empty, the
IDs aren't given to another pod.

A container's IDs are recorded while it runs. After a restart of the plugin nothing names the IDs of a container whose
pod is gone; its memory is then found as memory of no share.
"""

from __future__ import annotations

import dataclasses
import threading
import typing as t

from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import limits, pod_facts, steering
from gpushare.plugin.cgroups import Cgroups
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject


@dataclasses.dataclass(frozen=True)
class Holder:
    """A container and its device IDs.

    :param pod: its pod, ``namespace/name``.
    :param uid: the pod's.
    :param container: its name in the pod.
    :param folder: its cgroup.
    """

    pod: str
    uid: str
    container: str
    folder: str
    ids: tuple[str, ...]

    def units(self, cards: t.Sequence[contract.Card]) -> dict[str, int]:
        """Return its units by card (UUID)."""
        return {uuid: len(ids) for uuid, ids in steering.slots_of(cards).by_card(self.ids).items() if uuid}


class Leftovers:
    """Containers with device IDs, and those of them that outlived their pod. ``observe`` is called by one thread."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._lock = threading.Lock()
        # By the container's ID.
        self._holders: dict[str, Holder] = {}

    def observe(self, pods: t.Sequence[JsonObject], listing: t.Sequence[Entry]) -> tuple[Holder, ...]:
        """Record the running containers, and return those that outlived their pod.

        :param pods: of this node, with the statuses of ``limits.trim_statuses``.
        :param listing: from PodResources.
        """
        seen: dict[str, int] = {}
        for entry in listing:
            seen[entry.key] = seen.get(entry.key, 0) + 1
        listed = {entry.key: entry for entry in listing if seen[entry.key] == 1}
        there = [pod for pod in pods if not contract.finished(pod)]
        running: set[str] = set()
        fresh: dict[str, tuple[JsonObject, str, tuple[str, ...]]] = {}
        for pod in there:
            found = listed.get(pod_facts.key(pod))
            wanted = {step.name: step.units for step in pod_facts.steps(pod)}
            for name, identifier in limits.running(pod).items() if wanted else ():
                running.add(identifier)
                ids = found.containers.get(name, ()) if found else ()
                # The IDs that were recorded first are the container's own: a successor of the pod has other containers.
                if identifier not in self._holders and ids and len(ids) == wanted.get(name):
                    fresh[identifier] = (pod, name, ids)
        folders = self._cgroups.folders(fresh)
        holders = dict(self._holders)
        for identifier, (pod, name, ids) in fresh.items():
            if identifier in folders:
                key, uid = pod_facts.key(pod), contract.pod_uid(pod)
                holders[identifier] = Holder(key, uid, name, folders[identifier], ids)
        ended = {
            one for one, holder in holders.items() if one not in running and not self._cgroups.populated(holder.folder)
        }
        with self._lock:
            self._holders = {one: holder for one, holder in holders.items() if one not in ended}
        left = [holder for one, holder in self._holders.items() if one not in running]
        if not left:
            return ()
        uids = {contract.pod_uid(pod) for pod in there}
        held = {one for entry in listing for one in entry.ids}
        return tuple(one for one in left if one.uid not in uids and held.isdisjoint(one.ids))

    def taken(self, available: t.Iterable[str]) -> frozenset[str]:
        """Return those of the IDs that kubelet offers which belong to a container with processes.

        kubelet may offer them before ``observe`` has seen that the pod is gone.
        """
        with self._lock:
            holders = list(self._holders.values())
        if not holders:
            return frozenset()
        offered = frozenset(available)
        # kubelet frees all IDs of a container at once.
        found = [one for one in holders if one.ids[0] in offered and self._cgroups.populated(one.folder)]
        return frozenset(identifier for one in found for identifier in one.ids)
