# SPDX-License-Identifier: GPL-3.0-or-later
"""What is right and looks wrong, and what the checks say of the rest."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import seconds, shorten, whole
from check_kit import checked, failing, found, recorded
from check_mutations import card, checkpoint, entry, listed, node, notes, the_pod
from check_worlds import GPU, MEM, NODE, container, host_process, our_pod, pod, pod_uid, process, uuid

Json = dict[str, Any]


def clean(world: Json, **options: Any) -> None:
    report = checked(world, **options)
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])


def only(world: Json, level: str, check: str, says: str, **options: Any) -> Json:
    report = checked(world, **options)
    assert failing(report, level) == {check}, found(report, "FAIL", "WARN", "UNKNOWN")
    (mine, *_more) = [one for one in report["findings"] if (one["check"], one["level"]) == (check, level)]
    assert says in mine["what"], mine
    return mine


# --------------------------------------------------------------------------- who may use cards


@pytest.mark.parametrize(
    "name", ["/usr/lib/xorg/Xorg", "Xorg", "nvidia-cuda-mps", "nvidia-persistenced", "/usr/bin/gnome-shell -x"]
)
def test_processes_of_the_machine_may(name: str) -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(host_process(5, name, 10))
    clean(world)


def test_the_name_of_a_process_in_a_pod_says_nothing() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(process(80, 5, 10, name="Xorg"))
    only(world, "FAIL", "C2", "its pod asks for no card")


def test_allowed_processes_and_pods_are_the_users() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"] += [host_process(5, "python3", 10), process(80, 6, 10)]
    clean(world, processes=("python3", "Xorg"), pods=("default/web-*",))
    assert failing(checked(world, processes=(), pods=())) == {"C2"}


def test_a_privileged_pod_is_called_what_it_is() -> None:
    world = recorded("ours_cdi")
    the_pod(world, 3)["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    card(world)["processes"].append(process(80, 6, 10))
    mine = only(world, "FAIL", "C2", "its privileged pod asks for no card")
    assert mine["pod"] == "default/web-0" and "cgroup /kubepods.slice" in mine["evidence"]["proc"]


def test_who_has_a_resource_claim_is_not_judged() -> None:
    world = recorded("nvidia_exclusive")
    world["pods"].append(pod(60, [container("main")], resourceClaims=[{"name": "gpu"}]))
    card(world)["processes"].append(process(60, 6, 10))
    only(world, "UNKNOWN", "C2", "resource claim")


def test_a_process_that_has_gone_is_nobodys() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(host_process(5, "python3", 10) | {"where": "gone"})
    clean(world)


def test_a_static_pods_process_is_found_by_its_hash() -> None:
    world = recorded("ours_cdi")
    digest = "0123456789abcdef0123456789abcdef"
    notes(world)["kubernetes.io/config.hash"] = digest
    card(world)["processes"][0].update(pod_uid=digest, static=True)
    clean(world)


def test_an_environment_without_runtime_class_is_a_warning() -> None:
    world = recorded("ours_cdi")
    the_pod(world, 3)["spec"]["containers"][0]["env"][0]["value"] = "all"
    only(world, "WARN", "C8", "where NVIDIA's is the default runtime")


def test_an_environment_from_elsewhere_is_a_warning() -> None:
    world = recorded("ours_envvar")
    source = {"configMapKeyRef": {"name": "x", "key": "y"}}
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": source}]
    only(world, "WARN", "C8", "can't be told")


def test_cdi_devices_come_after_the_pods_own_environment() -> None:
    world = recorded("ours_cdi")
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    clean(world)


# --------------------------------------------------------------------------- what comes and goes


def test_a_pod_that_ends_needs_no_entry() -> None:
    world = recorded("ours_envvar")
    del checkpoint(world)["entries"][-1]
    assert the_pod(world, 2)["metadata"]["deletionTimestamp"]
    clean(world)


def test_a_pod_past_the_extender_is_given_its_annotations_by_our_plugin() -> None:
    world = recorded("ours_envvar")
    new = our_pod(60, [contract.Card(0, uuid(1), 0, 16384, 16)], 2)
    new["metadata"].update(annotations={}, creationTimestamp="2026-11-22T11:59:59Z")
    new["status"] = {"phase": "Pending"}
    world["pods"].append(new)
    clean(world)
    new["status"] = {"phase": "Running", "startTime": "2026-11-22T11:59:59Z"}
    assert {"G3", "C4"} == failing(checked(world))


def test_a_young_pod_is_not_compared_with_the_extender() -> None:
    world = recorded("ours_envvar")
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []
    the_pod(world)["metadata"]["creationTimestamp"] = "2026-11-22T11:59:45Z"
    clean(world)
    assert failing(checked(world, grace=5)) == {"G10"}


def test_the_same_numbers_of_two_moments_are_not_compared_as_sums() -> None:
    """A pod that came between two questions changes the sum, and is no finding; a pod on another card is."""
    world = recorded("ours_envvar")
    devs = world["extender"]["cp1"]["nodes"][0]["devs"]
    devs[0]["usedGPU"], devs[1]["usedGPU"] = 99, 0
    clean(world)
    devs[1]["pods"].append(devs[0]["pods"].pop())
    mine = only(world, "FAIL", "G10", "believes that it holds 2 units of card 1, and it holds 2 units of card 0")
    assert mine["pod"] == "default/work-1"


def test_upstreams_extender_hides_pods_that_end() -> None:
    world = recorded("upstream_head")
    the_pod(world)["metadata"]["deletionTimestamp"] = "2026-11-22T11:59:50Z"
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []
    clean(world)


def test_an_extender_that_knows_no_node() -> None:
    for name, level in (("ours_cdi", "FAIL"), ("upstream_2019", "WARN")):
        world = recorded(name)
        world["extender"]["cp1"]["nodes"] = []
        only(world, level, "G10", "the node")


def test_churn_in_two_samples_is_no_finding() -> None:
    """Each sample has a race of its own, with other pods: nothing of it is a finding."""
    first, second = recorded("ours_envvar"), recorded("ours_envvar")
    for world, name in ((first, "a"), (second, "b")):
        new = our_pod(60, [contract.Card(0, uuid(1), 0, 16384, 16)], 2, name=f"job-{name}")
        new["metadata"]["annotations"] = {}
        world["pods"].append(new)
        card(world)["processes"].append(process(70 + len(name), 900, 10, pod_uid=pod_uid(70 + ord(name) % 7)))
    before = checked(first)
    assert failing(before) == {"G3", "C4", "C2"}
    after = checked(second, before=before)
    assert not failing(after) and not failing(after, "WARN")
    assert after["transient"] == 6


# --------------------------------------------------------------------------- backends


def test_pods_of_upstreams_plugin_live_on_under_ours() -> None:
    """After a migration: device IDs of upstream's plugin, and its annotations."""
    world = recorded("ours_envvar")
    entry(world)["ids"] = [f"{uuid(2)}-_-{slot}" for slot in (0, 1)]
    listed(world)[:] = entry(world)["ids"]
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = "0"
    clean(world)
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = "1"
    assert "G7" in failing(checked(world))


def test_several_containers_break_upstreams_plugin() -> None:
    world = recorded("upstream_head")
    two = the_pod(world, 1)["spec"]["containers"]
    two[0]["resources"]["limits"][MEM] = "6"
    two.append(container("other", {MEM: 4}))
    ids = entry(world, 1)["ids"]
    entry(world, 1).update(ids=ids[:6], count=6)
    entry(world, 1)["envs"][contract.CONTAINER_UNITS] = "6"
    other = copy.deepcopy(entry(world, 1)) | {"container": "other", "ids": ids[6:], "count": 4}
    other["envs"][contract.CONTAINER_UNITS] = "4"
    checkpoint(world)["entries"].append(other)
    books = world["evidence"][NODE]["kubelet"]["pod_resources"]["pods"][1]["containers"]
    books[0]["devices"][0]["ids"] = ids[:6]
    books.append({"name": "other", "devices": [{"resource": MEM, "ids": ids[6:]}]})
    only(world, "WARN", "G7", "which upstream's plugin can't match")


def test_hami_chooses_before_it_binds() -> None:
    world = recorded("hami_json")
    waiting = copy.deepcopy(the_pod(world))
    waiting["metadata"].update(name="waits", uid=pod_uid(60))
    waiting["metadata"]["annotations"]["hami.io/bind-phase"] = "allocating"
    waiting["spec"].pop("nodeName")
    waiting["status"] = {"phase": "Pending"}
    world["pods"].append(waiting)
    clean(world)
    waiting["spec"]["schedulerName"] = "default-scheduler"
    only(world, "FAIL", "H10", "HAMi's webhook didn't see it")


def test_hami_with_kubelets_own_choice_is_a_warning() -> None:
    world = recorded("hami_json")
    entry(world).update(ids=[f"{uuid(2)}-5"])
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world, 1)["processes"].append(card(world)["processes"].pop(0))
    only(world, "WARN", "H6", "kubelet chose them")


def test_hamis_scaled_memory_is_a_warning() -> None:
    world = recorded("hami_text")
    annotations = node(world)["metadata"]["annotations"]
    annotations["hami.io/node-nvidia-register"] = annotations["hami.io/node-nvidia-register"].replace("16384", "32768")
    notes(world)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,15000,30:;"
    entry(world)["envs"]["CUDA_DEVICE_MEMORY_LIMIT_0"] = "15000m"
    only(world, "WARN", "H5", "memory is oversubscribed")


def test_hami_with_a_gpu_for_one_alone() -> None:
    world = recorded("hami_json")
    notes(world)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,3000,100:;"
    notes(world, 1)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,4000,0:{uuid(2)},NVIDIA,4000,0:;"
    entry(world)["envs"]["CUDA_DEVICE_SM_LIMIT"] = "100"
    entry(world, 1)["envs"]["CUDA_DEVICE_SM_LIMIT"] = "0"
    only(world, "FAIL", "H5", "isn't alone")


def test_nvidias_init_containers_pass_their_devices_on() -> None:
    world = recorded("nvidia_exclusive")
    the_pod(world)["spec"]["initContainers"] = [container("init", {GPU: 1})]
    checkpoint(world)["entries"].append(copy.deepcopy(entry(world)) | {"container": "init"})
    clean(world)


def test_cdi_devices_in_annotations() -> None:
    world = recorded("nvidia_exclusive")
    entry(world).update(cdi_devices=[], annotations={"cdi.k8s.io/nvidia-device-plugin_x": f"nvidia.com/gpu={uuid(1)}"})
    clean(world)
    entry(world)["annotations"] = {"cdi.k8s.io/nvidia-device-plugin_x": f"nvidia.com/gpu={uuid(2)}"}
    only(world, "FAIL", "N3", "kubelet counts")


def test_mig_strategy_single_announces_devices_as_cards() -> None:
    world = recorded("nvidia_mig_mixed")
    told = node(world)
    told["metadata"]["labels"]["nvidia.com/mig.strategy"] = "single"
    text = json.dumps(world).replace("nvidia.com/mig-1g.10gb", "nvidia.com/gpu")
    world = json.loads(text)
    for field in ("capacity", "allocatable"):
        node(world)["status"][field][GPU] = "2"
    clean(world)


def test_a_leftover_of_gpushare_beside_another_stack() -> None:
    world = recorded("nvidia_exclusive")
    for field in ("capacity", "allocatable"):
        node(world)["status"][field][contract.RESOURCE_COUNT] = "2"
    report = checked(world)
    assert "C1 FAIL: left over from gpushare: aliyun.com/gpu-count: gpushare, nvidia" in found(report, "FAIL")


def test_a_node_without_cards_is_none_of_our_business() -> None:
    world = recorded("ours_cdi")
    plain = {"metadata": {"name": "cpu1"}, "status": {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}}
    world["nodes"].append(plain)
    clean(world)
    plain["metadata"]["labels"] = {"gpushare": "true"}
    assert failing(checked(world)) == {"C1", "C9"}


def test_a_node_that_nobody_looked_at_is_named() -> None:
    world = recorded("ours_cdi")
    other = copy.deepcopy(world["nodes"][0])
    other["metadata"]["name"] = "gpu2"
    world["nodes"].append(other)
    told = [one for one in checked(world)["findings"] if one["check"] == "C9"]
    assert [(one["level"], one["node"]) for one in told] == [("UNKNOWN", "gpu2")]


# --------------------------------------------------------------------------- the report


def test_the_report_shows_what_is_claimed_beside_what_is_used() -> None:
    (shown,) = checked(recorded("ours_envvar"))["nodes"]
    assert {key: shown[key] for key in ("name", "backend", "unit", "unit_mib")} == {
        "name": NODE,
        "backend": "gpushare",
        "unit": "GiB",
        "unit_mib": 1024,
    }
    first, second = shown["cards"]
    assert (first["total_mib"], first["claimed_mib"], first["used_mib"], first["foreign_mib"]) == (
        16384,
        2048,
        1840,
        40,
    )
    assert first["pods"] == [
        {"pod": "default/work-1", "uid": pod_uid(1), "claimed_mib": 2048, "used_mib": 1500, "terminating": False}
    ]
    assert [(one["claimed_mib"], one["used_mib"], one["terminating"]) for one in second["pods"]] == [
        (12288, 4900, False),
        (6144, 0, True),
    ]


def test_the_report_of_shared_cards() -> None:
    (shown,) = checked(recorded("nvidia_time_slicing"))["nodes"]
    assert (shown["backend"], shown["unit"]) == ("nvidia", "count")
    assert [one["claimed_mib"] for one in shown["cards"][0]["pods"]] == [4096, 4096]
    (shown,) = checked(recorded("nvidia_mig_mixed"))["nodes"]
    assert [one["claimed_mib"] for one in shown["cards"][0]["pods"]] == [9984, 9984]


def test_findings_come_worst_first() -> None:
    world = recorded("ours_envvar")
    card(world, 1)["minor"] = 7
    card(world)["minor"] = 9
    world["extender"]["cp1"] = "refused"
    report = checked(world)
    assert [(one["check"], one["level"], one["card"]) for one in report["findings"]] == [
        ("G1", "FAIL", 0),
        ("G1", "FAIL", 1),
        ("G10", "UNKNOWN", None),
    ]
    assert report["time"] == "2026-11-22T12:00:00Z"
    assert report["counts"] == {"FAIL": 2, "WARN": 0, "UNKNOWN": 1, "PASS": 38}
    (first,) = [one for one in report["checks"] if one["id"] == "G1"]
    assert (first["result"], first["n"], first["fail"]) == ("FAIL", 2, 2)


def test_times_and_numbers() -> None:
    assert seconds("2026-11-22T12:00:00Z") == seconds("2026-11-22T20:00:00+08:00") == 1795348800
    assert seconds("2026-11-22T12:00:00.123456Z") == 1795348800
    for text in ("", "2026-11-22", "2026-13-22T12:00:00Z", "0000-01-01T00:00:00Z", "2026-11-22T25:00:00Z"):
        assert seconds(text) is None
    assert [whole(one) for one in ("7", "-1", "9" * 30, "", "x", "٣", None)] == [7, -1, None, None, None, None, None]
    assert shorten("a\nb" + "c" * 100) == "a b" + "c" * 56 + "…"
