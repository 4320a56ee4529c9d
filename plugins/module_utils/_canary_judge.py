# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the canary's pods tell: each is judged by itself, so that others may come and go meanwhile. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as workloads
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary import Survey
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import (
    Churned,
    Failed,
    NotShown,
    Told,
    short,
)
from ansible_collections.kubegpu.share.plugins.module_utils._canary_seen import Seen
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card

# What ours and upstream's extender say; the first two are also acceptance's.
EXTENDER_WORDS = (*workloads.EXTENDER_WORDS, "largest healthy card", "wanted card")
# Why a container waits for its image, in kubelet's words.
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
    "ImageInspectError",
    "SignatureValidationFailed",
)
# kubelet or the runtime refuses what the device plugin should give.
DEVICE_WORDS = ("UnexpectedAdmissionError", "OutOf", "no-gpu-has", "nvidia", "device plugin", contract.RESOURCE_MEMORY)

WIRING = (
    "see with gpu_allocation_check whether the scheduler of these pods asks the gpushare extender (filter and bind)"
)
COUNTS = (
    "compare the extender's own count (/gpushare-scheduler/inspect) with the pods' annotations, and restart it where "
    "they differ"
)
PLUGIN = "look at the log of the gpushare device plugin on that node"


# --------------------------------------------------------------------------- placed


def settled(pod: Seen, seen: Survey) -> bool:
    return pod.running and pod.index is not None and (pod.assigned or _fast_path(seen))


def _fast_path(seen: Survey) -> bool:
    """Upstream's plugin leaves a pod unassigned on a node with one card."""
    return seen.upstream and len(seen.cards) == 1


def check_placement(pod: Seen, units: int, seen: Survey) -> None:
    """Section by section what the contract says of a bound pod's annotations.

    :raises Failed: one of them is missing or wrong.
    """
    cards = {card.index: card for card in seen.cards}

    def wrong(what: str, do: str = PLUGIN) -> Failed:
        return Failed(f"pod {pod.name} {what}", do, pod.name, pod.index, f"{pod.says}: {pod.booked}")

    if pod.node != seen.view.name:
        raise wrong(f"may run on node {seen.view.name} only and is on {pod.node}", WIRING)
    if pod.index is None:
        raise wrong(f"was bound to node {pod.node} without a card ({contract.POD_INDEX})", WIRING)
    card: Card | None = cards.get(pod.index)
    if card is None:
        raise wrong(f"is on card {pod.index}, which node {pod.node} doesn't have", WIRING)
    if not card.healthy:
        raise Told(f"pod {pod.name} is on card {card.index} of node {pod.node}, which isn't healthy now", "", pod.name)
    for key, expected, of in (
        (contract.POD_UNITS, units, "units of the pod"),
        (contract.POD_CARD_UNITS, card.units, "units of its card"),
    ):
        if str(pod.annotations.get(key)) != str(expected):
            raise wrong(f"has {key}={pod.annotations.get(key)}, not {expected}, the {of}", WIRING)
    if not _positive(pod.annotations.get(contract.POD_ASSUME_TIME)):
        raise wrong(f"has {contract.POD_ASSUME_TIME}={pod.annotations.get(contract.POD_ASSUME_TIME)}", WIRING)
    if pod.running and not pod.assigned and not _fast_path(seen):
        raise wrong(f"runs, and {contract.POD_ASSIGNED} isn't true")


def _positive(value: t.Any) -> bool:
    text = str(value)
    return text.isascii() and text.isdigit() and len(text) < 30 and int(text) > 0


def check_room(pod: Seen, before: Survey, after: Survey, namespace: str) -> None:
    """Whether the card of a placed pod holds no more than it has.

    :raises Failed: it does, with nobody there who wasn't before.
    :raises Churned: it does, and others came in between.
    """
    card = next((one for one in after.cards if one.index == pod.index), None)
    if card is None:
        return
    load = after.load(card.index, namespace)
    if load <= card.units:
        return
    what = f"card {card.index} of node {after.view.name} is booked with {load} of {card.units} units"
    strangers = [
        contract.pod_key(one)
        for one in after.pods
        if contract.pod_uid(one) in after.uids - before.uids
        and (one.get("metadata") or {}).get("namespace") != namespace
    ]
    if strangers:
        raise Churned(f"{what}, and {', '.join(sorted(strangers)[:3])} came in meanwhile", COUNTS, pod.name, card.index)
    raise Failed(f"{what} after pod {pod.name}", COUNTS, pod.name, card.index, pod.booked)


def not_running(pod: Seen, timeout: float) -> Told:
    """What it means that a bound pod with a card didn't come up."""
    waited = f"pod {pod.name} doesn't run on node {pod.node} within {timeout:g} s: {pod.says}"
    if set(pod.waits) & set(IMAGE_REASONS):
        return Told(waited, "name an image that this node has or can pull (option image)", pod.name, pod.index)
    if pod.ended or any(word in pod.says for word in DEVICE_WORDS):
        words = f"pod {pod.name} was refused on node {pod.node}: {pod.says}" if pod.ended else waited
        return Failed(words, PLUGIN, pod.name, pod.index, pod.booked)
    return Told(waited, "see what kubelet says of the pod", pod.name, pod.index)


# --------------------------------------------------------------------------- refused


def by_extender(texts: t.Iterable[str]) -> str:
    """The refusal that is the extender's own; empty where there is none."""
    for text in texts:
        if workloads.SCHEDULER_WORDS not in text and any(words in text for words in EXTENDER_WORDS):
            return text
    return ""


def not_placed(pod: Seen, units: int, seen: Survey, claimed: bool, timeout: float) -> Told:
    """What it means that a pod for which there was room is Pending.

    :param claimed: the extender keeps memory for a pod that others were evicted for, which no count of ours sees.
    """
    largest = max(seen.view.free.values(), default=0)
    reason = short(pod.refusals[-1]) if pod.refusals else ""
    counted = bool(by_extender(pod.refusals)) or workloads.SCHEDULER_WORDS in reason
    if pod.scheduler_broken:
        return Failed(f"the scheduler can't place pod {pod.name}: {reason}", WIRING, pod.name)
    if not reason:
        name = f"pod {pod.name} is Pending, and no scheduler said why within {timeout:g} s"
        return Told(name, "see whether the scheduler that the pod names runs (option scheduler_name)", pod.name)
    if not counted:
        return Told(f"pod {pod.name} is Pending for a reason that isn't gpushare's: {reason}", "", pod.name)
    if largest < units or seen.view.total_free < units or claimed or seen.view.stray:
        return Churned(f"others took the room of pod {pod.name} on node {seen.view.name}: {reason}", "", pod.name)
    what = f"pod {pod.name} of {units} units is Pending though a card of node {seen.view.name} has {largest} free"
    return Churned.perhaps(Failed(what, COUNTS, pod.name, None, reason))


def check_refused(pod: Seen, units: int, before: Survey, after: Survey, namespace: str, timeout: float) -> str:
    """The extender's own refusal of a pod that must not be placed.

    :raises Failed: it was placed without the extender, or over a card's size.
    :raises NotShown: kube-scheduler's own count refuses it, and rightly: the extender isn't asked then.
    :raises Churned: others came or went, or kube-scheduler counts wrong (for a moment).
    :raises Told: nothing follows from what was seen.
    """
    if pod.node:
        _check_intruder(pod, units, before, after, namespace)
    reason = by_extender(pod.refusals)
    if reason:
        return short(reason)
    if not pod.refusals:
        raise Told(f"pod {pod.name} stayed Pending, and no scheduler said why within {timeout:g} s", "", pod.name)
    text = short(pod.refusals[-1])
    if pod.scheduler_broken:
        raise Failed(f"the scheduler can't judge pod {pod.name}: {text}", WIRING, pod.name)
    if workloads.SCHEDULER_WORDS not in text:
        raise Told(f"pod {pod.name} stayed Pending for a reason that isn't the extender's: {text}", "", pod.name)
    if before.view.total_free < units:
        raise NotShown(
            f"it stayed Pending by kube-scheduler's own count ({before.view.total_free} units left on node "
            f"{before.view.name} for {units}), so that the extender wasn't asked",
            "",
            pod.name,
        )
    if before.uids != after.uids or after.view.total_free < units:
        raise Churned(f"others came to node {after.view.name} before pod {pod.name} was judged: {text}", "", pod.name)
    failure = Failed(
        f"kube-scheduler refuses pod {pod.name} of {units} units by its own count, though node {after.view.name} has "
        f"{after.view.total_free} free",
        "see whether kube-scheduler's view of the node is stale, and which pods it counts there",
        pod.name,
        None,
        text,
    )
    raise Churned.perhaps(failure)


def _check_intruder(pod: Seen, units: int, before: Survey, after: Survey, namespace: str) -> t.NoReturn:
    """A pod was placed that had no room.

    :raises Failed: it still has none, or came without a card.
    :raises Churned: it had, because others left.
    """
    if pod.index is None:
        raise Failed(
            f"pod {pod.name} of {units} units was bound to node {pod.node} without a card, where no card had room: "
            "its scheduler doesn't ask the extender",
            WIRING,
            pod.name,
            None,
            pod.says,
        )
    if pod.ended:
        raise Failed(f"pod {pod.name} was bound and then refused: {pod.says}", WIRING, pod.name, pod.index, pod.booked)
    check_placement(pod, units, after)
    check_room(pod, before, after, namespace)
    told = Churned(f"others left node {after.view.name}, and pod {pod.name} found room", "", pod.name, pod.index)
    told.bound = True
    raise told
