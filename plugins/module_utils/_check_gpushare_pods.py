# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of gpushare, ours and upstream's: each pod's annotations, and kubelet's books of it. No I/O."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import entries_of, own_cards
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten, whole
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._check_use import use

STUCK_SECONDS = 60
ANEW = "delete the pod, so that it is scheduled and admitted anew"
# NVML rounds each process's memory; a limit is kept by the driver to the byte.
SLACK_MIB = 32


def sharers(node: Node) -> list[Pod]:
    """Pods that hold units here, be it while they come or go."""
    return [pod for pod in node.pods if contract.counts(pod.json)]


def units_by_rule(node: Node, pod: Pod) -> int:
    """Upstream counts containers alone; ours as Kubernetes does."""
    spec = pod.json["spec"]
    return pod.units if node.ours else sum(contract.container_units(one) for one in spec["containers"])


def annotations_are_whole(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G3: a bound pod says which card it has, truly."""
    for pod in sharers(node):
        # Ours writes them itself on a pod that came past the extender, once kubelet has admitted it.
        if pod.terminating or (node.ours and (not pod.started or _unwritten(node, pod))):
            continue
        tally.seen()
        wrong = _wrong(node, pod)
        if wrong:
            keys = (contract.POD_INDEX, contract.POD_INDICES, contract.POD_UNITS, contract.POD_CARD_UNITS)
            have = [f"{key}={shorten(pod.annotations[key])}" for key in keys if key in pod.annotations]
            tally.fail(wrong, ANEW, pod=pod, api="; ".join(have) or "no annotation of gpushare")


def _unwritten(node: Node, pod: Pod) -> bool:
    """Ours writes nothing on a pod while kubelet lists it and a predecessor of its name."""
    return pod.key in node.kubelet.twice and contract.POD_INDEX not in pod.annotations


def _wrong(node: Node, pod: Pod) -> str:
    text, booked = pod.annotations.get(contract.POD_INDEX), contract.booking(pod.json)
    if text is None:
        return (
            f"it holds {counted(pod.units, 'unit')} and no annotation says of which card: it came past the extender "
            f"(spec.nodeName was set, or scheduler {shorten(pod.scheduler) or 'unnamed'!r} doesn't ask it)"
        )
    cards = {card.index: card for card in node.cards}
    if booked is None or not set(booked.indices) <= set(cards):
        return f"{contract.POD_INDEX}={shorten(text)!r} is no card of the node, which has {listed(cards) or 'none'}"
    several = pod.annotations.get(contract.POD_INDICES, "")
    if several and booked.indices != tuple(whole(one) for one in several.split(",")):
        return f"{contract.POD_INDICES}={shorten(several)!r} can't be true of it"
    for key, right in (
        (contract.POD_UNITS, units_by_rule(node, pod)),
        (contract.POD_CARD_UNITS, cards[booked.index].units),
    ):
        told = pod.annotations.get(key)
        if whole(told) != right:
            return f"{key} is {'missing' if told is None else repr(shorten(told))}, and should be {shorten(str(right))}"
    since = whole(pod.annotations.get(contract.POD_ASSUME_TIME))
    if since is None or since <= 0:
        return f"{contract.POD_ASSUME_TIME}={shorten(pod.annotations.get(contract.POD_ASSUME_TIME, ''))!r} is no time"
    return ""


def assigned_is_told(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G4: a running pod is marked as assigned."""
    for pod in sharers(node):
        told = pod.annotations.get(contract.POD_ASSIGNED)
        if pod.phase != "Running" or not pod.steady or contract.booking(pod.json) is None:
            continue
        if node.ours and pod.key in node.kubelet.twice:
            continue
        tally.seen()
        if told == "true":
            continue
        if told == "false" and _fast_path(node):
            if node.kubelet.problem:
                tally.unknown(
                    f"it runs and isn't marked as assigned, which is right if kubelet has it: {node.kubelet.problem}",
                    LOOK,
                    pod=pod,
                )
                continue
            if entries_of(node, pod):
                continue
        tally.fail(
            f"it runs, and {contract.POD_ASSIGNED} is {shorten(told or '') or 'missing'!r}",
            "see the device plugin's log: it can't write on pods, or another pod of this size took its place",
            pod=pod,
            api=f"{contract.POD_ASSIGNED}={shorten(told or '')}",
        )


def _fast_path(node: Node) -> bool:
    """Upstream's plugin on a node of one card writes nothing on pods."""
    return not node.ours and len(node.cards) == 1


def nobody_is_stuck(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G5: what was chosen is soon given."""
    for pod in sharers(node):
        booked = contract.booking(pod.json)
        if pod.terminating or pod.phase != "Pending" or booked is None:
            continue
        if node.ours and pod.key in node.kubelet.twice:
            continue
        tally.seen()
        age = snapshot.now - booked.assume_time // 10**9
        if booked.assigned or not booked.assume_time or age <= STUCK_SECONDS:
            continue
        if _fast_path(node) and entries_of(node, pod):
            continue
        tally.fail(
            f"a card was chosen for it {shorten(str(age))} s ago, and kubelet hasn't been given it",
            "see kubelet's and the device plugin's log on the node",
            pod=pod,
            api=f"phase Pending, {contract.POD_ASSIGNED}={shorten(pod.annotations.get(contract.POD_ASSIGNED, ''))}",
        )


def shares_are_kept(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G9: nobody uses more than his share."""
    mine = [pod for pod in sharers(node) if contract.shares(pod.json)]
    if not mine:
        return
    if node.nvml.problem or node.unit_mib is None:
        tally.seen(len(mine))
        why = node.nvml.problem or "in which memory unit the node counts isn't known"
        tally.unknown(f"what {counted(len(mine), 'pod')} use can't be told: {why}", LOOK)
        return
    told = node.annotations.get(contract.NODE_LIMIT, "none")
    enforced = told == contract.LIMIT_ENFORCED
    uuids = {card.index: card.uuid for card in node.cards}
    for pod in mine:
        for index, units in _held(node, pod).items():
            gpu = node.nvml.gpu(uuids.get(index, ""))
            if gpu is None:
                continue
            tally.seen()
            share, used = units * node.unit_mib, use(gpu, pod)
            place = {
                "pod": pod,
                "gpu": gpu,
                "api": f"share {shorten(str(share))} MiB; limits: {shorten(told)}",
                "nvml": f"{used.mib} MiB in {counted(used.processes, 'process', 'processes')}"
                + (f"; limit {used.hard_mib} MiB" if used.hard_mib is not None else ""),
            }
            if used.mib is None:
                tally.unknown(f"what it uses of {gpu.label} can't be told: NVML says N/A", LOOK, **place)
            elif used.mib > share + SLACK_MIB:
                say = tally.fail if enforced else tally.warn
                say(
                    f"it uses {used.mib} MiB of {gpu.label}, and its share is {shorten(str(share))} MiB"
                    + (", though limits are enforced here" if enforced else "; nobody holds it to it"),
                    "have the program use less; or ask for more; memory limits need driver 615 and cgroup v2",
                    **place,
                )
            elif enforced and used.hard_mib is not None and used.hard_mib > share:
                tally.fail(
                    f"its limit on {gpu.label} is {used.hard_mib} MiB, and its share {shorten(str(share))} MiB",
                    "see who raised it: the pod has SYS_ADMIN or is privileged; the device plugin sets it back",
                    **place,
                )
            elif enforced and used.processes and used.limited and used.hard_mib is None:
                tally.warn(
                    f"limits are enforced here, and the driver has none for it on {gpu.label}",
                    "see the device plugin's log",
                    **place,
                )


def _held(node: Node, pod: Pod) -> dict[int, int]:
    """Units by card's index: as kubelet gave them, where that can be told, else as the annotations say."""
    units = contract.shares(pod.json)
    by_uuid = {card.uuid: card.index for card in node.cards}
    for entry in entries_of(node, pod):
        held, strange = own_cards(node, entry.ids) if node.ours else ({}, [])
        if held and not strange and len(held) == len(units):
            share = next(iter(units.values()))
            return dict.fromkeys((by_uuid[uuid] for uuid in held), share)
    return units


CHECKS = (
    Check(
        "G3",
        "gpushare",
        "Every pod with units says which card it has",
        "IDX (and card-indices), POD, DEV and ASSUME_TIME with the pod's requests and the node's cards",
        "FAIL",
        node=annotations_are_whole,
    ),
    Check(
        "G4",
        "gpushare",
        "Every running pod is marked as assigned",
        "ASSIGNED of pods that run; upstream's plugin needn't write it on a node of one card if kubelet has an entry",
        "FAIL",
        node=assigned_is_told,
    ),
    Check(
        "G5",
        "gpushare",
        "No pod waits for the card that was chosen for it",
        f"age of ASSUME_TIME of pods that are Pending and not assigned: {STUCK_SECONDS} s at most",
        "FAIL",
        node=nobody_is_stuck,
    ),
    Check(
        "G9",
        "gpushare",
        "No pod uses more than its share",
        "memory of the pod's processes and of its control groups with its units, per card; the driver's limits too",
        "WARN; FAIL where the node says that limits are enforced",
        node=shares_are_kept,
    ),
)
