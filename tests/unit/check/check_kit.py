# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded cluster through all checks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._allocation.claims import Read, read
from ansible_collections.kubegpu.share.plugins.module_utils._check import collect as cluster
from ansible_collections.kubegpu.share.plugins.module_utils._check import result
from ansible_collections.kubegpu.share.plugins.module_utils._check.evidence import Reader
from ansible_collections.kubegpu.share.plugins.module_utils._check.model import Options, Servers
from ansible_collections.kubegpu.share.plugins.module_utils._check.report import report
from ansible_collections.kubegpu.share.plugins.module_utils._check.snapshot import (
    classes_of,
    read_nodes,
    read_pods,
    snapshot,
)
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import FIELD_MANAGER, Ref
from check_worlds import WORLDS
from fake_kube import FakeKube

# A message that lacks a field is an error here, and not the word "unknown".
del result._Fields.__missing__
RECORDINGS = {name: json.dumps(build()) for name, build in WORLDS.items()}


def recorded(name: str) -> JsonObject:
    """A healthy cluster as JSON, for the caller to change."""
    return json.loads(RECORDINGS[name])


def checked(world: JsonObject, before: JsonObject | None = None, scope: str = "all", **options: Any) -> JsonObject:
    """The report of a cluster, written as JSON and read again."""
    given = Options(
        **{
            "allowed_processes": cluster.PROCESSES,
            "exempt_namespaces": cluster.EXEMPT_NAMESPACES,
            "schedulers": cluster.SCHEDULERS,
            "hami_schedulers": cluster.HAMI_SCHEDULERS,
            "extender": world.get("extender"),
            **options,
        }
    )
    reader = Reader()
    pods = read_pods(world["pods"], reader)
    evidence, servers = world["evidence"], servers_of(world.get("servers"))
    seen = snapshot(
        read_nodes(world["nodes"], reader),
        pods,
        evidence,
        given,
        world["now"],
        reader,
        world["configmaps"],
        servers=servers,
        by_claims=claims_of(world),
        templates=world.get("templates", ()),
    )
    if "runtimeclasses" in world:
        seen = dataclasses.replace(seen, classes=classes_of(world["runtimeclasses"]))
    return json.loads(json.dumps(report(seen, "https://192.0.2.1:6443", before, scope), allow_nan=False))


def claims_of(world: JsonObject) -> Read:
    """A world's slices and claims, as they are read from the API."""
    api = ListsKube(
        {"ResourceSlice": world.get("slices", []), "ResourceClaim": world.get("claims", [])},
        world.get("claims_refused", ""),
    )
    return read(api)


class ListsKube:
    """Lists of objects of any shape."""

    def __init__(self, lists: JsonObject, refused: str = "") -> None:
        self.lists, self.refused = lists, refused

    def list_all(self, api_version: str, kind: str, **_more: Any) -> list[Any]:
        if self.refused:
            raise KubeError(self.refused, 403, "Forbidden", self.refused)
        return list(self.lists[kind])


def servers_of(given: JsonObject | None) -> Servers | None:
    """A world's servers, whose pods and single objects stand beside it."""
    if given is None:
        return None
    known = {key: one for key, one in given.items() if key not in ("pods", "objects", "edited", "control_plane")}
    api = FakeKube()
    for one in given["objects"]:
        api.add(one, FIELD_MANAGER)
    for ref, path, value in given.get("edited", ()):
        api.edit(Ref(*ref), path, value)
    return Servers(tuple(given["control_plane"]), pods=tuple(given["pods"]), api=api, **known)


def found(shown: JsonObject, *levels: str) -> list[str]:
    """Check, level and text of the findings of these levels."""
    return [
        f"{finding['check']} {finding['level']}: {finding['what']}"
        for finding in shown["findings"]
        if finding["level"] in levels
    ]


def failing(shown: JsonObject, level: str = "FAIL") -> set[str]:
    return {finding["check"] for finding in shown["findings"] if finding["level"] == level}
