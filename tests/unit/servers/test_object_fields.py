# SPDX-License-Identifier: GPL-3.0-or-later
"""Of a large object the servers get the fields of ``fields.OBJECT``: everything that they read gives the same there."""

from __future__ import annotations

import json
import typing as t

import pytest
from api_double import make_node, make_pod
from dra_kit import NODE, make_claim, result, uid
from gpushare.api import decoding
from gpushare.api.fields import OBJECT
from gpushare.dra import claims, slices
from gpushare.extender import bind, binding_status
from gpushare.extender.claims import claim_of
from gpushare.extender.filter import RefusedPod
from gpushare.extender.state import node_row, pod_row
from gpushare.plugin.admission import trim_pod
from gpushare.plugin.reconcile import trim_node
from gpushare.shared._contracts import gpushare as contract
from gpushare.templates.keeper import made, waiting
from gpushare.templates.objects import template_of

CLAIM = json.dumps({"node": "a", "cards": [0], "victims": ["v"]})


def pod(**metadata: t.Any) -> t.Any:
    one = make_pod("p", 4, priority=7)
    one["metadata"] |= {"uid": "u", "resourceVersion": "9", "creationTimestamp": "2026-01-01T00:00:00Z", **metadata}
    one["spec"] |= {
        "preemptionPolicy": "Never",
        "resourceClaims": [{"name": "gpu-mem", "resourceClaimTemplateName": "gpu-mem-4"}],
        "initContainers": [
            {"name": "i", "restartPolicy": "Always", "resources": {"requests": {contract.RESOURCE_MEMORY: "1"}}}
        ],
        "ephemeralContainers": [{"name": "e", "securityContext": {"privileged": True}}],
    }
    one["spec"]["containers"].append({"name": "big", "securityContext": {"privileged": True, "runAsUser": 0}})
    one["status"] |= {
        "startTime": "2026-01-01T00:00:01Z",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:02Z"}],
        "containerStatuses": [
            {"name": "main", "containerID": "containerd://1", "state": {"running": {"startedAt": "x"}}}
        ],
        "initContainerStatuses": [{"name": "i", "containerID": "containerd://2", "state": {"terminated": {}}}],
    }
    return one


BOOKED = dict.fromkeys(contract.POD_ANNOTATIONS, "0") | {contract.POD_ASSIGNED: "true", contract.POD_CLAIM: CLAIM}
DEMANDS = {contract.POD_PLACEMENT: "spread", contract.POD_MODELS: "a*", contract.POD_EXCLUDE_MODELS: "b"}
ENTRY = binding_status.Entry("u", "default", "p", "a", ((0, 4),), 0, "9", "x")
READERS: dict[str, t.Callable[[t.Any], t.Any]] = {
    "row": pod_row,
    "mirrored": trim_pod,
    "waiting": waiting,
    "claim": claim_of,
    "demand": contract.demand,
    "kept": bind._trimmed,
    "refused": lambda one: RefusedPod.of(one, contract.Demand(1), ["a"], ["a"]),
    "status": lambda one: binding_status._status_of(one, ENTRY),
}


@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize("node", ["", "a"])
@pytest.mark.parametrize("more", [{}, {"deletionTimestamp": "x"}, {"annotations": BOOKED}, {"annotations": DEMANDS}])
def test_a_pod(reader: str, node: str, more: dict[str, t.Any]) -> None:
    one = pod(**more)
    one["spec"] |= {"nodeName": node} if node else {}
    assert READERS[reader](reduced(one)) == READERS[reader](one)


def reduced(one: t.Any) -> t.Any:
    """An object as if it were large, from its text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_decode", refuse)
        found = decoding.document([json.dumps(one).encode()], OBJECT)
    assert found == decoding._reduced(one, OBJECT)
    return found


def refuse(*_given: t.Any) -> t.Any:
    raise ValueError


def test_a_node() -> None:
    one = make_node("a", 16, 16, models=("x", "y"))
    one["metadata"]["annotations"] |= {contract.NODE_LIMIT: "off", contract.NODE_RUNTIME_CDI: "true"}
    one["status"] |= {
        "allocatable": one["status"]["capacity"],
        "nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": "containerd://2", "machineID": "x"},
    }
    for reader in (node_row, trim_node):
        assert reader(reduced(one)) == reader(one)


def test_a_claim() -> None:
    devices = {"config": [{"source": "FromClaim", "opaque": {"driver": "other", "parameters": {"a": "b"}}}]}
    one = make_claim(1, result("gpu-0", "4Gi"), result("gpu-1", "4Gi"), pods=(1, 2), **devices)
    assert claims.parse(reduced(one), uid(1), NODE) == claims.parse(one, uid(1), NODE)


@pytest.mark.parametrize("healthy", [True, False])
def test_a_slice(healthy: bool) -> None:
    cards = [contract.Card(at, f"GPU-{at}", at, 16384, 16, healthy, "m", code="XIDError") for at in range(2)]
    facts = slices.Facts("580.1.2", {"GPU-0": "0000:01:00.0"}, {"GPU-0": "pci0000:00"}, {"GPU-0": "off"})
    devices = slices.devices(cards, "GiB", facts)
    (one,) = slices.plan("a", "owner", devices, []).create
    one["metadata"]["resourceVersion"] = "3"
    assert slices.trimmed(reduced(one)) == slices.trimmed(one)
    assert slices.plan("a", "owner", devices, [slices.trimmed(reduced(one))]).empty
    other = json.loads(json.dumps(one))
    other["spec"]["sharedCounters"] = [{"name": "x"}]
    assert not slices.plan("a", "owner", devices, [slices.trimmed(reduced(other))]).empty


def test_a_template_and_a_lease() -> None:
    template = template_of("default", "gpu-mem-4", "GiB")
    assert template is not None and made(reduced(template)) == made(template)
    lease = {
        "metadata": {
            **{"name": "l", "uid": "u", "resourceVersion": "1", "labels": {"a": "b"}, "finalizers": ["f/f"]},
            "annotations": {contract.LEDGER: "x" * 200_000, "theirs": "y"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}],
        },
        "spec": {"holderIdentity": "h", "acquireTime": "t", "renewTime": "t", "leaseTransitions": 2},
    }
    assert reduced(lease) == lease
