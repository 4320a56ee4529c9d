# SPDX-License-Identifier: GPL-3.0-or-later
"""Have kube-scheduler retry pods that were refused just before memory became free.

kube-scheduler and the extender each watch the API. If the scheduler receives the deletion of a pod first, it requests
memory that isn't free here yet, is refused, and retries only after some other event in the cluster, which may take
minutes. It has no event for the end of a claim either. So a refused pod is evaluated again shortly afterwards, and if
it fits then, an annotation on it is changed, which is an event for the scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable

from gpushare.api.client import Kube, KubeError
from gpushare.extender.binding_status import patch_pod
from gpushare.extender.filter import RefusedPod, evaluate
from gpushare.extender.state import State
from gpushare.shared._contracts import gpushare as contract

# A late watch has mostly caught up after the first time, and certainly after the last.
FIRST_SECONDS = 0.5
LAST_SECONDS = 3.0
MAX_REFUSED = 200

log = logging.getLogger("gpushare.extender")


@dataclasses.dataclass(frozen=True)
class _Recorded(RefusedPod):
    """A refused pod, and the time of its refusal."""

    at: float = 0.0


class RetryQueue:
    """Has the scheduler retry pods that were refused too early."""

    def __init__(self, kube: Kube, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._state, self._clock = kube, state, clock
        self._refused: dict[str, _Recorded] = {}
        self._lock = threading.Lock()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="retry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5)

    def refused(self, pod: RefusedPod) -> None:
        """Record a refused pod."""
        with self._lock:
            self._refused.pop(pod.uid, None)
            if len(self._refused) >= MAX_REFUSED:
                # The oldest one: while any claim exists none of them ends by its age.
                del self._refused[next(iter(self._refused))]
            # The state has equal strings; those of the request are freed.
            kept = {**vars(pod), "nodes": tuple(map(sys.intern, pod.nodes)), "filtered": ()}
            self._refused[pod.uid] = _Recorded(**kept, at=self._clock())
        self._wake.set()

    def check(self) -> None:
        """Evaluate the pods that are due."""
        now, claims, freed = self._clock(), bool(self._state.claims()), self._state.freed
        with self._lock:
            due = [pod for pod in self._refused.values() if now - pod.at >= FIRST_SECONDS]
        given: dict[str, int] = {}
        for pod in due:
            fits = pod.freed != freed and self._fits(pod, given)
            with self._lock:
                if self._refused.get(pod.uid) is not pod:
                    # It has been refused again meanwhile.
                    pass
                elif fits or (now - pod.at > LAST_SECONDS and not claims):
                    del self._refused[pod.uid]
                elif pod.freed != freed:
                    # Evaluated until here.
                    self._refused[pod.uid] = dataclasses.replace(pod, freed=freed)
            if fits:
                self._request_retry(pod)

    def _fits(self, recorded: _Recorded, given: dict[str, int]) -> bool:
        """Return whether a pod fits into memory that no other pod of this check is going to get.

        :param given: units of the largest card of a node that other pods get.
        """
        view = self._state.viewer(recorded.uid, recorded.priority)
        # Only changed nodes: in a busy cluster many pods wait, and each was refused by thousands of nodes.
        freed = self._state.freed_since(recorded.freed)
        refused_by = set(freed).intersection(recorded.nodes)
        for name in evaluate([name for name in freed if name in refused_by], view, recorded.demand).passed:
            node = view(name)
            if node is not None and node.largest - given.get(name, 0) >= recorded.demand.share:
                given[name] = given.get(name, 0) + recorded.demand.share
                return True
        return False

    def _request_retry(self, recorded: _Recorded) -> None:
        again = {"uid": recorded.uid, "annotations": {contract.POD_RETRY: str(time.time_ns())}}
        try:
            patch_pod(self._kube, recorded.namespace, recorded.name, again)
        except KubeError as error:
            log.debug("pod %s/%s can't be retried: %s", recorded.namespace, recorded.name, error)
        else:
            log.info(
                "memory became free just after a refusal",
                extra={"data": {"pod": f"{recorded.namespace}/{recorded.name}"}},
            )

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Sleeps while no pod is refused.
            self._wake.wait()
            self._stopped.wait(FIRST_SECONDS)
            try:
                self.check()
            except Exception:
                log.exception("refused pods couldn't be evaluated again")
            with self._lock:
                if not self._refused:
                    self._wake.clear()
            if self._stopped.is_set():
                return
