# SPDX-License-Identifier: GPL-3.0-or-later
"""Two moments of a cluster in which pods come and go all the while: what passes is no finding, what stays is one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._verification import Story, _shares
from check_kit import checked, failing, found, recorded
from check_mutations import card, checkpoint, entry, listed, listing, node, notes, nvml, resource, the_pod
from check_worlds import GPU, MEM, NODE, container, our_cards, our_entries, our_pod, pod, pod_uid, process, uuid

Json = dict[str, Any]
CARDS = our_cards(16, 40)
LEVELS = ("FAIL", "WARN", "UNKNOWN")


def both(first: Json, second: Json) -> Json:
    return checked(second, before=checked(first))


def passes(first: Json, second: Json, check: str, level: str = "FAIL") -> None:
    """Each sample finds it alone, and together they don't."""
    for world in (first, second):
        assert check in failing(checked(world), level), found(checked(world), *LEVELS)
    report = both(first, second)
    assert report["result"] == "PASS", found(report, *LEVELS)
    assert report["transient"] or level == "UNKNOWN"


def stays(first: Json, second: Json, check: str, level: str = "FAIL") -> Json:
    report = both(first, second)
    assert check in failing(report, level), found(report, *LEVELS)
    return report


def named(number: int, units: int, at: int = 0, name: str = "churn") -> Json:
    """A pod of ours with its own UID."""
    return our_pod(number, [CARDS[at]], units, name=name)


def comes(world: Json, number: int, units: int, at: int = 0, name: str = "churn") -> Json:
    """A pod that all planes know but the extender, which was asked before it came."""
    new = named(number, units, at, name)
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


def overbooked(number: int, units: int = 15) -> Json:
    world = recorded("ours_envvar")
    comes(world, number, units, name=f"job-{number}")
    return world


def test_two_moments_with_other_pods_too_many_are_no_finding() -> None:
    passes(overbooked(61), overbooked(62), "G6")


def test_the_same_pods_too_many_are_one_though_others_come_and_go() -> None:
    first, second = overbooked(61), overbooked(61)
    comes(first, 62, 1, name="a")
    comes(second, 63, 1, name="b")
    stays(first, second, "G6")


def test_what_a_card_has_too_much_by_pods_that_come_and_go_alone() -> None:
    """The pods of both samples are exactly what the card holds."""
    first, second = overbooked(61, 14), overbooked(61, 14)
    comes(first, 62, 1, name="a")
    comes(second, 63, 1, name="b")
    passes(first, second, "G6")


def test_the_same_sum_in_the_words_of_verification_info() -> None:
    """Its sentence is the same at both moments, and G6 is who knows the pods."""
    first, second = overbooked(61), overbooked(62)
    for world in (first, second):
        story = Story()
        _shares(story, node(world), world["pods"])
        assert "pods hold 17 units of card 0" in story.problems[0]
        world["story"]["problems"] = story.problems
    passes(first, second, "G6")
    bypass = recorded("ours_envvar")
    notes(bypass).clear()
    the_pod(bypass)["status"] = {"phase": "Pending"}
    story = Story()
    _shares(story, node(bypass), bypass["pods"])
    assert "of which the API doesn't say" in story.unknown[0]
    bypass["story"]["unknown"] = story.unknown
    assert not [one for one in checked(bypass)["findings"] if one["check"] == "S1"]


def test_other_words_of_verification_info_count() -> None:
    for sentence in ("extender isn't ready on cp1: x", "node other: pods hold 17 units of card 0, which has 16"):
        world = recorded("ours_envvar")
        world["story"]["problems"] = [sentence]
        assert failing(both(world, world)) == {"S1"}


def hami_crowd(number: int, mib: int, cores: int) -> Json:
    world = recorded("hami_json")
    annotations = dict(notes(world)) | {"hami.io/vgpu-devices-allocated": f"{uuid(1)},NVIDIA,{mib},{cores}:;"}
    new = pod(number, [container("main", {GPU: 1})], annotations, scheduler="hami-scheduler", name=f"job-{number}")
    new["metadata"]["deletionTimestamp"] = "2026-11-22T11:59:59Z"
    world["pods"].append(new)
    return world


@pytest.mark.parametrize(("mib", "cores"), [(16000, 0), (100, 99), (100, 100)], ids=["mib", "cores", "alone"])
def test_hamis_sums_are_of_the_same_pods(mib: int, cores: int) -> None:
    passes(hami_crowd(61, mib, cores), hami_crowd(62, mib, cores), "H5")
    stays(hami_crowd(61, mib, cores), hami_crowd(61, mib, cores), "H5")


def test_hamis_places() -> None:
    def crowd(*numbers: int) -> Json:
        world = hami_crowd(numbers[0], 1, 0)
        for number in numbers[1:]:
            world["pods"].append(hami_crowd(number, 1, 0)["pods"][-1])
        return world

    passes(crowd(*range(50, 60)), crowd(*range(60, 70)), "H5")
    stays(crowd(*range(50, 60)), crowd(*range(50, 60)), "H5")


def heavy(*pids: int) -> Json:
    """NVML's lists tell of more than the card has in use."""
    world = recorded("ours_cdi")
    # Read before the processes came, and without what theirs is.
    card(world)["processes"] += [process(1, pid, 40) for pid in pids]
    card(world)["memory"]["used_mib"] = 2400
    return world


def test_nvmls_sums_are_of_the_same_processes() -> None:
    passes(heavy(501), heavy(502), "C7", "UNKNOWN")
    stays(heavy(501), heavy(501), "C7", "UNKNOWN")


def test_memory_that_nobody_tells_in_the_second_sample_is_unknown() -> None:
    """What a check can't see needs no second witness."""
    second = recorded("ours_cdi")
    card(second)["memory"] = None
    stays(recorded("ours_cdi"), second, "C7", "UNKNOWN")


# --------------------------------------------------------------------------- one name, another pod


def fresh(number: int) -> Json:
    """A pod that came after the machine was looked at."""
    world = recorded("ours_envvar")
    new = named(number, 1)
    new["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
    world["pods"].append(new)
    return world


def test_a_pod_that_came_since_the_machine_was_looked_at() -> None:
    """Not with other pods, and not with other pods of the same name."""
    passes(fresh(61), fresh(62), "C4")
    stays(fresh(61), fresh(61), "C4")


def test_a_report_without_uids_still_confirms() -> None:
    before = checked(fresh(61))
    for one in before["findings"]:
        del one["pod_uid"]
    assert "C4" in failing(checked(fresh(62), before=before))


def test_a_pod_of_a_name_that_the_extender_had_with_another_uid() -> None:
    def world(uid: str) -> Json:
        found_ = recorded("ours_envvar")
        row = {"namespace": "default", "name": "sts-0", "usedGPU": 1, "uid": uid}
        found_["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"].append(row)
        return found_

    passes(world(pod_uid(61)), world(pod_uid(62)), "G10")
    stays(world(pod_uid(61)), world(pod_uid(61)), "G10")
    stays(world(""), world(""), "G10")


def test_a_pod_that_waits_may_be_booked_already() -> None:
    world = recorded("ours_envvar")
    waits = pod(61, [container("main", {MEM: 1})], name="waits")
    del waits["spec"]["nodeName"]
    waits["status"] = {"phase": "Pending"}
    world["pods"].append(waits)
    devs = world["extender"]["cp1"]["nodes"][0]["devs"]
    devs[0]["pods"].append({"namespace": "default", "name": "waits", "usedGPU": 1})
    assert found(checked(world), *LEVELS) == []
    devs[0]["pods"][-1]["name"] = "gone"
    assert failing(checked(world)) == {"G10"}


def test_one_extender_after_the_other_is_no_finding() -> None:
    first, second = recorded("ours_cdi"), recorded("ours_cdi")
    for world, stale in ((first, "cp1"), (second, "cp2")):
        world["extender"] = {one: copy.deepcopy(world["extender"]["cp1"]) for one in ("cp1", "cp2")}
        world["extender"][stale]["nodes"] = []
    passes(first, second, "G10")


# --------------------------------------------------------------------------- kubelet with two pods of a name


def succeeded() -> Json:
    """A pod that was deleted by force, of which kubelet still lists the predecessor (8 units) beside it (2 units)."""
    world = recorded("ours_envvar")
    rows = listing(world)["pods"]
    old = copy.deepcopy(rows[0])
    old["containers"][0]["devices"][0]["ids"] = [f"5a4d7f21-{slot}" for slot in range(100, 108)]
    rows.insert(0, old)
    return world


def test_two_pods_of_a_name_in_podresources_are_not_added_up() -> None:
    assert found(checked(succeeded()), *LEVELS) == []


def test_the_checkpoint_still_tells_of_each() -> None:
    world = succeeded()
    del checkpoint(world)["entries"][0]
    assert failing(checked(world)) == {"C4"}
    world = succeeded()
    entry(world)["ids"].append("5a4d7f21-99")
    entry(world)["count"] += 1
    assert "G8" in failing(checked(world))


def test_our_plugin_writes_nothing_while_kubelet_lists_two() -> None:
    for change in ({contract.POD_ASSIGNED: "false"}, {contract.POD_INDEX: "1", contract.POD_CARD_UNITS: "40"}, None):
        world = succeeded()
        world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []
        the_pod(world)["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
        if change is None:
            notes(world).clear()
        else:
            notes(world).update(change)
        assert found(checked(world), *LEVELS) == []
        listing(world)["pods"].pop(0)
        assert failing(checked(world))


# --------------------------------------------------------------------------- nodes and cards


def test_each_resource_and_each_sick_card_is_its_own_finding() -> None:
    names = ("nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb")

    def short(name: str) -> Json:
        world = recorded("nvidia_mig_mixed")
        for one in names:
            resource(world, one, 1)
        resource(world, name, 0, "allocatable")
        return world

    passes(short(names[0]), short(names[1]), "C6")
    stays(short(names[0]), short(names[0]), "C6")

    def sick(*indices: int) -> Json:
        world = recorded("ours_several")
        cards = json.loads(node(world)["metadata"]["annotations"][contract.NODE_CARDS])
        for one in cards:
            one["healthy"] = one["index"] not in indices
        node(world)["metadata"]["annotations"][contract.NODE_CARDS] = json.dumps(cards)
        resource(world, MEM, 48 - 16 * len(indices), "allocatable")
        return world

    report = stays(sick(1), sick(0, 1), "C6")
    assert [one["card"] for one in report["findings"] if one["check"] == "C6"] == [1]


def test_hamis_lock_of_another_pod_is_another_lock() -> None:
    def locked(name: str) -> Json:
        world = recorded("hami_json")
        node(world)["metadata"]["annotations"]["hami.io/mutex.lock"] = f"2026-11-22T11:59:59Z,default,{name}"
        return world

    passes(locked("job-1"), locked("job-2"), "H7")
    stays(locked("job-1"), locked("job-1"), "H7")


@pytest.mark.parametrize(
    ("name", "check", "what"),
    [
        ("nvidia_time_slicing", "N1", GPU),
        ("hami_json", "H2", GPU),
        ("ours_cdi", "G2", MEM),
        ("upstream_head", "G2", MEM),
    ],
)
def test_a_number_on_its_way_is_no_finding(name: str, check: str, what: str) -> None:
    def off(number: int) -> Json:
        world = recorded(name)
        resource(world, what, int(node(world)["status"]["capacity"][what]) + number)
        return world

    report = both(off(1), off(2))
    assert check not in failing(report), found(report, *LEVELS)
    stays(off(1), off(1), check)


def test_a_pod_of_a_node_that_is_gone() -> None:
    def gone(number: int) -> Json:
        world = recorded("ours_envvar")
        new = named(number, 1)
        new["spec"]["nodeName"] = "gpu9"
        world["pods"].append(new)
        return world

    (mine,) = [one for one in stays(gone(61), gone(61), "C9")["findings"] if one["check"] == "C9"]
    assert (mine["node"], mine["pod"]) == ("gpu9", "default/churn") and "the API doesn't have" in mine["what"]
    passes(gone(61), gone(62), "C9")
    other = gone(61)
    the_pod(other, -1)["spec"]["containers"][0]["resources"] = {}
    assert found(checked(other), *LEVELS) == []


# --------------------------------------------------------------------------- a first sample that couldn't tell


def blind(world: Json) -> Json:
    world["evidence"][NODE] = {"nvml": None, "kubelet": None, "problem": "its machine can't be reached: timeout"}
    return world


def test_what_only_the_second_sample_could_see_is_unknown_and_no_pass() -> None:
    second = recorded("ours_envvar")
    card(second)["processes"].append(process(80, 6, 10))
    report = both(blind(recorded("ours_envvar")), second)
    assert report["result"] == "UNKNOWN" and failing(report, "UNKNOWN") == {"C2"}
    assert "(the first sample couldn't tell)" in report["findings"][0]["what"]


def test_a_machine_that_could_not_be_asked_confirms_nothing() -> None:
    second = recorded("ours_envvar")
    node(second)["status"]["conditions"][1]["status"] = "False"
    report = both(blind(recorded("ours_envvar")), second)
    assert not failing(report) and failing(report, "UNKNOWN") == {"C9"}


def test_a_warning_that_becomes_worse_is_still_a_warning() -> None:
    def used(state: str) -> Json:
        world = recorded("ours_envvar")
        node(world)["metadata"]["annotations"][contract.NODE_LIMIT] = state
        card(world)["processes"][0]["used_mib"] = 3000
        return world

    report = both(used("off"), used(contract.LIMIT_ENFORCED))
    assert (failing(report), failing(report, "WARN")) == (set(), {"G9"})
    stays(used(contract.LIMIT_ENFORCED), used(contract.LIMIT_ENFORCED), "G9")


def test_what_the_first_sample_says_is_read_with_care() -> None:
    before = checked(overbooked(61))
    (mine,) = [one for one in before["findings"] if one["check"] == "G6"]
    assert mine["most"] == 16 and sum(mine["parts"].values()) == 17
    damages: list[Callable[[Json], Any]] = [
        lambda one: one.update(level="BAD"),
        lambda one: one.update(parts=[1]),
        lambda one: one.update(most="x"),
        lambda one: one.update(pod_uid=7),
        lambda one: one.update(key={}),
    ]
    for damage in damages:
        told = copy.deepcopy(before)
        damage(told["findings"][0])
        with pytest.raises(BadInput, match=r"^before: "):
            checked(overbooked(61), before=told)


def test_a_sum_beyond_all_bounds_can_be_read_again() -> None:
    world = recorded("ours_envvar")
    the_pod(world)["spec"]["containers"][0]["resources"]["limits"][MEM] = "9" * 20
    stays(world, copy.deepcopy(world), "G6")


# --------------------------------------------------------------------------- what NVIDIA's plugin answers


def test_devices_by_mounts_and_mig_devices_by_place_are_unknown() -> None:
    for value in ("/var/run/nvidia-container-devices", "0:1"):
        world = recorded("nvidia_exclusive")
        entry(world).update(cdi_devices=[])
        entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = value
        report = checked(world)
        assert not failing(report) and failing(report, "UNKNOWN") == {"N3"}, found(report, *LEVELS)


def test_cdi_devices_that_come_with_a_card_are_no_cards() -> None:
    world = recorded("nvidia_exclusive")
    mine = entry(world)
    mine["envs"] = {"NVIDIA_VISIBLE_DEVICES": "void"}
    beside = [f"nvidia.com/{one}=all" for one in ("gds", "mofed", "gdrcopy")]
    mine["cdi_devices"] = [f"k8s.device-plugin.nvidia.com/gpu={one}" for one in mine["ids"]] + beside
    assert found(checked(world), *LEVELS) == []
    mine["cdi_devices"].append("k8s.device-plugin.nvidia.com/gpu=all")
    assert failing(checked(world)) == {"N3"}


# --------------------------------------------------------------------------- all of it at once


def test_fifty_samples_of_a_healthy_cluster_under_churn() -> None:
    """Pods of the same few names come and go between what each plane was asked, and be it in every sample."""
    before = None
    for number in range(50):
        world = recorded("ours_envvar")
        at = 20 + number
        # Gone from the API, and still in kubelet's books and on the card.
        checkpoint(world)["entries"] += our_entries(at, CARDS, [CARDS[0]], 1)
        card(world)["processes"].append(process(at, 1000 + number, 10, pod_uid=pod_uid(at)))
        # In the API, and not yet in anybody's books.
        new = named(at + 1, 1, name="churn-0")
        new["metadata"]["creationTimestamp"] = "2026-11-22T11:59:59Z"
        world["pods"].append(new)
        # Two pods whose annotations are being exchanged.
        comes(world, at + 2, 14, name="churn-1")
        # Two pods of a name in kubelet's list.
        rows = listing(world)["pods"]
        rows.append(copy.deepcopy(rows[0]))
        sample = checked(world, before=before)
        assert failing(checked(world)) == {"C2", "C4", "G6"}
        assert before is None or (not failing(sample) and not failing(sample, "WARN")), found(sample, *LEVELS)
        before = checked(world)
    assert listed(recorded("ours_envvar")) and nvml(recorded("ours_envvar"))


# --------------------------------------------------------------------------- what is of one moment


def test_programs_without_an_mps_server_are_the_same_programs() -> None:
    def bare(pid: int) -> Json:
        world = recorded("nvidia_mps")
        mine = card(world)
        mine["processes"] = [one for one in mine["processes"] if "mps-server" not in one["name"]][:1]
        mine["processes"][0]["pid"] = pid
        return world

    passes(bare(501), bare(502), "N6")
    stays(bare(501), bare(501), "N6")


def test_two_device_plugins_are_the_same_two() -> None:
    def update(number: int) -> Json:
        world = recorded("ours_cdi")
        (plugin,) = [one for one in world["pods"] if one["metadata"]["namespace"] == "kube-system"]
        more = copy.deepcopy(plugin)
        more["metadata"].update(uid=pod_uid(number), name=f"device-plugin-{number}")
        world["pods"].append(more)
        return world

    passes(update(61), update(62), "C1")
    stays(update(61), update(61), "C1")


def test_pods_whose_card_is_not_told_yet_are_others_a_moment_later() -> None:
    def bypass(number: int) -> Json:
        world = recorded("ours_envvar")
        new = comes(world, number, 1, name=f"job-{number}")
        new["metadata"]["annotations"] = {}
        return world

    passes(bypass(61), bypass(62), "G6", "UNKNOWN")
    stays(bypass(61), bypass(61), "G6", "UNKNOWN")


def test_a_pod_that_ends_may_have_lost_its_mig_device() -> None:
    world = recorded("nvidia_mig_mixed")
    mine = card(world)
    lost = entry(world)["ids"][0].partition("::")[0]
    mine["mig"]["devices"] = [one for one in mine["mig"]["devices"] if one["uuid"] != lost]
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


# --------------------------------------------------------------------------- a card that doesn't say who it is


@pytest.mark.parametrize(
    "name", ["ours_envvar", "upstream_head", "hami_json", "nvidia_exclusive", "nvidia_time_slicing"]
)
def test_a_card_that_hangs_before_it_says_its_uuid_is_unknown(name: str) -> None:
    """Of a card that NVML lists without a UUID nobody can say that it isn't there."""
    world = recorded(name)
    card(world).update(uuid="", memory=None, processes=None, limits=None, minor=None, compute_mode="unknown")
    card(world)["problem"] = "NVML gave no answer in 10 s"
    report = checked(world)
    assert not failing(report), found(report, *LEVELS)
    assert report["result"] == "UNKNOWN"
