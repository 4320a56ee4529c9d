# SPDX-License-Identifier: GPL-3.0-or-later
"""Two samples of a cluster in which pods come and go: transient findings don't count, lasting ones do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, failing, found, recorded
from check_mutations import card, checkpoint, devs, entry, listing, node, node_notes, notes, resource, the_pod
from check_worlds import GPU, MEM, NODE, container, our_cards, our_entries, our_pod, pod, pod_uid, process, uuid

CARDS = our_cards(16, 40)
LEVELS = ("FAIL", "WARN", "UNKNOWN")


def both(first: JsonObject, second: JsonObject) -> JsonObject:
    return checked(second, before=checked(first))


def passes(first: JsonObject, second: JsonObject, check: str, level: str = "FAIL") -> None:
    """Each sample alone has the finding, and both together don't."""
    for world in (first, second):
        assert check in failing(checked(world), level), found(checked(world), *LEVELS)
    report = both(first, second)
    assert report["result"] == "PASS", found(report, *LEVELS)
    assert report["transient"] or level == "UNKNOWN"


def stays(first: JsonObject, second: JsonObject, check: str, level: str = "FAIL") -> JsonObject:
    report = both(first, second)
    assert check in failing(report, level), found(report, *LEVELS)
    return report


def own_pod(number: int, units: int, at: int = 0, name: str = "churn") -> JsonObject:
    """A pod of this collection's gpushare with a UID of its own."""
    return our_pod(number, [CARDS[at]], units, name=name)


def add_pod(world: JsonObject, number: int, units: int, at: int = 0, name: str = "churn") -> JsonObject:
    """Add a pod that all sources know but the extender, which answered before the pod was created."""
    new = own_pod(number, units, at, name)
    new["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
    world["pods"].append(new)
    rows = our_entries(number, CARDS, [CARDS[at]], units)
    checkpoint(world)["entries"] += rows
    devices = [{"resource": MEM, "ids": list(rows[0]["ids"])}]
    listing(world)["pods"].append(
        {"namespace": "default", "name": name, "containers": [{"name": "main-0", "devices": devices}]}
    )
    return new


# --------------------------------------------------------------------------- sums of other pods


def overbooked(number: int, units: int = 15) -> JsonObject:
    world = recorded("ours_envvar")
    add_pod(world, number, units, name=f"job-{number}")
    return world


def test_a_sum_exceeded_by_the_same_pods_is_a_finding_though_others_come_and_go() -> None:
    first, second = overbooked(61), overbooked(61)
    add_pod(first, 62, 1, name="a")
    add_pod(second, 63, 1, name="b")
    stays(first, second, "G6")


def test_an_excess_of_transient_pods_alone_is_transient() -> None:
    """The pods of both samples are exactly what the card holds."""
    first, second = overbooked(61, 14), overbooked(61, 14)
    add_pod(first, 62, 1, name="a")
    add_pod(second, 63, 1, name="b")
    passes(first, second, "G6")


def hami_crowd(number: int, mib: int, cores: int) -> JsonObject:
    world = recorded("hami_json")
    annotations = dict(notes(world)) | {"hami.io/vgpu-devices-allocated": f"{uuid(1)},NVIDIA,{mib},{cores}:;"}
    new = pod(number, [container("main", {GPU: 1})], annotations, scheduler="hami-scheduler", name=f"job-{number}")
    new["metadata"]["deletionTimestamp"] = "2026-11-22T11:59:59Z"
    world["pods"].append(new)
    return world


def hami_slots(first: int) -> JsonObject:
    world = hami_crowd(first, 1, 0)
    world["pods"] += [hami_crowd(number, 1, 0)["pods"][-1] for number in range(first + 1, first + 10)]
    return world


def heavy(pid: int) -> JsonObject:
    """NVML lists more memory in processes than is in use on the GPU."""
    world = recorded("ours_cdi")
    # The memory in use was read before the process began.
    card(world)["processes"].append(process(1, pid, 40))
    card(world)["memory"]["used_mib"] = 2400
    return world


def test_memory_missing_in_the_second_sample_is_unknown() -> None:
    """Missing data needs no confirmation by the other sample."""
    second = recorded("ours_cdi")
    card(second)["memory"] = None
    stays(recorded("ours_cdi"), second, "C7", "UNKNOWN")


# --------------------------------------------------------------------------- one name, another pod


def fresh(number: int) -> JsonObject:
    """Add a pod that was created after the machine was observed."""
    world = recorded("ours_envvar")
    new = own_pod(number, 1)
    new["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
    world["pods"].append(new)
    return world


def test_a_report_without_uids_still_confirms() -> None:
    before = checked(fresh(61))
    for finding in before["findings"]:
        del finding["pod_uid"]
    assert "C4" in failing(checked(fresh(62), before=before))


def cached(uid: str) -> JsonObject:
    """Add a pod to the extender's cache only."""
    world = recorded("ours_envvar")
    devs(world)[0]["pods"].append({"namespace": "default", "name": "sts-0", "usedGPU": 1, "uid": uid})
    return world


def test_the_extender_may_list_a_pending_pod() -> None:
    world = recorded("ours_envvar")
    waits = pod(61, [container("main", {MEM: 1})], name="waits")
    del waits["spec"]["nodeName"]
    waits["status"] = {"phase": "Pending"}
    world["pods"].append(waits)
    devs(world)[0]["pods"].append({"namespace": "default", "name": "waits", "usedGPU": 1})
    assert found(checked(world), *LEVELS) == []
    devs(world)[0]["pods"][-1]["name"] = "gone"
    assert failing(checked(world)) == {"G10"}


def test_one_extender_after_the_other_is_transient() -> None:
    first, second = recorded("ours_cdi"), recorded("ours_cdi")
    for world, stale in ((first, "cp1"), (second, "cp2")):
        world["extender"] = {one: copy.deepcopy(world["extender"]["cp1"]) for one in ("cp1", "cp2")}
        world["extender"][stale]["nodes"] = []
    passes(first, second, "G10")


# --------------------------------------------------------------------------- kubelet with two pods of a name


def succeeded() -> JsonObject:
    """A pod whose predecessor of its name was deleted by force: kubelet lists it (8 units) beside the pod (2 units)."""
    world = recorded("ours_envvar")
    rows = listing(world)["pods"]
    old = copy.deepcopy(rows[0])
    old["containers"][0]["devices"][0]["ids"] = [f"5a4d7f21-{slot}" for slot in range(100, 108)]
    rows.insert(0, old)
    return world


def test_two_pods_of_one_name_in_podresources_are_not_added_up() -> None:
    assert found(checked(succeeded()), *LEVELS) == []


def test_the_checkpoint_distinguishes_them() -> None:
    world = succeeded()
    del checkpoint(world)["entries"][0]
    assert failing(checked(world)) == {"C4"}
    world = succeeded()
    entry(world)["ids"].append("5a4d7f21-99")
    entry(world)["count"] += 1
    assert "G8" in failing(checked(world))


def test_annotations_are_not_checked_while_kubelet_lists_two_pods_of_the_name() -> None:
    for change in ({contract.POD_ASSIGNED: "false"}, {contract.POD_INDEX: "1", contract.POD_CARD_UNITS: "40"}, None):
        world = succeeded()
        devs(world)[0]["pods"] = []
        the_pod(world)["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
        if change is None:
            notes(world).clear()
        else:
            notes(world).update(change)
        assert found(checked(world), *LEVELS) == []
        listing(world)["pods"].pop(0)
        assert failing(checked(world))


# --------------------------------------------------------------------------- nodes and cards


def short_of(name: str) -> JsonObject:
    """None of this resource's devices is allocatable."""
    world = recorded("nvidia_mig_mixed")
    for one in MIG:
        resource(world, one, 1)
    resource(world, name, 0, "allocatable")
    return world


def test_each_unhealthy_gpu_is_a_finding_of_its_own() -> None:
    def unhealthy(*indices: int) -> JsonObject:
        world = recorded("ours_several")
        cards = json.loads(node_notes(world)[contract.NODE_CARDS])
        for one in cards:
            one["healthy"] = one["index"] not in indices
        node_notes(world)[contract.NODE_CARDS] = json.dumps(cards)
        resource(world, MEM, 48 - 16 * len(indices), "allocatable")
        return world

    report = stays(unhealthy(1), unhealthy(0, 1), "C6")
    assert [finding["card"] for finding in report["findings"] if finding["check"] == "C6"] == [1]


def locked(name: str) -> JsonObject:
    """HAMi's lock of the node is that of this pod."""
    world = recorded("hami_json")
    node_notes(world)["hami.io/mutex.lock"] = f"2026-11-22T11:59:59Z,default,{name}"
    return world


@pytest.mark.parametrize(
    ("name", "check", "what"),
    [
        ("nvidia_time_slicing", "N1", GPU),
        ("hami_json", "H2", GPU),
        ("ours_cdi", "G2", MEM),
        ("upstream_head", "G2", MEM),
    ],
)
def test_numbers_that_change_between_samples_are_transient(name: str, check: str, what: str) -> None:
    def off(number: int) -> JsonObject:
        world = recorded(name)
        resource(world, what, int(node(world)["status"]["capacity"][what]) + number)
        return world

    report = both(off(1), off(2))
    assert check not in failing(report), found(report, *LEVELS)
    stays(off(1), off(1), check)


def orphaned(number: int) -> JsonObject:
    """A pod of a deleted node."""
    world = fresh(number)
    the_pod(world, -1)["spec"]["nodeName"] = "gpu9"
    return world


def test_a_pod_of_a_deleted_node() -> None:
    (mine,) = [finding for finding in checked(orphaned(61))["findings"] if finding["check"] == "C9"]
    assert (mine["node"], mine["pod"]) == ("gpu9", "default/churn") and mine["cause"] == "orphaned_pod"
    other = orphaned(61)
    the_pod(other, -1)["spec"]["containers"][0]["resources"] = {}
    assert found(checked(other), *LEVELS) == []


# --------------------------------------------------------------------------- a first sample without data


def without_data(world: JsonObject) -> JsonObject:
    world["evidence"][NODE] = {"nvml": None, "kubelet": None, "problem": "its machine can't be reached: timeout"}
    return world


def test_a_finding_without_data_in_the_first_sample_is_unknown() -> None:
    second = recorded("ours_envvar")
    card(second)["processes"].append(process(80, 6, 10))
    report = both(without_data(recorded("ours_envvar")), second)
    assert report["result"] == "UNKNOWN" and failing(report, "UNKNOWN") == {"C2"}
    assert "(the first sample had no data for this)" in report["findings"][0]["what"]


def test_a_machine_without_evidence_confirms_nothing() -> None:
    second = recorded("ours_envvar")
    node(second)["status"]["conditions"][1]["status"] = "False"
    report = both(without_data(recorded("ours_envvar")), second)
    assert not failing(report) and failing(report, "UNKNOWN") == {"C9"}


def test_of_a_warning_and_a_failure_the_milder_counts() -> None:
    def used(state: str) -> JsonObject:
        world = recorded("ours_envvar")
        node_notes(world)[contract.NODE_LIMIT] = state
        card(world)["processes"][0]["used_mib"] = 3000
        return world

    report = both(used("off"), used(contract.LIMIT_ENFORCED))
    assert (failing(report), failing(report, "WARN")) == (set(), {"G9"})
    stays(used(contract.LIMIT_ENFORCED), used(contract.LIMIT_ENFORCED), "G9")


def test_an_invalid_first_sample_is_refused() -> None:
    before = checked(overbooked(61))
    (mine,) = [finding for finding in before["findings"] if finding["check"] == "G6"]
    assert mine["most"] == 16 and sum(mine["parts"].values()) == 17
    invalid: list[JsonObject] = [{}, {"findings": None}, {"findings": [1]}, {"findings": [{"check": 7}]}]
    for change in ({"level": "BAD"}, {"parts": [1]}, {"most": "x"}, {"pod_uid": 7}, {"key": {}}):
        invalid.append({**before, "findings": [{**before["findings"][0], **change}]})
    for report in invalid:
        with pytest.raises(BadInput, match=r"^before: "):
            checked(overbooked(61), before=report)


def test_an_absurd_sum_can_be_parsed_again() -> None:
    world = recorded("ours_envvar")
    the_pod(world)["spec"]["containers"][0]["resources"]["limits"][MEM] = "9" * 20
    stays(world, copy.deepcopy(world), "G6")


# --------------------------------------------------------------------------- responses of NVIDIA's device plugin


def test_devices_by_mounts_and_mig_devices_by_index_are_unknown() -> None:
    for value in ("/var/run/nvidia-container-devices", "0:1"):
        world = recorded("nvidia_exclusive")
        entry(world).update(cdi_devices=[])
        entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = value
        report = checked(world)
        assert not failing(report) and failing(report, "UNKNOWN") == {"N3"}, found(report, *LEVELS)


def test_cdi_devices_beside_a_gpu_are_no_gpus() -> None:
    world = recorded("nvidia_exclusive")
    mine = entry(world)
    mine["envs"] = {"NVIDIA_VISIBLE_DEVICES": "void"}
    beside = [f"nvidia.com/{one}=all" for one in ("gds", "mofed", "gdrcopy")]
    mine["cdi_devices"] = [f"k8s.device-plugin.nvidia.com/gpu={one}" for one in mine["ids"]] + beside
    assert found(checked(world), *LEVELS) == []
    mine["cdi_devices"].append("k8s.device-plugin.nvidia.com/gpu=all")
    assert failing(checked(world)) == {"N3"}


# --------------------------------------------------------------------------- findings of one sample


def bare(pid: int) -> JsonObject:
    """A program on a GPU without an MPS server."""
    world = recorded("nvidia_mps")
    mine = card(world)
    mine["processes"] = [one for one in mine["processes"] if one["name"] != "nvidia-cuda-mps"][:1]
    mine["processes"][0]["pid"] = pid
    return world


def update(number: int) -> JsonObject:
    """Two device plugins on one node."""
    world = recorded("ours_cdi")
    (plugin,) = [one for one in world["pods"] if one["metadata"]["namespace"] == "kube-system"]
    more = copy.deepcopy(plugin)
    more["metadata"].update(uid=pod_uid(number), name=f"device-plugin-{number}")
    world["pods"].append(more)
    return world


def ended(number: int) -> JsonObject:
    """A pod that is deleted from the API, and still in kubelet's checkpoint and on the GPU."""
    world = recorded("ours_envvar")
    checkpoint(world)["entries"] += our_entries(number, CARDS, [CARDS[0]], 1)
    card(world)["processes"].append(process(number, 1000 + number, 10))
    return world


def bypass(number: int) -> JsonObject:
    """A pod without annotations yet."""
    world = recorded("ours_envvar")
    add_pod(world, number, 1, name=f"job-{number}")["metadata"]["annotations"] = {}
    return world


MIG = ("nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb")


@pytest.mark.parametrize(
    ("world", "one", "other", "check", "level"),
    [
        (overbooked, (61,), (62,), "G6", "FAIL"),
        (hami_crowd, (61, 16000, 0), (62, 16000, 0), "H5", "FAIL"),
        (hami_crowd, (61, 100, 99), (62, 100, 99), "H5", "FAIL"),
        (hami_crowd, (61, 100, 100), (62, 100, 100), "H5", "FAIL"),
        (hami_slots, (50,), (60,), "H5", "FAIL"),
        (heavy, (501,), (502,), "C7", "UNKNOWN"),
        (fresh, (61,), (62,), "C4", "FAIL"),
        (ended, (61,), (62,), "C2", "FAIL"),
        (cached, (pod_uid(61),), (pod_uid(62),), "G10", "FAIL"),
        (short_of, MIG[:1], MIG[1:], "C6", "FAIL"),
        (locked, ("job-1",), ("job-2",), "H7", "FAIL"),
        (bare, (501,), (502,), "N6", "FAIL"),
        (update, (61,), (62,), "C1", "FAIL"),
        (bypass, (61,), (62,), "G6", "UNKNOWN"),
        (orphaned, (61,), (62,), "C9", "FAIL"),
    ],
)
def test_a_finding_in_both_samples_counts_if_it_is_about_the_same_thing(
    world: Callable[..., JsonObject], one: tuple[Any, ...], other: tuple[Any, ...], check: str, level: str
) -> None:
    """Other pods are transient even if they have the same name."""
    passes(world(*one), world(*other), check, level)
    stays(world(*one), world(*one), check, level)


def test_pods_of_an_extender_that_reports_no_uids_are_compared_by_name() -> None:
    stays(cached(""), cached(""), "G10")


def test_a_terminating_pod_may_have_lost_its_mig_device() -> None:
    world = recorded("nvidia_mig_mixed")
    mine = card(world)
    lost = entry(world)["ids"][0].partition("::")[0]
    mine["mig"]["devices"] = [device for device in mine["mig"]["devices"] if device["uuid"] != lost]
    assert "C5" in failing(checked(world))
    the_pod(world)["metadata"]["deletionTimestamp"] = "2026-11-22T11:59:59Z"
    assert "C5" not in failing(checked(world))


def test_a_pod_waits_while_its_predecessor_ends() -> None:
    world = succeeded()
    the_pod(world)["status"] = {"phase": "Pending"}
    notes(world)[contract.POD_ASSIGNED] = "false"
    assert found(checked(world), *LEVELS) == []
    listing(world)["pods"].pop(0)
    assert failing(checked(world)) == {"G5"}


# --------------------------------------------------------------------------- a GPU without a UUID


@pytest.mark.parametrize(
    "name", ["ours_envvar", "upstream_head", "hami_json", "nvidia_exclusive", "nvidia_time_slicing"]
)
def test_a_gpu_without_a_uuid_is_unknown(name: str) -> None:
    """A GPU without a UUID may be any of those that are missing."""
    world = recorded(name)
    card(world).update(uuid="", memory=None, processes=None, limits=None, minor=None, compute_mode="unknown")
    card(world)["problem"] = "NVML gave no answer in 10 s"
    report = checked(world)
    assert not failing(report), found(report, *LEVELS)
    assert report["result"] == "UNKNOWN"
