# SPDX-License-Identifier: GPL-3.0-or-later
"""Correct the API's annotations of this node's pods and cards by what kubelet has really allocated.

kubelet's list and the API are all the state there is: the plugin may be killed at any time, and the API may be away for
any time; the next pass finds the differences. A pod that kubelet doesn't list proves nothing, since after its own
restart kubelet's list fills one by one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import typing as t

from gpushare.api.client import Kube, KubeError
from gpushare.api.events import Events
from gpushare.kubelet.pod_resources import Entry, PodResources, Unreadable
from gpushare.nvml.inventory import Inventory
from gpushare.plugin import pod_facts, steering
from gpushare.plugin.admission import Pods
from gpushare.plugin.metrics import Metrics
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.reconcile")

# After an Allocate kubelet lists the IDs a moment later: it is asked again this often, for so long.
BUSY_SECONDS = 3.0
BUSY_PAUSE = 0.15
# A pass before kubelet has even had our answer would find nothing, and only keep it waiting.
FIRST_PAUSE = 0.05
# A patch is repeated if the mirror still shows the old state after so long.
SETTLE_SECONDS = 5.0
LONGEST_BACKOFF = 5.0

NODE_ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT, contract.NODE_RUNTIME_CDI)


@dataclasses.dataclass(frozen=True)
class Notice:
    """An Event to be."""

    reason: str
    message: str
    warning: bool = False


@dataclasses.dataclass(frozen=True)
class Correction:
    """A pod whose annotations differ from kubelet's allocation.

    :param annotations: None for one that must go; empty where only a notice is due.
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
    """What has to be written on pods so that their annotations are kubelet's truth.

    :param granted: cards (UUIDs) by pod (UID), of pods that kubelet has been answered for by this very process.
    """
    slots, found = steering.slots_of(cards), []
    by_uuid = {card.uuid: card for card in cards}
    seen: dict[str, int] = {}
    for entry in listing:
        seen[entry.key] = seen.get(entry.key, 0) + 1
    for entry in listing:
        pod = pods.get(entry.key)
        # kubelet gives no UID: a pod and its successor of the same name can't be distinguished while both are listed.
        if pod is None or seen[entry.key] > 1 or contract.finished(pod) or not pod_facts.steps(pod):
            continue
        uid = contract.pod_uid(pod)
        # Before kubelet has spoken of this very UID, what it lists may be the predecessor's.
        if not pod_facts.started(pod) and uid not in granted:
            continue
        equal = True
        if not entry.ids:
            # Units of plain init containers aren't listed; what we know of them is what kubelet was answered.
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
            found.append(Correction(pod, {}, _ambiguous(given)))
        elif not _matches(pod, given):
            found.append(Correction(pod, _differences(pod, given, now_ns), _notice(pod, given)))
    return found


def _cards_of(slots: steering.Slots, entry: Entry) -> tuple[set[str], bool]:
    """The cards (UUIDs) of a pod's IDs, the empty text for an unknown one; whether each container has equal shares."""
    each = [slots.units(counts) for counts in entry.counts.values() if counts]
    used = {uuid for one in each for uuid in one}
    return used, all(one.keys() == used and len(set(one.values())) == 1 for one in each)


def _matches_pod(pod: JsonObject, entry: Entry) -> bool:
    """As many IDs as each container wants; otherwise kubelet speaks of another pod of this name."""
    return all(
        len(entry.containers[step.name]) == step.units for step in pod_facts.steps(pod) if step.name in entry.containers
    )


def _differences(pod: JsonObject, cards: t.Sequence[contract.Card], now_ns: int) -> dict[str, str | None]:
    """The annotations that differ from the truth; None for one that must go."""
    have = (pod.get("metadata") or {}).get("annotations") or {}
    booked = contract.booking(pod)
    since = booked.assume_time if booked and booked.assume_time else now_ns
    truth = contract.booking_annotations(cards, pod, since, assigned=True)
    # An empty annotation counts as absent: a merge can't remove one.
    return {key: value for key, value in truth.items() if (have.get(key) or None) != value}


@pod_facts.kept
def _matches(pod: JsonObject, cards: tuple[contract.Card, ...]) -> bool:
    """Nothing differs; without the time that every pod has to have, something does."""
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
    words = f"the containers of this pod have units of several cards, not the same share of each: {_places(cards)}"
    return Notice("GpuCardAmbiguous", words, warning=True)


def _places(cards: t.Iterable[contract.Card]) -> str:
    return ", ".join(f"card {card.index} ({card.uuid})" for card in cards)


def holders(
    card: contract.Card, cards: t.Sequence[contract.Card], pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry]
) -> list[JsonObject]:
    """The pods that have units of a card: as kubelet lists them, else as they are booked."""
    slots = steering.slots_of(cards)
    listed = {entry.key: entry for entry in listing if entry.ids}
    found = []
    for key, pod in pods.items():
        if not pod_facts.counts(pod):
            continue
        places = {slots.named(short) for short in listed[key].total} if key in listed else {None}
        # IDs of another plugin name no card of ours; then the booking is all there is.
        if card in places or (places == {None} and card.index in pod_facts.shares(pod)):
            found.append(pod)
    return found


def held_units(cards: t.Sequence[contract.Card], listing: t.Iterable[Entry]) -> dict[str, int]:
    """Units of each card (by UUID) that kubelet has given to containers."""
    slots = steering.slots_of(cards)
    held = {card.uuid: 0 for card in cards}
    for entry in listing:
        for short, number in entry.total.items():
            card = slots.named(short)
            if card is not None:
                held[card.uuid] += number
    return held


def trim_node(node: JsonObject) -> JsonObject:
    """What the plugin needs of its node."""
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


def node_patches(cards: t.Sequence[contract.Card], limit: str, node: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return the patches of the node and its status; empty where nothing differs.

    Unhealthy cards are in the capacity and not in what can be allocated, just as kubelet counts their units.

    :param limit: what is true of the node's memory limits, as ``contract.NODE_LIMIT`` has it.
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
    return {"metadata": {"annotations": annotations}} if annotations else {}, {} if same else {"status": counts}


# --------------------------------------------------------------------------- the loop


class Reconciler:
    """Runs a pass after each Allocate, on each change of a pod, the node or a card, and every so often."""

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
        # The state of the node's memory limits; and a callback for what a pass has read.
        self.limit: t.Callable[[], str] = lambda: contract.LIMIT_OFF
        self.on_reconciled: t.Callable[[list[JsonObject], list[Entry]], None] = lambda pods, listing: None
        self.error: str | None = None

    def wake(self) -> None:
        """Something may differ."""
        self._wake.set()

    def expect_allocation(self) -> None:
        """kubelet is about to list new IDs."""
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
                # Nothing that happens meanwhile makes the API come back sooner.
                stop.wait(min(LONGEST_BACKOFF, 0.2 * 2 ** min(failures, 8)))
            elif time.monotonic() < self._busy_until:
                stop.wait(max(BUSY_PAUSE, 3 * took))
            else:
                self._wake.wait(self._resync)
                if time.monotonic() < self._busy_until:
                    stop.wait(FIRST_PAUSE)

    def once(self) -> bool:
        """One pass; false if something is left to do that failed."""
        cards = self._inventory.cards
        self._differences = set()
        done = self._correct_node(cards)
        # Before the list is read, so that a later answer isn't taken as proof of an older list.
        granted = self._granted()
        try:
            listing = self._podresources.list()
        except Unreadable as error:
            self._fail(str(error))
            return False
        pods = pod_facts.by_key(self._pods.items())
        self._metrics.cards(cards, held_units(cards, listing))
        self._report_health(cards, pods, listing)
        self.on_reconciled(list(pods.values()), listing)
        self._matches &= {contract.pod_uid(pod) for pod in pods.values()}
        for correction in corrections(cards, pods, listing, granted, time.time_ns()):
            done = self._correct_pod(correction) and done
        # Patches that weren't needed in this pass are in the mirror.
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
        # With its UID in the patch, a successor of the same name can't be hit: the API refuses.
        body: JsonObject = {"metadata": {"uid": uid, "annotations": dict(correction.annotations)}}
        try:
            self._kube.patch(f"/api/v1/namespaces/{namespace}/pods/{name}", body)
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
        node = next((one for one in self._node_cache.items() if one["metadata"].get("name") == self._node), None)
        if node is None or not cards:
            return True
        annotation, status = node_patches(cards, self.limit(), node)
        done = True
        for path, body in ((f"/api/v1/nodes/{self._node}", annotation), (f"/api/v1/nodes/{self._node}/status", status)):
            if not body or not self._is_due(path, body, node):
                continue
            try:
                self._kube.patch(path, body)
                self._sent[path] = (body, node, time.monotonic())
            except KubeError as error:
                self._fail(f"the cards of node {self._node} can't be announced: {error}")
                done = False
        return done

    def _report_health(
        self, cards: t.Sequence[contract.Card], pods: t.Mapping[str, JsonObject], listing: t.Sequence[Entry]
    ) -> None:
        """An Event on the node, and on each pod that has units of it, for a card that may not be given any more.

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
                words = f"this pod has units of {where}, which isn't given to pods any more: {card.reason}"
                if key in self._warned or self.post(pod, "GpuCardUnhealthy", words):
                    warned.add(key)
        self._unhealthy = {card.uuid: card.reason for card in cards if not card.healthy}
        self._warned = warned

    def _is_due(self, what: str, wanted: t.Any, have: t.Any) -> bool:
        """Not sent just now, with the mirror only late to show it."""
        self._differences.add(what)
        sent, seen, when = self._sent.get(what, (None, None, 0.0))
        if sent == wanted and seen == have and time.monotonic() - when < SETTLE_SECONDS:
            self._busy_until = max(self._busy_until, when + SETTLE_SECONDS + BUSY_PAUSE)
            return False
        return True

    def post(self, pod: JsonObject, reason: str, message: str, warning: bool = True) -> bool:
        """Say something about a pod of this node; whether it was taken."""
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
