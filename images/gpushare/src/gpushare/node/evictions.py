# SPDX-License-Identifier: GPL-3.0-or-later
"""Evict the pods that hold memory of others and that the driver doesn't limit any more.

Through the Eviction API, so that disruption budgets hold. No other pod is ever evicted.
"""

from __future__ import annotations

import logging
import time
import typing as t

from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.api.evictions import evict, refused_by_budget
from gpushare.node.limits import Violation
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.evictions")

# A violation must last so long: a container that frees its memory at once isn't worth an eviction.
LASTING_SECONDS = 10.0
# After a refusal.
RETRY_SECONDS = 60.0
# kubelet's copy of a static pod in the API: its eviction wouldn't end the containers.
MIRROR = "kubernetes.io/config.mirror"


class Evictions:
    """Evicts pods of this node; called by one thread.

    :param count: called for each attempt with ``evicted``, ``refused`` (by a disruption budget) or ``failed``.
    :param clock: monotonic, in seconds.
    """

    def __init__(
        self,
        kube: Kube,
        events: Events,
        count: t.Callable[[str], None],
        clock: t.Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._events, self._count, self._clock = kube, events, count, clock
        # By pod (UID): since when it violates, and when it is tried (again).
        self._due: dict[str, float] = {}

    def once(self, violations: t.Iterable[Violation], pods: t.Iterable[JsonObject]) -> None:
        """Evict the pods of violations that have lasted.

        :param pods: of this node.
        """
        causes: dict[str, Violation] = {}
        for violation in violations:
            causes.setdefault(violation.pod, violation)
        now = self._clock()
        self._due = {uid: self._due.get(uid, now + LASTING_SECONDS) for uid in causes}
        for pod in pods:
            uid = contract.pod_uid(pod)
            if uid in causes and now >= self._due[uid] and not contract.terminating(pod):
                self._due[uid] = now + RETRY_SECONDS
                self._evict(pod, causes[uid])

    def _evict(self, pod: JsonObject, cause: Violation) -> None:
        namespace, _slash, name = contract.pod_key(pod).partition("/")
        uid = contract.pod_uid(pod)

        def report(reason: str, text: str) -> None:
            log.warning("pod %s/%s: %s", namespace, name, text)
            self._events.pod(namespace, name, uid, reason, f"{cause.code}: {text}")

        if MIRROR in ((pod.get("metadata") or {}).get("annotations") or {}):
            report("GpuEvictionRefused", f"a static pod can't be evicted: {cause.text}")
            return
        try:
            evict(self._kube, namespace, name, uid)
        except KubeError as error:
            if error.status in (404, 409):
                # Gone, or another pod of that name.
                return
            self._count("refused" if refused_by_budget(error) else "failed")
            again = f"it is tried again in {RETRY_SECONDS:.0f} s"
            report("GpuEvictionRefused", f"this pod can't be evicted, {again}: {error}; {cause.text}")
            return
        self._count("evicted")
        report("GpuPodEvicted", f"this pod is evicted: {cause.text}")
