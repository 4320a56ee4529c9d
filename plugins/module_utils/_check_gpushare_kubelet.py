# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of gpushare, ours and upstream's: kubelet's books of each pod. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_gpushare_pods import ANEW, sharers
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import NO_GPU, entries_of, own_cards, visible
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Entry, Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten, whole
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally


def kubelet_did_as_told(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G7: kubelet's answer names the card of the annotations."""
    # Ours corrects nothing on a pod while kubelet lists it and a predecessor of its name.
    mine = [pod for pod in sharers(node) if pod.steady and not (node.ours and pod.key in node.kubelet.twice)]
    if node.kubelet.problem:
        tally.seen(len(mine))
        if mine:
            tally.unknown(f"which cards {counted(len(mine), 'pod')} got can't be told: {node.kubelet.problem}", LOOK)
        return
    for pod in mine:
        entries = [one for one in entries_of(node, pod) if one.resource == contract.RESOURCE_MEMORY and one.count]
        tally.seen(len(entries))
        for entry in entries:
            _compare(node, pod, entry, tally)
        if not node.ours and len(contract.gpu_containers(pod.json)) > 1:
            tally.warn(
                "more than one of its containers asks for units, which upstream's plugin can't match",
                "have one container ask for all of them",
                pod=pod,
                api=listed(f"{name} {units}" for name, units in contract.gpu_containers(pod.json)),
            )


def _compare(node: Node, pod: Pod, entry: Entry, tally: Tally) -> None:
    booked = contract.booking(pod.json)
    envs = entry.envs
    place: dict[str, t.Any] = {"pod": pod, "container": entry.container}
    if envs is None:
        why = entry.problem or "it can't be decoded"
        tally.unknown(f"what container {entry.container} was answered can't be told: {why}", LOOK, **place)
        return
    told, value = envs.get(contract.POD_INDEX, ""), envs.get("NVIDIA_VISIBLE_DEVICES", "")
    place["kubelet"] = f"{contract.POD_INDEX}={shorten(told)}; NVIDIA_VISIBLE_DEVICES={shorten(value, 100)}" + (
        f"; CDI: {shorten(listed(entry.cdi), 120)}" if entry.cdi else ""
    )
    if NO_GPU in value or told == "-1":
        tally.fail(
            f"the device plugin found no card for container {entry.container} ({shorten(value)!r}): it can't start",
            ANEW,
            **place,
        )
        return
    if booked is None:
        return
    place["api"] = f"cards {listed(booked.indices)}"
    by_index = {card.index: card for card in node.cards}
    held, strange = own_cards(node, entry.ids) if node.ours else ({}, [])
    if node.ours and not entry.ids:
        tally.unknown(f"which device IDs container {entry.container} has isn't told", LOOK, **place)
        return
    foreign = bool(strange) and all("-_-" in one for one in strange)
    if strange and not foreign:
        tally.fail(
            f"container {entry.container} has device IDs of no card of the node ({listed(strange, 2)})", ANEW, **place
        )
        return
    booked_uuids = {by_index[one].uuid if one in by_index else "" for one in booked.indices}
    if held and set(held) != booked_uuids:
        tally.fail(
            f"kubelet gave container {entry.container} units of {listed(sorted(held))}, and the pod's annotations say "
            f"{'card' if len(booked.indices) == 1 else 'cards'} {listed(booked.indices)}",
            "don't edit these annotations; the device plugin brings them to the truth once it looks again",
            **place,
        )
        return
    sees = visible(node, entry)
    if whole(told) != booked.index:
        tally.fail(
            f"container {entry.container} was told card {shorten(told) or 'none'}, and the pod's annotation says "
            f"{booked.index}: another pod of this size got its card, or somebody edited it",
            ANEW,
            **place,
        )
    elif (node.nvml.problem or node.nvml.nameless) and sees.strange == (str(booked.index),):
        why = node.nvml.problem or node.nvml.nameless
        tally.unknown(f"which card number {booked.index} is can't be told: {why}", LOOK, **place)
    elif sees.strange or sees.uuids is None:
        tally.fail(f"what container {entry.container} was given names no card: {shorten(value)!r}", ANEW, **place)
    elif "" in booked_uuids:
        tally.unknown(f"card {listed(booked.indices)} has no UUID that could be compared", LOOK, **place)
    elif sees.uuids <= node.nvml.uuids | booked_uuids and sees.uuids != booked_uuids:
        tally.fail(
            f"container {entry.container} sees {listed(sorted(sees.uuids))}, and is booked on "
            f"{listed(sorted(booked_uuids))}",
            ANEW,
            **place,
        )
    else:
        wanted = dict(contract.gpu_containers(pod.json)).get(entry.container)
        if whole(envs.get(contract.CONTAINER_UNITS)) != wanted:
            tally.fail(
                f"container {entry.container} was told {shorten(envs.get(contract.CONTAINER_UNITS, '')) or 'no'} units "
                f"where it asks for {wanted}",
                ANEW,
                **place,
            )


def counts_are_right(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G8: as many device IDs as units."""
    mine = [pod for pod in sharers(node) if pod.steady]
    problems = [one for one in dict.fromkeys([node.kubelet.problem, node.kubelet.listed_problem]) if one]
    if mine:
        for problem in problems:
            tally.unknown(f"kubelet's counts of {counted(len(mine), 'pod')} can't be told: {problem}", LOOK)
    for pod in mine:
        steps = [(one.name, one.requests.get(contract.RESOURCE_MEMORY, 0)) for one in pod.containers if not one.init]
        have = {one.container: one for one in entries_of(node, pod) if one.resource == contract.RESOURCE_MEMORY}
        listing = node.kubelet.listed.get(pod.key) or {}
        for name, units in steps:
            if not units:
                continue
            tally.seen()
            entry, ids = have.get(name), listing.get(name, {}).get(contract.RESOURCE_MEMORY, ())
            checkpoint, resources = entry.count if entry else None, len(ids) or None
            if pod.key in node.kubelet.twice:
                resources = None
            # What isn't there at all is C4's.
            if {checkpoint, resources} - {None, units}:
                tally.fail(
                    f"container {name} asks for {units} units, and kubelet counts otherwise",
                    ANEW,
                    pod=pod,
                    container=name,
                    api=f"{units} units",
                    kubelet=f"checkpoint {checkpoint}, PodResources {resources}",
                )


CHECKS = (
    Check(
        "G7",
        "gpushare",
        "kubelet gave every container the card that its pod's annotations say",
        "the answer in kubelet's checkpoint (IDX, NVIDIA_VISIBLE_DEVICES, CDI devices, CONTAINER; with ours the device "
        "IDs too) with the annotations and NVML's UUIDs",
        "FAIL; WARN for several containers with upstream's plugin",
        node=kubelet_did_as_told,
    ),
    Check(
        "G8",
        "gpushare",
        "kubelet counts as many units as containers ask for",
        "device IDs in the checkpoint and in PodResources with each container's request",
        "FAIL",
        node=counts_are_right,
    ),
)
