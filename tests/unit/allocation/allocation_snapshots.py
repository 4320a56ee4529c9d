# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes and pods of each backend and version, as the API returns them."""

from __future__ import annotations

import json

from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract

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
