# SPDX-License-Identifier: GPL-3.0-or-later
"""A large object means what its small twin means: no server reads a field that is only kept of small ones."""

from __future__ import annotations

import ast
import json
import typing as t
from pathlib import Path

import gpushare
import pytest
from gpushare.api import decoding
from gpushare.api.decoding import Each, Shape
from gpushare.api.fields import EVENT, OBJECT
from gpushare.extender import state
from gpushare.plugin import admission
from gpushare.shared._contracts import gpushare as contract
from gpushare.templates import rows

PACKAGE = Path(gpushare.__file__).parent
READING = ("api", "dra", "extender", "node", "plugin", "templates", "shared")
# What is read of other JSON: our records, the annotations' values, tokens, the ledger; and kinds of values.
OTHERWISE: dict[str, set[str]] = {
    "dra/claims.py": {"mib", "pods", "share", "shares"},
    "dra/owner.py": {"kubernetes.io", "node"},
    "dra/records.py": {"cdi", "claim", "mib", "share", "specification", "unbooked", "version"},
    # Below names that are kept whatever they are.
    "dra/slices.py": {"effect", "index", "int", "key", "model", "string", "timeAdded", "uuid"},
    "api/evictions.py": {"PodDisruptionBudget"},
    "extender/claims.py": {"Deny", "cards", "node", "victims"},
    "extender/register.py": {"at", "bookings", "cards", "count", "pods"},
    "node/metrics_server.py": {"Content-Type"},
    "shared/_contracts/cgroup.py": {"hash"},
    "shared/_contracts/gpushare.py": {
        *("healthy", "index", "limit", "limitReason", "memoryMiB", "minor", "model", "reservedMiB", "units"),
        *("unreleasedUnits", "uuid", "xid"),
    },
}


def names_of(shape: Shape) -> set[str]:
    if isinstance(shape, Each):
        return names_of(shape.shape)
    if shape is None or isinstance(shape, str):
        return set()
    return set(shape).union(*map(names_of, shape.values()))


def read_in(file: Path) -> set[str]:
    """The keys that a file reads, or looks for, by their literal names."""
    found = list[t.Any]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=key), *_]):
                found.append(key)
            case ast.Subscript(slice=ast.Constant(value=key), ctx=ast.Load()):
                found.append(key)
            case ast.Compare(left=ast.Constant(value=key), ops=[ast.In()]):
                found.append(key)
    return {key for key in found if isinstance(key, str) and any(map(str.isalpha, key)) and " " not in key}


def test_each_field_that_a_server_reads_is_kept_of_large_objects() -> None:
    kept, files = names_of(EVENT), [file for folder in READING for file in sorted((PACKAGE / folder).rglob("*.py"))]
    read = {str(file.relative_to(PACKAGE)): read_in(file) for file in files}
    missing = {file: keys - kept - OTHERWISE.get(file, set()) for file, keys in read.items()}
    assert {file: keys for file, keys in missing.items() if keys} == {}
    assert {file: keys - read[file] for file, keys in OTHERWISE.items() if keys - read[file]} == {}


def pod() -> dict[str, t.Any]:
    """A pod with whatever a server reads."""
    limits = {"limits": {contract.RESOURCE_MEMORY: "4"}}
    names = ("gpu-mem-4", "gpu-mem-8")
    return {
        "metadata": {
            "name": "p",
            "namespace": "a",
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {
                contract.POD_INDEX: "0",
                contract.POD_ASSIGNED: "true",
                contract.POD_ASSUME_TIME: "1760000000000000000",
                contract.POD_CLAIM: '{"node":"n","cards":[0],"victims":["v"]}',
                "kubernetes.io/config.mirror": "hash",
            },
        },
        "spec": {
            "nodeName": "n",
            "priority": 5,
            "preemptionPolicy": "Never",
            "initContainers": [{"name": "i", "restartPolicy": "Always", "resources": limits}],
            "containers": [{"name": "c", "resources": limits, "securityContext": {"privileged": True}}],
            "ephemeralContainers": [{"name": "e", "securityContext": {"privileged": True}}],
            "resourceClaims": [{"name": f"c{at}", "resourceClaimTemplateName": one} for at, one in enumerate(names)],
        },
        "status": {
            "phase": "Running",
            "startTime": "2026-01-01T00:00:01Z",
            "nominatedNodeName": "n",
            "conditions": [{"type": "PodScheduled", "lastTransitionTime": "2026-01-01T00:00:01Z", "status": "True"}],
            "containerStatuses": [
                {"name": "c", "containerID": "containerd://1", "state": {"running": {"startedAt": "2026-01-01"}}}
            ],
            "resourceClaimStatuses": [{"name": "c0", "resourceClaimName": "x0"}],
        },
    }


def cut(data: bytes) -> t.Iterator[bytes]:
    return (data[at : at + 16_384] for at in range(0, len(data), 16_384))


ROWS: dict[str, t.Callable[[dict[str, t.Any]], t.Any]] = {
    "extender": state.pod_row,
    "device plugin": admission.trim_pod,
    "templates": rows.waiting,
    "preemption": lambda one: one["status"].get("nominatedNodeName"),
}


@pytest.mark.parametrize("server", ROWS)
def test_a_large_pod_is_read_as_its_small_twin(server: str) -> None:
    small, large = pod(), pod()
    large["spec"]["imagePullSecrets"] = [{"name": "a" * 50}] * (8 * decoding.WHOLE_BYTES // 50)
    found = [decoding.document(cut(json.dumps(one).encode()), OBJECT) for one in (small, large)]
    assert "imagePullSecrets" not in found[1]["spec"], "the large one was decoded at once"
    assert ROWS[server](found[1]) == ROWS[server](found[0])
    assert ROWS[server](found[0])
