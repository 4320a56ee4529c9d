# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of NVIDIA's device plugin: exclusive cards, time-slicing, MPS and MIG. No I/O."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils import _nvidia_plugin as nvidia
from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import entries_of, visible
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Entry, Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten, whole
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._check_use import use

SLACK_MIB = 64
RESTART = "restart NVIDIA's device plugin on the node, and see its log"
ANEW = "delete the pod, so that it is admitted anew"


def holders(node: Node) -> list[tuple[Pod, Entry]]:
    """Pods and kubelet's entries of them, of this plugin's resources."""
    return [
        (pod, entry)
        for pod in node.pods
        if pod.active
        for entry in entries_of(node, pod)
        if nvidia.is_one(entry.resource) and entry.ids
    ]


def slots(node: Node) -> int | None:
    """How many may share a card: by the label, else by the IDs that kubelet has registered; None for neither."""
    label = whole(node.labels.get(nvidia.LABEL_REPLICAS))
    if label is not None and 0 < label <= 10_000:
        return label
    numbers = [
        whole(one.partition("::")[2]) or 0
        for resource, ids in node.kubelet.registered.items()
        if nvidia.is_one(resource)
        for one in ids
    ]
    return max(numbers) + 1 if numbers else None


def sharing(node: Node) -> str:
    """The label's word: none, time-slicing or mps; by the number of replicas where there is no label."""
    told = node.labels.get(nvidia.LABEL_STRATEGY)
    return told if told else "time-slicing" if (slots(node) or 1) > 1 else "none"


def capacity_is_the_cards(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N1: the number announced is that of cards, or MIG devices, times replicas."""
    tally.seen()
    announced = {name: number for name, number in nvidia.announced(node.json, "capacity").items() if number}
    api = listed(f"{name} {number}" for name, number in announced.items())
    if node.nvml.problem or node.nvml.nameless:
        why = node.nvml.problem or node.nvml.nameless
        tally.unknown(f"what it announces ({api}) can't be compared: {why}", LOOK)
        return
    strategy = node.labels.get(nvidia.LABEL_MIG_STRATEGY, "none")
    divided = [gpu for gpu in node.nvml.gpus if gpu.mig_mode == "enabled" and strategy in ("single", "mixed")]
    devices, plain = sum(len(gpu.mig) for gpu in divided), len(node.nvml.gpus) - len(divided)
    by_profile = sum(number for name, number in announced.items() if name.startswith(nvidia.RESOURCE_MIG))
    cards = sum(announced.values()) - by_profile
    replicas = slots(node)
    if replicas is None:
        right_cards = plain if strategy != "single" else devices or plain
        wrong = bool(right_cards and cards % right_cards) or (not right_cards and bool(cards))
    elif strategy == "single" and divided:
        wrong = (cards, by_profile) != (devices * replicas, 0)
    else:
        wrong = (cards, by_profile) != (plain * replicas, devices * replicas)
    if wrong:
        tally.fail(
            f"it announces {api}, and has {counted(plain, 'whole card')} and {counted(devices, 'MIG device')}, each "
            f"for {replicas if replicas is not None else 'an unknown number'}",
            RESTART,
            api=api,
            nvml=listed(f"{gpu.label}: {counted(len(gpu.mig), 'MIG device')}" for gpu in node.nvml.gpus),
            key=f"{shorten(api, 200)}; {plain}, {devices}",
        )


def each_is_held_once(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N2: no device is two containers'."""
    asking = [pod for pod in node.pods if pod.steady and any(map(nvidia.is_one, pod.asks("nvidia.com/")))]
    if node.kubelet.problem:
        tally.seen(len(asking))
        if asking:
            tally.unknown(f"what {counted(len(asking), 'pod')} hold can't be told: {node.kubelet.problem}", LOOK)
        return
    replicas = slots(node)
    seen: dict[str, tuple[Pod, str]] = {}
    for pod in asking:
        for entry in entries_of(node, pod):
            if nvidia.is_one(entry.resource) and entry.count and not entry.ids:
                tally.unknown(f"which devices container {entry.container} has isn't told", LOOK, pod=pod)
    for pod, entry in holders(node):
        passing = {one.name for one in pod.containers if one.init}
        for one in entry.ids:
            tally.seen()
            uuid, _colons, number = one.partition("::")
            place = {"pod": pod, "container": entry.container, "uuid": uuid, "kubelet": shorten(one)}
            before = seen.get(one)
            # What an init container had, its pod's own containers are given again.
            if before and not (before[0] is pod and (before[1] in passing or entry.container in passing)):
                tally.fail(f"it holds {one}, which {before[0].key} holds too", ANEW, **place)
            elif number and replicas is not None and (whole(number) is None or (whole(number) or 0) >= replicas):
                tally.fail(f"it holds {shorten(one)}, and a card has {counted(replicas, 'place')}", RESTART, **place)
            seen[one] = (pod, entry.container)


def kubelet_did_as_told(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N3: a container sees the devices that kubelet counts for it."""
    for pod, entry in holders(node):
        tally.seen()
        sees = visible(node, entry)
        counts = {one.partition("::")[0] for one in entry.ids}
        if sees.uuids is None or ((node.nvml.problem or node.nvml.nameless) and sees.strange):
            why = entry.problem or node.nvml.problem or node.nvml.nameless or "kubelet's answer names no device"
            tally.unknown(f"what container {entry.container} sees can't be told: {why}", LOOK, pod=pod)
        elif sees.strange or sees.uuids != counts:
            tally.fail(
                f"container {entry.container} sees {listed([*sorted(sees.uuids), *sees.strange]) or 'nothing'}, and "
                f"kubelet counts {listed(sorted(counts))} for it",
                ANEW,
                pod=pod,
                container=entry.container,
                kubelet=f"{sees.source}: {listed(sorted(sees.uuids))}; IDs: {listed(entry.ids)}",
            )


def one_place_each(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N4: more places of a shared card are no more of it."""
    strategy = sharing(node)
    if strategy == "none":
        return
    for pod, entry in holders(node):
        tally.seen()
        if len(entry.ids) < 2:
            continue
        place = {"pod": pod, "container": entry.container, "kubelet": listed(entry.ids)}
        words = f"container {entry.container} holds {len(entry.ids)} places of shared cards"
        if strategy == "mps":
            tally.fail(f"{words}, and with MPS one is the most", "have it ask for one", **place)
        else:
            tally.warn(f"{words}, which give it no more than one does", "set failRequestsGreaterThanOne", **place)


def fair_shares(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """N5: with time-slicing nobody is held to anything."""
    replicas = slots(node)
    if sharing(node) != "time-slicing" or replicas is None:
        return
    if node.nvml.problem:
        tally.unknown(f"what pods use of the shared cards can't be told: {node.nvml.problem}", LOOK)
        return
    for pod, entry in holders(node):
        for uuid in sorted({one.partition("::")[0] for one in entry.ids}):
            gpu = node.nvml.gpu(uuid)
            if gpu is None or gpu.total_mib is None:
                continue
            tally.seen()
            places = sum(one.partition("::")[0] == uuid for one in entry.ids)
            used, fair = use(gpu, pod), gpu.total_mib // replicas * places
            place = {"pod": pod, "gpu": gpu, "nvml": f"{used.mib} MiB of {gpu.total_mib}", "kubelet": listed(entry.ids)}
            if used.mib is None:
                tally.unknown(f"what it uses of {gpu.label} can't be told: NVML says N/A", LOOK, **place)
            elif used.mib > fair + SLACK_MIB:
                tally.warn(
                    f"it uses {used.mib} MiB of {gpu.label}, and its fair share is {fair}; time-slicing divides none",
                    "use MPS, MIG or gpushare's memory limits where that matters",
                    **place,
                )


CHECKS = (
    Check(
        "N1",
        "nvidia",
        "The node announces its cards, times replicas",
        "capacity with NVML's cards and MIG devices and the labels of GPU feature discovery",
        "FAIL",
        node=capacity_is_the_cards,
    ),
    Check(
        "N2",
        "nvidia",
        "Each place is held by one container",
        "device IDs in kubelet's checkpoint, of all pods of the node",
        "FAIL",
        node=each_is_held_once,
    ),
    Check(
        "N3",
        "nvidia",
        "Every container sees the devices that kubelet counts for it",
        "NVIDIA_VISIBLE_DEVICES or CDI devices in kubelet's answer with its device IDs",
        "FAIL",
        node=kubelet_did_as_told,
    ),
    Check(
        "N4",
        "nvidia",
        "No container holds several places of shared cards",
        "number of device IDs where cards are shared",
        "FAIL with MPS; WARN with time-slicing",
        node=one_place_each,
    ),
    Check(
        "N5",
        "nvidia",
        "With time-slicing, pods keep to a fair share",
        "memory of the pod's processes with the card's by its replicas",
        "WARN",
        node=fair_shares,
    ),
)
