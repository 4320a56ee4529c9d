# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the canary decides without touching anything: on which node, and pods of which size.

The sizes are chosen so that what must happen follows from whole numbers alone, whether the extender packs cards or
spreads over them. No I/O.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as workloads
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance_plan import NodeView
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json

# Of a node with more room than so many pods fill, larger pods are taken.
MOST_PODS = 32
# More than the API has for a quantity: such a node isn't read any further.
MOST_UNITS = 2**63

# Resource of NVIDIA's plugin and of HAMi's, and the mark of HAMi's.
OTHER_RESOURCE = "nvidia.com/gpu"
HAMI_REGISTER = "hami.io/node-nvidia-register"

# What reading nonsense raises: it is told, never passed on.
NONSENSE = (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Survey:
    """One node at one moment.

    :param pods: all that the API has on it.
    :param told: what its device plugin says of memory limits; empty where it says nothing.
    """

    view: NodeView
    cards: tuple[Card, ...]
    pods: tuple[Json, ...]
    allocatable: int
    upstream: bool
    told: str

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(contract.pod_uid(pod) for pod in self.pods if contract.counts(pod))

    def load(self, index: int, namespace: str) -> int:
        """Units on a card; pods of others that are told to end are left out, as an extender may do."""
        return sum(
            contract.shares(pod).get(index, 0)
            for pod in self.pods
            if contract.counts(pod)
            and (not contract.terminating(pod) or (pod.get("metadata") or {}).get("namespace") == namespace)
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """
    :param units: of each pod.
    :param pods: how many of them the node's cards take, however they are laid.
    :param decides: the pod after them is the extender's to refuse: by kube-scheduler's own count it fits.
    """

    units: int
    pods: int
    decides: bool

    @property
    def taken(self) -> int:
        return self.units * self.pods


@dataclasses.dataclass(frozen=True)
class Chosen:
    survey: Survey
    sizes: Sizes

    @property
    def within_one_card(self) -> bool:
        return self.sizes.taken <= max(self.survey.view.free.values())

    @property
    def worth(self) -> tuple[bool, bool, int]:
        """How much can be shown there, and for how little."""
        return self.sizes.decides, self.within_one_card, -self.sizes.taken

    @property
    def best(self) -> bool:
        return self.sizes.decides and self.within_one_card


# --------------------------------------------------------------------------- nodes


def name_of(one: t.Any) -> str:
    """An object's name; empty where it can't be read."""
    try:
        return str(one["metadata"]["name"])
    except NONSENSE:
        return ""


def shares_memory(node: t.Any) -> bool:
    """Whether a node announces gpushare's memory."""
    try:
        return contract.node_resource(node, contract.RESOURCE_MEMORY) > 0
    except NONSENSE:
        return False


def other_backend(node: t.Any) -> str:
    """Who else gives GPUs of a node away; empty where nobody does."""
    try:
        if HAMI_REGISTER in ((node.get("metadata") or {}).get("annotations") or {}):
            return "HAMi"
        return "NVIDIA's device plugin" if contract.node_resource(node, OTHER_RESOURCE) > 0 else ""
    except NONSENSE:
        return ""


def nobody_shares(nodes: t.Iterable[t.Any]) -> str:
    """Why there is nothing to do on a cluster without gpushare, in one sentence."""
    others = sorted({other_backend(node) for node in nodes} - {""})
    words = f"no node announces {contract.RESOURCE_MEMORY}"
    if not others:
        return words
    return f"{words}; what {' and '.join(others)} gives away here can't be told apart by gpushare's contract"


def unfit(node: Json) -> str:
    """Why a node that shares memory can't be used, before its pods are looked at; empty where it can."""
    try:
        other = other_backend(node)
        if other:
            return f"{other} gives its GPUs away too, so that what is free can't be told"
        if not workloads.usable(node, {}):
            return "it isn't Ready, takes no pods, has a taint, or has no healthy card"
    except NONSENSE:
        return "what the API says of it can't be read"
    return ""


def survey(node: Json, pods: t.Sequence[Json]) -> Survey | str:
    """A node as the extender and kube-scheduler count it, or why that can't be said."""
    try:
        seen = Survey(
            view=workloads.view(node, pods),
            cards=tuple(contract.node_cards(node)),
            pods=tuple(pods),
            allocatable=contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable"),
            upstream=contract.NODE_CARDS not in ((node.get("metadata") or {}).get("annotations") or {}),
            told=str(((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_LIMIT) or ""),
        )
        _uids = seen.uids
        numbers = [*seen.view.free.values(), *seen.view.sizes.values(), seen.view.stray, seen.allocatable]
        if any(abs(one) >= MOST_UNITS for one in [*numbers, seen.view.total_free]):
            return "its numbers are larger than any cluster's"
        return seen
    except NONSENSE:
        return "what the API says of it or of its pods can't be read"


def evictable(seen: Survey, priority: int, namespace: str) -> list[str]:
    """Others' pods with a share that kube-scheduler may evict for a pod of this priority, as ``namespace/name``."""
    return sorted(
        contract.pod_key(pod)
        for pod in seen.pods
        if contract.counts(pod)
        and (pod.get("metadata") or {}).get("namespace") != namespace
        and contract.pod_priority(pod) < priority
    )


def choose(seen: Survey, namespace: str) -> Chosen | str:
    """What would be shown on a node, or why nothing can be.

    A pod without a priority class has priority 0 (what another default makes of it is known once there is one).
    """
    if seen.view.stray:
        return f"{seen.view.stray} units of it are held by pods whose card the API doesn't tell"
    weaker = evictable(seen, 0, namespace)
    if weaker:
        return f"pods there have a priority below 0 and could be evicted ({weaker[0]})"
    found = sizes(seen.view.free, seen.view.total_free)
    return Chosen(seen, found) if found else "no card of it has a free share"


# --------------------------------------------------------------------------- sizes


def sizes(free: t.Mapping[int, int], total: int) -> Sizes | None:
    """The size of which so many pods fill a node that no card has room for one more.

    How many fit on a card depends on the card alone, so it doesn't matter on which cards the extender begins. Of all
    sizes: that whose next pod the extender must refuse, not kube-scheduler; that which takes no more than one card
    has; that of which two fit on one card; that which takes the least.

    :param free: units left on each card.
    :param total: units left by kube-scheduler's count.
    """
    lefts = sorted((one for one in free.values() if one > 0), reverse=True)
    tried = {part + more for left in lefts for parts in range(1, 5) for part in [left // parts] for more in (0, 1)}
    found = []
    for units in sorted(one for one in tried if lefts and 1 <= one <= lefts[0]):
        pods = sum(left // units for left in lefts)
        taken = units * pods
        if pods > MOST_PODS or taken > total:
            continue
        decides = total - taken >= units
        shared = lefts[0] // units > 1
        found.append(((not decides, taken > lefts[0], not shared, taken), Sizes(units, pods, decides)))
    return min(found, key=lambda one: one[0])[1] if found else None


def fragment(seen: Survey) -> int | None:
    """The size of a pod that fits what the node has free and no single card; None where there is none."""
    positive = [one for one in seen.view.free.values() if one > 0]
    low, high = max(positive, default=0) + 1, min(seen.view.total_free, sum(positive))
    if len(positive) < 2 or low > high:
        return None
    largest = max(seen.view.sizes.values())
    # In the middle, so that a little that others take or give back doesn't matter.
    return low if largest < low else (low + min(high, largest) + 1) // 2


def fragments_when_filled(chosen: Chosen) -> bool:
    """Whether two cards have something left once the pods are there."""
    left = [one % chosen.sizes.units for one in chosen.survey.view.free.values()]
    return sum(1 for one in left if one > 0) > 1 and sum(left) <= chosen.survey.view.total_free - chosen.sizes.taken
