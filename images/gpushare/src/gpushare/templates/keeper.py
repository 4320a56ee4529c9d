# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the templates that waiting pods name, and sweep those that no pod names any more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError, Pages
from gpushare.api.events import Events
from gpushare.api.mirror import Mirror
from gpushare.shared._contracts import claim_templates as contract
from gpushare.shared._core.types import JsonObject
from gpushare.templates.objects import template_of

# Only pods that wait for a node may still wait for a claim: one that is bound has its claims.
PODS = ("/api/v1/pods", {"fieldSelector": "spec.nodeName=,status.phase!=Succeeded,status.phase!=Failed"})
TEMPLATES = (
    f"/apis/{contract.API_VERSION}/resourceclaimtemplates",
    {"labelSelector": f"{contract.MANAGED_BY}={contract.MANAGER}"},
)
# On a template: the hash of what this server has put in, which differs with another unit of memory.
DIGEST = "kubegpu.share/digest"
# Without an event everything is looked through again after this time.
PASS_SECONDS = 5.0
# The first and the longest pause after a refusal, for each template.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# A template goes when no pod has named it for so long: the next pod of a Deployment is to find it.
UNUSED_SECONDS = 600.0
# Of one pass: after so many requests the pods are looked at anew, so that nobody's templates keep others waiting.
PASS_REQUESTS = 100
EVENT = "GpuClaimTemplateFailed"
log = logging.getLogger("gpushare.templates")


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A pod that waits for a node.

    :param templates: the names of the templates of this server's kind that it names.
    """

    namespace: str
    name: str
    uid: str
    templates: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Made:
    """A template that this server has made.

    :param digest: of its content.
    """

    namespace: str
    name: str
    digest: str


def waiting(pod: JsonObject) -> Waiting | None:
    """Return a pod's row; None for one that names no template of this kind."""
    metadata, templates = pod["metadata"], contract.templates_of_pod(pod)
    if not templates or metadata.get("deletionTimestamp"):
        return None
    return Waiting(str(metadata["namespace"]), str(metadata["name"]), str(metadata.get("uid", "")), templates)


def made(template: JsonObject) -> Made | None:
    """Return a template's row; None for one that is on its way out, or isn't of this kind."""
    metadata = template["metadata"]
    if metadata.get("deletionTimestamp") or contract.shape_of(str(metadata["name"])) is None:
        return None
    digest = (metadata.get("annotations") or {}).get(DIGEST, "")
    return Made(str(metadata["namespace"]), str(metadata["name"]), str(digest))


def filled(namespace: str, name: str, unit: str) -> JsonObject:
    """Return the template of a name, with its digest.

    :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
    """
    template = template_of(namespace, name, unit)
    assert template is not None, f"{name} is no name of a template"
    text = json.dumps(template["spec"], sort_keys=True, separators=(",", ":"))
    template["metadata"]["annotations"] = {DIGEST: hashlib.sha256(text.encode()).hexdigest()[:16]}
    return template


def in_turns(keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the templates so that each namespace has its first one before any has its second one."""
    counts = Counter[str]()
    ranked = []
    for key in keys:
        ranked.append((counts[key[0]], key))
        counts[key[0]] += 1
    return [key for _rank, key in sorted(ranked, key=lambda one: one[0])]


class Keeper:
    """Compares the pods with the templates after each event, in a thread of its own, while this process leads.

    :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
    :param leading: whether this process may act.
    :param count: counts what was done: ``created``, ``deleted`` or ``failed``.
    :param unused: seconds after which a template that no pod names is deleted.
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
    ) -> None:
        self._kube, self._unit, self._leading, self._events = kube, unit, leading, events
        self._count, self._unused = count, unused
        self._changed, self._stopped = threading.Event(), threading.Event()
        self.pods: Mirror[Waiting] = Mirror(kube, *PODS, waiting, self.wake, backoff)
        self.templates: Mirror[Made] = Mirror(kube, *TEMPLATES, made, self.wake, backoff)
        # By template, as namespace and name: when it may be tried again, and after which pause; since when no waiting
        # pod has named it.
        self._later: dict[tuple[str, str], tuple[float, float]] = {}
        self._idle: dict[tuple[str, str], float] = {}
        # The requests that the present pass may still send.
        self._left = 0
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

    def wake(self, *_event: object) -> None:
        """Have everything be compared now."""
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(FIRST_PAUSE if self._later else PASS_SECONDS)
            self._changed.clear()
            if self._stopped.is_set():
                return
            try:
                self.compare()
            except Exception:
                # One object of an unexpected shape must not end the work for all others.
                log.exception("unexpected failure")

    def compare(self) -> None:
        """Create what is missing, replace what has another content, and delete what is unused."""
        if not (self.pods.synced and self.templates.synced and self._leading()):
            return
        wanted = {(pod.namespace, name): pod for pod in self.pods.items() for name in pod.templates}
        known = {(one.namespace, one.name): one for one in self.templates.items()}
        self._later = {key: later for key, later in self._later.items() if key in wanted}
        self._left = PASS_REQUESTS
        for key in in_turns(wanted):
            if time.monotonic() < self._later.get(key, (0.0, 0.0))[0]:
                continue
            template, there = filled(*key, self._unit), known.get(key)
            if there is not None and there.digest == template["metadata"]["annotations"][DIGEST]:
                continue
            if not self._goes_on():
                return
            self._provide(key, template, there, wanted[key])
        self._sweep(wanted.keys(), known)

    def _goes_on(self) -> bool:
        """Count a request of this pass; return whether it may be sent."""
        if self._stopped.is_set() or not self._leading():
            return False
        if self._left == 0:
            self.wake()
            return False
        self._left -= 1
        return True

    def _provide(self, key: tuple[str, str], template: JsonObject, there: Made | None, pod: Waiting) -> None:
        """Create a pod's template, or delete it where it has another content."""
        try:
            if there is not None:
                # A template can't be changed. Its end is an event, after which it is created.
                self._delete(key, "it has another content")
                return
            self._kube.post(_path(key[0]), template)
        except KubeError as error:
            # It is there already: one of the namespace's owner, or the watch is behind.
            exists = error.status == 409 and error.reason == "AlreadyExists"
            self._postpone(key, LONGEST_PAUSE if exists else 0.0)
            if exists:
                return
            self._count("failed")
            log.warning("template %s/%s can't be made: %s", *key, error)
            message = f"template {key[1]} of its claim can't be made, and it waits for it: {error.message}"
            self._events.pod(pod.namespace, pod.name, pod.uid, EVENT, message)
        else:
            self._postpone(key)
            self._count("created")
            log.info("created", extra={"data": {"template": "/".join(key), "pod": pod.name}})

    def _postpone(self, key: tuple[str, str], least: float = 0.0) -> None:
        """Don't try a template again before a pause, which doubles each time."""
        pause = max(least, min(self._later.get(key, (0.0, FIRST_PAUSE / 2))[1] * 2, LONGEST_PAUSE))
        self._later[key] = (time.monotonic() + pause, pause)

    def _sweep(self, wanted: Container[tuple[str, str]], known: dict[tuple[str, str], Made]) -> None:
        """Delete templates that no pod has named for long, not even one that is bound."""
        now = time.monotonic()
        self._idle = {key: self._idle.get(key, now) for key in known if key not in wanted}
        unused: dict[str, list[tuple[str, str]]] = {}
        for key, since in self._idle.items():
            if now - since >= self._unused:
                unused.setdefault(key[0], []).append(key)
        for namespace in sorted(unused):
            if not self._goes_on():
                return
            try:
                named = self._named(namespace)
            except KubeError as error:
                self._failed(f"unused templates of namespace {namespace} stay: {error}")
                named = {name for _space, name in unused[namespace]}
            for key in unused[namespace]:
                if key[1] not in named:
                    if not self._goes_on():
                        return
                    try:
                        self._delete(key, "no pod names it")
                    except KubeError as error:
                        self._failed(f"the unused template {'/'.join(key)} stays: {error}")
                # One that stays is looked at again when as much time has passed.
                self._idle[key] = now

    def _failed(self, text: str) -> None:
        self._count("failed")
        log.warning("%s", text)

    def _named(self, namespace: str) -> set[str]:
        """Return the templates that the pods of a namespace name, with those that are bound.

        :raises KubeError: they can't be read.
        """
        found = set[str]()
        for pod in Pages(self._kube, paths.under("/api/v1", "namespaces", namespace, "pods")):
            found.update(contract.templates_of_pod(pod))
        return found

    def _delete(self, key: tuple[str, str], why: str) -> None:
        try:
            self._kube.delete(_path(*key))
        except KubeError as error:
            if error.status != 404:
                raise
        self._count("deleted")
        log.info("deleted", extra={"data": {"template": "/".join(key), "reason": why}})


def _path(namespace: str, *name: str) -> str:
    return paths.under(f"/apis/{contract.API_VERSION}", "namespaces", namespace, "resourceclaimtemplates", *name)
