# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the templates that waiting pods name, and sweep those that none names any more."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.api.mirror import Mirror, object_key
from gpushare.api.rate import Bucket
from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._core.types import JsonObject
from gpushare.templates.rows import Made, Waiting, filled, made, waiting
from gpushare.templates.state import PER_NAMESPACE, UNUSED_SECONDS, Do, State, Step

# Only pods that wait for a node may still wait for a claim: one that is bound has its claims.
PODS = ("/api/v1/pods", {"fieldSelector": "spec.nodeName=,status.phase!=Succeeded,status.phase!=Failed"})
TEMPLATES = (
    f"/apis/{contract.API_VERSION}/resourceclaimtemplates",
    {"labelSelector": f"{contract.MANAGED_BY}={contract.MANAGER}"},
)
# Without an event the state is looked at again after this time.
PASS_SECONDS = 5.0
# Requests for templates, a second and at once.
RATE, BURST = 10.0, 50
# After a request without an answer.
AWAY_SECONDS = 1.0
EVENT = "GpuClaimTemplateFailed"
log = logging.getLogger("gpushare.templates")


class Keeper:
    """Makes and deletes one template after another, in a thread of its own, while this process leads.

    :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
    :param leading: whether this process may act.
    :param count: counts what was done: ``created``, ``deleted`` or ``failed``.
    :param unused: seconds after which a template that no waiting pod names is deleted.
    :param per_namespace: how many templates a namespace has at most.
    """

    def __init__(
        self,
        kube: Kube,
        unit: str,
        leading: Callable[[], bool],
        events: Events,
        count: Callable[[str], None] = lambda result: None,
        backoff: tuple[float, float] = (0.2, 10.0),
        unused: float = UNUSED_SECONDS,
        per_namespace: int = PER_NAMESPACE,
    ) -> None:
        self._kube, self._unit, self._leading, self._events = kube, unit, leading, events
        self._count = count
        self._changed, self._stopped = threading.Event(), threading.Event()
        self.state = State(unit, time.monotonic, per_namespace, unused=unused)
        self._all = Bucket(RATE, BURST, time.monotonic())
        self.pods: Mirror[Waiting] = Mirror(kube, *PODS, self._pod, self._pod_changed, backoff)
        self.templates: Mirror[Made] = Mirror(kube, *TEMPLATES, self._template, self._template_changed, backoff)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.pods.start()
        self.templates.start()
        self._thread = threading.Thread(target=self._run, name="templates", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()
        self.pods.stop()
        self.templates.stop()
        if self._thread is not None:
            self._thread.join(5)

    def unready(self) -> str | None:
        """Return why waiting pods may be overlooked; None if they aren't."""
        for what, mirror in (("pods", self.pods), ("templates", self.templates)):
            if not mirror.synced:
                return f"the {what} haven't been read from the API yet" + (f": {mirror.error}" if mirror.error else "")
            if reason := mirror.stale:
                return f"the {what} may be outdated, since {reason}"
        return None

    def wake(self) -> None:
        """Have the state be looked at now."""
        self._changed.set()

    # What the mirrors keep.

    def _pod(self, pod: JsonObject) -> Waiting | None:
        return self.state.keep_pod(waiting(pod), self.pods.get(object_key(pod)) is not None)

    def _pod_changed(self, key: str, before: Waiting | None, now: Waiting | None) -> None:
        self.state.pod_changed(key, before, now)
        self.wake()

    def _template(self, template: JsonObject) -> Made | None:
        return self.state.keep_template(made(template), self.templates.get(object_key(template)) is not None)

    def _template_changed(self, _key: str, before: Made | None, now: Made | None) -> None:
        self.state.template_changed(before, now)
        self.wake()

    # The keeper's thread.

    def _run(self) -> None:
        while True:
            self._changed.wait(self.state.seconds(PASS_SECONDS) if self._may() else PASS_SECONDS)
            self._changed.clear()
            if self._stopped.is_set():
                return
            try:
                self.work()
            except Exception:
                # One object of an unexpected shape must not end the work for all others.
                log.exception("unexpected failure")
                self._stopped.wait(AWAY_SECONDS)

    def work(self) -> None:
        """Send requests until none is due."""
        while self._may():
            step = self.state.next_step()
            for pod, code, text in self.state.reports():
                self._events.pod(pod.namespace, pod.name, pod.uid, EVENT, f"{code}: {text}")
            if step is None:
                return
            while not self._all.take(time.monotonic()) and not self._stopped.wait(1 / RATE):
                pass
            if not self._may():
                self.state.dropped(step)
                return
            try:
                self._do(step)
            except Exception:
                self.state.failed(step, "unexpected failure; the log has it")
                raise

    def _may(self) -> bool:
        return self.pods.synced and self.templates.synced and self._leading() and not self._stopped.is_set()

    def _do(self, step: Step) -> None:
        path = paths.under(f"/apis/{contract.API_VERSION}", "namespaces", step.namespace, "resourceclaimtemplates")
        data = {"template": f"{step.namespace}/{step.name}"}
        try:
            if step.do is Do.CREATE:
                self._kube.post(path, filled(step.namespace, step.name, self._unit))
            else:
                self._kube.delete(paths.under(path, step.name))
        except KubeError as error:
            if step.do is Do.CREATE and error.status == 409 and error.reason == "AlreadyExists":
                self.state.exists(step)
                return
            if step.do is Do.CREATE or error.status != 404:
                self.state.failed(step, error.message)
                self._count("failed")
                log.warning("%s of template %s/%s: %s", step.do.value, step.namespace, step.name, error)
                if error.status == 0:
                    self._stopped.wait(AWAY_SECONDS)
                return
        if step.do is Do.CREATE:
            self.state.created(step)
            self._count("created")
            log.info("created", extra={"data": data})
        else:
            self.state.deleted(step)
            self._count("deleted")
            log.info("deleted", extra={"data": {**data, "reason": step.why}})
