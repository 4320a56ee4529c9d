# SPDX-License-Identifier: GPL-3.0-or-later
"""Templates of many: whose are made first, and that neither making nor sweeping keeps other namespaces waiting."""

from __future__ import annotations

import types
import typing as t

import pytest
from api_double import ListingDouble
from gpushare.api.client import KubeError
from gpushare.shared._core.types import JsonObject
from gpushare.templates import keeper
from gpushare.templates.keeper import PASS_REQUESTS, Keeper, Made, Waiting, in_turns


class Api:
    """Records what is created and deleted; a template of the name in ``kept`` can't be deleted."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.kept = ""

    def post(self, path: str, body: JsonObject) -> JsonObject:
        self.made.append((path.split("/")[5], body["metadata"]["name"]))
        return body

    def listing(self, path: str) -> ListingDouble:
        return ListingDouble({"metadata": {}, "items": []})

    def delete(self, path: str) -> JsonObject:
        parts = path.split("/")
        if parts[7] == self.kept:
            raise KubeError(403, "Forbidden", "the policy refuses it")
        self.deleted.append((parts[5], parts[7]))
        return {}


class World:
    """A leader with what it sees of pods and templates."""

    def __init__(self) -> None:
        self.api, self.results = Api(), list[str]()
        self.pods: list[Waiting] = []
        self.templates: list[Made] = []
        events: t.Any = types.SimpleNamespace(pod=lambda *given: None)
        api: t.Any = self.api
        self.keeper = Keeper(api, "GiB", lambda: True, events, self.results.append)
        mirrors: t.Any = (
            types.SimpleNamespace(synced=True, items=lambda: self.pods),
            types.SimpleNamespace(synced=True, items=lambda: self.templates),
        )
        self.keeper.pods, self.keeper.templates = mirrors

    def waits(self, namespace: str, *units: int) -> None:
        names = tuple(f"gpu-mem-{one}" for one in units)
        self.pods.append(Waiting(namespace, f"pod-{units[0]}", "", names))


@pytest.fixture
def world() -> World:
    return World()


def test_each_namespace_has_its_first_template_before_any_has_its_second() -> None:
    keys = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("c", "1"), ("c", "2")]
    assert in_turns(keys) == [("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("c", "2"), ("a", "3")]


def test_thousands_of_templates_of_one_namespace_keep_nobody_waiting(world: World) -> None:
    for number in range(100):
        world.waits("greedy", *range(1 + 30 * number, 31 + 30 * number))
    world.waits("small", 4)
    world.keeper.compare()
    assert world.api.made[1] == ("small", "gpu-mem-4") and len(world.api.made) == PASS_REQUESTS
    # A pod that comes meanwhile is served by the next pass, which follows at once.
    assert world.keeper._changed.is_set()
    world.waits("late", 2)
    before = len(world.api.made)
    world.keeper.compare()
    assert ("late", "gpu-mem-2") in world.api.made[before : before + 2]


def test_a_sweep_keeps_nobody_waiting_and_one_refusal_no_other_template(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now[0])
    world.templates = [Made("many", f"gpu-mem-{number}", "") for number in range(1, 251)]
    world.templates += [Made(f"space-{number}", "gpu-mem-1", "") for number in range(60)]
    world.api.kept = "gpu-mem-1"
    world.keeper.compare()
    now[0] += keeper.UNUSED_SECONDS
    world.keeper.compare()
    # The first one can't be deleted, and the others of its namespace go all the same.
    assert len(world.api.deleted) == PASS_REQUESTS - 2 and world.results[0] == "failed"
    world.waits("late", 2)
    world.keeper.compare()
    assert world.api.made == [("late", "gpu-mem-2")]
    for _pass in range(4):
        gone = set(world.api.deleted)
        world.templates = [one for one in world.templates if (one.namespace, one.name) not in gone]
        world.keeper.compare()
    assert len(world.api.deleted) == 249 and world.results.count("failed") == 61
    # What stays isn't tried in every pass.
    world.keeper.compare()
    assert world.results.count("failed") == 61
