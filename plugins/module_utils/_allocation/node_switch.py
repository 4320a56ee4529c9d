# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that changes its allocator: the pods with cards leave it, and nothing of the former one stays."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import claim_templates, virtual
from .._contracts.claims import Claim, claim_of
from .._contracts.gpushare import ContractError
from .._contracts.model import Node, Pod, PodParser, node_of, well_formed
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.errors import TOO_MANY, KubeError
from .._kube.options import auth_arguments
from .._kube.refs import Ref
from . import allocators, foreign

# No pod of the node has a card; nor is anything else of another allocator left there.
DRAINED, CLEAN = "drained", "clean"
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "node": {"type": "str", "required": True},
    "state": {"type": "str", "choices": [DRAINED, CLEAN], "required": True},
    "allocator": {"type": "str", "choices": list(allocators.ALLOCATORS)},
    "force": {"type": "bool", "default": False},
    "delete_emptydir_data": {"type": "bool", "default": False},
    "grace_period": {"type": "int"},
    "timeout": {"type": "int", "default": 600},
    "resources": {"type": "list", "elements": "str", "default": []},
    "namespaces": {"type": "dict", "default": {}},
}
MIRROR = "kubernetes.io/config.mirror"
# The resources of virtual machines' cards mostly have NVIDIA's name.
OF_NVIDIA = "nvidia.com/"

# What may be left of an allocation on a node.
LABEL, ANNOTATION, RESOURCE, SLICE, SERVER, CLAIM, POD = (
    *("label", "annotation", "resource", "slice", "server", "claim", "pod"),
)


class Remain(t.NamedTuple):
    """Something that is left, and its name."""

    code: str
    name: str

    def __str__(self) -> str:
        return f"{self.code} {self.name}"


class BoundPod(t.NamedTuple):
    """A pod of the node, and what tells whether it may be evicted.

    :param controller: kind and name of the object that makes it again; empty without one.
    :param has_data: in an emptyDir, which is lost with it.
    """

    pod: Pod
    controller: tuple[str, str]
    has_data: bool


@dataclasses.dataclass(frozen=True)
class NodeState:
    """What the API has of a node.

    :param node: None where there is none.
    :param pods: bound to it.
    :param slices: the names of its ResourceSlices of this collection's driver.
    :param claims: of the whole cluster.
    """

    node: Node | None
    pods: t.Sequence[BoundPod]
    slices: t.Sequence[str]
    claims: t.Sequence[Claim]


def read(kube: Kube, name: str, by_claims: bool) -> NodeState:
    """Read a node.

    :param by_claims: the cluster serves claims.
    """
    api, on_node = claim_templates.API_VERSION, f"spec.nodeName={name}"
    nodes, parse = well_formed("node", [node_of(kube.get(Ref("v1", "Node", "", name)))]), PodParser()
    listed = kube.list_all("v1", "Pod", field_selector=on_node)
    slices = kube.list_all(api, "ResourceSlice", field_selector=on_node) if by_claims else []
    try:
        claims = [claim_of(raw) for raw in (kube.list_all(api, "ResourceClaim") if by_claims else [])]
    except ContractError as error:
        raise ShareError(str(error)) from error
    return NodeState(
        nodes[0] if nodes else None,
        [BoundPod(pod, _controller(raw), _has_data(raw)) for raw in listed for pod in well_formed("pod", [parse(raw)])],
        [str(raw["metadata"]["name"]) for raw in slices if raw["spec"].get("driver") == claim_templates.DRIVER],
        claims,
    )


def _controller(pod: JsonObject) -> tuple[str, str]:
    owners = pod["metadata"].get("ownerReferences") or []
    return next(((owner["kind"], owner["name"]) for owner in owners if owner.get("controller")), ("", ""))


def _has_data(pod: JsonObject) -> bool:
    return any("emptyDir" in volume for volume in pod["spec"].get("volumes") or [])


def serves_claims(kube: Kube) -> bool:
    """Return whether the cluster divides devices by claims."""
    return allocators.release(str(kube.version().get("gitVersion", ""))) >= allocators.CLAIMS_SINCE


def holders(state: NodeState, resources: t.Collection[str] = ()) -> list[BoundPod]:
    """Return the pods that have a card of the node, whoever has allocated it; not those that have ended.

    :param resources: that virtual machines request for cards, beside NVIDIA's.
    """
    drivers = {claim_templates.DRIVER, *foreign.DRIVERS}
    claiming = {user.uid for claim in state.claims if claim.drivers & drivers for user in claim.users}
    return [
        bound
        for bound in state.pods
        if not bound.pod.finished
        and (
            bound.pod.holds_units
            or bound.pod.uid in claiming
            or _asks_others(bound.pod)
            or _asks_virtual(bound.pod, resources)
        )
    ]


def _asks_virtual(pod: Pod, resources: t.Collection[str]) -> bool:
    """Return whether a pod requests a card for virtual machines; one that is no virtual machine gets it, too."""
    requests = {name for container in pod.containers for name, number in container.requests.items() if number > 0}
    return any(
        virtual.is_resource(name) or name in resources or (pod.machine and name.startswith(OF_NVIDIA))
        for name in requests
    )


def _asks_others(pod: Pod) -> bool:
    """Return whether a container has another stack's resource; beside it another one may name 0 of the same."""
    return any(foreign.announced(container.requests) for container in pod.containers)


def is_server(bound: BoundPod, label: tuple[str, str], namespace: str) -> bool:
    """Return whether a pod is a server of an allocator: a DaemonSet's, in the namespace that only administrators have.

    By its label alone a pod of anybody would be one, and hinder a switch for ever.

    :param label: of the allocator's servers.
    """
    pod = bound.pod
    of_set = bound.controller[0] == "DaemonSet"
    return of_set and pod.key.partition("/")[0] == namespace and pod.labels.get(label[0]) == label[1]


def remains(
    state: NodeState, allocator: str, requested: t.Collection[str] = (), namespaces: t.Mapping[str, str] | None = None
) -> list[Remain]:
    """Return what is left in the API of a node's allocators, except for the one that is to have it.

    :param allocator: that one's name, a key of ``ALLOCATORS``.
    :param requested: as ``resources`` for ``holders``.
    :param namespaces: of the servers, by allocator.
    """
    node = state.node
    if node is None:
        return []
    left = [Remain(POD, bound.pod.key) for bound in holders(state, requested)]
    kept = allocators.ALLOCATORS[allocator]
    # Before the node has its label, it announces nothing there.
    own = kept.labels(node.labels)
    resources = [name for name, number in node.allocatable.items() if number > 0 and not (own and kept.announces(name))]
    for name, other in allocators.ALLOCATORS.items():
        if other == kept:
            continue
        if other.server != kept.server:
            space = (namespaces or {}).get(name) or ""
            left += [Remain(SERVER, bound.pod.key) for bound in state.pods if is_server(bound, other.server, space)]
        own_labels = (other.label, other.restricted)
        left += [Remain(LABEL, f"{key}={value}") for key, value in own_labels if node.labels.get(key) == value]
        left += [Remain(ANNOTATION, name) for name in other.annotations if name in node.annotations]
        left += [Remain(RESOURCE, name) for name in resources if other.announces(name)]
    if allocator != allocators.DRA:
        left += [Remain(SLICE, name) for name in state.slices]
        claims = [claim for claim in state.claims if any(part.pool == node.name for part in claim.parts)]
        left += [Remain(CLAIM, claim.key) for claim in claims]
    return list(dict.fromkeys(left))


class Drain:
    """Reconciler: no pod on a node has a card.

    :param params: as ``ARGUMENTS``.
    """

    def __init__(self, kube: Kube, params: JsonObject, waiting: Waiting) -> None:
        self._kube = kube
        self._params = params
        self._waiting = waiting
        self._by_claims = serves_claims(kube)

    def observe(self) -> NodeState:
        return read(self._kube, self._params["node"], self._by_claims)

    def plan(self, state: NodeState) -> Plan:
        reasons = {bound.pod.key: self._refusal(bound) for bound in self._holders(state)}
        refused = {key: reason for key, reason in reasons.items() if reason}
        if refused:
            raise BadInput(
                f"node {self._params['node']} can't be drained of its pods with cards: {'; '.join(refused.values())}. "
                "Nothing was evicted",
                pods=list(refused),
            )
        return Plan(tuple(Change(f"Pod {key}", "has a card\n", "", key) for key in reasons))

    def _holders(self, state: NodeState) -> list[BoundPod]:
        return holders(state, self._params.get("resources") or ())

    def _refusal(self, bound: BoundPod) -> str:
        """Return why a pod isn't evicted; empty where it may be, or goes already."""
        key, (kind, name) = bound.pod.key, bound.controller
        if bound.pod.terminating:
            return ""
        # By its label alone anybody's pod could hinder the drain, and no virtctl could stop it.
        if bound.pod.machine:
            return (
                f"{key} is a virtual machine with a card, which can't be moved to another node: stop it (virtctl stop)"
            )
        if MIRROR in bound.pod.annotations:
            return f"{key} is a static pod of the node"
        if kind == "DaemonSet":
            return f"{key} is a pod of DaemonSet {name}, which would make it again: exclude the node there"
        if not kind and not self._params["force"]:
            return f"{key} has no controller that makes it again (maintenance_force evicts it nevertheless)"
        if bound.has_data and not self._params["delete_emptydir_data"]:
            return f"{key} has data in an emptyDir, which is lost (maintenance_delete_emptydir_data allows that)"
        return ""

    def apply(self, state: NodeState, plan: Plan) -> None:
        left, refusals = self._holders(state), dict[str, str]()
        for _attempt in self._waiting.attempts():
            for bound in left:
                if not bound.pod.terminating:
                    self._evict(bound.pod, refusals)
            state = self.observe()
            left = self._holders(state)
            if not left:
                return
        names = [bound.pod.key for bound in left]
        reasons = [f"{name} ({refusals[name]})" if name in refusals else name for name in names]
        ready = state.node is not None and state.node.ready == "True"
        lost = "" if ready else ". The node isn't Ready, so its kubelet ends no pod"
        raise NotInEffect(
            f"node {self._params['node']} still has pods with cards after {self._params['timeout']} s: "
            f"{', '.join(reasons)}{lost}",
            pods=names,
        )

    def _evict(self, pod: Pod, refusals: dict[str, str]) -> None:
        refusals.pop(pod.key, None)
        try:
            self._kube.evict(pod.namespace, pod.name, self._params["grace_period"])
        except KubeError as error:
            if error.status == TOO_MANY:
                refusals[pod.key] = error.message or str(error)
            elif error.status != 404:
                raise


def ensure(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module ``node_switch``.

    :param params: as ``ARGUMENTS``.
    :param check: change nothing and wait for nothing.
    :raises NotInEffect: pods, or something of the allocation, are left after the timeout.
    """
    waiting = waiting or Waiting(params["timeout"], 2.0)
    if params["state"] == DRAINED:
        return run(Drain(kube, params, waiting), check)
    if not params["allocator"]:
        raise BadInput("state clean needs the allocator beside which nothing may be left")
    by_claims, left = serves_claims(kube), list[Remain]()
    for _attempt in waiting.attempts():
        state = read(kube, params["node"], by_claims)
        left = remains(state, params["allocator"], params.get("resources") or (), params.get("namespaces"))
        if not left or check:
            return {"changed": False, "remains": [remain._asdict() for remain in left]}
    raise NotInEffect(
        f"node {params['node']} isn't clean for {params['allocator']} after {params['timeout']} s: "
        f"{', '.join(map(str, left))}",
        remains=[remain._asdict() for remain in left],
    )
