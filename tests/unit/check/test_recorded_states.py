# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks over states of the lab with the real HAMi 2.10 and NVIDIA's real plugin 0.20, and over faults in them.

``tests/lab/test_51_other_backends.py`` records them, on simulated cards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from allocation_snapshots import allocation
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, failing, found

FOLDER = Path(__file__).parent / "recordings"
MIXED, SHARED, SCALED = "hami-and-nvidia", "nvidia-mps-and-time-slicing", "hami-scaled"
COMMON = {"C1", "C4", "C5", "C6", "C7", "C8", "C9"}
# What each state compares, and the codes of its warnings.
STATES = {
    MIXED: (
        {*COMMON, "C2", "C3", "H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8", "H9", "H10", "N1", "N2", "N3"},
        set(),
    ),
    SHARED: ({*COMMON, "C2", "C3", "N1", "N2", "N3", "N4", "N5", "N6"}, {("C6", "resource_kept")}),
    SCALED: ({*COMMON, "H1", "H2", "H3", "H4", "H5", "H6", "H7", "H9", "H10"}, {("H5", "oversubscribed")}),
}


def state(name: str) -> JsonObject:
    recorded: JsonObject = json.loads((FOLDER / f"{name}.json").read_text())
    return recorded


def test_each_recording_is_tested() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(STATES)


@pytest.mark.parametrize("name", STATES)
def test_no_check_fails(name: str) -> None:
    report = checked(state(name))
    compared, warned = STATES[name]
    assert found(report, "FAIL", "UNKNOWN") == []
    assert {(one["check"], one["cause"]) for one in report["findings"]} == warned
    assert {one["id"] for one in report["checks"] if one["n"]} == compared


def node_of(world: JsonObject, name: str) -> JsonObject:
    return next(one for one in world["nodes"] if one["metadata"]["name"] == name)


def given(world: JsonObject, node: str) -> JsonObject:
    """Return what kubelet gave the only container with a card of a node."""
    (entry,) = world["evidence"][node]["kubelet"]["checkpoint"]["entries"]
    found: JsonObject = entry
    return found


def replace(marks: JsonObject, key: str, old: str, new: str) -> None:
    assert old in marks[key]
    marks[key] = marks[key].replace(old, new)


def of_hami(world: JsonObject) -> JsonObject:
    return next(one for one in world["pods"] if one["metadata"]["name"] == "of-hami")


def register_less(world: JsonObject) -> None:
    replace(node_of(world, "gpu1")["metadata"]["annotations"], "hami.io/node-nvidia-register", "16640", "8000")


def choose_more(world: JsonObject) -> None:
    replace(of_hami(world)["metadata"]["annotations"], "hami.io/vgpu-devices-allocated", ",3000,", ",2000,")


def skip_the_webhook(world: JsonObject) -> None:
    of_hami(world)["spec"]["schedulerName"] = "default-scheduler"


def unload(world: JsonObject) -> None:
    processes(world, "gpu1")[0]["libvgpu"] = False


def processes(world: JsonObject, node: str) -> list[JsonObject]:
    return [one for card in world["evidence"][node]["nvml"]["cards"] for one in card["processes"]]


def use_more(world: JsonObject) -> None:
    processes(world, "gpu1")[0]["used_mib"] = 9000


def swap_cards(world: JsonObject) -> None:
    """Give the container the card that another one may get."""
    cards = [one["uuid"] for one in world["evidence"]["gpu2"]["nvml"]["cards"]]
    envs = given(world, "gpu2")["envs"]
    envs["NVIDIA_VISIBLE_DEVICES"] = next(one for one in cards if one != envs["NVIDIA_VISIBLE_DEVICES"])


def announce_more(world: JsonObject) -> None:
    for field in ("capacity", "allocatable"):
        node_of(world, "gpu2")["status"][field]["nvidia.com/gpu"] = "3"


def end_mps(world: JsonObject) -> None:
    for card in world["evidence"]["gpu1"]["nvml"]["cards"]:
        card["compute_mode"] = "default"


def give_a_slot_twice(world: JsonObject) -> None:
    first, second = world["evidence"]["gpu2"]["kubelet"]["checkpoint"]["entries"]
    second["ids"] = first["ids"]


def sell_more(world: JsonObject) -> None:
    replace(
        next(one for one in world["pods"] if one["metadata"]["name"] == "more")["metadata"]["annotations"],
        "hami.io/vgpu-devices-allocated",
        ",33280,",
        ",60000,",
    )


@pytest.mark.parametrize(
    ("name", "check", "change"),
    [
        (MIXED, "H1", register_less),
        (MIXED, "H6", choose_more),
        (MIXED, "H8", unload),
        (MIXED, "H9", use_more),
        (MIXED, "H10", skip_the_webhook),
        (MIXED, "N1", announce_more),
        (MIXED, "N3", swap_cards),
        (SHARED, "N2", give_a_slot_twice),
        (SHARED, "N6", end_mps),
        (SCALED, "H5", sell_more),
    ],
)
def test_a_fault_in_a_recorded_state_is_found(name: str, check: str, change: Callable[[JsonObject], None]) -> None:
    world = state(name)
    change(world)
    assert check in failing(checked(world))


def test_the_table_of_the_mixed_cluster() -> None:
    recorded = state(MIXED)
    found = allocation(recorded["nodes"], recorded["pods"])
    held = [
        (node["name"], node["backend"], card["used"], card["total"], [pod["name"] for pod in card["pods"]])
        for node in found["nodes"]
        for card in node["cards"]
    ]
    # NVIDIA's plugin writes nowhere in the API whose card is whose.
    assert held == [("gpu1", "hami", 0, 16640, []), ("gpu1", "hami", 3000, 16640, ["of-hami"])]
    assert [(node["name"], node["used"], node["total"]) for node in found["nodes"]] == [
        ("gpu1", 3000, 33280),
        ("gpu2", 1, 2),
    ]
