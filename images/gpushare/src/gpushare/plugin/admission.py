# SPDX-License-Identifier: GPL-3.0-or-later
"""Answer kubelet's calls while it admits a pod, from kubelet's own list and the API's pods.

Nothing here has to survive a restart: the state between the two calls only saves a lookup.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
import typing as t

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError, Pages
from gpushare.api.kept import kept_annotations, kept_containers
from gpushare.kubelet import wire
from gpushare.kubelet.errors import InvalidIds, NoDevices, RequestRefused
from gpushare.kubelet.pod_resources import Entry, PodResources, Unreadable
from gpushare.node.evictions import MIRROR
from gpushare.node.injection import Injection
from gpushare.nvml.inventory import Inventory
from gpushare.plugin import limits, pod_facts, steering
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.admission")

# kubelet admits no other pod meanwhile; after this time the plugin decides without the API's answer.
LOOKUP_SECONDS = 2.0
# kubelet admits one pod after the other, so few requests are open at a time; each may have thousands of IDs.
MAX_ASKED = 8
MAX_GRANTED = 512
# A node's pods that the plugin keeps: each takes 77 KB at the most, and an ordinary one 3 KB.
MOST_PODS = 4000
KEPT_ANNOTATIONS = (*contract.POD_ANNOTATIONS, *contract.POD_DEMANDS, MIRROR)
METADATA = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp")


T = t.TypeVar("T")


class Pods(t.Protocol):
    """The pods of this node in the API, as last read."""

    def items(self) -> list[JsonObject]: ...


class Grant(t.NamedTuple):
    """An identified pod for which kubelet allocates IDs.

    :param units: of the whole pod.
    :param cards: number of cards that it requests.
    """

    uid: str
    key: str
    units: int
    cards: int


def grant_of(subject: steering.Subject) -> Grant:
    try:
        count = contract.demand(subject.pod).count
    except contract.ContractError:
        # GetPreferredAllocation has refused it for that already.
        count = 1
    return Grant(contract.pod_uid(subject.pod), subject.key, pod_facts.units(subject.pod), count)


def trim_pod(pod: JsonObject) -> pod_facts.MirroredPod:
    """Return the fields of a pod that the plugin needs; updates of other fields are ignored."""
    metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}

    def containers(field: str) -> list[JsonObject]:
        if contract.finished(pod):
            return []
        return [trim_container(container) for container in kept_containers(spec.get(field) or [], pod_facts.privileged)]

    return pod_facts.MirroredPod(
        {
            "metadata": {
                **{key: metadata[key] for key in METADATA if key in metadata},
                "annotations": kept_annotations(annotations, KEPT_ANNOTATIONS),
            },
            "spec": {
                "nodeName": spec.get("nodeName", ""),
                "initContainers": containers("initContainers"),
                "containers": containers("containers"),
                "ephemeralContainers": containers("ephemeralContainers"),
            },
            "status": {
                "phase": status.get("phase", ""),
                "startTime": status.get("startTime"),
                **limits.trim_statuses(status),
                "conditions": [
                    {key: condition[key] for key in ("type", "lastTransitionTime") if key in condition}
                    for condition in status.get("conditions") or []
                    if condition.get("type") == "PodScheduled"
                ][:1],
            },
        }
    )


def trim_container(container: JsonObject) -> JsonObject:
    """Return the fields of a container that the plugin needs; those of one that isn't kept are the same object."""
    if not container:
        return container
    units = contract.container_units(container)
    return {
        **{key: container[key] for key in ("name", "restartPolicy") if key in container},
        **({"resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}} if units else {}),
        **({"securityContext": {"privileged": True}} if pod_facts.privileged(container) else {}),
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
        injection: Injection,
    ) -> None:
        """
        :param node: name of this node.
        :param inventory: the cards of this node.
        :param kube: the client of the API.
        :param pods: the mirror of this node's pods.
        :param podresources: the client of kubelet's PodResources API.
        :param injection: determines how containers get their cards.
        """
        self._node = node
        self._inventory = inventory
        self._kube = kube
        self._pods = pods
        self._podresources = podresources
        self._injection = injection
        self._lock = threading.Lock()
        self._asked: collections.OrderedDict[frozenset[str], Grant] = collections.OrderedDict()
        self._granted: collections.OrderedDict[str, tuple[str, ...]] = collections.OrderedDict()
        self.on_allocated: t.Callable[[], None] = lambda: None
        self.on_refused: t.Callable[[Reason], None] = lambda code: None
        # Returns those of the available IDs that processes of a former pod may still use.
        self.taken: t.Callable[[t.Iterable[str]], frozenset[str]] = lambda available: frozenset()
        # Returns the environment variables that limit a container to its share, by its units by card (UUID).
        self.limits: t.Callable[[t.Mapping[str, int]], t.Mapping[str, str]] = lambda units: {}

    def granted(self) -> dict[str, tuple[str, ...]]:
        """Return the cards (UUIDs, by index) of recently allocated pods (by UID)."""
        with self._lock:
            return dict(self._granted)

    def preferred(self, ask: wire.Ask) -> tuple[str, ...]:
        cards = self._inventory.cards
        if taken := self.taken(ask.available):
            ask = ask._replace(available=tuple(identifier for identifier in ask.available if identifier not in taken))
        listing = self._list_pods()
        pods, subject = self._identify_pod(ask.size, listing)
        reserved = steering.reserved_units(cards, pods, listing, contract.pod_uid(subject.pod) if subject else "")
        try:
            decision = steering.choose(cards, ask, subject, reserved, steering.unknown_pod_ids(pods, listing))
        except NoDevices as error:
            self._report(error, subject.key if subject else "")
            raise
        log.info(
            "kubelet requests units",
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
                _store(self._asked, ids, grant_of(subject), MAX_ASKED)
            else:
                # The IDs of an earlier pod now belong to an unknown one.
                self._asked.pop(ids, None)
        return decision.ids

    def _report(self, error: RequestRefused, pod: str) -> None:
        code, text = error.refusal
        log.error("refused: %s", text, extra={"data": {"pod": pod, "code": code.value}})
        self.on_refused(code)

    def allocate(self, ids: tuple[str, ...]) -> wire.Answer:
        cards = self._inventory.cards
        ids_by_card = steering.slots_of(cards).by_card(ids)
        given = tuple(card for card in cards if card.uuid in ids_by_card)
        with self._lock:
            grant = self._grant(frozenset(ids))
        if grant is None and "" not in ids_by_card:
            # The plugin was restarted between kubelet's two calls, or kubelet didn't make the first one.
            grant = self._identify_late(len(ids), len(ids_by_card) > 1)
        cdi: tuple[str, ...] = ()
        try:
            _check_shares(ids, ids_by_card, grant)
            cdi = self._injection.devices([card.uuid for card in given])
        except InvalidIds as error:
            self._report(error, grant.key if grant else "")
            raise
        if grant is not None:
            with self._lock:
                _store(self._granted, grant.uid, tuple(card.uuid for card in given), MAX_GRANTED)
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
                # With CDI names NVIDIA's runtime must add nothing, in any of its modes.
                "NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(card.uuid for card in given),
                contract.POD_INDEX: str(given[0].index),
                contract.POD_CARD_UNITS: str(given[0].units),
                contract.POD_UNITS: str(grant.units if grant else len(ids)),
                contract.CONTAINER_UNITS: str(len(ids)),
                **self.limits({uuid: len(each) for uuid, each in ids_by_card.items()}),
            },
            cdi,
        )

    def _grant(self, ids: frozenset[str]) -> Grant | None:
        """Return the latest pod that was offered these IDs; a container may get those of an init container again."""
        exact = self._asked.get(ids)
        return exact or next((grant for given, grant in reversed(self._asked.items()) if ids <= given), None)

    def _identify_late(self, size: int, several: bool) -> Grant | None:
        """Identify the pod at Allocate; the API is only read if the units are of several cards."""
        listing = self._list_pods()
        if several:
            _pods, subject = self._identify_pod(size, listing)
        else:
            subject = steering.identify(size, pod_facts.by_key(self._pods.items()), listing)
        return grant_of(subject) if subject else None

    def _list_pods(self) -> list[Entry] | None:
        try:
            return self._podresources.list()
        except Unreadable as error:
            log.warning("%s; the oldest assumed pod of this size is chosen", error)
            return None

    def _identify_pod(
        self, size: int, listing: t.Sequence[Entry] | None
    ) -> tuple[dict[str, JsonObject], steering.Subject | None]:
        """Return the pods of this node, and the one for which kubelet requests so many units, None if it is unknown.

        The API is read if the mirror is behind kubelet: if it lacks a listed pod without its units, or if the only
        candidate has started already, and so is the predecessor of a pod of the same name.
        """
        pods = pod_facts.by_key(self._pods.items())
        if listing is None:
            return pods, steering.identify(size, pods, None)
        missing = [entry.key for entry in listing if entry.lacking and entry.key not in pods]
        subject = steering.listed(size, pods, listing)
        doubtful = pod_facts.started(subject.pod) if subject else not missing
        is_list = doubtful or len(missing) > 1
        if not (is_list or missing):
            return pods, subject

        def read() -> list[JsonObject]:
            if is_list:
                listed = Pages(self._kube, "/api/v1/pods", paths.of_node(self._node))
                return [trim_pod(pod) for pod in itertools.islice(listed, MOST_PODS)]
            namespace, _slash, name = missing[0].partition("/")
            return [trim_pod(self._kube.get(paths.pod(namespace, name)))]

        known_pods = call_within(LOOKUP_SECONDS, read)
        if known_pods is not None:
            # A pod of this name on another node isn't the one that kubelet lists.
            here = {contract.pod_key(pod): pod for pod in known_pods if contract.pod_node(pod) == self._node}
            pods = {**({} if is_list else pods), **here}
        return pods, steering.identify(size, pods, listing)


def _check_shares(ids: t.Sequence[str], ids_by_card: t.Mapping[str, t.Sequence[str]], grant: Grant | None) -> None:
    """Refuse IDs that aren't equal shares of as many cards as the pod requests.

    :param found: the IDs by card (UUID); unknown ones have the empty string.
    :raises InvalidIds: they aren't.
    """
    if "" in ids_by_card:
        raise InvalidIds(Reason.UNKNOWN_DEVICE_ID, f"device ID {ids_by_card[''][0]!r} names no card of this node")
    count = grant.cards if grant else 1
    if len(ids_by_card) == count and len({len(each) for each in ids_by_card.values()}) == 1:
        return
    names = ", ".join(f"{len(each)} of {uuid}" for uuid, each in sorted(ids_by_card.items())) or "of no card"
    owner = f"pod {grant.key}: a container's" if grant else "a container's"
    kind = "of one card" if count == 1 else f"equally many of each of {count} cards"
    raise InvalidIds(Reason.UNEQUAL_SHARES, f"{owner} {len(ids)} units must be {kind}; these are {names}")


def _named(cards: t.Sequence[contract.Card]) -> JsonObject:
    """Format cards for the log."""
    return {"card": ",".join(str(card.index) for card in cards), "uuid": ",".join(card.uuid for card in cards)}


def call_within(seconds: float, call: t.Callable[[], T]) -> T | None:
    """Call the API with a time limit; the call itself continues in its thread after that.

    :returns: the answer; None after an error or so many seconds.
    """
    answers: list[T] = []
    done = threading.Event()

    def ask() -> None:
        try:
            answers.append(call())
        except KubeError as error:
            log.warning("a pod that kubelet lists can't be read from the API: %s", error)
        finally:
            done.set()

    began = time.monotonic()
    threading.Thread(target=ask, name="lookup", daemon=True).start()
    if not done.wait(seconds):
        log.warning("the API hasn't answered in %.1f s", time.monotonic() - began)
    return answers[0] if answers else None


K = t.TypeVar("K")
V = t.TypeVar("V")


def _store(store: collections.OrderedDict[K, V], key: K, value: V, most: int) -> None:
    store[key] = value
    store.move_to_end(key)
    while len(store) > most:
        store.popitem(last=False)
