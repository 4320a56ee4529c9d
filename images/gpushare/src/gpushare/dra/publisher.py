# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the node's ResourceSlices in the API as they should be.

kubelet deletes them when it starts, and when the driver was away for half a minute; a person may. Each is written again
then. They aren't removed when the driver stops: an update of it would take all cards out of the scheduler's sight, and
kubelet removes them if it doesn't come back.
"""

from __future__ import annotations

import logging
import threading
import time
import typing as t

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.mirror import Mirror
from gpushare.api.rate import Bucket
from gpushare.dra import slices
from gpushare.dra.claims import DRIVER
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.dra.slices")

# A write is in the mirror within milliseconds; without it, the next pass would write once more.
REACH_SECONDS = 5.0
# After a request that failed.
RETRY_SECONDS = 2.0
# Somebody may delete the slices as soon as they are there: the garbage collector does, while the token still names the
# Node object that a new one has replaced.
WRITES_PER_SECOND, WRITES_AT_ONCE = 1.0, 20
PAUSE_SECONDS = 0.2
# Slices of this driver on this node, 64 cards each, whoever wrote them; each is kept as objects of at most 3 MB.
MOST_SLICES = 32


class Publisher:
    """Writes the slices. ``step`` is called by one thread.

    :ivar written: the number of requests that changed something.
    """

    def __init__(
        self, kube: Kube, node: str, owner: t.Callable[[], str], backoff: tuple[float, float] = (0.2, 3.0)
    ) -> None:
        """
        :param kube: the client of the API.
        :param node: this node's name.
        :param owner: returns the UID of this node's object in the API; raises :class:`KubeError`.
        :param backoff: shortest and longest pause before the API is asked again, in seconds.
        """
        self._kube, self._node, self._owner = kube, node, owner
        self._wanted: list[JsonObject] | None = None
        self._changed = threading.Event()
        self._generation = 0
        # The version of the last write.
        self._version = 0
        self._done = False
        self._is_held = False
        # Whether the API server leaves taints out: its feature DRADeviceTaints is off.
        self._drops_taints = False
        self._bucket = Bucket(WRITES_PER_SECOND, WRITES_AT_ONCE, time.monotonic())
        self.written = 0
        self.error: str | None = None
        query = {"fieldSelector": f"spec.nodeName={node},spec.driver={DRIVER}"}
        self.mirror: Mirror[JsonObject] = Mirror(
            kube, slices.PATH, query, slices.trimmed, backoff=backoff, most=MOST_SLICES
        )
        self.mirror.on_change(lambda key, before, now: self.wake())

    def wake(self) -> None:
        self._changed.set()

    def publish(self, devices: list[JsonObject]) -> None:
        """Set the node's devices."""
        if devices != self._wanted:
            self._wanted, self._done = devices, False
            self.wake()

    @property
    def generation(self) -> int:
        """The pool's generation that was written last."""
        return self._generation

    @property
    def reason(self) -> str | None:
        """Return why the slices in the API may not be as they should be; None if they are."""
        if not self.mirror.synced:
            return "the node's ResourceSlices can't be read from the API yet" + (
                f": {self.mirror.error}" if self.mirror.error else ""
            )
        if stale := self.mirror.stale:
            return f"what is known of the node's ResourceSlices may be outdated, since {stale}"
        return self.error or (None if self._done else "the node's ResourceSlices aren't written yet")

    def step(self, seconds: float) -> None:
        """Wait for a change, at most so many seconds, and write what differs."""
        if not self.mirror.wait_synced(seconds):
            return
        self._changed.wait(seconds if self.error is None else min(seconds, RETRY_SECONDS))
        self._changed.clear()
        wanted = self._wanted
        if wanted is None:
            return
        if self._version > self.mirror.version and not self.mirror.wait_for(self._version, REACH_SECONDS):
            # The write may have been undone with an older state of etcd.
            self.mirror.relist()
            self._version = 0
            self.wake()
            return
        if self._drops_taints:
            wanted = [wanted_slice for wanted_slice in wanted if "taints" not in wanted_slice]
        try:
            plan = slices.plan(self._node, self._owner(), wanted, self.mirror.items(), self._generation)
            if not plan.empty and not self._bucket.take(time.monotonic()):
                self._hold()
                return
            self._is_held = False
            self._write(plan)
        except KubeError as error:
            text = f"the node's ResourceSlices can't be written: {error}"
            if text != self.error:
                log.error("%s", text)
            self.error = text
            if error.status in (404, 409):
                # The mirror was behind.
                self.mirror.relist()
        else:
            self.error, self._done = None, True

    def _hold(self) -> None:
        """Leave a write to a later pass."""
        if not self._is_held:
            log.warning(
                "the node's ResourceSlices had to be written %d times in a short time: they are written once a second "
                "now; if neither cards nor claims change, somebody deletes them as soon as they are there",
                WRITES_AT_ONCE,
            )
        self._is_held = True
        self.wake()
        time.sleep(PAUSE_SECONDS)

    def _write(self, plan: slices.Plan) -> None:
        if plan.empty:
            self._generation = max(self._generation, plan.generation)
            return
        self._generation = plan.generation
        for body in plan.create:
            self._wrote(body, self._kube.post(slices.PATH, body))
        for body in plan.replace:
            self._wrote(body, self._kube.put(_path(body["metadata"]["name"]), body))
        for name in plan.delete:
            self._kube.delete(_path(name))
            self.written += 1
        log.info(
            "slices written",
            extra={
                "data": {
                    "generation": plan.generation,
                    "created": len(plan.create),
                    "replaced": len(plan.replace),
                    "deleted": len(plan.delete),
                }
            },
        )
        # Once more, against what the API has made of it.
        self.wake()

    def _wrote(self, body: JsonObject, answer: JsonObject) -> None:
        self.written += 1
        if _has_taints(body) and not _has_taints(answer) and not self._drops_taints:
            self._drops_taints = True
            log.warning(
                "the API server drops taints of devices (its feature DRADeviceTaints is off): a card with a taint is "
                "left out of the slices instead"
            )
        self._version = max(self._version, int((answer.get("metadata") or {}).get("resourceVersion") or 0))


def _has_taints(resource_slice: JsonObject) -> bool:
    return any(each.get("taints") for each in (resource_slice.get("spec") or {}).get("devices") or [])


def _path(name: str) -> str:
    return paths.under(slices.PATH, name)
