# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants that every sharing stack must keep, of nodes and of kubelet's books. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import (
    NOTHING,
    asks_for_card,
    entries_of,
    entry_cards,
    gpu_requests,
    may_use_cards,
    plugin_of,
    visible,
    wanted,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, listed, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_snapshot import VISIBLE
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally

LOOK = "run verify.yml with the machine in reach, as a user that may read kubelet's folder and ask NVML"
SETTLE = "look at the device plugin's log and at kubelet's; a restart of the plugin makes kubelet ask it anew"


def one_stack(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    running = [pod for pod in node.pods if pod.phase == "Running" and not pod.terminating and plugin_of(pod)]
    kinds = sorted({plugin_of(pod) for pod in running})
    books = sorted(name for name, ids in node.kubelet.registered.items() if ids and gpu_requests({name: 1}))
    shared = {"gpushare" if one.startswith("gpushare") else one for one in node.backends}
    tally.seen()
    do = "leave one device plugin on the node, and take the other's resources and annotations away"
    api = (
        f"announced: {listed(node.backends) or 'nothing'}; device plugins: {listed(pod.key for pod in running) or '-'}"
    )
    planes: dict[str, t.Any] = {"api": api, "kubelet": f"registered: {listed(books)}" if books else ""}
    if len(kinds) > 1:
        tally.fail(f"device plugins of {' and '.join(kinds)} run here, and give the same cards away", do, **planes)
    elif len(running) > 1:
        # While a DaemonSet is updated, two may run for a moment.
        planes.update(parts={pod.told_apart: 1 for pod in running}, most=1)
        tally.fail(
            f"{len(running)} device plugins of {kinds[0]} run here, and kubelet hears the last one only", do, **planes
        )
    elif len(shared) > 1:
        left = contract.RESOURCE_COUNT in node.resources() and not node.resource(contract.RESOURCE_MEMORY)
        what = f"left over from gpushare: {contract.RESOURCE_COUNT}" if left else "two stacks announce the same cards"
        tally.fail(f"{what}: {listed(sorted(shared))}", do, **planes)
    elif node.looked and not node.kubelet.problem and _two(books):
        tally.fail(f"kubelet has {listed(books)} registered, of two stacks for the same cards", do, **planes)
    elif not running and node.backends and any(gpu_requests(node.resources("allocatable"))):
        tally.warn(
            "cards are handed out here, and no pod is known to be their device plugin",
            "see who listens on kubelet's sockets of device plugins",
            api=api,
            kubelet=f"sockets: {listed(node.kubelet.sockets)}" if node.kubelet.sockets else "",
        )
    elif not node.backends and node.labels.get(contract.NODE_LABEL) == contract.NODE_LABEL_VALUE:
        tally.fail(
            f"it has the label {contract.NODE_LABEL}={contract.NODE_LABEL_VALUE}, and announces no card",
            "see why the device plugin doesn't run or find a card there",
            api=api,
        )


def _two(books: t.Iterable[str]) -> bool:
    return len({one == contract.RESOURCE_MEMORY for one in books}) > 1


def books_are_kept(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C4: kubelet has given each container that runs what it asks for."""
    asking = [pod for pod in node.pods if pod.steady and wanted(pod)]
    for pod in asking:
        tally.seen()
        if node.kubelet.problem or node.kubelet.listed_problem:
            continue
        have = {(one.container, one.resource): one for one in entries_of(node, pod)}
        for container, resource, number in wanted(pod):
            entry = have.get((container, resource))
            ids: t.Sequence[str] = (node.kubelet.listed.get(pod.key) or {}).get(container, {}).get(resource, ())
            if entry is not None and pod.key in node.kubelet.twice:
                # The checkpoint has UIDs, and is the only witness.
                ids = entry.ids or ("",) * entry.count
            place = {"pod": pod, "container": container, "api": f"{resource}: {number}"}
            if entry is None or not ids:
                where = " and ".join(
                    [*(["its checkpoint"] if entry is None else []), *(["its PodResources"] if not ids else [])]
                )
                tally.fail(
                    f"container {container} runs and asks for {number} of {resource}, and kubelet has given it none "
                    f"according to {where}",
                    "delete the pod, so that it is admitted anew",
                    kubelet=f"checkpoint: {entry.count if entry else 'no entry'}; PodResources: {len(ids)}",
                    **place,
                )
            elif resource != contract.RESOURCE_MEMORY and {entry.count, len(ids)} != {number}:
                tally.fail(
                    f"container {container} asks for {number} of {resource}, and kubelet's books say otherwise",
                    "delete the pod, so that it is admitted anew",
                    kubelet=f"checkpoint: {entry.count}; PodResources: {len(ids)}",
                    **place,
                )
    for problem in dict.fromkeys([node.kubelet.problem, node.kubelet.listed_problem]):
        if problem and asking:
            tally.unknown(f"what kubelet gave to {counted(len(asking), 'pod')} can't be told: {problem}", LOOK)


def cards_exist(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C5: what pods were given is still there; a pod that ends may have lost its MIG device already."""
    mine = [pod for pod in node.pods if pod.active and not pod.terminating]
    asking = [pod for pod in mine if asks_for_card(pod)]
    entries = [(pod, one) for pod in mine for one in entries_of(node, pod)]
    if not (asking or entries):
        return
    if node.nvml.problem or node.kubelet.problem:
        tally.seen(len(asking))
        tally.unknown(f"granted cards can't be compared: {node.nvml.problem or node.kubelet.problem}", LOOK)
        return
    for pod, entry in entries:
        tally.seen()
        both = set(entry_cards(node, entry).uuids or ()) | set(visible(node, entry).uuids or ())
        if node.nvml.nameless and both - node.nvml.uuids:
            tally.unknown(
                f"its card can't be looked for: {node.nvml.nameless}", LOOK, pod=pod, container=entry.container
            )
            continue
        for uuid in sorted(both - node.nvml.uuids):
            tally.fail(
                f"it was given {uuid}, which the machine doesn't have (any more)",
                "delete the pod; where the machine's cards have changed, drain the node, and remove kubelet's "
                "checkpoint of devices before it goes on",
                pod=pod,
                container=entry.container,
                uuid=uuid,
                kubelet=uuid,
                nvml=listed(one.uuid for one in node.nvml.gpus),
            )


def all_can_be_given(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C6: allocatable is capacity."""
    allocatable = node.resources("allocatable")
    sick = [card for card in node.cards if not card.healthy]
    for resource, number in node.resources().items():
        if not (gpu_requests({resource: 1}) or resource == contract.RESOURCE_COUNT):
            continue
        tally.seen()
        left = allocatable.get(resource, 0)
        # One finding is enough of what is told in two resources.
        if left == number or (resource == contract.RESOURCE_COUNT and contract.RESOURCE_MEMORY in allocatable):
            continue
        what, api = f"{resource}: {left} of {number} can be given", f"capacity {number}, allocatable {left}"
        for card in sick:
            tally.fail(
                f"{what}, for card {card.index} ({card.uuid}) is {shorten(card.reason or 'unhealthy', 200)}",
                "mend or replace the card",
                api=api,
                card=card.index,
                uuid=card.uuid,
                key=resource,
            )
        if not sick:
            tally.fail(f"{what}{'' if left else '; no device plugin answers kubelet'}", SETTLE, api=api, key=resource)


def grants_are_honoured(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    """C8: no pod's own environment brings cards that it wasn't given."""
    for pod in node.pods:
        if not pod.active or may_use_cards(pod, snapshot.options.pods):
            continue
        tally.seen()
        for one in pod.containers:
            if VISIBLE not in one.env or (one.init and pod.phase == "Running"):
                continue
            value, asks = one.env[VISIBLE], bool(gpu_requests(one.requests))
            if value is not None and value in NOTHING:
                continue
            _judge(node, pod, one.name, value, asks, one.privileged, tally)


def _judge(node: Node, pod: Pod, container: str, value: str | None, asks: bool, privileged: bool, tally: Tally) -> None:
    entries = [one for one in entries_of(node, pod) if one.container == container]
    if asks and any(one.cdi for one in entries):
        # The specification's void comes last: the container has what it was given.
        return
    own = {uuid for one in entries for uuid in entry_cards(node, one).uuids or ()}
    if value is not None and asks and own and set(value.split(",")) <= own:
        return
    shown = "a value from elsewhere" if value is None else repr(shorten(value))
    head = f"container {container} sets {VISIBLE} to {shown} itself"
    more = {
        "pod": pod,
        "container": container,
        "api": f"{VISIBLE}={shown}; runtimeClassName {pod.runtime_class or 'none'}"
        + ("; privileged" if privileged else ""),
    }
    do = "take the variable out of the pod; let the cluster refuse it (gpushare_admission: deny)"
    if value is None:
        tally.warn(f"{head}, so which cards it sees can't be told", do, **more)
    elif privileged:
        tally.warn(f"{head}, and is privileged: it sees every card, whatever it asks for", do, **more)
    elif asks:
        tally.fail(f"{head}: it sees other cards than it was given", do, **more)
    elif "nvidia" in pod.runtime_class:
        tally.fail(f"{head} and asks for no card: NVIDIA's runtime gives it what it names", do, **more)
    else:
        tally.warn(f"{head} and asks for no card: where NVIDIA's is the default runtime it sees them", do, **more)


def concerns(node: Node) -> bool:
    """Whether a node has to do with cards at all."""
    return bool(node.backends) or node.looked or node.labels.get(contract.NODE_LABEL) == contract.NODE_LABEL_VALUE


CHECKS = (
    Check(
        "C1",
        "common",
        "One stack shares a node's cards",
        "running device plugins, announced resources and kubelet's registered ones: all of one stack",
        "FAIL; WARN where nobody known serves them",
        node=one_stack,
    ),
    Check(
        "C4",
        "common",
        "kubelet has given every running container what it asks for",
        "each container's requests with kubelet's checkpoint and PodResources",
        "FAIL",
        node=books_are_kept,
    ),
    Check(
        "C5",
        "common",
        "The cards that pods were given exist",
        "UUIDs in kubelet's answers with NVML's",
        "FAIL",
        node=cards_exist,
    ),
    Check(
        "C6",
        "common",
        "All announced cards can be given to pods",
        "allocatable with capacity",
        "FAIL",
        node=all_can_be_given,
    ),
    Check(
        "C8",
        "common",
        "No pod's environment brings it cards",
        f"{VISIBLE} in pods' specifications with what they were given",
        "FAIL; WARN for privileged pods and where the runtime decides",
        node=grants_are_honoured,
    ),
)
