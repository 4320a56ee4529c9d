# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose one of several processes to act, by a Lease of the Kubernetes API."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.shared._core.types import JsonObject

# A Lease that nobody has renewed for this time is free.
LEASE_SECONDS = 16
log = logging.getLogger("gpushare.leader")


class Leader:
    """Takes the Lease when it is free and renews it, in a thread of its own.

    Another holder's time isn't read from the Lease, whose times are of other clocks: it begins when this process sees a
    renewal.

    :param identity: of this process; differs from that of every other.
    :param seconds: for which a Lease holds. It is renewed four times as often; and the leader ends a quarter earlier
        than others begin, since a request of it may still be on its way.
    :param on_lead: called when this process begins to lead.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        seconds: int = LEASE_SECONDS,
        on_lead: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube, self._seconds, self._on_lead = kube, seconds, on_lead
        self._parent = paths.under("/apis/coordination.k8s.io/v1", "namespaces", namespace, "leases")
        self._path = paths.under(self._parent, name)
        self._name, self.identity = name, identity
        # What was last seen of the Lease, and since when.
        self._seen: tuple[str, str] = ("", "")
        self._since = float("-inf")
        self._until = float("-inf")
        # Why the Lease can't be had, other than by another holder.
        self.problem = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def leading(self) -> bool:
        """Whether this process may act now."""
        return time.monotonic() < self._until

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give the Lease back, so that another process needn't wait."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while True:
            self.renew()
            if self._stopped.wait(self._seconds / 4):
                break
        if self.leading:
            self._until = float("-inf")
            try:
                lease = self._kube.get(self._path)
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    self._kube.put(self._path, self._filled(lease, ""))
            except KubeError as error:
                log.info("the Lease isn't given back, and others wait for its end: %s", error)

    def renew(self) -> None:
        """Read the Lease once, and take or renew it if it is free or this process's own."""
        began, was = time.monotonic(), self.leading
        try:
            if self._write(began):
                self._until = began + self._seconds * 3 / 4
            self.problem = ""
        except KubeError as error:
            # A conflict: another one was faster.
            self.problem = "" if error.status == 409 else f"the Lease {self._name} can't be had: {error}"
            if self.problem:
                log.warning("%s", self.problem)
        if self.leading != was:
            log.info("not leading any more" if was else "leading")
            if not was:
                self._on_lead()

    def _write(self, now: float) -> bool:
        """Return whether the Lease is this process's own now.

        :raises KubeError: it can't be read or written.
        """
        try:
            lease = self._kube.get(self._path)
        except KubeError as error:
            if error.status != 404:
                raise
            self._kube.post(self._parent, self._filled({"metadata": {"name": self._name}}, self.identity))
            return True
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        seen = (holder, str(lease["metadata"].get("resourceVersion", "")))
        if seen != self._seen:
            self._seen, self._since = seen, now
        if holder not in ("", self.identity) and now - self._since < self._seconds:
            self._until = float("-inf")
            return False
        self._kube.put(self._path, self._filled(lease, self.identity))
        return True

    def _filled(self, lease: JsonObject, holder: str) -> JsonObject:
        """Return the Lease to write; with its resourceVersion, so that one of two writers fails."""
        text = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = lease.get("spec") or {}
        changed = before.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._seconds,
            "renewTime": text,
            "acquireTime": text if changed else before.get("acquireTime", text),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (changed and bool(holder)),
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": lease["metadata"],
            "spec": spec,
        }
