# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and pods of each backend and version, as the API returns them."""

from __future__ import annotations

import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._allocation.claims import Read
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import Cluster
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.compute import assemble
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.nodes import read_node
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.pods import Allocation, PodReader
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claims import claim_of, slice_of
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import Node

T4, V100 = "GPU-1c1ae2a4-3c34-4e7f-9d0e-000000000001", "GPU-1c1ae2a4-3c34-4e7f-9d0e-000000000002"

HAMI_TEXT_7 = f"{T4},10,15360,100,NVIDIA-Tesla T4,0,true:{V100},10,32768,100,NVIDIA-Tesla V100,1,false:"
HAMI_TEXT_9 = (
    f"{T4},10,15360,100,NVIDIA-Tesla T4,0,true,0,hami-core:{V100},10,32768,100,NVIDIA-Tesla V100,1,false,1,mig:"
)
# Fields that are 0, false or empty are omitted.
HAMI_JSON = json.dumps(
    [
        {"id": V100, "index": 1, "count": 10, "devmem": 32768, "devcore": 100, "type": "NVIDIA-Tesla V100", "numa": 1},
        {"id": T4, "count": 10, "devmem": 15360, "devcore": 100, "type": "NVIDIA-Tesla T4", "health": True},
    ]
)


NAMES = {
    "mem": "aliyun.com/gpu-mem",
    "count": "aliyun.com/gpu-count",
    "gpu": "nvidia.com/gpu",
    "shared": "nvidia.com/gpu.shared",
    "mig": "nvidia.com/mig-1g.5gb",
    "gpumem": "nvidia.com/gpumem",
    "cores": "nvidia.com/gpucores",
}


def node(name="n1", annotations=None, labels=None, **announced):
    resources = {NAMES[key]: str(value) for key, value in announced.items()}
    return {
        "metadata": {"name": name, "annotations": annotations or {}, "labels": labels or {}},
        "status": {
            "capacity": {"cpu": "8", **resources},
            "allocatable": {"cpu": "8", **resources},
            "addresses": [{"type": "InternalIP", "address": "192.0.2.7"}],
        },
    }


def asks(name="main", always=False, **asked):
    limits = {NAMES[key]: str(value) for key, value in asked.items()}
    return {"name": name, "resources": {"limits": limits}, **({"restartPolicy": "Always"} if always else {})}


def pod(name, containers, on="n1", annotations=None, phase="Running", inits=(), **more):
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "annotations": annotations or {}}
    metadata.update(more)
    return {
        "metadata": metadata,
        "spec": {
            **({"nodeName": on} if on else {}),
            "containers": list(containers),
            **({"initContainers": list(inits)} if inits else {}),
        },
        "status": {"phase": phase},
    }


# ----------------------------------------------------------------- gpushare


def booked(index, units, assigned="true", card=16):
    return {
        contract.POD_INDEX: str(index),
        contract.POD_CARD_UNITS: str(card),
        contract.POD_UNITS: str(units),
        contract.POD_ASSIGNED: assigned,
        contract.POD_ASSUME_TIME: "1790000000000000000",
    }


def ours(name="n1", **announced):
    cards = [contract.Card(at, uuid, at, 16384, 16, True, "NVIDIA T4") for at, uuid in enumerate((T4, V100))]
    return node(
        name, {contract.NODE_CARDS: contract.cards_to_annotation(cards)}, **{"mem": 32, "count": 2, **announced}
    )


def upstream(name="n1"):
    return node(name, mem=32, count=2)


# ----------------------------------------------------------------- HAMi


def hami_node(register=HAMI_JSON, name="n1", **announced):
    return node(name, {"hami.io/node-nvidia-register": register}, **{"gpu": 20, **announced})


def given(allocated, on="n1", phase="success"):
    return {"hami.io/vgpu-node": on, "hami.io/vgpu-devices-allocated": allocated, "hami.io/bind-phase": phase}


# ----------------------------------------------------------------- NVIDIA's plugin


def nvidia_node(name="n1", labels=None, **announced):
    return node(name, None, {f"nvidia.com/{key}": value for key, value in (labels or {}).items()}, **announced)


# ----------------------------------------------------------------- all of them


def mixed_cluster():
    """Lists of nodes and pods of every back end and in every state, as kube-apiserver writes their fields."""
    nodes = [ours("n1"), upstream("n2"), hami_node(name="n3"), node("n4", shared=4, mig=2), node("n5"), ours("n10")]
    nodes[0]["status"]["images"] = [{"names": ["x"]}]
    nodes.append(node("n6", {contract.NODE_CARDS: "{"}, mem=3))
    made = [
        pod("a", [asks(mem=10)], annotations=booked(1, 10)),
        pod("leaves", [asks(mem=1)], annotations=booked(0, 1), deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("two", [asks("x", mem=2), asks("y"), asks("z", mem=3)], annotations=booked(0, 5), inits=[asks("i", mem=1)]),
        pod("both", [asks(mem=4)], "n10", {**booked(0, 4), contract.POD_INDICES: "0,1"}),
        pod("lost", [asks(mem=1)], annotations=booked(7, 1)),
        pod("starts", [asks(mem=2)], "n2", booked(0, 2, "false"), "Pending"),
        pod("done", [asks(mem=9)], annotations=booked(0, 9), phase="Succeeded"),
        pod("given", [asks(gpu=2)], "n3", given(f"{T4},NVIDIA,3000,30:{V100},NVIDIA,1000,10:;", "n3")),
        pod("bare", [asks(gpu=1, gpumem=500)], "n3"),
        pod("wrong", [asks(gpu=1)], "n3", given("x", "n3")),
        pod("shares", [asks(shared=2)], "n4"),
        pod("slice", [asks(mig=1)], "n4", phase="Pending"),
        pod("stray", [asks(mem=1)], "n5"),
        pod("w", [asks(mem=99)], None, phase="Pending"),
        pod("none", [asks()]),
        *(pod(f"p{at}", [asks(mem=1)], annotations=booked(at % 2, 1)) for at in range(12)),
        *(pod(f"q-{at}", [asks(mem=2)], "n2", booked(at % 2, 2)) for at in range(3)),
    ]
    for at, one in enumerate(made):
        one["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:spec": {}}}]
        for each in one["spec"]["containers"]:
            each["env"] = [{"name": "A", "value": f"}} {at}"}]
            each["volumeMounts"] = [{"name": f"kube-api-access-{at}", "mountPath": "/x"}]
        bound = one["spec"].pop("nodeName", None)
        one["spec"] |= {
            "restartPolicy": "Always",
            **({"nodeName": bound} if bound else {}),
            "tolerations": [{"key": "a"}],
        }
        reason = {"type": "PodScheduled", "status": "True" if bound else "False", "message": "no card has so much"}
        one["status"] |= {"conditions": [reason], "containerStatuses": [{"name": "main"}], "qosClass": "Guaranteed"}
    return {"/api/v1/nodes": nodes, "/api/v1/pods": made}


def row(name: str, **fields: t.Any) -> dict[str, t.Any]:
    """A node as the module ``cluster_info`` returns it."""
    [bare] = Cluster("", (Node(name, ready="True"),)).result()["nodes"]
    return {**bare, **fields}


def allocation(
    nodes: t.Iterable[t.Any], pods: t.Iterable[t.Any], slices: t.Sequence[t.Any] = (), claims: t.Sequence[t.Any] = ()
) -> Allocation:
    """Compute the allocation of a cluster from the objects of its API."""
    read = PodReader()
    parsed = [shares for node in nodes for shares in read_node(node)]
    in_api = Read(tuple(map(slice_of, slices)), tuple(map(claim_of, claims)))
    return assemble(parsed, [claim for pod in pods for claim in read(pod)], in_api)
