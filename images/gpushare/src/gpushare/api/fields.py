# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields of the API's objects that the servers read. Of a large object nothing else is kept.

One shape for all kinds, since no field has two meanings. A server that reads another field adds it here: otherwise who
makes an object large hides that field.
"""

from __future__ import annotations

from gpushare.api.decoding import LEAF, OTHERS, Each, Shape
from gpushare.shared._contracts import gpushare as contract

_MEMORY: Shape = {contract.RESOURCE_MEMORY: LEAF}
_COUNTS: Shape = {contract.RESOURCE_MEMORY: LEAF, contract.RESOURCE_COUNT: LEAF}
# Annotations that are read by their name, so that however many others don't hide them.
_ANNOTATIONS: Shape = {
    **dict.fromkeys((*contract.POD_ANNOTATIONS, *contract.POD_DEMANDS), LEAF),
    **dict.fromkeys((contract.NODE_CARDS, contract.NODE_RUNTIME_CDI, contract.NODE_LIMIT, contract.LEDGER), LEAF),
    **dict.fromkeys((contract.POD_FENCED, contract.POD_CLAIM, contract.POD_RETRY), LEAF),
    OTHERS: LEAF,
}
_METADATA: Shape = {
    **dict.fromkeys(("name", "namespace", "uid", "resourceVersion", "generation"), LEAF),
    **dict.fromkeys(("creationTimestamp", "deletionTimestamp", "continue"), LEAF),
    "annotations": _ANNOTATIONS,
    "labels": {OTHERS: LEAF},
    "finalizers": Each(LEAF, 100),
    "ownerReferences": Each(
        dict.fromkeys(("apiVersion", "kind", "name", "uid", "controller", "blockOwnerDeletion"), LEAF), 100
    ),
}
_CONTAINERS = Each(
    {
        "name": LEAF,
        "restartPolicy": LEAF,
        "resources": {"limits": _MEMORY, "requests": _MEMORY},
        "securityContext": {"privileged": LEAF},
    }
)
_STATUSES = Each({"name": LEAF, "containerID": LEAF, "state": {"running": {}}})
# A device of a ResourceSlice, as this driver makes them.
_DEVICE: Shape = {
    "name": LEAF,
    "attributes": {OTHERS: {OTHERS: LEAF}},
    "capacity": {
        OTHERS: {
            "value": LEAF,
            "requestPolicy": {
                "default": LEAF,
                "validValues": Each(LEAF, 100),
                "validRange": {"min": LEAF, "max": LEAF, "step": LEAF},
            },
        }
    },
    "taints": Each({OTHERS: LEAF}, 100),
    OTHERS: LEAF,
}
_SPEC: Shape = {
    **dict.fromkeys(("nodeName", "priority", "preemptionPolicy"), LEAF),
    "containers": _CONTAINERS,
    "initContainers": _CONTAINERS,
    "ephemeralContainers": _CONTAINERS,
    "resourceClaims": Each({"name": LEAF, "resourceClaimName": LEAF, "resourceClaimTemplateName": LEAF}, 1000),
    # Fields of Leases.
    **dict.fromkeys(("holderIdentity", "leaseDurationSeconds", "acquireTime", "renewTime", "leaseTransitions"), LEAF),
    # Fields of ResourceSlices.
    "driver": LEAF,
    "pool": {OTHERS: LEAF},
    "devices": Each(_DEVICE, 1000),
    **dict.fromkeys(("allNodes", "nodeSelector", "perDeviceNodeSelection", "sharedCounters"), LEAF),
    # Fields of bindings of admission policies.
    "validationActions": Each(LEAF, 100),
}
_ALLOCATION: Shape = {
    "devices": {
        "config": Each({"source": LEAF, "opaque": {"driver": LEAF}}),
        "results": Each(
            {
                **dict.fromkeys(("driver", "pool", "device", "request", "adminAccess", "shareID"), LEAF),
                "consumedCapacity": {OTHERS: LEAF},
            }
        ),
    }
}
_STATUS: Shape = {
    "phase": LEAF,
    "startTime": LEAF,
    "conditions": Each(dict.fromkeys(("type", "status", "lastTransitionTime"), LEAF)),
    **dict.fromkeys(("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"), _STATUSES),
    # Where kube-scheduler has evicted pods for this one.
    "nominatedNodeName": LEAF,
    "resourceClaimStatuses": Each({"name": LEAF}, 1000),
    # Fields of nodes.
    "capacity": _COUNTS,
    "allocatable": _COUNTS,
    "nodeInfo": {"kubeletVersion": LEAF, "containerRuntimeVersion": LEAF},
    # Fields of claims.
    "allocation": _ALLOCATION,
    "reservedFor": Each(dict.fromkeys(("resource", "apiGroup", "name", "uid"), LEAF)),
    # Fields of reviews.
    **dict.fromkeys(("authenticated", "allowed", "denied", "error", "reason"), LEAF),
    "user": {"username": LEAF, "uid": LEAF, "groups": Each(LEAF, 10_000), "extra": {OTHERS: Each(LEAF, 1000)}},
}
OBJECT: Shape = {
    **dict.fromkeys(("apiVersion", "kind", "message", "reason", "code"), LEAF),
    "metadata": _METADATA,
    "spec": _SPEC,
    "status": _STATUS,
    "details": {"causes": Each({"reason": LEAF}, 100)},
}
EVENT: Shape = {"type": LEAF, "object": OBJECT}
