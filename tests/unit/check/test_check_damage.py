# SPDX-License-Identifier: GPL-3.0-or-later
"""Evidence that is missing, broken or absurd makes the right check UNKNOWN, never PASS, and never raises."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import registry
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, failing, found, recorded
from check_mutations import REGISTER, card, checkpoint, entry, listing, node_notes, notes, nvml, resource
from check_worlds import NODE, WORLDS, uuid
from hypothesis import given, settings
from hypothesis import strategies as st

LEVELS = ("FAIL", "WARN", "UNKNOWN", "PASS")
FAILED_ITSELF = "unexpected_error"
JUNK: list[Any] = [None, True, -1, 10**400, 1e308, float("nan"), "", "x", "\ud800", "9" * 5000, "[" * 3000]
JUNK += ["0" * 300 + ",", [], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from paths(one, (*path, at))


def put(world: JsonObject, path: tuple[Any, ...], value: Any) -> None:
    at: Any = world
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value


PLACES = {
    name: [path for path in paths(recorded(name)) if path and path[0] not in ("now", "servers")] for name in WORLDS
}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=180)
@given(st.sampled_from(sorted(WORLDS)), st.integers(0, 10**6), st.sampled_from(JUNK).map(copy.deepcopy) | ANY_JSON)
def test_any_value_anywhere_makes_no_check_fail_itself(name: str, at: int, value: Any) -> None:
    world = recorded(name)
    put(world, PLACES[name][at % len(PLACES[name])], value)
    report = checked(world)
    assert report["result"] in LEVELS
    assert not [finding for finding in report["findings"] if finding["cause"] == FAILED_ITSELF]
    again = checked(recorded(name), before=report)
    assert again["result"] == "PASS"


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_evidence_as_text_is_the_same_evidence(name: str) -> None:
    world = recorded(name)
    as_text = {**world, "evidence": {node: json.dumps(one) for node, one in world["evidence"].items()}}
    assert checked(as_text) == checked(world)


@pytest.mark.parametrize("text", ["", "{", '"x"', "[]", "null", "[" * 100000, "9" * 5000])
def test_text_that_isnt_evidence_is_unknown(text: str) -> None:
    world = recorded(sorted(WORLDS)[0])
    report = checked({**world, "evidence": dict.fromkeys(world["evidence"], text)})
    assert report["result"] == "UNKNOWN" and not failing(report)
    assert {finding["node"] for finding in report["findings"]} >= set(world["evidence"])


# --------------------------------------------------------------------------- missing evidence


def truncated(world: JsonObject) -> None:
    sentence = "kubelet_internal_checkpoint isn't JSON: it ends after 512 bytes"
    checkpoint(world).update(state="unreadable", problem=sentence, entries=[])


def strange(world: JsonObject) -> None:
    checkpoint(world).update(state="unknown", problem="kubelet_internal_checkpoint is of a version that isn't known")


def hangs(world: JsonObject) -> None:
    world["evidence"][NODE]["nvml"] = {"available": False, "problem": "NVML didn't answer in 20 s", "cards": []}


def unlisted(world: JsonObject) -> None:
    listing(world).update(state="missing", problem="there is no pod-resources/kubelet.sock", pods=[])


def undecodable(world: JsonObject) -> None:
    for one in checkpoint(world)["entries"]:
        one.update(envs=None, cdi_devices=[], problem="its AllocResp isn't a message of the device plugin API")


def not_available(world: JsonObject) -> None:
    for one in nvml(world)["cards"]:
        for each in one["processes"]:
            each["used_mib"] = None
        one["limits"] = None


def unobserved(world: JsonObject) -> None:
    world["evidence"].clear()


def no_processes(world: JsonObject) -> None:
    for one in nvml(world)["cards"]:
        one["processes"] = None


WITHOUT_DATA: list[tuple[str, Callable[[JsonObject], None], str, set[str]]] = [
    ("ours_envvar", truncated, "it ends after 512 bytes", {"C4", "C5", "G7", "G8"}),
    ("upstream_single", truncated, "it ends after 512 bytes", {"C4", "C5", "G4", "G7", "G8"}),
    ("hami_text", truncated, "it ends after 512 bytes", {"C4", "C5", "H6"}),
    ("nvidia_mps", truncated, "it ends after 512 bytes", {"C4", "N2"}),
    ("ours_cdi", strange, "of a version that isn't known", {"C4", "C5", "G7", "G8"}),
    ("ours_envvar", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C5", "C7", "G1", "G9"}),
    ("upstream_head", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C5", "C7", "G1", "G2", "G9"}),
    ("hami_json", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C7", "H1", "H8", "H9"}),
    ("hami_mig", hangs, "NVML didn't answer in 20 s", {"C2", "H1", "H11"}),
    ("nvidia_time_slicing", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N5"}),
    ("nvidia_mps", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N6"}),
    ("nvidia_mig_mixed", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N7"}),
    ("ours_several", unlisted, "pod-resources/kubelet.sock", {"C4", "G8"}),
    ("upstream_2019", undecodable, "isn't a message of the device plugin API", {"G7"}),
    ("hami_json", undecodable, "isn't a message of the device plugin API", {"H6"}),
    ("nvidia_exclusive", undecodable, "isn't a message of the device plugin API", {"N3"}),
    ("ours_cdi", not_available, "NVML reports N/A", {"G9"}),
    ("hami_json", not_available, "NVML reports N/A", {"H9"}),
    ("nvidia_time_slicing", not_available, "NVML reports N/A", {"N5"}),
    ("nvidia_mps", not_available, "NVML reports N/A", {"N6"}),
    ("ours_cdi", no_processes, "NVML doesn't list them", {"C2", "C3"}),
    ("ours_envvar", unobserved, "machine wasn't observed in this run", {"C2", "C4", "C9", "G1", "G7"}),
    ("hami_text", unobserved, "machine wasn't observed in this run", {"C2", "C9", "H1", "H6"}),
    ("nvidia_exclusive", unobserved, "machine wasn't observed in this run", {"C2", "C9", "N1", "N2"}),
]


@pytest.mark.parametrize(
    ("name", "change", "message", "checks"),
    WITHOUT_DATA,
    ids=[f"{name}-{change.__name__}" for name, change, *_rest in WITHOUT_DATA],
)
def test_missing_evidence_is_unknown(
    name: str, change: Callable[[JsonObject], None], message: str, checks: set[str]
) -> None:
    world = recorded(name)
    change(world)
    report = checked(world)
    assert report["result"] == "UNKNOWN", found(report, "FAIL", "WARN")
    unknown = {
        finding["check"]
        for finding in report["findings"]
        if finding["level"] == "UNKNOWN" and message in finding["what"]
    }
    assert checks <= unknown, found(report, "UNKNOWN")
    # A second sample without data doesn't change the result.
    assert checked(world, before=report)["result"] == "UNKNOWN"


ALLOCATED = "hami.io/vgpu-devices-allocated"
ABSURD: list[tuple[str, str, Callable[[JsonObject], Any], str]] = [
    ("ours_envvar", "G3", lambda w: notes(w).update({contract.POD_INDEX: "9" * 500}), "is no GPU of the node"),
    ("ours_envvar", "G3", lambda w: notes(w).update({contract.POD_INDEX: "-1"}), "is no GPU of the node"),
    ("upstream_head", "G3", lambda w: notes(w).update({contract.POD_UNITS: "two"}), "is 'two', and should be 2"),
    ("upstream_head", "G3", lambda w: notes(w).update({contract.POD_CARD_UNITS: None}), "DEV is missing"),
    ("ours_cdi", "G3", lambda w: notes(w).update({contract.POD_ASSUME_TIME: "1e400"}), "is not a time"),
    ("ours_cdi", "C9", lambda w: node_notes(w).update({contract.NODE_CARDS: "[{"}), "share/cards can't be read"),
    ("hami_json", "H1", lambda w: node_notes(w).update({REGISTER: "[{]"}), "isn't valid JSON"),
    ("hami_json", "H3", lambda w: notes(w).update({ALLOCATED: "GPU-1,NVIDIA,many,30:;"}), "isn't UUID, vendor"),
    ("hami_mig", "H11", lambda w: notes(w).update({"hami.io/vgpu-mig-allocations": "{"}), "of the pod are unknown"),
    ("hami_json", "H7", lambda w: node_notes(w).update({"hami.io/mutex.lock": "now"}), "no readable time"),
    ("upstream_head", "C9", lambda w: resource(w, contract.RESOURCE_COUNT, "1e9", "capacity"), "more GPUs"),
    ("ours_envvar", "G10", lambda w: w.update(extender={"cp1": "connection refused"}), "connection refused"),
    ("ours_envvar", "G10", lambda w: w.update(extender={"cp1": [1]}), "is no JSON object"),
    ("ours_envvar", "G10", lambda w: w.update(extender={"cp1": {"nodes": [], "error": "not ready"}}), "not ready"),
    ("ours_envvar", "G10", lambda w: w.update(extender=None), "no extender was queried"),
    ("ours_envvar", "C9", lambda w: w["evidence"].update({NODE: "gone"}), "its evidence is the text 'gone'"),
    ("ours_envvar", "C9", lambda w: w["pods"].append(7), "an entry of the list of pods is the number 7"),
    ("ours_envvar", "C9", lambda w: card(w).update(processes={}), "nvml GPU 0 processes is an object"),
    ("ours_envvar", "C9", lambda w: entry(w).update(ids="5a4d7f21-0"), "checkpoint ids is the text"),
    ("ours_envvar", "C2", lambda w: card(w)["processes"][0].update(where="unknown", pod_uid=""), "can't be determined"),
    ("ours_envvar", "C2", lambda w: card(w)["processes"][0].update(where="x", pod_uid=""), "can't be determined"),
    ("ours_envvar", "C2", lambda w: nvml(w).update(cards=None), "NVML's GPUs are nothing"),
    ("ours_cdi", "C7", lambda w: card(w).update(memory=None, problem="GPU is lost"), "GPU is lost"),
    ("ours_several", "C7", lambda w: card(w, 1).update(uuid=uuid(1)), "two GPUs with the same index or UUID"),
    ("ours_envvar", "G7", lambda w: entry(w).update(ids=[]), "device IDs of container main-0 are unknown"),
    ("upstream_head", "G1", lambda w: card(w).update(minor=None), "the /dev/nvidiaN of"),
    ("nvidia_mps", "N2", lambda w: entry(w).update(ids=[]), "the devices of container main are unknown"),
    ("nvidia_mps", "N6", lambda w: card(w)["processes"][1].update(types=[]), "by MPS is unknown"),
    ("ours_envvar", "S1", lambda w: w["servers"].update(problem="no group"), "scheduler is unknown: no group"),
]


@pytest.mark.parametrize(
    ("name", "check", "change", "message"), ABSURD, ids=[f"{at}-{one[1]}-{one[0]}" for at, one in enumerate(ABSURD)]
)
def test_absurd_data_is_reported_by_the_right_check(
    name: str, check: str, change: Callable[[JsonObject], Any], message: str
) -> None:
    """As UNKNOWN, but for the annotations that the extender writes: these are wrong, which is a FAIL."""
    world = recorded(name)
    change(world)
    report = checked(world)
    level = "FAIL" if check == "G3" else "UNKNOWN"
    texts = [
        finding["what"] for finding in report["findings"] if (finding["check"], finding["level"]) == (check, level)
    ]
    assert any(message in text for text in texts), found(report, *LEVELS)
    assert all(len(finding["what"]) < 700 for finding in report["findings"])


def test_an_unexpected_exception_makes_the_check_unknown_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        check if check.id != "G6" else dataclasses.replace(check, node=lambda *_all: 1 / 0) for check in registry.CHECKS
    ]
    monkeypatch.setattr(registry, "CHECKS", tuple(broken))
    world = recorded("ours_envvar")
    card(world)["minor"] = 3
    report = checked(world)
    assert failing(report) == {"G1"}
    assert found(report, "UNKNOWN") == [
        "G6 UNKNOWN: this check failed on what was collected (ZeroDivisionError: division by zero)"
    ]


def test_huge_shares_stay_numbers() -> None:
    world = recorded("ours_envvar")
    rows = json.loads(node_notes(world)[contract.NODE_CARDS])
    rows[0]["units"] = 10**400
    node_notes(world)[contract.NODE_CARDS] = json.dumps(rows)
    report = checked(world)
    assert "G1" in failing(report)
    assert all(len(finding["what"]) < 700 for finding in report["findings"])
    sizes = [one[key] for one in report["nodes"][0]["cards"] for key in ("total_mib", "claimed_mib")]
    assert all(size is None or size <= 10**15 for size in sizes)
