# SPDX-License-Identifier: GPL-3.0-or-later
"""Find containers that outlived their pod, and the device IDs whose memory they may still use.

kubelet frees a pod's IDs once it doesn't know the pod any more. After a forced deletion that is before its processes
have ended: one that ignores SIGTERM is killed two seconds later, and one that hangs in the kernel ends when that lets
it. Until its cgroup is empty, the IDs aren't given to another pod; a call for them waits for some seconds.

A container's IDs are recorded while it runs. After a restart of the plugin nothing names the IDs of a container whose
pod is gone; its memory is then found as memory of no share.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import typing as t

from gpushare.kubelet.pod_resources import Entry, by_pod
from gpushare.node.cgroups import Cgroups
from gpushare.plugin import limits, pod_facts, steering
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.leftovers")

# Seconds that processes of a gone pod are given to end: kubelet kills those of a forced deletion after two. Nothing is
# reported before, and a call for their IDs waits so long at most.
ENDING_SECONDS = 5.0
POLL_SECONDS = 0.05


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
    """Containers with device IDs, and those of them that outlived their pod. ``observe`` is called by one thread.

    :param clock: monotonic, in seconds.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        clock: t.Callable[[], float] = time.monotonic,
        sleep: t.Callable[[float], None] = time.sleep,
    ) -> None:
        self._cgroups, self._clock, self._sleep = cgroups, clock, sleep
        self._lock = threading.Lock()
        # By the container's ID; and since when its pod is gone.
        self._holders: dict[str, Holder] = {}
        self._gone_since: dict[str, float] = {}

    def observe(self, pods: t.Sequence[JsonObject], listing: t.Sequence[Entry]) -> tuple[Holder, ...]:
        """Record the running containers, and return those that outlived their pod by ``ENDING_SECONDS``.

        :param pods: of this node, with the statuses of ``limits.trim_statuses``.
        :param listing: from PodResources.
        """
        listed = by_pod(listing)
        there = [pod for pod in pods if not contract.finished(pod)]
        running: set[str] = set()
        fresh: dict[str, tuple[JsonObject, str, tuple[str, ...]]] = {}
        for pod in there:
            pod_entry = listed.get(pod_facts.key(pod))
            wanted = {step.name: step.units for step in pod_facts.steps(pod)}
            for name, identifier in limits.running(pod).items() if wanted else ():
                running.add(identifier)
                ids = pod_entry.containers.get(name, ()) if pod_entry else ()
                # The IDs that were recorded first are the container's own: a successor of the pod has other containers.
                if identifier not in self._holders and ids and len(ids) == wanted.get(name):
                    fresh[identifier] = (pod, name, ids)
        folders = self._cgroups.folders(fresh)
        holders = dict(self._holders)
        for identifier, (pod, name, ids) in fresh.items():
            if identifier in folders:
                key, uid = pod_facts.key(pod), contract.pod_uid(pod)
                holders[identifier] = Holder(key, uid, name, folders[identifier], ids)
                log.info("container recorded", extra={"data": {"pod": key, "container": name, "units": len(ids)}})
        ended = {
            container
            for container, holder in holders.items()
            if container not in running and not self._cgroups.populated(holder.folder)
        }
        with self._lock:
            self._holders = {container: holder for container, holder in holders.items() if container not in ended}
            self._gone_since = {
                container: since for container, since in self._gone_since.items() if container in self._holders
            }
        left = {container: holder for container, holder in self._holders.items() if container not in running}
        if not left:
            return ()
        uids = {contract.pod_uid(pod) for pod in there}
        held = {slot for entry in listing for slot in entry.ids}
        gone = {
            container: holder
            for container, holder in left.items()
            if holder.uid not in uids and held.isdisjoint(holder.ids)
        }
        return tuple(holder for container, holder in gone.items() if not self._is_ending(container))

    def _is_ending(self, identifier: str) -> bool:
        """Return whether the pod of a container is gone for less than ``ENDING_SECONDS``."""
        now = self._clock()
        with self._lock:
            return now - self._gone_since.setdefault(identifier, now) < ENDING_SECONDS

    def taken(self, available: t.Iterable[str]) -> frozenset[str]:
        """Return those of the IDs that kubelet offers which belong to a container with processes.

        kubelet may offer them before ``observe`` has seen that the pod is gone, and before it has killed the processes:
        these are waited for, since kubelet doesn't try a refused pod again.
        """
        with self._lock:
            holders = dict(self._holders)
        if not holders:
            return frozenset()
        offered = frozenset(available)
        while True:
            # kubelet frees all IDs of a container at once.
            holders = {
                container: holder
                for container, holder in holders.items()
                if holder.ids[0] in offered and self._cgroups.populated(holder.folder)
            }
            if not any(self._is_ending(container) for container in holders):
                return frozenset(identifier for holder in holders.values() for identifier in holder.ids)
            self._sleep(POLL_SECONDS)
