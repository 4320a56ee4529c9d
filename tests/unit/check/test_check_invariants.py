# SPDX-License-Identifier: GPL-3.0-or-later
"""Every check over healthy clusters, which pass, and over injected faults, each of which one check reports."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check.catalog import CATALOG
from ansible_collections.kubegpu.share.plugins.module_utils._check.invariant import UNEXPECTED_ERROR
from ansible_collections.kubegpu.share.plugins.module_utils._check.registry import CHECKS
from check_kit import checked, failing, found, recorded
from check_mutations import MUTATIONS, Mutation
from check_table import PAGE, page
from check_worlds import GPU, NODE, WORLDS

NUMBERS = {"C": 9, "D": 11, "G": 12, "H": 11, "K": 3, "N": 7, "S": 5, "V": 4}
EVERY = [f"{letter}{n}" for letter, number in NUMBERS.items() for n in range(1, number + 1)]


def test_all_checks_are_registered_in_order() -> None:
    assert [check.id for check in CHECKS] == EVERY


@pytest.mark.parametrize("name", WORLDS)
def test_a_healthy_cluster_passes(name: str) -> None:
    report = checked(recorded(name))
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])
    assert report["counts"] == {"FAIL": 0, "WARN": 0, "UNKNOWN": 0, "PASS": len(EVERY)}
    # A check without anything to compare would pass, too.
    own = {"ours": "G", "clai": "D", "upst": "G", "hami": "H", "kata": "K", "nvid": "N", "virt": "V"}[name[:4]]
    compared = {check["id"] for check in report["checks"] if check["n"]}
    # Claims aren't a device plugin's, which has resources and allocations.
    common = {"C1", "C2", "C3", "C7", "C8", "C9"} | (set() if name.startswith("claims") else {"C4", "C5", "C6"})
    if own == "K":
        # NVIDIA's driver isn't there, nor are resources of containers.
        common = {"C1", "C9", "V1", "V2", "V3"}
    assert {*common, f"{own}1", f"{own}2", f"{own}3"} <= compared
    if own == "D":
        assert {f"D{number}" for number in (*range(1, 10), 11)} <= compared


def test_a_node_without_a_card_of_its_own_passes_and_may_announce_none() -> None:
    """NVIDIA's driver isn't there, and nothing of NVML's is unknown."""
    world = recorded("virtual_beside_shares")
    evidence, node = world["evidence"][NODE], world["nodes"][0]
    world["pods"] = []
    evidence["nvml"] = {"available": False, "problem": "there is no library", "cards": []}
    evidence["kubelet"]["checkpoint"].update(entries=[], registered={})
    evidence["kubelet"]["pod_resources"]["pods"] = []
    evidence["virtual_machines"]["others"] = 0
    node["metadata"]["labels"] = {}
    allocatable = dict(node["status"]["allocatable"])
    for field in ("capacity", "allocatable"):
        del node["status"][field][GPU]
    report = checked(world)
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])
    node["status"]["allocatable"] = allocatable
    causes = [one["cause"] for one in checked(world)["findings"] if one["check"] == "V3"]
    assert causes == ["nothing_left"]


def test_a_group_that_a_virtual_machine_has_passes_and_is_said() -> None:
    """Nobody can ask about it beside the machine."""
    world = recorded("virtual_beside_shares")
    world["evidence"][NODE]["virtual_machines"]["functions"][0]["state"] = "held"
    report = checked(world)
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])
    [node] = report["nodes"]
    assert [(row["address"], row["state"]) for row in node["virtual_machines"]] == [
        ("0000:02:00.0", "held"),
        ("0000:02:00.1", "viable"),
    ]


def test_a_machine_that_gave_no_answer_about_its_cards_for_virtual_machines_is_unknown() -> None:
    world = recorded("virtual_beside_shares")
    world["evidence"][NODE]["virtual_machines"] = {"problem": "virtual_machines_info: no result"}
    report = checked(world)
    unknown = {row["check"] for row in report["findings"] if row["level"] == "UNKNOWN"}
    assert unknown == {"V1", "V2", "V3", "V4"} and report["result"] != "PASS"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.id)
def test_exactly_this_check_reports_the_fault(mutation: Mutation) -> None:
    world = recorded(mutation.world)
    mutation.change(world)
    report = checked(world)
    everything = found(report, "FAIL", "WARN", "UNKNOWN")
    assert failing(report) == ({mutation.check} if mutation.level == "FAIL" else set()), everything
    assert mutation.check in failing(report, mutation.level), everything
    mine = [
        finding
        for finding in report["findings"]
        if (finding["check"], finding["level"]) == (mutation.check, mutation.level)
    ]
    assert any(one["cause"] == mutation.cause for one in mine), everything
    assert all(one["what"] and one["evidence"].keys() <= {"api", "kubelet", "nvml", "proc", "extender"} for one in mine)
    assert report["result"] == mutation.level or mutation.level == "UNKNOWN"
    assert any(one["evidence"] or one["check"][0] == "S" or one["check"] == "C9" for one in mine)
    assert all(one["do"] for one in mine)
    assert not [finding for finding in report["findings"] if finding["cause"] == UNEXPECTED_ERROR]
    cluster_wide = mutation.check[0] == "S" or mutation.check in ("D8", "D10")
    assert all(one["node"] == NODE or cluster_wide or one["node"] == "gpu7" for one in mine)


def test_every_check_has_mutations_of_their_own_names() -> None:
    assert {mutation.check for mutation in MUTATIONS} == set(EVERY)
    assert len({mutation.id for mutation in MUTATIONS}) == len(MUTATIONS)


def test_every_cause_says_what_to_do() -> None:
    causes = [
        (id, cause, unknown) for id, one in CATALOG.items() for cause in one.messages for unknown in (True, False)
    ]
    assert [cause for cause in causes if not CATALOG[cause[0]].message(*cause[1:])[1]] == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run check_table.py --write"


FIRST_OF_EACH = list({mutation.check: mutation for mutation in reversed(MUTATIONS)}.values())


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(mutation, marks=[] if mutation in FIRST_OF_EACH else pytest.mark.long) for mutation in MUTATIONS],
    ids=lambda one: one.id,
)
def test_two_samples_distinguish_transient_from_lasting_faults(mutation: Mutation) -> None:
    """A finding counts only if both samples have it."""
    healthy, broken = recorded(mutation.world), recorded(mutation.world)
    mutation.change(broken)
    first, calm = checked(broken), checked(healthy)
    stays = checked(copy.deepcopy(broken), before=first)
    mine = [
        finding
        for finding in stays["findings"]
        if finding["check"] == mutation.check and finding["level"] == mutation.level
    ]
    assert mine and all(one["seen"] == 2 for one in mine)
    assert stays["samples"] == 2 and stays["transient"] == 0
    went = checked(healthy, before=first)
    assert (went["result"], went["findings"]) == ("PASS", [])
    assert went["transient"] == sum(finding["level"] in ("FAIL", "WARN") for finding in first["findings"])
    came = checked(broken, before=calm)
    assert not failing(came) and not failing(came, "WARN")
    if mutation.level != "UNKNOWN":
        assert came["transient"] >= 1
