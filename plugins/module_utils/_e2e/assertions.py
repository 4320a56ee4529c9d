# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Assertions on a suite's pods, whose shares may be claims; each pod is validated by itself. No I/O.

A claim is a booking: what it is allocated becomes its pod's booking by gpushare's contract, and the cards in slices
become those of the node.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts.claims import MALFORMED
from .._contracts.model import Node, Pod, PodParser
from .._core.errors import ShareError
from .._core.types import JsonObject
from .nodes import NodeState
from .result import Failed, Inconclusive, Skipped, StepOutcome, shorten

# The text of kube-scheduler's condition where no card has room for a claim (kubernetes v1.36.3, dynamicresources).
REFUSAL = "cannot allocate all claims"


class Cards(t.NamedTuple):
    """The cards in a node's slices, and the unit of their memory."""

    devices: tuple[dra.Device, ...]
    unit: str

    def card(self, device: str) -> contract.Card | None:
        """Return the card of a device; its minor number isn't in a slice, and its index stands in for it."""
        for position, offered in enumerate(self.devices):
            if offered.name == device:
                index = position if offered.index is None else offered.index
                units = contract.units_of(offered.memory_mib, self.unit)
                healthy, limit = offered.unhealthy is None, offered.limit
                about: JsonObject = {"model": offered.model, "reason": offered.unhealthy or "", "limit": limit}
                return contract.Card(index, offered.uuid, index, offered.memory_mib, units, healthy, **about)
        return None


def cards_by_node(slices: t.Iterable[JsonObject]) -> dict[str, Cards]:
    """Return the cards in slices by node.

    :raises ContractError: a slice is malformed.
    """
    by_node = dra.newest(map(dra.slice_of, slices))
    return {node: _cards([device for part in mine for device in part.devices]) for node, mine in by_node.items()}


def _cards(devices: t.Sequence[dra.Device]) -> Cards:
    units = {device.unit for device in devices}
    return Cards(tuple(devices), units.pop() if len(units) == 1 else "MiB")


def as_announced(node: Node, cards: Cards | None) -> Node:
    """Return a node as a device plugin would announce its cards; unchanged where it has none in slices."""
    if cards is None:
        return node
    mine = [card for card in (cards.card(device.name) for device in cards.devices) if card is not None]
    limits = sorted({card.limit for card in mine if card.limit})
    annotations = {**node.annotations, contract.NODE_CARDS: contract.cards_to_annotation(mine)}
    if len(limits) == 1:
        annotations[contract.NODE_LIMIT] = limits[0]
    healthy = [card for card in mine if card.healthy]
    capacity, allocatable = (
        {contract.RESOURCE_MEMORY: sum(card.units for card in counted), contract.RESOURCE_COUNT: len(mine)}
        for counted in (mine, healthy)
    )
    return dataclasses.replace(
        node,
        annotations=annotations,
        cards=tuple(sorted(mine, key=lambda card: card.index)),
        cards_problem="",
        capacity={**node.capacity, **capacity},
        allocatable={**node.allocatable, **allocatable},
    )


def as_booked(pods: t.Iterable[Pod], claims: t.Iterable[JsonObject], by_node: t.Mapping[str, Cards]) -> list[Pod]:
    """Return pods as the extender would have booked them, and a pod for each claim that holds memory without one.

    Of several pods that share a claim, the first has its memory.

    :raises ContractError: a claim is malformed.
    """
    known = {(claim.namespace, claim.name): claim for claim in map(dra.claim_of, claims) if claim.ours}
    used: set[str] = set()
    booked = []
    for pod in pods:
        mine = [known.get((pod.namespace, use.claim)) for use in pod.uses]
        held = [
            claim
            for claim in mine
            if claim is not None
            and claim.parts
            and claim.uid not in used
            and pod.uid in {user.uid for user in claim.users}
        ]
        used |= {claim.uid for claim in held}
        booked.append(_booked(pod, held, by_node) if held else pod)
    for claim in known.values():
        if claim.parts and claim.uid not in used:
            left = Pod(claim.namespace, f"claim {claim.name}", claim.uid, frozenset({claim.uid}), claim.parts[0].pool)
            booked.append(_booked(left, [claim], by_node))
    return booked


def _booked(pod: Pod, held: t.Sequence[dra.Claim], by_node: t.Mapping[str, Cards]) -> Pod:
    """Return a pod with what its claims hold as its units and its booking, and with the annotations of that."""
    cards = by_node.get(held[0].parts[0].pool)
    if cards is None:
        return pod
    mib: dict[str, int] = {}
    for claim in held:
        for (_pool, device), amount in claim.mib().items():
            mib[device] = mib.get(device, 0) + amount
    units = contract.units_of(sum(mib.values()), cards.unit)
    mine = [card for card in map(cards.card, mib) if card is not None]
    if len(mine) != len(mib):
        # A claim of a card that no slice has is a pod without a card.
        return pod._replace(units=units)
    indices = tuple(card.index for card in mine)
    # As in the contract, cards of which the shares differ are one: the first.
    booking = contract.Booking(indices if units % len(indices) == 0 else indices[:1], True, 1)
    request = {"resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}}}
    written = contract.booking_annotations(mine, {"spec": {"containers": [request]}}, 1, True)
    annotations = contract.merge_only(written, {})
    return pod._replace(units=units, booking=booking, annotations={**pod.annotations, **annotations})


@dataclasses.dataclass(frozen=True)
class PodState:
    """A pod at one moment.

    :param index: the card in its annotations; None without one.
    :param summary: its phase with the reasons of kubelet and the scheduler, in one line.
    :param waiting: why its containers aren't running, by kubelet.
    :param refusals: why the scheduler left it unbound.
    :param scheduler_error: the scheduler reports an error of its own.
    """

    name: str
    uid: str
    node: str
    phase: str
    running: bool
    ended: bool
    index: int | None
    annotations: JsonObject
    summary: str
    waiting: tuple[str, ...]
    refusals: tuple[str, ...]
    scheduler_error: bool
    priority: int
    preempts: bool

    @property
    def assigned(self) -> bool:
        return self.annotations.get(contract.POD_ASSIGNED) == "true"

    @property
    def booking(self) -> str:
        """The contract's annotations, as evidence."""
        booked = [f"{key}={self.annotations[key]}" for key in contract.POD_ANNOTATIONS if key in self.annotations]
        return ", ".join(booked) or "no annotation of gpushare"


def pod_state(raw: JsonObject, events: t.Iterable[JsonObject] = (), booked: Pod | None = None) -> PodState:
    """Read a pod's state.

    :param events: of its namespace.
    :param booked: the pod with what its claims hold; by default as it is.
    :raises ShareError: the object is malformed.
    """
    pod = booked or PodParser()(raw)
    if pod is None or pod.problem:
        raise ShareError("a pod's object in the API is malformed")
    try:
        status = raw.get("status") or {}
        own = [event for event in events if _involved(event).get("uid") == pod.uid]
        return PodState(
            name=pod.name,
            uid=pod.uid,
            node=pod.node,
            phase=pod.phase or "unknown",
            running=is_running(raw),
            ended=pod.finished,
            index=pod.booking.index if pod.booking else None,
            annotations=dict(pod.annotations),
            summary=_summary(status, own),
            waiting=tuple(str(state.get("reason") or "") for _prefix, state in _stopped(status)),
            refusals=tuple(_refusals(status, own)),
            scheduler_error=any(condition.get("reason") == "SchedulerError" for condition in _unscheduled(status)),
            priority=pod.priority,
            preempts=raw["spec"].get("preemptionPolicy") != "Never",
        )
    except MALFORMED as error:
        raise ShareError(f"a pod's object in the API is malformed: {type(error).__name__}") from error


def is_running(pod: JsonObject) -> bool:
    """Return whether all containers of a pod run."""
    status = pod.get("status") or {}
    up = [
        container
        for container in status.get("containerStatuses") or []
        if (container.get("state") or {}).get("running") is not None
    ]
    return status.get("phase") == "Running" and len(up) == len((pod.get("spec") or {}).get("containers") or [])


def _involved(event: JsonObject) -> JsonObject:
    return event.get("involvedObject") or event.get("regarding") or {}


def _message(event: JsonObject) -> str:
    return str(event.get("message") or event.get("note") or "")


def _unscheduled(status: JsonObject) -> t.Iterator[JsonObject]:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield condition


def _refusals(status: JsonObject, events: t.Iterable[JsonObject]) -> t.Iterator[str]:
    """Return why the scheduler left the pod unbound: its condition and its FailedScheduling events."""
    texts = [str(condition.get("message", "")) for condition in _unscheduled(status)]
    texts += [_message(event) for event in events if event.get("reason") == "FailedScheduling"]
    return (text for text in texts if text)


def _stopped(status: JsonObject) -> t.Iterator[tuple[str, JsonObject]]:
    for field, prefix in (("initContainerStatuses", "init:"), ("containerStatuses", "")):
        for container in status.get(field) or []:
            state = (container.get("state") or {}).get("waiting") or (container.get("state") or {}).get("terminated")
            if state:
                yield prefix, state


def _summary(status: JsonObject, events: t.Sequence[JsonObject]) -> str:
    """Return phase, kubelet's reasons, and the last warning: only events report why a container isn't created yet."""
    parts = [str(status.get("phase") or "unknown")]
    parts += [str(status[key]) for key in ("reason", "message") if status.get(key)]
    for prefix, state in _stopped(status):
        parts += [prefix + str(state[key]) for key in ("reason", "message") if state.get(key)]
    parts += [_message(event) for event in events if event.get("type") == "Warning"][-1:]
    return shorten("; ".join(dict.fromkeys(part for part in parts if part)))


# The refusals of our and of upstream's extender, which reach a pod only in the text of kube-scheduler's condition: our
# reason codes, and upstream's words. kube-scheduler's own, where it allocates claims.
EXTENDER_REFUSALS = (
    f"{contract.Reason.INSUFFICIENT_GPU_MEMORY}: ",
    f"{contract.Reason.CARD_TOO_SMALL}: ",
    "one device",
    REFUSAL,
)
SCHEDULER_REFUSAL = f"Insufficient {contract.RESOURCE_MEMORY}"
# kubelet's reasons for a container that waits for its image (kubernetes v1.36.0, pkg/kubelet/images/types.go).
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
    "SignatureValidationFailed",
)
# Parts of kubelet's and the runtime's messages if they refuse the device plugin's devices.
DEVICE_ERRORS = ("UnexpectedAdmissionError", "OutOf", "no-gpu-has", "nvidia", "device plugin", contract.RESOURCE_MEMORY)

CHECK_WIRING = "check with gpu_allocation_check that the scheduler of these pods calls the gpushare extender"
CHECK_COUNTS = (
    "compare the extender's state (/gpushare-scheduler/inspect) with the pods' annotations, and restart the extender "
    "if they differ"
)
CHECK_PLUGIN = "read the log of the gpushare device plugin on that node"


# --------------------------------------------------------------------------- placed pods


def is_settled(pod: PodState, node: NodeState) -> bool:
    """Return whether a pod runs with a card that is assigned."""
    return pod.running and pod.index is not None and (pod.assigned or _may_stay_unassigned(node))


def _may_stay_unassigned(node: NodeState) -> bool:
    """Return whether pods stay unassigned: upstream's plugin leaves them so on a node with one card."""
    return node.upstream and len(node.cards) == 1


def assert_placement(pod: PodState, units: int, node: NodeState) -> None:
    """Validate the annotations of a bound pod against the contract.

    :raises Failed: an annotation is missing or wrong.
    """
    cards = {card.index: card for card in node.cards}

    def failure(what: str, do: str = CHECK_PLUGIN) -> Failed:
        return Failed(f"pod {pod.name} {what}", do, pod.name, pod.index, f"{pod.summary}: {pod.booking}")

    if pod.node != node.name:
        raise failure(f"may run on node {node.name} only and is on {pod.node}", CHECK_WIRING)
    if pod.index is None:
        raise failure(f"was bound to node {pod.node} without a card ({contract.POD_INDEX})", CHECK_WIRING)
    card = cards.get(pod.index)
    if card is None:
        raise failure(f"is on card {pod.index}, which node {pod.node} doesn't have", CHECK_WIRING)
    if not card.healthy:
        what = f"pod {pod.name} is on card {card.index} of node {pod.node}, which isn't healthy now"
        raise StepOutcome(what, "", pod.name)
    for key, expected, of in (
        (contract.POD_UNITS, units, "units of the pod"),
        (contract.POD_CARD_UNITS, card.units, "units of its card"),
    ):
        if str(pod.annotations.get(key)) != str(expected):
            raise failure(f"has {key}={pod.annotations.get(key)}, not {expected}, the {of}", CHECK_WIRING)
    if not _positive(pod.annotations.get(contract.POD_ASSUME_TIME)):
        assumed = pod.annotations.get(contract.POD_ASSUME_TIME)
        raise failure(f"has {contract.POD_ASSUME_TIME}={assumed}", CHECK_WIRING)
    if pod.running and not pod.assigned and not _may_stay_unassigned(node):
        raise failure(f"runs, and {contract.POD_ASSIGNED} isn't true")


def _positive(value: t.Any) -> bool:
    text = str(value)
    return text.isascii() and text.isdigit() and len(text) < 30 and int(text) > 0


def assert_not_overbooked(pod: PodState, before: NodeState, after: NodeState, namespace: str) -> None:
    """Validate that the card of a placed pod holds no more than it has.

    :param before: the node before the pod was created.
    :param namespace: the suite's.
    :raises Failed: it holds more, and no other pod came in.
    :raises Inconclusive: it holds more, and other pods came in.
    """
    card = next((seen for seen in after.cards if seen.index == pod.index), None)
    if card is None:
        return
    booked = after.booked_units(card.index, namespace)
    if booked <= card.units:
        return
    what = f"card {card.index} of node {after.name} is booked with {booked} of {card.units} units"
    others = [
        other.key for other in after.pods if other.uid in after.uids - before.uids and other.namespace != namespace
    ]
    if others:
        what = f"{what}, and {', '.join(sorted(others)[:3])} came in meanwhile"
        raise Inconclusive(what, CHECK_COUNTS, pod.name, card.index)
    raise Failed(f"{what} after pod {pod.name}", CHECK_COUNTS, pod.name, card.index, pod.booking)


def not_running(pod: PodState, timeout: float) -> StepOutcome:
    """Return the outcome for a bound pod that didn't start within the timeout (seconds)."""
    waited = f"pod {pod.name} doesn't run on node {pod.node} within {timeout:g} s: {pod.summary}"
    if set(pod.waiting) & set(IMAGE_REASONS):
        return StepOutcome(waited, "name an image that this node has or can pull (option image)", pod.name, pod.index)
    if pod.ended or any(part in pod.summary for part in DEVICE_ERRORS):
        what = f"pod {pod.name} was refused on node {pod.node}: {pod.summary}" if pod.ended else waited
        return Failed(what, CHECK_PLUGIN, pod.name, pod.index, pod.booking)
    return StepOutcome(waited, "read kubelet's events of the pod", pod.name, pod.index)


# --------------------------------------------------------------------------- refused pods


def extender_refusal(texts: t.Iterable[str]) -> str:
    """Return the refusal that is the extender's own; empty if there is none."""
    for text in texts:
        if SCHEDULER_REFUSAL not in text and any(part in text for part in EXTENDER_REFUSALS):
            return text
    return ""


def not_placed(pod: PodState, units: int, node: NodeState, claimed: bool, timeout: float) -> StepOutcome:
    """Return the outcome for a Pending pod that should have been placed.

    :param claimed: the extender reserves memory for a pod that preempted others; no count includes it.
    :param timeout: seconds that it was Pending.
    """
    reason = shorten(pod.refusals[-1]) if pod.refusals else ""
    by_memory = bool(extender_refusal(pod.refusals)) or SCHEDULER_REFUSAL in reason
    if pod.scheduler_error:
        return Failed(f"the scheduler can't place pod {pod.name}: {reason}", CHECK_WIRING, pod.name)
    if not reason:
        what = f"pod {pod.name} is Pending, and no scheduler gave a reason within {timeout:g} s"
        return StepOutcome(what, "check that the scheduler that the pod names runs (option scheduler_name)", pod.name)
    if not by_memory:
        return StepOutcome(f"pod {pod.name} is Pending for a reason that isn't gpushare's: {reason}", "", pod.name)
    if node.largest_free < units or node.total_free < units or claimed or node.stray:
        what = f"other pods took the memory for pod {pod.name} on node {node.name}: {reason}"
        return Inconclusive(what, "", pod.name)
    what = f"pod {pod.name} of {units} units is Pending though a card of node {node.name} has {node.largest_free} free"
    return Inconclusive.unless_repeated(Failed(what, CHECK_COUNTS, pod.name, None, reason))


def assert_refused(
    pod: PodState, units: int, before: NodeState, after: NodeState, namespace: str, timeout: float
) -> str:
    """Validate that a pod that fits no card stayed Pending for the extender's reason, and return that reason.

    :param before: the node before the pod was created.
    :param namespace: the suite's.
    :param timeout: seconds that it was watched.
    :raises Failed: it was placed without the extender, or exceeds a card's size.
    :raises Skipped: it exceeds kube-scheduler's own count, so that the extender isn't called.
    :raises Inconclusive: other pods came or went, or kube-scheduler's count is stale.
    :raises StepOutcome: nothing follows from the pod's state.
    """
    if pod.node:
        _reject_bound(pod, units, before, after, namespace)
    reason = extender_refusal(pod.refusals)
    if reason:
        return shorten(reason)
    if not pod.refusals:
        what = f"pod {pod.name} stayed Pending, and no scheduler gave a reason within {timeout:g} s"
        raise StepOutcome(what, "", pod.name)
    text = shorten(pod.refusals[-1])
    if pod.scheduler_error:
        raise Failed(f"the scheduler can't evaluate pod {pod.name}: {text}", CHECK_WIRING, pod.name)
    if SCHEDULER_REFUSAL not in text:
        what = f"pod {pod.name} stayed Pending for a reason that isn't the extender's: {text}"
        raise StepOutcome(what, "", pod.name)
    if before.total_free < units:
        raise Skipped(
            f"it stayed Pending by kube-scheduler's own count ({before.total_free} units left on node {before.name} "
            f"for {units}), so that the extender wasn't called",
            "",
            pod.name,
        )
    if before.uids != after.uids or after.total_free < units:
        what = f"other pods came to node {after.name} before pod {pod.name} was evaluated: {text}"
        raise Inconclusive(what, "", pod.name)
    failure = Failed(
        f"kube-scheduler refuses pod {pod.name} of {units} units by its own count, though node {after.name} has "
        f"{after.total_free} free",
        "check whether kube-scheduler's cache of the node is stale, and which pods it counts there",
        pod.name,
        None,
        text,
    )
    raise Inconclusive.unless_repeated(failure)


def _reject_bound(pod: PodState, units: int, before: NodeState, after: NodeState, namespace: str) -> t.NoReturn:
    """Raise the outcome for a bound pod that should have been refused."""
    if pod.index is None:
        raise Failed(
            f"pod {pod.name} of {units} units was bound to node {pod.node} without a card, where no card had enough: "
            "its scheduler doesn't call the extender",
            CHECK_WIRING,
            pod.name,
            None,
            pod.summary,
        )
    if pod.ended:
        what = f"pod {pod.name} was bound and then refused: {pod.summary}"
        raise Failed(what, CHECK_WIRING, pod.name, pod.index, pod.booking)
    assert_placement(pod, units, after)
    assert_not_overbooked(pod, before, after, namespace)
    what = f"other pods left node {after.name}, and pod {pod.name} was placed"
    outcome = Inconclusive(what, "", pod.name, pod.index)
    outcome.bound = True
    raise outcome
