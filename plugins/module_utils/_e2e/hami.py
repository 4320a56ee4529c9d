# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``hami``: cases on one node of HAMi, and how many of their pods its rule places."""

from __future__ import annotations

import functools
import typing as t

from .._allocation.pods import held_by_hami
from .._contracts import backends, hami, hami_marks
from .._contracts.model import Node, Pod
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._kube.pod_exec import Execute
from .assertions import PodState
from .case_suite import CaseSuite
from .cases import ALLOCATE, COMPUTE, OUT_OF_MEMORY, Case
from .client import SuiteClient
from .nodes import Options
from .result import Failed

CORES = "nvidia.com/gpucores"
ALL_CORES = 100


def request_of(case: Case) -> Request:
    """Return what each pod of a case requests."""
    count = case.limits.get(hami.RESOURCE_COUNT, 1)
    memory = case.limits.get(hami.RESOURCE_MEMORY)
    # Without memory a card is exclusive.
    return Request(count, memory, case.limits.get(CORES, 0 if memory is not None else ALL_CORES))


class Request(t.NamedTuple):
    """A pod's request.

    :param mib: of each card; None for the whole card.
    """

    cards: int
    mib: int | None
    cores: int


class Free(t.NamedTuple):
    """What is free of a card, in MiB, percent of its cores and slots."""

    uuid: str
    mib: int
    cores: int
    slots: int
    unused: bool


def free_cards(register: t.Sequence[hami.Gpu], pods: t.Iterable[Pod]) -> list[Free]:
    """Return what is free of a node's healthy cards.

    :param register: the node's.
    :param pods: those on it that haven't ended.
    """
    held: dict[str, list[hami.Held]] = {card.uuid: [] for card in register}
    for pod in pods:
        text = pod.annotations.get(hami.POD_ALLOCATED)
        if text is None:
            continue
        for uuid, part in held_by_hami(pod, hami.allocated(text)).items():
            held.setdefault(uuid, []).append(part)
    free = []
    for card in register:
        parts = held[card.uuid]
        # A pod with all cores excludes others.
        taken = any(part.cores == ALL_CORES for part in parts)
        mib, cores = card.devmem - sum(part.mib for part in parts), card.devcore - sum(part.cores for part in parts)
        slots = 0 if taken else card.count - sum(part.slots for part in parts)
        if card.healthy and card.mode in ("", "hami-core"):
            free.append(Free(card.uuid, mib, cores, slots, not parts))
    return free


def fits(request: Request, cards: t.Sequence[Free]) -> int:
    """Return how many pods with a request HAMi places on the cards, each of its cards being another one."""
    each = [_on_card(request, card) for card in cards]
    if request.cards == 1:
        return sum(each)
    # One pod takes the cards with most left.
    placed, left = 0, sorted(each, reverse=True)
    while len(left) >= request.cards and left[request.cards - 1] > 0:
        left = sorted([number - (at < request.cards) for at, number in enumerate(left)], reverse=True)
        placed += 1
    return placed


def _on_card(request: Request, card: Free) -> int:
    if request.cores == ALL_CORES or request.mib is None:
        return int(card.unused and card.slots > 0 and (request.mib or 0) <= card.mib)
    limits = [card.slots, card.mib // request.mib if request.mib else card.slots]
    if request.cores:
        limits.append(card.cores // request.cores)
    return max(0, min(limits))


MEMORY, COUNT = hami.RESOURCE_MEMORY, hami.RESOURCE_COUNT
# What one pod of 3000 MiB shows of its container.
_ONE = functools.partial(Case, limits={MEMORY: 3000}, at_most=1)
CASES = (
    Case(
        "memory",
        "Pods of 5000 MiB run as far as the cards' memory goes, and four more wait",
        "HAMi's scheduler books each card's memory, scaled as configured, and its slots",
        ("scheduling", "annotation"),
        {MEMORY: 5000},
        more=4,
    ),
    Case(
        "too_much",
        "A pod with more memory than any card has waits",
        "no card is overbooked by one pod",
        ("scheduling",),
        {MEMORY: hami.MAX_NUMBER // 1024},
        more=1,
        reason="CardInsufficientMemory",
    ),
    Case(
        "cores",
        "Pods with 60 % of the cores get a card each, and one more waits",
        "HAMi's scheduler books each card's cores",
        ("scheduling", "annotation"),
        {MEMORY: 1000, CORES: 60},
        more=1,
    ),
    Case(
        "exclusive",
        "A pod that requests a card and no memory has it alone, and one more than cards waits",
        "nobody shares a card with a pod that requested no memory",
        ("scheduling", "annotation"),
        {COUNT: 1},
        more=1,
    ),
    Case(
        "two_cards",
        "A pod with two cards gets two different ones",
        "a pod's cards are counted apart",
        ("scheduling", "annotation"),
        {COUNT: 2, MEMORY: 1000},
        at_most=1,
    ),
    _ONE(
        "environment",
        "A container of 3000 MiB has that limit in its environment",
        "HAMi's device plugin passes the scheduler's choice to the container",
        ("environment",),
        command=("printenv", "CUDA_DEVICE_MEMORY_LIMIT_0"),
        shows="3000m",
    ),
    _ONE(
        "library",
        "nvidia-smi in a container of 3000 MiB shows a card of 3000 MiB",
        "HAMi's library is loaded in the container's programs and answers for NVML",
        ("NVML",),
        command=("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader"),
        shows="3000 MiB",
    ),
    Case(
        "allocation_fails",
        "A program that allocates 2000 MiB is refused it in a container of 1000 MiB",
        "HAMi's library refuses memory beyond the limit",
        ("exit code",),
        {MEMORY: 1000},
        at_most=1,
        command=ALLOCATE,
        status=OUT_OF_MEMORY,
    ),
    _ONE(
        "allocation_runs",
        "The same program runs in a container of 3000 MiB",
        "HAMi's library grants memory up to the limit",
        ("exit code",),
        command=ALLOCATE,
    ),
    _ONE(
        "computes",
        "A program that computes runs in a container of 3000 MiB",
        "CUDA works through HAMi's library",
        ("exit code",),
        command=COMPUTE,
    ),
    Case(
        "throttled",
        "A program with 30 % of the cores computes at about a third of its speed",
        "HAMi's library limits the use of cores",
        ("silicon",),
        {MEMORY: 1000, CORES: 30},
    ),
    Case(
        "swaps",
        "Programs that together use more than a card's memory run by the host's memory",
        "scaled memory is real",
        ("silicon",),
        {MEMORY: 1000},
    ),
)


class Hami(CaseSuite[list[hami.Gpu]]):
    """See gpu_acceptance, suite ``hami``."""

    backend, title, log = backends.HAMI, "HAMi", "HAMi's device plugin"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES, [])

    def see(self, node: Node) -> tuple[int, list[hami.Gpu]] | str:
        if hami.NODE_REGISTER not in node.annotations:
            return "HAMi's device plugin has registered no card of it"
        try:
            register = hami.registered(node.annotations[hami.NODE_REGISTER])
        except hami.HamiError as error:
            return str(error)
        cards = free_cards(register, self._client.unfinished_pods(node.name))
        return sum(card.mib for card in cards), register

    def default_image(self) -> str:
        """Return the image of HAMi's device plugin, which the node has.

        :raises BadInput: it can't be found.
        """
        key, value = hami_marks.PLUGIN_LABEL
        for daemon_set in self._client.daemon_sets():
            template = daemon_set["spec"]["template"]
            if (template["metadata"].get("labels") or {}).get(key) == value:
                return str(template["spec"]["containers"][0]["image"])
        raise BadInput(
            "image: not set, and the cluster has no DaemonSet of HAMi's device plugin whose image could be used"
        )

    def keep_to_back_end(self, spec: JsonObject) -> None:
        # Where NVIDIA's plugin is in the cluster, too, HAMi's webhook leaves pods alone that name no scheduler.
        spec["schedulerName"] = hami.SCHEDULER

    def fits(self, case: Case) -> int:
        return fits(request_of(case), free_cards(self._seen, self._client.unfinished_pods(self.node)))

    def assert_booked(self, case: Case, running: t.Sequence[PodState]) -> None:
        """Validate that the pods' parts are what they requested, on different cards, and fit together."""
        sums = dict.fromkeys((card.uuid for card in self._seen), 0)
        for pod in running:
            text = pod.annotations.get(hami.POD_ALLOCATED)
            try:
                parts = [part for container in hami.allocated(text) for part in container]
            except hami.HamiError as error:
                raise Failed(f"pod {pod.name} runs, and {error}", "", pod.name) from error
            request = request_of(case)
            cards = {uuid for uuid, *_rest in parts}
            if len(parts) != request.cards or len(cards) != request.cards or not cards <= set(sums):
                raise Failed(
                    f"pod {pod.name} has cards {', '.join(sorted(cards)) or 'none'}", "", pod.name, None, str(text)
                )
            for uuid, mib, cores in parts:
                # Cores that nobody requested are the cluster's default.
                fixed = request.mib is None or CORES in case.limits
                if request.mib not in (None, mib) or (fixed and cores != request.cores):
                    raise Failed(f"pod {pod.name} has {mib} MiB and {cores} % of {uuid}", "", pod.name, None, str(text))
                sums[uuid] += mib
        for card in self._seen:
            if sums[card.uuid] > card.devmem:
                raise Failed(f"pods hold {sums[card.uuid]} MiB of {card.uuid}, which has {card.devmem}")
