# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have KubeVirt announce the cards that nodes have on VFIO, and prove it by what the nodes have allocatable.

virt-handler looks for cards when it starts and when KubeVirt's object is changed, and a resource that it announces
already keeps the cards of that time (main of 2026-08-22). So on a node that has got cards since, its pod is replaced;
virtual machines run on without it.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.refs import ref_of
from .._kube.rollout import ready

HANDLER, DAEMON_SET = "kubevirt.io=virt-handler", "virt-handler"
# How long virt-handler gets to see a change of KubeVirt's object.
PATIENCE = 20.0
# virt-handler announces all cards that it sees at once, when it starts: so long after that a node has no more.
SETTLED = 30.0


@dataclasses.dataclass(frozen=True)
class Missing:
    """A node that has fewer allocatable than cards on VFIO."""

    node: str
    resource: str
    announced: int
    wanted: int

    def __str__(self) -> str:
        return f"node {self.node} has {self.announced} of {self.wanted} {self.resource} allocatable"


def numbers_of(cards: t.Any, resources: t.Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return how many of each resource each node has to announce.

    :param cards: by node, the number of cards on VFIO by vendor and device.
    :param resources: what KubeVirt itself announces, by vendor and device.
    :raises BadInput: a number isn't one.
    """
    wanted: dict[str, dict[str, int]] = {}
    for node, numbers in cards.items():
        for selector, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise BadInput(f"kubevirt_devices: {number!r} of node {node} isn't a number of cards")
            resource = resources.get(str(selector).upper())
            if resource and number:
                own = wanted.setdefault(str(node), {})
                own[resource] = own.get(resource, 0) + number
    return wanted


def missing(kube: Kube, wanted: t.Mapping[str, t.Mapping[str, int]]) -> list[Missing]:
    """Return what nodes of the cluster lack."""
    live = {item["metadata"]["name"]: item for item in kube.list_all("v1", "Node")} if wanted else {}
    rows = []
    for node, numbers in sorted(wanted.items()):
        allocatable = (live.get(node, {}).get("status") or {}).get("allocatable") or {}
        for resource, number in sorted(numbers.items()):
            text = str(allocatable.get(resource, "0"))
            announced = int(text) if text.isdecimal() else 0
            if node in live and announced < number:
                rows.append(Missing(node, resource, announced, number))
    return rows


def ensure(
    kube: Kube, wanted: t.Mapping[str, t.Mapping[str, int]], changed: bool, waiting: Waiting, namespace: str
) -> list[str]:
    """Replace virt-handler's pods on nodes that announce too few cards, and wait until all are announced.

    :param changed: KubeVirt's object was changed a moment ago.
    :param namespace: of KubeVirt.
    :returns: the nodes whose pod was replaced.
    :raises NotInEffect: a node doesn't announce its cards in time, or has fewer than it says.
    """
    left = missing(kube, wanted)
    if left and changed:
        left = _wait(kube, wanted, dataclasses.replace(waiting, timeout=min(PATIENCE, waiting.timeout)))
    replaced = sorted({row.node for row in left})
    former = [ref_of(pod) for pod in _handlers(kube, replaced, namespace)]
    for ref in former:
        kube.delete(ref)
    if left:
        names = frozenset(ref.name for ref in former)
        left = _wait(kube, wanted, waiting, lambda rows: _started(kube, rows, namespace, names))
    if left:
        raise NotInEffect(
            f"KubeVirt doesn't announce all cards: {'; '.join(map(str, left))}. Read the log of virt-handler on the "
            "node, and compare with the cards that are there (lspci -nnk -d 10de:): the greater number is what the "
            "node says of itself. KubeVirt itself announces only cards on vfio-pci, no other VFIO driver",
            missing=[dataclasses.asdict(row) for row in left],
        )
    return replaced


def _handlers(kube: Kube, nodes: t.Collection[str], namespace: str) -> list[JsonObject]:
    """Return virt-handler's pods on nodes; anybody's pod may have their label."""
    pods: list[JsonObject] = kube.list_all("v1", "Pod", namespace, label_selector=HANDLER) if nodes else []
    return [pod for pod in pods if _of_handler(pod) and (pod.get("spec") or {}).get("nodeName") in nodes]


def _started(kube: Kube, rows: t.Sequence[Missing], namespace: str, former: t.Collection[str]) -> bool:
    """Return whether each of these nodes has a new virt-handler that is ready.

    :param former: names of the pods that were deleted.
    """
    nodes = {row.node for row in rows}
    pods = [pod for pod in _handlers(kube, nodes, namespace) if pod["metadata"]["name"] not in former and ready(pod)]
    return nodes <= {pod["spec"]["nodeName"] for pod in pods}


def _of_handler(pod: JsonObject) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(
        (owner.get("kind"), owner.get("name"), owner.get("controller")) == ("DaemonSet", DAEMON_SET, True)
        for owner in owners
    )


def _wait(
    kube: Kube,
    wanted: t.Mapping[str, t.Mapping[str, int]],
    waiting: Waiting,
    started: t.Callable[[t.Sequence[Missing]], bool] | None = None,
) -> list[Missing]:
    """Return what is missing when nothing is, when nothing more will come, or when the time is over.

    :param started: whether who announces runs again on the nodes of these rows.
    """
    left: list[Missing] = []
    since: float | None = None
    for _attempt in waiting.attempts():
        before, left = left, missing(kube, wanted)
        if not left:
            break
        if left != before or started is None or not started(left):
            since = None
        elif since is None:
            since = waiting.now()
        elif waiting.now() - since >= SETTLED:
            break
        waiting.status("; ".join(map(str, left)))
    return left
