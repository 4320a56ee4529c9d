# SPDX-License-Identifier: GPL-3.0-or-later
"""No server reads a field that is only kept of small objects, by the literal keys in its source."""

from __future__ import annotations

import ast
import typing as t
from pathlib import Path

import gpushare
from gpushare.api.decoding import Each, Shape
from gpushare.api.fields import EVENT

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
    "shared/_contracts/card_exclusion.py": {"cards", "nodes"},
    "shared/_contracts/cgroup.py": {"hash"},
    "shared/_contracts/gpushare.py": {
        *("healthy", "index", "limit", "limitReason", "memoryMiB", "minor", "model", "reservedMiB", "units"),
        *("unreleasedUnits", "uuid", "xid"),
    },
}
# Kubelet's and NVML's answers on the node, which gpushare-node-facts prints: no objects of the API.
OF_THE_NODE = ("node/facts.py", "shared/_kubelet/", "shared/_nvml/")


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
    read = {file: keys for file, keys in read.items() if not file.startswith(OF_THE_NODE)}
    missing = {file: keys - kept - OTHERWISE.get(file, set()) for file, keys in read.items()}
    assert {file: keys for file, keys in missing.items() if keys} == {}
    assert {file: keys - read[file] for file, keys in OTHERWISE.items() if keys - read[file]} == {}
