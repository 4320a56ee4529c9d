# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Assertions on a suite's pods; each pod is validated by itself, so that others may come and go meanwhile. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .claims import REFUSAL
from .nodes import NodeState
from .pods import PodState
from .result import Failed, Inconclusive, Skipped, StepOutcome, shorten

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
        found = pod.annotations.get(contract.POD_ASSUME_TIME)
        raise failure(f"has {contract.POD_ASSUME_TIME}={found}", CHECK_WIRING)
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
    card = next((one for one in after.cards if one.index == pod.index), None)
    if card is None:
        return
    booked = after.booked_units(card.index, namespace)
    if booked <= card.units:
        return
    what = f"card {card.index} of node {after.name} is booked with {booked} of {card.units} units"
    others = [
        contract.pod_key(one)
        for one in after.pods
        if contract.pod_uid(one) in after.uids - before.uids
        and (one.get("metadata") or {}).get("namespace") != namespace
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
