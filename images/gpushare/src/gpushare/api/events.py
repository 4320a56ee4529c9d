# SPDX-License-Identifier: GPL-3.0-or-later
"""Write Kubernetes Events about pods and nodes, as ``kubectl describe`` shows them: best effort, with a rate limit."""

from __future__ import annotations

import contextlib
import datetime
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.rate import Bucket
from gpushare.shared._core.types import JsonObject
from gpushare.shared._core.untrusted import line

# Bytes; the API server refuses longer ones.
MESSAGE_LENGTH = 1024
log = logging.getLogger("gpushare.events")


class Events:
    """Writes Events in a thread of its own, so that callers don't wait.

    Events above the limits, and those that can't be written, are dropped.

    :param component: the Events' source.
    :param host: the name of the machine or pod.
    :param repeat: the same message about the same object is written once in this time, in seconds.
    :param rate: Events per second.
    :param burst: Events at once.
    :param clock: monotonic, in seconds.
    """

    def __init__(
        self,
        kube: Kube,
        component: str,
        host: str = "",
        repeat: float = 60.0,
        rate: float = 5.0,
        burst: int = 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._component, self._host, self._clock = kube, component, host, clock
        self._repeat, self._bucket = repeat, Bucket(rate, burst, clock())
        self._last_sent: dict[tuple[str, str, str], float] = {}
        self._lock = threading.Lock()
        self._queue: queue.Queue[JsonObject | None] = queue.Queue(maxsize=200)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread is not None:
            self._thread.join(2)

    def pod(self, namespace: str, name: str, uid: str, reason: str, message: str, kind: str = "Warning") -> bool:
        """Enqueue an Event about a pod.

        :param reason: the Event's reason, in CamelCase.
        :param kind: ``Warning`` or ``Normal``.
        :returns: False if it was dropped.
        """
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
        return self._enqueue(about, namespace, reason, message, kind)

    def node(self, name: str, reason: str, message: str, kind: str = "Warning") -> bool:
        """Enqueue an Event about a node.

        :param reason: the Event's reason, in CamelCase.
        :param kind: ``Warning`` or ``Normal``.
        :returns: False if it was dropped.
        """
        # A node has no namespace, so its events are in "default"; kubelet and kubectl use its name as the UID.
        return self._enqueue(
            {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}, "default", reason, message, kind
        )

    def _enqueue(self, about: JsonObject, namespace: str, reason: str, message: str, kind: str) -> bool:
        if not self._is_allowed(about["uid"], reason, message):
            return False
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event: JsonObject = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{about['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": about,
            "type": kind,
            "reason": reason,
            "message": _bounded(message),
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host or self._component,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            return False
        return True

    def _is_allowed(self, uid: str, reason: str, message: str) -> bool:
        now, key = self._clock(), (uid, reason, message)
        with self._lock:
            if now - self._last_sent.get(key, float("-inf")) < self._repeat:
                return False
            if not self._bucket.take(now):
                return False
            self._last_sent[key] = now
            if len(self._last_sent) > 1000:
                self._last_sent = {sent: at for sent, at in self._last_sent.items() if now - at < self._repeat}
            return True

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._kube.post(paths.under("/api/v1", "namespaces", event["metadata"]["namespace"], "events"), event)
            except KubeError as error:
                log.info("an event couldn't be written: %s", error)
            except Exception:
                log.exception("an event couldn't be written")


def _bounded(message: str) -> str:
    """Return a message as one printable line that the API server takes."""
    return line(message, MESSAGE_LENGTH).encode()[:MESSAGE_LENGTH].decode(errors="ignore")
