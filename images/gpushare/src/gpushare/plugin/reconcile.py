# SPDX-License-Identifier: GPL-3.0-or-later
"""Correct the annotations of this node's pods and cards in the API to kubelet's actual allocation.

The only state is in kubelet's list and the API: the plugin may be killed, and the API unavailable, at any time; the
next pass finds the differences. A pod may be missing from kubelet's list, which fills one by one after its restart.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import typing as t

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.kubelet.pod_resources import Entry, PodResources, Unreadable, by_pod
from gpushare.nvml.inventory import Inventory
from gpushare.plugin import pod_facts, steering
from gpushare.plugin.admission import Pods
from gpushare.plugin.metrics import Metrics
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.reconcile")

# kubelet lists the IDs a moment after an Allocate: its list is read with this pause, for so long.
BUSY_SECONDS = 3.0
BUSY_PAUSE = 0.15
# A pass before kubelet has received the answer would find nothing, and delay it.
FIRST_PAUSE = 0.05
# A patch is repeated if the mirror still shows the old state after so long.
SETTLE_SECONDS = 5.0
LONGEST_BACKOFF = 5.0

NODE_ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT, contract.NODE_RUNTIME_CDI)


@dataclasses.dataclass(frozen=True)
class Notice:
    """The content of an Event."""

    reason: str
    message: str
    warning: bool = False


@dataclasses.dataclass(frozen=True)
class Correction:
    """A pod whose annotations differ from kubelet's allocation.

    :param annotations: None removes an annotation; empty if only an Event is due.
    """

    pod: JsonObject
    annotations: t.Mapping[str, str | None]
    notice: Notice | None


# --------------------------------------------------------------------------- pure


def corrections(
    cards: t.Sequence[contract.Card],
    pods: t.Mapping[str, JsonObject],
    listing: t.Sequence[Entry],
    granted: t.Mapping[str, tuple[str, ...]],
    now_ns: int,
) -> list[Correction]:
    """Return the corrections of pods whose annotations differ from kubelet's allocation.

    :param pods: the node's pods by key.
    :param listing: from PodResources.
    :param granted: cards (UUIDs) by pod (UID), as this process has allocated them.
    :param now_ns: nanoseconds since the epoch, for a pod without a time.
    """
    slots, wrong = steering.slots_of(cards), []
    by_uuid = {card.uuid: card for card in cards}
    for key, entry in by_pod(listing).items():
        pod = pods.get(key)
        if pod is None or contract.finished(pod) or not pod_facts.steps(pod):
            continue
        uid = contract.pod_uid(pod)
        # Before kubelet has reported this UID as started, the listed units may be its predecessor's.
        if not pod_facts.started(pod) and uid not in granted:
            continue
        equal = True
        if not entry.ids:
            # Units of plain init containers aren't listed; they are known only from the plugin's own answers.
            hidden_only = uid in granted and not pod_facts.visible_units(pod)
            used = set(granted[uid]) if hidden_only else set()
        elif steering.pending(pod, entry) or not _matches_pod(pod, entry):
            continue
        else:
            used, equal = _cards_of(slots, entry)
        if not used or not used <= by_uuid.keys():
            continue
        given = tuple(sorted((by_uuid[uuid] for uuid in used), key=lambda card: card.index))
        if not equal:
            wrong.append(Correction(pod, {}, _ambiguous(given)))
        elif not _matches(pod, given):
            wrong.append(Correction(pod, _differences(pod, given, now_ns), _notice(pod, given)))
    return wrong


def _cards_of(slots: steering.Slots, entry: Entry) -> tuple[set[str], bool]:
    """Return the cards (UUIDs) of a pod's IDs, and whether each container has equal shares; unknown cards are empty."""
    each = [slots.units(counts) for counts in entry.counts.values() if counts]
    used = {uuid for shares in each for uuid in shares}
    return used, all(shares.keys() == used and len(set(shares.values())) == 1 for shares in each)


def _matches_pod(pod: JsonObject, entry: Entry) -> bool:
    """Return whether each container has as many IDs as it requests; if not, kubelet lists another pod of this name."""
    return all(
        len(entry.containers[step.name]) == step.units for step in pod_facts.steps(pod) if step.name in entry.containers
    )


def _differences(pod: JsonObject, cards: t.Sequence[contract.Card], now_ns: int) -> dict[str, str | None]:
    """Return the annotations that differ from the allocation; None removes one."""
    have = (pod.get("metadata") or {}).get("annotations") or {}
    booked = contract.booking(pod)
    since = booked.assume_time if booked and booked.assume_time else now_ns
    actual = contract.booking_annotations(cards, pod, since, assigned=True)
    # An empty annotation counts as absent: a merge can't remove one.
    return {key: value for key, value in actual.items() if (have.get(key) or None) != value}


@pod_facts.kept
def _matches(pod: JsonObject, cards: tuple[contract.Card, ...]) -> bool:
    """Return whether nothing differs; a pod without a time always differs."""
    return not _differences(pod, cards, -1)


def _notice(pod: JsonObject, cards: t.Sequence[contract.Card]) -> Notice | None:
    booked = contract.booking(pod)
    where = _places(cards)
    if booked is None or booked.index < 0:
        return Notice("GpuCardAssigned", f"kubelet gave this pod {contract.pod_units(pod)} units of {where}")
    if set(booked.indices) != {card.index for card in cards}:
        before = ", ".join(f"card {index}" for index in booked.indices)
        return Notice("GpuCardCorrected", f"kubelet gave this pod units of {where}, not of {before}")
    return None


def _ambiguous(cards: t.Sequence[contract.Card]) -> Notice:
    text = f"the containers of this pod have units of several cards, not the same share of each: {_places(cards)}"
    return Notice("GpuCardAmbiguous", text, warning=True)


def _places(cards: t.Iterable[contract.Card]) -> str:
    return ", ".join(f"card {card.index} ({card.uuid})" for card in cards)


def holders(
    card: contract.Card, cards: t.Sequence[contract.Card], pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry]
) -> list[JsonObject]:
    """Return the pods with units of a card, by kubelet's list or else by their booking.

    :param cards: all cards of the node.
    :param pods: the node's pods, by namespace/name.
    :param listing: what kubelet's PodResources lists.
    """
    slots = steering.slots_of(cards)
    listed = {entry.key: entry for entry in listing if entry.ids}
    holding = []
    for key, pod in pods.items():
        if not pod_facts.counts(pod):
            continue
        places = {slots.named(short) for short in listed[key].total} if key in listed else {None}
        # IDs of another plugin don't identify a card; then the booking decides.
        if card in places or (places == {None} and card.index in pod_facts.shares(pod)):
            holding.append(pod)
    return holding


def trim_node(node: JsonObject) -> JsonObject:
    """Return the fields of a node that the plugin needs."""
    metadata, status = node.get("metadata") or {}, node.get("status") or {}
    annotations, info = metadata.get("annotations") or {}, status.get("nodeInfo") or {}
    count = contract.RESOURCE_COUNT
    return {
        "metadata": {
            "name": metadata.get("name", ""),
            "annotations": {key: annotations[key] for key in NODE_ANNOTATIONS if key in annotations},
        },
        "status": {
            **{
                field: {count: str(status[field][count])} if count in (status.get(field) or {}) else {}
                for field in ("capacity", "allocatable")
            },
            "nodeInfo": {key: info[key] for key in ("kubeletVersion", "containerRuntimeVersion") if key in info},
        },
    }


def node_patch(cards: t.Sequence[contract.Card], limit: str, node: JsonObject) -> JsonObject:
    """Return the patch of the node's annotations and status; empty if nothing differs.

    Unhealthy cards are in the capacity and not in what can be allocated, just as kubelet counts their units.

    :param limit: the state of the node's memory limits, as in the annotation ``contract.NODE_LIMIT``.
    """
    have = trim_node(node)
    wanted_annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards), contract.NODE_LIMIT: limit}
    annotations = {
        key: text for key, text in wanted_annotations.items() if have["metadata"]["annotations"].get(key) != text
    }
    counts = {
        "capacity": {contract.RESOURCE_COUNT: str(len(cards))},
        "allocatable": {contract.RESOURCE_COUNT: str(sum(1 for card in cards if card.healthy))},
    }
    same = all(have["status"][field] == values for field, values in counts.items())
    return {
        **({"metadata": {"annotations": annotations}} if annotations else {}),
        **({} if same else {"status": counts}),
    }


# --------------------------------------------------------------------------- the loop


class Reconciler:
    """Runs a pass after each Allocate, on each change of a pod, the node or a card, and periodically.

    :param node_cache: the mirror of this node.
    :param granted: returns the cards of recently allocated pods.
    :param resync: seconds between two passes at the most.
    :param exempt: namespaces whose privileged pods aren't reported.
    """

    def __init__(
        self,
        node: str,
        kube: Kube,
        inventory: Inventory,
        podresources: PodResources,
        pods: Pods,
        node_cache: Pods,
        granted: t.Callable[[], t.Mapping[str, tuple[str, ...]]],
        events: Events,
        metrics: Metrics,
        resync: float,
        exempt: t.Container[str] = (),
    ) -> None:
        self._node = node
        self._kube = kube
        self._inventory = inventory
        self._podresources = podresources
        self._pods = pods
        self._node_cache = node_cache
        self._granted = granted
        self._events = events
        self._metrics = metrics
        self._resync = resync
        self._wake = threading.Event()
        self._busy_until = 0.0
        self._sent: dict[str, tuple[t.Any, t.Any, float]] = {}
        self._differences: set[str] = set()
        self._matches: set[str] = set()
        self._unhealthy: dict[str, str] = {}
        self._warned: set[tuple[str, str, str]] = set()
        self._exempt, self._exposed = exempt, set[tuple[str, tuple[str, ...]]]()
        # The state of the memory limits, of the node and of a card (UUID); a card's units of deleted pods that aren't
        # released; and a callback for what a pass has read.
        self.limit: t.Callable[[], str] = lambda: contract.LIMIT_OFF
        self.card_limit: t.Callable[[str], tuple[str, str]] = lambda uuid: ("", "")
        self.unreleased: t.Callable[[str], int] = lambda uuid: 0
        self.on_reconciled: t.Callable[[list[JsonObject], list[Entry]], None] = lambda pods, listing: None
        self.error: str | None = None

    def wake(self) -> None:
        """Run a pass soon."""
        self._wake.set()

    def expect_allocation(self) -> None:
        """Run passes frequently for a while, since kubelet will list new IDs."""
        self._busy_until = time.monotonic() + BUSY_SECONDS
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            self._wake.clear()
            began = time.monotonic()
            try:
                agreed = self.once()
            except Exception as error:
                # A pod of an unexpected shape must not stop the correction of all others.
                log.exception("unexpected failure")
                self._fail(f"unexpected failure: {error}")
                agreed = False
            failures = 0 if agreed else failures + 1
            took = time.monotonic() - began
            if not agreed:
                # Other events don't make the API available sooner.
                stop.wait(min(LONGEST_BACKOFF, 0.2 * 2 ** min(failures, 8)))
            elif time.monotonic() < self._busy_until:
                stop.wait(max(BUSY_PAUSE, 3 * took))
            else:
                self._wake.wait(self._resync)
                if time.monotonic() < self._busy_until:
                    stop.wait(FIRST_PAUSE)

    def once(self) -> bool:
        """Run one pass; false if a correction failed."""
        cards = self._inventory.cards
        self._differences = set()
        done = self._correct_node(cards)
        # Read before the list, so that a later allocation isn't compared with an older list.
        granted = self._granted()
        try:
            listing = self._podresources.list()
        except Unreadable as error:
            self._fail(str(error))
            return False
        pods = pod_facts.by_key(self._pods.items())
        self._metrics.cards(cards, steering.held_units(cards, listing))
        self._report_health(cards, pods, listing)
        if cards:
            self._report_privileged(pods.values())
        self.on_reconciled(list(pods.values()), listing)
        self._matches &= {contract.pod_uid(pod) for pod in pods.values()}
        for correction in corrections(cards, pods, listing, granted, time.time_ns()):
            done = self._correct_pod(correction) and done
        # A patch that wasn't needed in this pass has reached the mirror.
        self._sent = {what: sent for what, sent in self._sent.items() if what in self._differences}
        if done:
            self.error = None
        return done

    def _correct_pod(self, correction: Correction) -> bool:
        pod, uid, key = correction.pod, contract.pod_uid(correction.pod), contract.pod_key(correction.pod)
        if not correction.annotations:
            if correction.notice and uid not in self._matches:
                log.error("%s: %s", key, correction.notice.message)
                self._matches.add(uid)
                self._post(pod, correction.notice)
            return True
        have = pod["metadata"].get("annotations") or {}
        if not self._is_due(uid, dict(correction.annotations), have):
            return True
        namespace, _slash, name = key.partition("/")
        # With the UID in the patch the API refuses to patch a successor of the same name.
        body: JsonObject = {"metadata": {"uid": uid, "annotations": dict(correction.annotations)}}
        try:
            # By its status the API server changes no specification.
            self._kube.patch(paths.pod(namespace, name, "status"), body)
        except KubeError as error:
            if error.status == 404:
                log.info("%s: gone before it could be corrected", key)
                return True
            if error.status == 409:
                # Replaced, which the mirror will show; or changed so often that the API server gave up.
                log.info("%s: replaced or changed while it was corrected: %s", key, error)
                return False
            self._fail(f"{key} can't be corrected: {error}")
            return False
        self._sent[uid] = (dict(correction.annotations), have, time.monotonic())
        self._metrics.corrected(correction.notice.reason if correction.notice else "GpuCardConfirmed")
        if correction.notice:
            log.warning("%s: %s", key, correction.notice.message)
            self._post(pod, correction.notice)
        return True

    def _correct_node(self, cards: t.Sequence[contract.Card]) -> bool:
        node = next(
            (cached for cached in self._node_cache.items() if cached["metadata"].get("name") == self._node), None
        )
        if node is None or not cards:
            return True
        shown = []
        for card in cards:
            limit, why = self.card_limit(card.uuid)
            unreleased = self.unreleased(card.uuid)
            shown.append(dataclasses.replace(card, limit=limit, limit_reason=why, unreleased=unreleased))
        path, body = paths.node(self._node, "status"), node_patch(shown, self.limit(), node)
        if not body or not self._is_due(path, body, node):
            return True
        try:
            self._kube.patch(path, body)
        except KubeError as error:
            self._fail(f"the cards of node {self._node} can't be announced: {error}")
            return False
        self._sent[path] = (body, node, time.monotonic())
        return True

    def _report_health(
        self, cards: t.Sequence[contract.Card], pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry]
    ) -> None:
        """Post an Event on the node and on each pod of a card that became unhealthy.

        Events are rate limited; the remaining pods get theirs in a later pass.
        """
        warned: set[tuple[str, str, str]] = set()
        for card in cards:
            where, before = f"card {card.index} ({card.uuid})", self._unhealthy.get(card.uuid)
            if card.healthy:
                if before is not None:
                    self._events.node(self._node, "GpuCardHealthy", f"{where} is given to pods again", "Normal")
                continue
            if card.reason != before:
                self._events.node(self._node, "GpuCardUnhealthy", f"{where} isn't given to pods: {card.reason}")
            for pod in holders(card, cards, pods, listing):
                key = (contract.pod_uid(pod), card.uuid, card.reason)
                text = f"this pod has units of {where}, which isn't given to pods any more: {card.reason}"
                if key in self._warned or self.post(pod, "GpuCardUnhealthy", text):
                    warned.add(key)
        self._unhealthy = {card.uuid: card.reason for card in cards if not card.healthy}
        self._warned = warned

    def _report_privileged(self, pods: t.Iterable[JsonObject]) -> None:
        """Post an Event on each pod that sees every card of the node whatever it requests, once for its containers."""
        exposed: set[tuple[str, tuple[str, ...]]] = set()
        for pod in pods:
            names, namespace = pod_facts.privileged_containers(pod), pod_facts.key(pod).partition("/")[0]
            if not names or namespace in self._exempt or not pod_facts.started(pod) or contract.finished(pod):
                continue
            which = f"container {names[0]} is" if len(names) == 1 else f"containers {', '.join(names)} are"
            text = (
                f"{which} privileged in pod {pod_facts.key(pod)}, which therefore sees every card of node "
                f"{self._node} and can lift memory limits: remove securityContext.privileged; if it is a part of the "
                f"node's system, add {namespace} to gpushare_admission_exempt_namespaces"
            )
            pod_and_names = contract.pod_uid(pod), names
            if pod_and_names in self._exposed or self.post(pod, "GpuCardsExposed", text):
                exposed.add(pod_and_names)
        self._exposed = exposed

    def _is_due(self, what: str, wanted: t.Any, have: t.Any) -> bool:
        """Return whether a patch has to be sent: not if it was sent a moment ago and the mirror doesn't show it yet."""
        self._differences.add(what)
        sent, seen, when = self._sent.get(what, (None, None, 0.0))
        if sent == wanted and seen == have and time.monotonic() - when < SETTLE_SECONDS:
            self._busy_until = max(self._busy_until, when + SETTLE_SECONDS + BUSY_PAUSE)
            return False
        return True

    def post(self, pod: JsonObject, reason: str, message: str, warning: bool = True) -> bool:
        """Post an Event about a pod of this node.

        :param reason: the Event's reason, in CamelCase.
        :param warning: whether its type is Warning; Normal otherwise.
        :returns: whether it was accepted.
        """
        namespace, _slash, name = contract.pod_key(pod).partition("/")
        kind = "Warning" if warning else "Normal"
        return self._events.pod(namespace, name, contract.pod_uid(pod), reason, message, kind)

    def _post(self, pod: JsonObject, notice: Notice) -> None:
        self.post(pod, notice.reason, notice.message, notice.warning)

    def _fail(self, error: str) -> None:
        if error != self.error:
            log.warning("%s", error)
        self.error = error
        self._metrics.failed("reconcile")
