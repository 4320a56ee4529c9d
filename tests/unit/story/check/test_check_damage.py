# SPDX-License-Identifier: GPL-3.0-or-later
"""Evidence that is missing, broken or absurd: UNKNOWN by the right check, never a pass, never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _check_run
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from check_kit import checked, failing, found, recorded
from check_mutations import card, checkpoint, entry, listing, node, notes, nvml
from check_worlds import NODE, WORLDS, uuid
from hypothesis import given, settings
from hypothesis import strategies as st

Json = dict[str, Any]
LEVELS = ("FAIL", "WARN", "UNKNOWN", "PASS")
WRAPPER = "this check can't be made"
JUNK: list[Any] = [
    None,
    True,
    -1,
    10**400,
    1e308,
    float("nan"),
    "",
    "x",
    "\ud800",
    "9" * 5000,
    "[" * 3000,
    "0" * 300 + ",",
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"a": {"b": [1]}},
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield from paths(one, (*path, at))


def put(world: Json, path: tuple[Any, ...], value: Any) -> None:
    at: Any = world
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value


PLACES = {name: [one for one in paths(recorded(name)) if one and one[0] != "now"] for name in WORLDS}


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(WORLDS)), at=st.integers(0, 10**6), junk=st.integers(0, len(JUNK) - 1))
def test_junk_anywhere_breaks_nothing(name: str, at: int, junk: int) -> None:
    world = recorded(name)
    put(world, PLACES[name][at % len(PLACES[name])], copy.deepcopy(JUNK[junk]))
    report = checked(world)
    assert report["result"] in LEVELS
    assert not [one for one in report["findings"] if WRAPPER in one["what"]]
    again = checked(recorded(name), before=report)
    assert again["result"] == "PASS"


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_evidence_as_text_is_the_same_evidence(name: str) -> None:
    world = recorded(name)
    as_text = {**world, "evidence": {node: json.dumps(one) for node, one in world["evidence"].items()}}
    assert checked(as_text) == checked(world)


@pytest.mark.parametrize("text", ["", "{", '"x"', "[]", "null", "[" * 100000, "9" * 5000])
def test_text_that_is_no_evidence_is_unknown(text: str) -> None:
    world = recorded(sorted(WORLDS)[0])
    report = checked({**world, "evidence": dict.fromkeys(world["evidence"], text)})
    assert report["result"] == "UNKNOWN" and not failing(report)
    assert {one["node"] for one in report["findings"]} >= set(world["evidence"])


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(WORLDS)),
    at=st.integers(0, 10**6),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_any_json_anywhere_breaks_nothing(name: str, at: int, value: Any) -> None:
    world = recorded(name)
    put(world, PLACES[name][at % len(PLACES[name])], value)
    assert not [one for one in checked(world)["findings"] if WRAPPER in one["what"]]


# --------------------------------------------------------------------------- never a pass


def truncated(world: Json) -> None:
    sentence = "kubelet_internal_checkpoint isn't JSON: it ends after 512 bytes"
    checkpoint(world).update(state="unreadable", problem=sentence, entries=[])


def strange(world: Json) -> None:
    checkpoint(world).update(state="unknown", problem="kubelet_internal_checkpoint is of a version that isn't known")


def hangs(world: Json) -> None:
    world["evidence"][NODE]["nvml"] = {"available": False, "problem": "NVML didn't answer in 20 s", "cards": []}


def unlisted(world: Json) -> None:
    listing(world).update(state="missing", problem="there is no pod-resources/kubelet.sock", pods=[])


def undecodable(world: Json) -> None:
    for one in checkpoint(world)["entries"]:
        one.update(envs=None, cdi_devices=[], problem="its AllocResp isn't a message of the device plugin API")


def not_available(world: Json) -> None:
    for one in nvml(world)["cards"]:
        for each in one["processes"]:
            each["used_mib"] = None
        one["limits"] = None


def unlooked(world: Json) -> None:
    world["evidence"].clear()


def no_processes(world: Json) -> None:
    for one in nvml(world)["cards"]:
        one["processes"] = None


BLIND: list[tuple[str, Callable[[Json], None], str, set[str], str]] = [
    ("ours_envvar", truncated, "it ends after 512 bytes", {"C4", "C5", "G7", "G8"}, "UNKNOWN"),
    ("upstream_single", truncated, "it ends after 512 bytes", {"C4", "C5", "G4", "G7", "G8"}, "UNKNOWN"),
    ("hami_text", truncated, "it ends after 512 bytes", {"C4", "C5", "H6"}, "UNKNOWN"),
    ("nvidia_mps", truncated, "it ends after 512 bytes", {"C4", "N2"}, "UNKNOWN"),
    ("ours_cdi", strange, "of a version that isn't known", {"C4", "C5", "G7", "G8"}, "UNKNOWN"),
    ("ours_envvar", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C5", "C7", "G1", "G9"}, "UNKNOWN"),
    ("upstream_head", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C5", "C7", "G1", "G2", "G9"}, "UNKNOWN"),
    ("hami_json", hangs, "NVML didn't answer in 20 s", {"C2", "C3", "C7", "H1", "H8", "H9"}, "UNKNOWN"),
    ("hami_mig", hangs, "NVML didn't answer in 20 s", {"C2", "H1", "H11"}, "UNKNOWN"),
    ("nvidia_time_slicing", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N5"}, "UNKNOWN"),
    ("nvidia_mps", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N6"}, "UNKNOWN"),
    ("nvidia_mig_mixed", hangs, "NVML didn't answer in 20 s", {"C2", "C7", "N1", "N7"}, "UNKNOWN"),
    ("ours_several", unlisted, "pod-resources/kubelet.sock", {"C4", "G8"}, "UNKNOWN"),
    ("upstream_2019", undecodable, "isn't a message of the device plugin API", {"G7"}, "UNKNOWN"),
    ("hami_json", undecodable, "isn't a message of the device plugin API", {"H6"}, "UNKNOWN"),
    ("nvidia_exclusive", undecodable, "isn't a message of the device plugin API", {"N3"}, "UNKNOWN"),
    ("ours_cdi", not_available, "NVML says N/A", {"G9"}, "UNKNOWN"),
    ("hami_json", not_available, "NVML says N/A", {"H9"}, "UNKNOWN"),
    ("nvidia_time_slicing", not_available, "NVML says N/A", {"N5"}, "UNKNOWN"),
    ("nvidia_mps", not_available, "NVML says N/A", {"N6"}, "UNKNOWN"),
    ("ours_cdi", no_processes, "NVML doesn't list them", {"C2", "C3"}, "UNKNOWN"),
    ("ours_envvar", unlooked, "its machine wasn't looked at in this run", {"C2", "C4", "C9", "G1", "G7"}, "UNKNOWN"),
    ("hami_text", unlooked, "its machine wasn't looked at in this run", {"C2", "C9", "H1", "H6"}, "UNKNOWN"),
    ("nvidia_exclusive", unlooked, "its machine wasn't looked at in this run", {"C2", "C9", "N1", "N2"}, "UNKNOWN"),
]


@pytest.mark.parametrize(
    ("name", "change", "says", "checks", "result"),
    BLIND,
    ids=[f"{name}-{change.__name__}" for name, change, *_rest in BLIND],
)
def test_missing_evidence_is_unknown(
    name: str, change: Callable[[Json], None], says: str, checks: set[str], result: str
) -> None:
    world = recorded(name)
    change(world)
    report = checked(world)
    assert report["result"] == result, found(report, "FAIL", "WARN")
    told = {one["check"] for one in report["findings"] if one["level"] == "UNKNOWN" and says in one["what"]}
    assert checks <= told, found(report, "UNKNOWN")
    # A second look that is as blind is no better.
    assert checked(world, before=report)["result"] == result


ABSURD: list[tuple[str, str, Callable[[Json], Any], str, str]] = [
    ("ours_envvar", "G3", lambda w: notes(w).update({contract.POD_INDEX: "9" * 500}), "is no card of the node", "FAIL"),
    ("ours_envvar", "G3", lambda w: notes(w).update({contract.POD_INDEX: "-1"}), "is no card of the node", "FAIL"),
    (
        "upstream_head",
        "G3",
        lambda w: notes(w).update({contract.POD_UNITS: "two"}),
        "is 'two', and should be 2",
        "FAIL",
    ),
    ("upstream_head", "G3", lambda w: notes(w).update({contract.POD_CARD_UNITS: None}), "DEV is missing", "FAIL"),
    ("ours_cdi", "G3", lambda w: notes(w).update({contract.POD_ASSUME_TIME: "1e400"}), "is no time", "FAIL"),
    (
        "ours_cdi",
        "C9",
        lambda w: node(w)["metadata"]["annotations"].update({contract.NODE_CARDS: "[{"}),
        "node annotation kubegpu.share/cards can't be read",
        "UNKNOWN",
    ),
    (
        "hami_json",
        "H1",
        lambda w: node(w)["metadata"]["annotations"].update({"hami.io/node-nvidia-register": "[{]"}),
        "isn't the JSON that it begins as",
        "UNKNOWN",
    ),
    (
        "hami_json",
        "H3",
        lambda w: notes(w).update({"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,many,30:;"}),
        "has an entry that isn't UUID, vendor, MiB and cores",
        "UNKNOWN",
    ),
    (
        "hami_mig",
        "H11",
        lambda w: notes(w).update({"hami.io/vgpu-mig-allocations": "{"}),
        "which MIG devices it holds can't be told",
        "UNKNOWN",
    ),
    (
        "hami_json",
        "H7",
        lambda w: node(w)["metadata"]["annotations"].update({"hami.io/mutex.lock": "now"}),
        "no time",
        "UNKNOWN",
    ),
    (
        "upstream_head",
        "C9",
        lambda w: node(w)["status"]["capacity"].update({contract.RESOURCE_COUNT: "1e9"}),
        "more cards",
        "UNKNOWN",
    ),
    ("ours_envvar", "G10", lambda w: w.update(extender={"cp1": "connection refused"}), "connection refused", "UNKNOWN"),
    ("ours_envvar", "G10", lambda w: w.update(extender={"cp1": [1]}), "is no JSON object", "UNKNOWN"),
    (
        "ours_envvar",
        "G10",
        lambda w: w.update(extender={"cp1": {"nodes": [], "error": "not ready"}}),
        "not ready",
        "UNKNOWN",
    ),
    ("ours_envvar", "G10", lambda w: w.update(extender=None), "no extender was asked", "UNKNOWN"),
    ("ours_envvar", "C9", lambda w: w["evidence"].update({NODE: "gone"}), "its evidence is the text 'gone'", "UNKNOWN"),
    ("ours_envvar", "C9", lambda w: w["pods"].append(7), "an entry of the list of pods is the number 7", "UNKNOWN"),
    ("ours_envvar", "C9", lambda w: card(w).update(processes={}), "nvml card 0 processes is an object", "UNKNOWN"),
    ("ours_envvar", "C9", lambda w: entry(w).update(ids="5a4d7f21-0"), "checkpoint ids is the text", "UNKNOWN"),
    (
        "ours_envvar",
        "C2",
        lambda w: card(w)["processes"][0].update(where="unknown", pod_uid=""),
        "can't be told",
        "UNKNOWN",
    ),
    ("ours_envvar", "C2", lambda w: nvml(w).update(cards=None), "NVML's cards are nothing", "UNKNOWN"),
    ("ours_cdi", "C7", lambda w: card(w).update(memory=None, problem="GPU is lost"), "GPU is lost", "UNKNOWN"),
    (
        "ours_several",
        "C7",
        lambda w: card(w, 1).update(uuid=uuid(1)),
        "two cards with the same index or UUID",
        "UNKNOWN",
    ),
    ("ours_envvar", "G7", lambda w: entry(w).update(ids=[]), "isn't told", "UNKNOWN"),
    ("upstream_head", "G1", lambda w: card(w).update(minor=None), "which /dev/nvidiaN", "UNKNOWN"),
    ("nvidia_mps", "N2", lambda w: entry(w).update(ids=[]), "which devices container main has isn't told", "UNKNOWN"),
    ("nvidia_mps", "N6", lambda w: card(w)["processes"][1].update(types=[]), "can't be told", "UNKNOWN"),
    ("ours_envvar", "S1", lambda w: w.update(story={"passed": "yes"}), "story.passed is the text 'yes'", "UNKNOWN"),
]


@pytest.mark.parametrize(
    ("name", "check", "change", "says", "level"),
    ABSURD,
    ids=[f"{at}-{one[1]}-{one[0]}" for at, one in enumerate(ABSURD)],
)
def test_junk_is_told_by_the_right_check(
    name: str, check: str, change: Callable[[Json], Any], says: str, level: str
) -> None:
    world = recorded(name)
    change(world)
    report = checked(world)
    assert any((one["check"], one["level"]) == (check, level) and says in one["what"] for one in report["findings"]), (
        found(report, *LEVELS)
    )
    assert all(len(one["what"]) < 700 for one in report["findings"])


def test_a_check_that_fails_itself_is_unknown_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        one if one.id != "G6" else _check_run.Check("G6", "gpushare", "x", "y", "FAIL", node=lambda *_all: 1 / 0)
        for one in _check_run.CHECKS
    ]
    monkeypatch.setattr(_check_run, "CHECKS", tuple(broken))
    world = recorded("ours_envvar")
    card(world)["minor"] = 3
    report = checked(world)
    assert failing(report) == {"G1"}
    assert found(report, "UNKNOWN") == [
        f"G6 UNKNOWN: {WRAPPER} of what was found (ZeroDivisionError: division by zero)"
    ]


def test_a_report_of_nonsense_is_refused_in_one_sentence() -> None:
    from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

    for nonsense in ({}, {"findings": None}, {"findings": [1]}, {"findings": [{"check": 7}]}):
        with pytest.raises(BadInput, match=r"^before: "):
            checked(recorded("ours_cdi"), before=nonsense)


def test_huge_shares_stay_numbers() -> None:
    world = recorded("ours_envvar")
    annotations = node(world)["metadata"]["annotations"]
    rows = json.loads(annotations[contract.NODE_CARDS])
    rows[0]["units"] = 10**400
    annotations[contract.NODE_CARDS] = json.dumps(rows)
    report = checked(world)
    assert "G1" in failing(report)
    assert all(len(one["what"]) < 700 for one in report["findings"])
    sizes = [one[key] for one in report["nodes"][0]["cards"] for key in ("total_mib", "claimed_mib")]
    assert all(one is None or one <= 10**15 for one in sizes)
