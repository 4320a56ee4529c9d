# SPDX-License-Identifier: GPL-3.0-or-later
"""What kubelet is answered while it admits a pod, from its own list and what the API says of the pods in it.

Nothing in here has to survive: what is remembered between the two calls only saves a wait.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
import typing as t

from gpushare import contract, steering, wire
from gpushare.kube import Json, Kube, KubeError
from gpushare.kubelet import InvalidIds
from gpushare.nvml import Inventory
from gpushare.podresources import Entry, PodResources, Unreadable

log = logging.getLogger("gpushare.admission")

# kubelet waits for us with the admission of all pods; what isn't known by then is decided without.
LOOKUP_SECONDS = 2.0
# kubelet admits one pod after the other, so few questions are open at a time; each may be of thousands of IDs.
ASKED = 8
GRANTED = 512


class Pods(t.Protocol):
    """The pods of this node as the API has (or last had) them."""

    def items(self) -> list[Json]: ...


class Grant(t.NamedTuple):
    """A pod that kubelet took IDs for, after we had told it apart."""

    uid: str
    key: str
    units: int


def slim_pod(pod: Json) -> Json:
    """What the plugin needs of a pod; an update of anything else is no change."""
    metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}

    def containers(field: str) -> list[Json]:
        return [
            {key: one[key] for key in ("name", "restartPolicy", "resources") if key in one}
            for one in spec.get(field) or []
        ]

    return {
        "metadata": {
            **{key: metadata[key] for key in ("name", "namespace", "uid", "creationTimestamp") if key in metadata},
            "annotations": {key: annotations[key] for key in contract.POD_ANNOTATIONS if key in annotations},
        },
        "spec": {
            "nodeName": spec.get("nodeName", ""),
            "initContainers": containers("initContainers"),
            "containers": containers("containers"),
        },
        "status": {
            "phase": status.get("phase", ""),
            "startTime": status.get("startTime"),
            "conditions": [one for one in status.get("conditions") or [] if one.get("type") == "PodScheduled"],
        },
    }


class Admission:
    """Answers GetPreferredAllocation and Allocate."""

    def __init__(
        self,
        node: str,
        inventory: Inventory,
        kube: Kube,
        pods: Pods,
        podresources: PodResources,
        lookup_seconds: float = LOOKUP_SECONDS,
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._kube = kube
        self._pods = pods
        self._podresources = podresources
        self._lookup_seconds = lookup_seconds
        self._lock = threading.Lock()
        self._asked: collections.OrderedDict[frozenset[str], Grant] = collections.OrderedDict()
        self._granted: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.on_allocated: t.Callable[[], None] = lambda: None
        self.on_refused: t.Callable[[str], None] = lambda reason: None

    def granted(self) -> dict[str, str]:
        """Card (UUID) of the pods (UID) that kubelet has been answered for; as far back as we remember."""
        with self._lock:
            return dict(self._granted)

    def preferred(self, ask: wire.Ask) -> tuple[str, ...]:
        cards = self._inventory.cards
        listing = self._listing()
        pods = {contract.pod_key(pod): pod for pod in self._pods.items()}
        pods.update(self._unknown(listing or [], pods))
        subject = steering.identify(ask.size, pods, listing)
        promises = steering.promised(cards, pods, listing, contract.pod_uid(subject.pod) if subject else "")
        try:
            decision = steering.choose(cards, ask, subject, promises)
        except steering.Refused as error:
            log.error("refused: %s", error)
            self.on_refused(str(error))
            raise
        log.info(
            "kubelet asks for units",
            extra={
                "data": {
                    "pod": subject.key if subject else "",
                    "container": subject.container if subject else "",
                    "units": ask.size,
                    "card": decision.card.index,
                    "uuid": decision.card.uuid,
                    "why": decision.reason,
                }
            },
        )
        if subject is not None:
            grant = Grant(contract.pod_uid(subject.pod), subject.key, contract.pod_units(subject.pod))
            with self._lock:
                _remember(self._asked, frozenset(decision.ids), grant, ASKED)
        return decision.ids

    def allocate(self, ids: tuple[str, ...]) -> dict[str, str]:
        found = steering.Slots(self._inventory.cards).by_card(ids)
        if "" in found:
            reason = f"device ID {found[''][0]!r} names no card of this node"
        elif len(found) != 1:
            names = ", ".join(sorted(found)) or "no card"
            reason = f"a container's {len(ids)} units must be of one card; these are of {names}"
        else:
            reason = ""
        if reason:
            log.error("refused: %s", reason)
            self.on_refused(reason)
            raise InvalidIds(reason)
        uuid = next(iter(found))
        card = next(card for card in self._inventory.cards if card.uuid == uuid)
        with self._lock:
            grant = self._grant(frozenset(ids))
            if grant is not None:
                _remember(self._granted, grant.uid, uuid, GRANTED)
        log.info(
            "allocated",
            extra={"data": {"pod": grant.key if grant else "", "units": len(ids), "card": card.index, "uuid": uuid}},
        )
        self.on_allocated()
        return {
            "NVIDIA_VISIBLE_DEVICES": uuid,
            contract.POD_INDEX: str(card.index),
            contract.POD_CARD_UNITS: str(card.units),
            contract.POD_UNITS: str(grant.units if grant else len(ids)),
            contract.CONTAINER_UNITS: str(len(ids)),
        }

    def _grant(self, ids: frozenset[str]) -> Grant | None:
        """Whose IDs these are; the latest of whom, for a container may be given those of an init container again."""
        exact = self._asked.get(ids)
        return exact or next((grant for given, grant in reversed(self._asked.items()) if ids <= given), None)

    def _listing(self) -> list[Entry] | None:
        try:
            return self._podresources.list()
        except Unreadable as error:
            log.warning("%s; the oldest assumed pod of this size is taken", error)
            return None

    def _unknown(self, listing: t.Sequence[Entry], pods: t.Mapping[str, Json]) -> dict[str, Json]:
        """Pods that kubelet lists without units and our mirror of the API hasn't got (yet)."""
        missing = [entry.key for entry in listing if entry.key not in pods and not entry.ids]
        if not missing:
            return {}
        if len(missing) == 1:
            namespace, _slash, name = missing[0].partition("/")
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        else:
            path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._node}"
        answer = within(self._lookup_seconds, lambda: self._kube.get(path))
        if answer is None:
            return {}
        found = [slim_pod(pod) for pod in answer.get("items", [answer])]
        # A pod of this name on another node is one that kubelet doesn't mean.
        return {contract.pod_key(pod): pod for pod in found if contract.pod_node(pod) == self._node}


def within(seconds: float, call: t.Callable[[], Json]) -> Json | None:
    """The API's answer, or None if there is none in so many seconds; the call may go on behind our back."""
    answers: list[Json] = []
    done = threading.Event()

    def ask() -> None:
        try:
            answers.append(call())
        except KubeError as error:
            log.warning("the API knows nothing of a pod that kubelet lists: %s", error)
        finally:
            done.set()

    began = time.monotonic()
    threading.Thread(target=ask, name="lookup", daemon=True).start()
    if not done.wait(seconds):
        log.warning("the API hasn't answered in %.1f s", time.monotonic() - began)
    return answers[0] if answers else None


K = t.TypeVar("K")
V = t.TypeVar("V")


def _remember(store: collections.OrderedDict[K, V], key: K, value: V, most: int) -> None:
    store[key] = value
    store.move_to_end(key)
    while len(store) > most:
        store.popitem(last=False)
