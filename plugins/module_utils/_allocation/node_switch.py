# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that changes its allocator: the pods with cards leave it, and nothing of the former one stays."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import claim_templates
from .._contracts import gpushare as contract
from .._core.errors import BadInput, NotInEffect
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.errors import TOO_MANY, KubeError
from .._kube.options import auth_arguments
from .._kube.refs import Ref, is_ready
from . import foreign, node_backends

# No pod of the node has a card; nor is anything else of another allocator left there.
DRAINED, CLEAN = "drained", "clean"
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "node": {"type": "str", "required": True},
    "state": {"type": "str", "choices": [DRAINED, CLEAN], "required": True},
    "allocator": {"type": "str", "choices": list(node_backends.ALLOCATORS)},
    "force": {"type": "bool", "default": False},
    "delete_emptydir_data": {"type": "bool", "default": False},
    "grace_period": {"type": "int"},
    "timeout": {"type": "int", "default": 600},
}
MIRROR = "kubernetes.io/config.mirror"

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


@dataclasses.dataclass(frozen=True)
class NodeState:
    """What the API has of a node.

    :param node: the Node object; None where there is none.
    :param pods: bound to it.
    :param slices: its ResourceSlices.
    :param claims: of the whole cluster.
    """

    node: JsonObject | None
    pods: t.Sequence[JsonObject]
    slices: t.Sequence[JsonObject]
    claims: t.Sequence[JsonObject]


def read(kube: Kube, name: str, by_claims: bool) -> NodeState:
    """Read a node.

    :param by_claims: the cluster serves claims.
    """
    api, node = claim_templates.API_VERSION, f"spec.nodeName={name}"
    return NodeState(
        kube.get(Ref("v1", "Node", "", name)),
        kube.list_all("v1", "Pod", field_selector=node),
        kube.list_all(api, "ResourceSlice", field_selector=node) if by_claims else [],
        kube.list_all(api, "ResourceClaim") if by_claims else [],
    )


def serves_claims(kube: Kube) -> bool:
    """Return whether the cluster divides devices by claims."""
    return node_backends.release(str(kube.version().get("gitVersion", ""))) >= node_backends.CLAIMS_SINCE


def _results(claim: JsonObject) -> list[JsonObject]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or []
    return [result for result in results if result.get("driver") in (claim_templates.DRIVER, *foreign.DRIVERS)]


def holders(state: NodeState) -> list[JsonObject]:
    """Return the pods that have a card of the node, whoever has allocated it; not those that have ended."""
    claiming = {
        str(user.get("uid"))
        for claim in state.claims
        if _results(claim)
        for user in claim["status"].get("reservedFor") or []
    }
    return [
        pod
        for pod in state.pods
        if not contract.finished(pod)
        and (contract.counts(pod) or contract.pod_uid(pod) in claiming or _asks_others(pod))
    ]


def _asks_others(pod: JsonObject) -> bool:
    """Return whether a container has another stack's resource; beside it another one may name 0 of the same."""
    spec = pod.get("spec") or {}
    both = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return any(foreign.announced((container.get("resources") or {}).get("limits") or {}) for container in both)


def remains(state: NodeState, allocator: str) -> list[Remain]:
    """Return what is left in the API of a node's allocators, except for the one that is to have it.

    :param allocator: that one's name, a key of ``ALLOCATORS``.
    """
    if state.node is None:
        return []
    metadata, status = state.node["metadata"], state.node.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    left = [Remain(POD, contract.pod_key(pod)) for pod in holders(state)]
    kept = node_backends.ALLOCATORS[allocator]
    # Before the node has its label, it announces nothing there.
    own = kept.labels(labels)
    resources = [
        name
        for name, text in (status.get("allocatable") or {}).items()
        if contract.quantity(text) > 0 and not (own and kept.announces(name))
    ]
    for other in node_backends.ALLOCATORS.values():
        if other == kept:
            continue
        left += [Remain(SERVER, contract.pod_key(pod)) for pod in state.pods if _has(pod, other.server)]
        own_labels = (other.label, other.restricted)
        left += [Remain(LABEL, f"{key}={value}") for key, value in own_labels if labels.get(key) == value]
        left += [Remain(ANNOTATION, name) for name in other.annotations if name in annotations]
        left += [Remain(RESOURCE, name) for name in resources if other.announces(name)]
    return list(
        dict.fromkeys(left if allocator == node_backends.DRA else left + _of_claims(state, str(metadata["name"])))
    )


def _has(pod: JsonObject, label: tuple[str, str]) -> bool:
    return (pod["metadata"].get("labels") or {}).get(label[0]) == label[1]


def _of_claims(state: NodeState, node: str) -> list[Remain]:
    """Return what is left of the DRA driver."""
    ours = claim_templates.DRIVER
    slices = [str(raw["metadata"]["name"]) for raw in state.slices if raw["spec"].get("driver") == ours]
    claims = [
        contract.pod_key(claim)
        for claim in state.claims
        if any(result["driver"] == ours and result.get("pool") == node for result in _results(claim))
    ]
    return [*(Remain(SLICE, name) for name in slices), *(Remain(CLAIM, name) for name in claims)]


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
        pods = holders(state)
        refused = [reason for reason in map(self._refusal, pods) if reason]
        if refused:
            raise BadInput(
                f"node {self._params['node']} can't be drained of its pods with cards: {'; '.join(refused)}. "
                "Nothing was evicted",
                pods=[contract.pod_key(pod) for pod in pods if self._refusal(pod)],
            )
        return Plan(tuple(Change(f"Pod {contract.pod_key(pod)}", "has a card\n", "", pod) for pod in pods))

    def _refusal(self, pod: JsonObject) -> str:
        """Return why a pod isn't evicted; empty where it may be, or goes already."""
        if contract.terminating(pod):
            return ""
        key, metadata = contract.pod_key(pod), pod["metadata"]
        owner = next((ref for ref in metadata.get("ownerReferences") or [] if ref.get("controller")), None)
        if MIRROR in (metadata.get("annotations") or {}):
            return f"{key} is a static pod of the node"
        if owner and owner["kind"] == "DaemonSet":
            return f"{key} is a pod of DaemonSet {owner['name']}, which would make it again: exclude the node there"
        if not owner and not self._params["force"]:
            return f"{key} has no controller that makes it again (maintenance_force evicts it nevertheless)"
        volumes = (pod.get("spec") or {}).get("volumes") or []
        if any("emptyDir" in volume for volume in volumes) and not self._params["delete_emptydir_data"]:
            return f"{key} has data in an emptyDir, which is lost (maintenance_delete_emptydir_data allows that)"
        return ""

    def apply(self, state: NodeState, plan: Plan) -> None:
        left, refusals = holders(state), dict[str, str]()
        for _attempt in self._waiting.attempts():
            for pod in left:
                if not contract.terminating(pod):
                    self._evict(pod, refusals)
            state = self.observe()
            left = holders(state)
            if not left:
                return
        names = [contract.pod_key(pod) for pod in left]
        reasons = [f"{name} ({refusals[name]})" if name in refusals else name for name in names]
        lost = "" if is_ready(state.node or {}) else ". The node isn't Ready, so its kubelet ends no pod"
        raise NotInEffect(
            f"node {self._params['node']} still has pods with cards after {self._params['timeout']} s: "
            f"{', '.join(reasons)}{lost}",
            pods=names,
        )

    def _evict(self, pod: JsonObject, refusals: dict[str, str]) -> None:
        refusals.pop(contract.pod_key(pod), None)
        try:
            self._kube.evict(pod["metadata"]["namespace"], pod["metadata"]["name"], self._params["grace_period"])
        except KubeError as error:
            if error.status == TOO_MANY:
                refusals[contract.pod_key(pod)] = error.message or str(error)
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
        left = remains(read(kube, params["node"], by_claims), params["allocator"])
        if not left or check:
            return {"changed": False, "remains": [remain._asdict() for remain in left]}
    raise NotInEffect(
        f"node {params['node']} isn't clean for {params['allocator']} after {params['timeout']} s: "
        f"{', '.join(map(str, left))}",
        remains=[remain._asdict() for remain in left],
    )
