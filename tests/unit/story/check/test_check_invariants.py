# SPDX-License-Identifier: GPL-3.0-or-later
"""Every invariant over recorded clusters: healthy ones pass, and one thing that goes wrong is found by one check."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check_run import CHECKS
from check_kit import SNAPSHOTS, checked, failing, found, recorded
from check_mutations import MUTATIONS, Mutation
from check_table import PAGE, page, recording
from check_worlds import NODE, WORLDS

EVERY = (
    [f"C{n}" for n in range(1, 10)]
    + [f"G{n}" for n in range(1, 13)]
    + [f"H{n}" for n in range(1, 12)]
    + [f"N{n}" for n in range(1, 8)]
    + ["S1"]
)


def test_every_invariant_is_there_in_order() -> None:
    assert [check.id for check in CHECKS] == EVERY


@pytest.mark.parametrize("name", WORLDS)
def test_a_healthy_cluster_passes(name: str) -> None:
    report = checked(recorded(name))
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])
    assert report["counts"] == {"FAIL": 0, "WARN": 0, "UNKNOWN": 0, "PASS": len(EVERY)}
    # Nothing passes because nobody looked.
    own = {"ours": "G", "upst": "G", "hami": "H", "nvid": "N"}[name[:4]]
    looked = {one["id"] for one in report["checks"] if one["n"]}
    assert {"C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "S1", f"{own}1", f"{own}2", f"{own}3"} <= looked


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.id)
def test_exactly_this_check_finds_it(mutation: Mutation) -> None:
    world = recorded(mutation.world)
    mutation.change(world)
    report = checked(world)
    everything = found(report, "FAIL", "WARN", "UNKNOWN")
    assert failing(report) == ({mutation.check} if mutation.level == "FAIL" else set()), everything
    assert mutation.check in failing(report, mutation.level), everything
    mine = [one for one in report["findings"] if (one["check"], one["level"]) == (mutation.check, mutation.level)]
    assert any(mutation.says in one["what"] for one in mine), everything
    assert all(one["what"] and one["evidence"].keys() <= {"api", "kubelet", "nvml", "proc", "extender"} for one in mine)
    assert report["result"] == mutation.level or mutation.level == "UNKNOWN"
    assert any(one["evidence"] or one["check"] in ("S1", "C9") for one in mine)
    assert all(one["do"] for one in mine)
    assert all(one["node"] == NODE or one["check"] == "S1" or one["node"] == "gpu7" for one in mine)


@pytest.mark.parametrize("check", EVERY)
def test_every_invariant_has_a_mutation(check: str) -> None:
    assert any(one.check == check for one in MUTATIONS)


def test_names_of_mutations_are_their_own() -> None:
    assert len({one.id for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("name", WORLDS)
def test_the_recording_is_the_builders(name: str) -> None:
    assert (SNAPSHOTS / f"{name}.json").read_text() == recording(name), "run check_table.py --write"


def test_nothing_else_is_recorded() -> None:
    assert {one.stem for one in SNAPSHOTS.iterdir()} == set(WORLDS)


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "run check_table.py --write"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.id)
def test_two_samples_tell_a_race_from_a_fault(mutation: Mutation) -> None:
    """What only one of two samples has is no finding; what both have is, and says so."""
    healthy, broken = recorded(mutation.world), recorded(mutation.world)
    mutation.change(broken)
    first, calm = checked(broken), checked(healthy)
    stays = checked(copy.deepcopy(broken), before=first)
    mine = [one for one in stays["findings"] if one["check"] == mutation.check and one["level"] == mutation.level]
    assert mine and all(one["seen"] == 2 for one in mine)
    assert stays["samples"] == 2 and stays["transient"] == 0
    went = checked(healthy, before=first)
    assert (went["result"], went["findings"]) == ("PASS", [])
    assert went["transient"] == sum(one["level"] in ("FAIL", "WARN") for one in first["findings"])
    came = checked(broken, before=calm)
    assert not failing(came) and not failing(came, "WARN")
    if mutation.level != "UNKNOWN":
        assert came["transient"] >= 1
