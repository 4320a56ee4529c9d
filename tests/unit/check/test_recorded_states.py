# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks over states of the lab with the real HAMi 2.10 and NVIDIA's real plugin 0.20.

``tests/lab/test_51_other_backends.py`` records them, on simulated cards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from allocation_snapshots import allocation
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, found

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
    report = checked(state(name), exempt_namespaces=("hami-system", "nvidia-device-plugin"))
    compared, warned = STATES[name]
    assert found(report, "FAIL", "UNKNOWN") == []
    assert {(finding["check"], finding["cause"]) for finding in report["findings"]} == warned
    assert {check["id"] for check in report["checks"] if check["n"]} == compared


def test_components_in_a_namespace_that_isnt_configured_are_each_named() -> None:
    report = checked(state(MIXED), exempt_namespaces=("nvidia-device-plugin",))
    mine = [one for one in report["findings"] if one["cause"] == "unconfirmed"]
    assert [one["pod"].partition("-wbtst")[0].partition("-bbf")[0] for one in mine] == [
        "hami-system/hami-device-plugin",
        "hami-system/hami-scheduler",
    ]
    assert all("hami-system" in one["what"] and "verify_exempt_namespaces" in one["do"] for one in mine)
    # The one finding says it.
    assert not [one for one in report["findings"] if one["cause"] == "unknown_plugin"]


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
