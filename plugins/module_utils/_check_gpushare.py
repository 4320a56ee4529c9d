# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of gpushare, ours and upstream's: nodes, cards and schedulers. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_extender import EXTENDER
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card

RESTART = "restart the device plugin; it looks at the cards anew"
# A card's memory is rounded to MiB by whoever tells it.
ROUNDING_MIB = 1


def cards_are_nvmls(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G1: what the node says of its cards is what NVML says."""
    tally.seen(len(node.cards))
    if node.nvml.problem:
        tally.unknown(f"the node's cards can't be compared: {node.nvml.problem}", LOOK)
    elif node.ours:
        _own_cards(node, tally)
    else:
        _upstream_cards(node, tally)


def _own_cards(node: Node, tally: Tally) -> None:
    told = {card.uuid for card in node.cards}
    for extra in node.nvml.gpus:
        if extra.uuid not in told:
            tally.fail(
                f"NVML has {extra.label}, and the node's annotation doesn't",
                RESTART,
                gpu=extra,
                api=listed(sorted(told)) or "no card",
                nvml=extra.uuid,
            )
    for card in node.cards:
        gpu = node.nvml.gpu(card.uuid)
        place = {"card": card.index, "uuid": card.uuid}
        if gpu is None:
            if card.healthy and node.nvml.nameless:
                tally.unknown(
                    f"card {card.index} ({card.uuid}) can't be looked for: {node.nvml.nameless}", LOOK, **place
                )
            elif card.healthy:
                tally.fail(
                    f"the node announces card {card.index} ({card.uuid}) as healthy, and NVML doesn't have it",
                    RESTART,
                    api=f"card {card.index}: {card.uuid}, healthy",
                    nvml=listed(one.uuid for one in node.nvml.gpus) or "no card",
                    **place,
                )
            continue
        if gpu.minor is not None and card.minor != gpu.minor:
            tally.fail(
                f"card {card.index} is /dev/nvidia{gpu.minor}, and the node says /dev/nvidia{card.minor}",
                RESTART,
                api=f"minor {card.minor}",
                nvml=f"minor {gpu.minor}",
                **place,
            )
        if gpu.total_mib is None:
            why = gpu.problem or "NVML doesn't tell it"
            tally.unknown(f"the size of card {card.index} can't be compared: {why}", LOOK, **place)
        elif abs(card.memory_mib - gpu.total_mib) > ROUNDING_MIB or card.units not in _sizes(node, gpu.total_mib):
            tally.fail(
                f"card {card.index} has {gpu.total_mib} MiB, and the node announces {shorten(str(card.units))} units "
                f"of {shorten(str(card.memory_mib))} MiB",
                RESTART,
                api=f"{card.units} units, {card.memory_mib} MiB" if card.units < 10**9 else "",
                nvml=f"{gpu.total_mib} MiB",
                **place,
            )


def _sizes(node: Node, total_mib: int) -> set[int]:
    """The units that so many MiB can be announced as."""
    units = [node.unit] if node.unit else list(contract.MIB_PER_UNIT)
    return {contract.units_of(total_mib, unit) for unit in units}


def _upstream_cards(node: Node, tally: Tally) -> None:
    gpus = node.nvml.gpus
    wrong = [one for one in gpus if one.minor is not None and one.minor != one.index]
    if node.nvml.nameless:
        tally.unknown(f"the cards' numbers can't be compared: {node.nvml.nameless}", LOOK)
    elif wrong or [one.index for one in gpus] != list(range(len(gpus))):
        first = wrong[0] if wrong else gpus[0]
        tally.fail(
            "the cards' numbers in NVML aren't those of /dev/nvidiaN, and upstream's plugin takes one for the other: "
            "pods come to other cards than they are booked on",
            "don't share this node with upstream's plugin",
            gpu=first,
            nvml=listed(f"card {one.index}: /dev/nvidia{one.minor}" for one in gpus),
        )
    for gpu in gpus:
        if gpu.minor is None:
            tally.unknown(f"which /dev/nvidiaN {gpu.label} is can't be told", LOOK, gpu=gpu)
        if gpu.total_mib is None:
            why = gpu.problem or "NVML doesn't tell it"
            tally.unknown(f"the size of {gpu.label} can't be compared: {why}", LOOK, gpu=gpu)
    sizes = {contract.units_of(one.total_mib, node.unit or "GiB") for one in gpus if one.total_mib is not None}
    if len(sizes) > 1:
        tally.fail(
            "the cards differ in size, and upstream's plugin takes all for as large as the first",
            "don't share this node with upstream's plugin",
            gpu=gpus[0],
            nvml=listed(f"card {one.index}: {one.total_mib} MiB" for one in gpus),
        )


def capacity_is_the_cards(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G2: kubelet and the node announce what the cards hold."""
    tally.seen()
    memory, count = node.resource(contract.RESOURCE_MEMORY), node.resource(contract.RESOURCE_COUNT)
    api = f"{contract.RESOURCE_MEMORY} {memory}, {contract.RESOURCE_COUNT} {count}"
    if node.ours:
        units, healthy = sum(card.units for card in node.cards), sum(c.units for c in node.cards if c.healthy)
        left = node.resource(contract.RESOURCE_MEMORY, "allocatable")
        own = f"{counted(len(node.cards), 'card')} with {shorten(str(units))} units"
        if node.cards_problem:
            tally.unknown(f"what it announces can't be compared: {node.cards_problem}", RESTART)
        elif (memory, count) != (units, len(node.cards)):
            tally.fail(f"it announces {api}, and its annotation tells of {own}", RESTART, api=api, key=api)
        elif left > healthy:
            tally.fail(
                f"kubelet gives out {left} units, and the node's healthy cards hold {healthy}",
                RESTART,
                api=f"allocatable {left}; {own}, {healthy} of them healthy",
                key=shorten(f"allocatable {left}, healthy {healthy}"),
            )
        return
    if node.nvml.problem or node.nvml.nameless:
        why = node.nvml.problem or node.nvml.nameless
        tally.unknown(f"what it announces ({api}) can't be compared: {why}", LOOK)
        return
    gpus = node.nvml.gpus
    first = gpus[0].total_mib if gpus else 0
    if first is None:
        tally.unknown(f"what it announces ({api}) can't be compared: NVML doesn't tell the first card's size", LOOK)
        return
    right = {len(gpus) * contract.units_of(first, unit) for unit in contract.MIB_PER_UNIT}
    if count != len(gpus) or memory not in right or not memory:
        tally.fail(
            f"it announces {api}, and NVML has {counted(len(gpus), 'card')}"
            + (f", the first of {first} MiB" if gpus else ""),
            "restart the device plugin; where it is gone, take the leftover resources off the node's status",
            api=api,
            key=api,
            nvml=listed(f"card {one.index}: {one.total_mib} MiB" for one in gpus) or "no card",
        )


def given_away_once(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """G6: the pods' units fit on their cards."""
    tally.seen(len(node.cards))
    holders = [pod for pod in node.pods if contract.counts(pod.json)]
    if not node.cards:
        if holders:
            why = node.cards_problem or "the node tells of no card"
            tally.unknown(f"whether the units of {counted(len(holders), 'pod')} fit can't be told: {why}", RESTART)
        return
    on_card: dict[int, list[tuple[Pod, int]]] = {card.index: [] for card in node.cards}
    unplaced: list[Pod] = []
    for pod in holders:
        shares = contract.shares(pod.json)
        if not shares or not set(shares) <= set(on_card):
            unplaced.append(pod)
        for index, units in shares.items():
            on_card.get(index, []).append((pod, units))
    for card in node.cards:
        _fits(card, on_card[card.index], node, tally)
    settled = [pod for pod in unplaced if pod.steady and not (node.ours and pod.key in node.kubelet.twice)]
    if settled:
        names = listed(pod.key for pod in settled)
        tally.unknown(
            f"on which card {names} holds units isn't told, so no card's sum is whole",
            "see G3",
            key="unplaced",
            parts={pod.told_apart: 1 for pod in settled},
            most=0,
        )


def _fits(card: Card, held: list[tuple[Pod, int]], node: Node, tally: Tally) -> None:
    strict = sum(units for _pod, units in held)
    if strict <= card.units:
        return
    counted_by_it = [(pod, units) for pod, units in held if node.ours or not pod.terminating]
    extenders = sum(units for _pod, units in counted_by_it)
    who = listed(f"{pod.key} {shorten(str(units))}" for pod, units in held)
    what = f"pods hold {shorten(str(strict))} units of card {card.index}, which has {shorten(str(card.units))}"
    more: dict[str, t.Any] = {
        "card": card.index,
        # Pods come and go, and two may have a card at once for the moment in which their annotations are corrected.
        "parts": {pod.told_apart: units for pod, units in (counted_by_it if extenders > card.units else held)},
        "most": card.units,
        "uuid": card.uuid,
        "api": f"with terminating pods {shorten(str(strict))}, as the extender counts {shorten(str(extenders))}, "
        f"of {shorten(str(card.units))}: {who}",
    }
    if extenders > card.units:
        tally.fail(what, "delete a pod of the card; restart the extender, which let them in", **more)
    else:
        tally.warn(
            f"{what}: upstream's extender takes the share of pods that are ending for free",
            "wait until they are gone; their processes may still hold memory",
            **more,
        )


CHECKS = (
    Check(
        "G1",
        "gpushare",
        "The node's cards are NVML's",
        "ours: each card of the node's annotation with NVML by UUID (minor, MiB, units); upstream's: NVML's numbers "
        "with /dev/nvidiaN, and all cards of one size",
        "FAIL",
        node=cards_are_nvmls,
    ),
    Check(
        "G2",
        "gpushare",
        "The node announces what its cards hold",
        "gpu-mem and gpu-count with the sum of the annotation's cards (ours), or number times first card (upstream's)",
        "FAIL",
        node=capacity_is_the_cards,
    ),
    Check(
        "G6",
        "gpushare",
        "No card is given away more than once",
        "units of all pods that aren't finished, terminating ones too, with the card's; and the extender's sum",
        "FAIL; WARN where only terminating pods are too many",
        node=given_away_once,
        confirm=True,
    ),
    EXTENDER,
)
