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

from gpushare import contract, limits, pod_facts, steering, wire
from gpushare.injection import Injection
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
KEPT = (*contract.POD_ANNOTATIONS, *contract.POD_WISHES)


class Pods(t.Protocol):
    """The pods of this node as the API has (or last had) them."""

    def items(self) -> list[Json]: ...


class Grant(t.NamedTuple):
    """A pod that kubelet took IDs for, after we had told it apart.

    :param units: all of the pod's.
    :param cards: how many of them it asks for.
    """

    uid: str
    key: str
    units: int
    cards: int


def grant_of(subject: steering.Subject) -> Grant:
    try:
        count = contract.wish(subject.pod).count
    except contract.ContractError:
        # Whoever asked us for units first has refused it with these words.
        count = 1
    return Grant(contract.pod_uid(subject.pod), subject.key, pod_facts.units(subject.pod), count)


def slim_pod(pod: Json) -> pod_facts.KeptPod:
    """What the plugin needs of a pod; an update of anything else is no change."""
    metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}

    def containers(field: str) -> list[Json]:
        return [
            {key: one[key] for key in ("name", "restartPolicy", "resources") if key in one}
            for one in spec.get(field) or []
        ]

    return pod_facts.KeptPod(
        {
            "metadata": {
                **{key: metadata[key] for key in ("name", "namespace", "uid", "creationTimestamp") if key in metadata},
                "annotations": {key: annotations[key] for key in KEPT if key in annotations},
            },
            "spec": {
                "nodeName": spec.get("nodeName", ""),
                "initContainers": containers("initContainers"),
                "containers": containers("containers"),
            },
            "status": {
                "phase": status.get("phase", ""),
                "startTime": status.get("startTime"),
                **limits.slim_statuses(status),
                "conditions": [one for one in status.get("conditions") or [] if one.get("type") == "PodScheduled"],
            },
        }
    )


class Admission:
    """Answers GetPreferredAllocation and Allocate."""

    def __init__(
        self,
        node: str,
        inventory: Inventory,
        kube: Kube,
        pods: Pods,
        podresources: PodResources,
        injection: Injection,
        lookup_seconds: float = LOOKUP_SECONDS,
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._kube = kube
        self._pods = pods
        self._podresources = podresources
        self._injection = injection
        self._lookup_seconds = lookup_seconds
        self._lock = threading.Lock()
        self._asked: collections.OrderedDict[frozenset[str], Grant] = collections.OrderedDict()
        self._granted: collections.OrderedDict[str, tuple[str, ...]] = collections.OrderedDict()
        self.on_allocated: t.Callable[[], None] = lambda: None
        self.on_refused: t.Callable[[str], None] = lambda reason: None
        # Variables that hold a container to its share, from its units by card (UUID).
        self.limits: t.Callable[[t.Mapping[str, int]], t.Mapping[str, str]] = lambda units: {}

    def granted(self) -> dict[str, tuple[str, ...]]:
        """Cards (UUIDs, by index) of the pods (UID) that kubelet has been answered for; as far back as we remember."""
        with self._lock:
            return dict(self._granted)

    def preferred(self, ask: wire.Ask) -> tuple[str, ...]:
        cards = self._inventory.cards
        listing = self._listing()
        pods, subject = self._asking(ask.size, listing)
        promises = steering.promised(cards, pods, listing, contract.pod_uid(subject.pod) if subject else "")
        try:
            decision = steering.choose(cards, ask, subject, promises, steering.strangers(pods, listing))
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
                    **_named(decision.cards),
                    "why": decision.reason,
                }
            },
        )
        ids = frozenset(decision.ids)
        with self._lock:
            if subject is not None:
                _remember(self._asked, ids, grant_of(subject), ASKED)
            else:
                # They aren't any more whose they were.
                self._asked.pop(ids, None)
        return decision.ids

    def allocate(self, ids: tuple[str, ...]) -> wire.Answer:
        cards = self._inventory.cards
        found = steering.slots_of(cards).by_card(ids)
        given = tuple(card for card in cards if card.uuid in found)
        with self._lock:
            grant = self._grant(frozenset(ids))
        if grant is None and "" not in found:
            # Killed between kubelet's two calls, or kubelet didn't ask what we prefer.
            grant = self._recognised(len(ids), len(found) > 1)
        cdi: tuple[str, ...] = ()
        try:
            _check_shares(ids, found, grant)
            cdi = self._injection.devices([card.uuid for card in given])
        except InvalidIds as error:
            log.error("refused: %s", error)
            self.on_refused(str(error))
            raise
        if grant is not None:
            with self._lock:
                _remember(self._granted, grant.uid, tuple(card.uuid for card in given), GRANTED)
        log.info(
            "allocated",
            extra={
                "data": {
                    "pod": grant.key if grant else "",
                    "units": len(ids),
                    **_named(given),
                    "injection": "cdi" if cdi else "envvar",
                }
            },
        )
        self.on_allocated()
        return wire.Answer(
            {
                # With CDI names nothing is left for NVIDIA's runtime to do, whatever its mode.
                "NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(card.uuid for card in given),
                contract.POD_INDEX: str(given[0].index),
                contract.POD_CARD_UNITS: str(given[0].units),
                contract.POD_UNITS: str(grant.units if grant else len(ids)),
                contract.CONTAINER_UNITS: str(len(ids)),
                **self.limits({uuid: len(each) for uuid, each in found.items()}),
            },
            cdi,
        )

    def _grant(self, ids: frozenset[str]) -> Grant | None:
        """Whose IDs these are; the latest of whom, for a container may be given those of an init container again."""
        exact = self._asked.get(ids)
        return exact or next((grant for given, grant in reversed(self._asked.items()) if ids <= given), None)

    def _recognised(self, size: int, several: bool) -> Grant | None:
        """Whom kubelet gives so many units to; the API is only asked where units of several cards need a reason."""
        listing = self._listing()
        if several:
            _pods, subject = self._asking(size, listing)
        else:
            subject = steering.identify(size, pod_facts.by_key(self._pods.items()), listing)
        return grant_of(subject) if subject else None

    def _listing(self) -> list[Entry] | None:
        try:
            return self._podresources.list()
        except Unreadable as error:
            log.warning("%s; the oldest assumed pod of this size is taken", error)
            return None

    def _asking(self, size: int, listing: t.Sequence[Entry] | None) -> tuple[dict[str, Json], steering.Subject | None]:
        """The pods of this node, and the one of them that kubelet asks so many units for, None if there is no telling.

        They are from the API itself where our mirror of it is behind kubelet: where it lacks a listed pod that may be
        asked for, knows nobody who can be, or only one that has started, which is asked for no more: that is the
        predecessor of one of its name.
        """
        pods = pod_facts.by_key(self._pods.items())
        if listing is None:
            return pods, steering.identify(size, pods, None)
        missing = [entry.key for entry in listing if entry.lacking and entry.key not in pods]
        subject = steering.listed(size, pods, listing)
        doubtful = pod_facts.started(subject.pod) if subject else not missing
        if doubtful or len(missing) > 1:
            path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._node}"
        elif missing:
            namespace, _slash, name = missing[0].partition("/")
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        else:
            return pods, subject
        answer = within(self._lookup_seconds, lambda: self._kube.get(path))
        if answer is not None:
            found = [slim_pod(pod) for pod in answer.get("items", [answer])]
            # A pod of this name on another node is one that kubelet doesn't mean.
            here = {contract.pod_key(pod): pod for pod in found if contract.pod_node(pod) == self._node}
            pods = {**({} if "items" in answer else pods), **here}
        return pods, steering.identify(size, pods, listing)


def _check_shares(ids: t.Sequence[str], found: t.Mapping[str, t.Sequence[str]], grant: Grant | None) -> None:
    """Refuse anything but the same share of each of as many cards as the pod asks for.

    :param found: the IDs by card (UUID), unknown ones under the empty text.
    :raises InvalidIds: in one sentence.
    """
    if "" in found:
        raise InvalidIds(f"device ID {found[''][0]!r} names no card of this node")
    count = grant.cards if grant else 1
    if len(found) == count and len({len(each) for each in found.values()}) == 1:
        return
    names = ", ".join(f"{len(each)} of {uuid}" for uuid, each in sorted(found.items())) or "of no card"
    whose = f"pod {grant.key}: a container's" if grant else "a container's"
    kind = "of one card" if count == 1 else f"equally many of each of {count} cards"
    raise InvalidIds(f"{whose} {len(ids)} units must be {kind}; these are {names}")


def _named(cards: t.Sequence[contract.Card]) -> Json:
    """Cards for a line of the log."""
    return {"card": ",".join(str(card.index) for card in cards), "uuid": ",".join(card.uuid for card in cards)}


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
