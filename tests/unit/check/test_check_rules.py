# SPDX-License-Identifier: GPL-3.0-or-later
"""Special cases: unusual states that are right, and the levels of risky ones."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check.grants import HELPERS, PLUGINS
from ansible_collections.kubegpu.share.plugins.module_utils._check.parse import parse_int, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import parse_time
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, failing, found, recorded
from check_mutations import (
    REGISTER,
    card,
    checkpoint,
    chosen,
    devs,
    entry,
    has_devices,
    listed,
    node,
    node_notes,
    notes,
    prepared,
    resource,
    the_pod,
)
from check_worlds import GPU, MEM, NODE, claims_enforced, container, host_process, our_pod, pod, pod_uid, process, uuid


def clean(world: JsonObject, **options: Any) -> None:
    report = checked(world, **options)
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])


def only(world: JsonObject, level: str, check: str, cause: str, **options: Any) -> JsonObject:
    report = checked(world, **options)
    assert failing(report, level) == {check}, found(report, "FAIL", "WARN", "UNKNOWN")
    (mine, *_more) = [
        finding for finding in report["findings"] if (finding["check"], finding["level"]) == (check, level)
    ]
    assert mine["cause"] == cause, mine
    return mine


# --------------------------------------------------------------------------- processes that may use GPUs


@pytest.mark.parametrize(
    "name", ["/usr/lib/xorg/Xorg", "Xorg", "nvidia-cuda-mps", "nvidia-persistenced", "/usr/bin/gnome-shell -x"]
)
def test_processes_of_the_machine_are_allowed(name: str) -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(host_process(5, name, 10))
    clean(world)


def test_the_name_of_a_process_in_a_pod_isnt_checked() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(process(80, 5, 10, name="Xorg"))
    only(world, "FAIL", "C2", "pod_without_request")


def test_users_allow_processes_and_pods() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"] += [host_process(5, "python3", 10), process(80, 6, 10)]
    clean(world, allowed_processes=("python3", "Xorg"), allowed_pods=("default/web-*",))
    assert failing(checked(world, allowed_processes=(), allowed_pods=())) == {"C2"}


@pytest.mark.parametrize(
    ("world", "labels", "kept"),
    [
        ("nvidia_exclusive", {"kubegpu.share/backend": "nvidia"}, {MEM: 32, contract.RESOURCE_COUNT: 2}),
        ("ours_envvar", {"gpushare": "true"}, {"nvidia.com/gpu": 20}),
    ],
)
def test_what_kubelet_still_reports_of_the_back_end_before_is_no_finding(
    world: str, labels: JsonObject, kept: dict[str, int]
) -> None:
    first = recorded(world)
    node(first)["metadata"]["labels"].update(labels)
    for name, number in kept.items():
        resource(first, name, number, "capacity")
        resource(first, name, 0, "allocatable")
    clean(first)
    # The plugin that the node has now isn't excused.
    own = next(name for name in node(first)["status"]["allocatable"] if "gpu" in name and name not in kept)
    resource(first, own, 0, "allocatable")
    assert "C6" in failing(checked(first))


@pytest.mark.parametrize(
    ("component", "namespace", "level"),
    [("hami-scheduler", "kube-system", None), ("web", "kube-system", "FAIL"), ("hami-scheduler", "team", "FAIL")],
)
def test_the_scheduler_of_hami_may_see_all_cards(component: str, namespace: str, level: str | None) -> None:
    # Its image sets NVIDIA_VISIBLE_DEVICES=all, so NVIDIA's default runtime gives it every card of its node.
    world = recorded("hami_json")
    labels = {"app.kubernetes.io/component": component}
    world["pods"].append(pod(60, [container("main")], labels=labels, namespace=namespace))
    has_devices(world, world["pods"][-1], 0)
    if level is None:
        clean(world)
    else:
        only(world, level, "C8", "other_devices")


# What a tenant can give a pod in his own namespace: name and labels.
DISGUISES = [
    *[("web", dict([label])) for labels in PLUGINS.values() for label in labels],
    *[("web", dict([label])) for label in HELPERS],
    ("mps-control-daemon", {}),
]


@pytest.mark.parametrize(("name", "labels"), DISGUISES)
@pytest.mark.parametrize("namespace", ["team", "mps-control-daemon", "kube-system-2"])
def test_a_tenants_pod_that_looks_like_a_component_is_checked_and_reported(
    name: str, labels: dict[str, str], namespace: str
) -> None:
    world = recorded("ours_envvar")
    world["pods"].append(pod(60, [container("main")], labels=labels, name=name, namespace=namespace))
    has_devices(world, world["pods"][-1], 0)
    card(world)["processes"].append(process(60, 6, 10))
    report = checked(world)
    assert failing(report) == {"C2", "C8"}
    [mine] = [finding for finding in report["findings"] if finding["cause"] == "unconfirmed"]
    assert (mine["check"], mine["level"], mine["pod"]) == ("C1", "WARN", f"{namespace}/{name}")
    assert namespace in mine["what"] and "verify_exempt_namespaces" in mine["do"]
    # In a namespace of nodes' own components it is one; a second device plugin is too many nevertheless.
    assert failing(checked(world, exempt_namespaces=("kube-system", namespace))) <= {"C1"}
    clean(world, allowed_pods=(f"{namespace}/*",))


def test_a_tenant_cant_pretend_that_templates_are_swept() -> None:
    world = recorded("claims_beside_extender")
    world["templates"].append("default/gpu-mem-7")
    labels = {"app.kubernetes.io/name": "gpushare-dra-templates"}
    world["pods"].append(pod(60, [container("main")], labels=labels, namespace="team"))
    only(world, "WARN", "D8", "templates_left")
    clean(world, exempt_namespaces=("kube-system", "team"))


def test_a_privileged_pod_is_reported_as_such() -> None:
    world = recorded("ours_cdi")
    the_pod(world, 3)["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    card(world)["processes"].append(process(80, 6, 10))
    mine = only(world, "FAIL", "C2", "pod_without_request")
    assert "its privileged pod requests no GPU" in mine["what"]
    assert mine["pod"] == "default/web-0" and "cgroup /kubepods.slice" in mine["evidence"]["proc"]


def test_a_pod_with_a_resource_claim_is_unknown() -> None:
    world = recorded("nvidia_exclusive")
    world["pods"].append(pod(60, [container("main")], resourceClaims=[{"name": "gpu"}]))
    card(world)["processes"].append(process(60, 6, 10))
    only(world, "UNKNOWN", "C2", "resource_claim")


def test_a_pod_with_the_class_as_an_extended_resource_is_one_with_a_claim() -> None:
    """Its status alone names the claim, which kube-scheduler has made."""
    world = claims_enforced()
    one = the_pod(world)
    [made] = one["status"].pop("resourceClaimStatuses")
    del one["spec"]["resourceClaims"]
    world["templates"].remove("default/gpu-mem-4")
    name = "deviceclass.resource.kubernetes.io/gpu.kubegpu.share"
    one["spec"]["containers"][0]["resources"] = {"limits": {name: "1"}}
    mapping = {"containerName": "main-0", "resourceName": name, "requestName": "gpu-0"}
    one["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": made["resourceClaimName"],
        "requestMappings": [mapping],
    }
    clean(world)


def test_an_ended_process_is_ignored() -> None:
    world = recorded("ours_envvar")
    card(world)["processes"].append(host_process(5, "python3", 10) | {"where": "gone"})
    clean(world)


def test_a_static_pods_process_is_attributed_by_its_hash() -> None:
    world = recorded("ours_cdi")
    digest = "0123456789abcdef0123456789abcdef"
    notes(world)["kubernetes.io/config.hash"] = digest
    card(world)["processes"][0].update(pod_uid=digest, static=True)
    clean(world)


def test_an_environment_without_runtime_class_is_a_warning() -> None:
    world = recorded("ours_cdi")
    the_pod(world, 3)["spec"]["containers"][0]["env"][0]["value"] = "all"
    only(world, "WARN", "C8", "default_runtime")


def test_an_environment_variable_with_a_source_is_a_warning() -> None:
    world = recorded("ours_envvar")
    source = {"configMapKeyRef": {"name": "x", "key": "y"}}
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": source}]
    only(world, "WARN", "C8", "set_from_source")


def test_cdi_devices_override_the_pods_own_environment() -> None:
    world = recorded("ours_cdi")
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    clean(world)


def test_a_pods_own_device_node_and_those_of_a_nodes_own_component_are_its_right() -> None:
    world = recorded("ours_envvar")
    has_devices(world, the_pod(world), 0)
    component = pod(60, [container("main", securityContext={"privileged": True})])
    component["metadata"]["namespace"] = "storage"
    world["pods"].append(component)
    has_devices(world, component, 0, 1)
    clean(world, exempt_namespaces=("kube-system", "storage"))
    mine = only(world, "WARN", "C8", "privileged")
    assert (mine["pod"], mine["node"]) == (contract.pod_key(component), NODE)
    # One that is exempt for its name, as NVIDIA's exporter, needs no namespace.
    clean(world, allowed_pods=("storage/*",))


def test_device_nodes_that_were_not_read_are_unknown() -> None:
    world = recorded("ours_cdi")
    world["evidence"][NODE]["kubelet"]["device_nodes"] = None
    only(world, "UNKNOWN", "C8", "no_data")


@pytest.mark.parametrize(
    "env",
    [
        [{"name": "CUDA_VERSION", "value": "12"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        [{"name": "CUDA_VERSION"}],
    ],
    ids=["void", "empty"],
)
def test_a_cuda_version_that_names_no_gpu(env: list[JsonObject]) -> None:
    world = recorded("nvidia_exclusive")
    world["pods"].append(pod(60, [container("main", env=env)], runtimeClassName="nvidia"))
    clean(world)


# --------------------------------------------------------------------------- pods that come and go


def test_a_terminating_pod_needs_no_entry() -> None:
    world = recorded("ours_envvar")
    del checkpoint(world)["entries"][-1]
    assert the_pod(world, 2)["metadata"]["deletionTimestamp"]
    clean(world)


def test_a_pending_pod_may_lack_annotations_and_a_running_one_not() -> None:
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
    devs(world)[0]["pods"] = []
    the_pod(world)["metadata"]["creationTimestamp"] = "2026-11-22T11:59:45Z"
    clean(world)
    assert failing(checked(world, grace_seconds=5)) == {"G10"}


def test_sums_of_two_moments_are_not_compared() -> None:
    """A pod created between two queries changes the sum and isn't a finding; a pod on another GPU is."""
    world = recorded("ours_envvar")
    first, second = devs(world)
    first["usedGPU"], second["usedGPU"] = 99, 0
    clean(world)
    second["pods"].append(first["pods"].pop())
    mine = only(world, "FAIL", "G10", "pod_differs")
    shown = ("2 units of GPU 1", "2 units of GPU 0")
    assert (mine["pod"], mine["evidence"]["extender"], mine["evidence"]["api"]) == ("default/work-1", *shown)


def test_upstreams_extender_leaves_out_terminating_pods() -> None:
    world = recorded("upstream_head")
    the_pod(world)["metadata"]["deletionTimestamp"] = "2026-11-22T11:59:50Z"
    devs(world)[0]["pods"] = []
    clean(world)


def test_an_extender_without_the_node() -> None:
    for name, level, cause in (("ours_cdi", "FAIL", "node_unknown"), ("upstream_2019", "WARN", "node_not_cached")):
        world = recorded(name)
        world["extender"]["cp1"]["nodes"] = []
        only(world, level, "G10", cause)


# --------------------------------------------------------------------------- backends


def test_pods_of_upstreams_plugin_stay_valid_under_ours() -> None:
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
    only(world, "WARN", "G7", "several_containers")


def test_an_unbound_pod_of_hami_has_its_annotations() -> None:
    world = recorded("hami_json")
    waiting = copy.deepcopy(the_pod(world))
    waiting["metadata"].update(name="waits", uid=pod_uid(60))
    waiting["metadata"]["annotations"]["hami.io/bind-phase"] = "allocating"
    waiting["spec"].pop("nodeName")
    waiting["status"] = {"phase": "Pending"}
    world["pods"].append(waiting)
    clean(world)
    waiting["spec"]["schedulerName"] = "default-scheduler"
    only(world, "FAIL", "H10", "other_scheduler")


def test_kubelets_preferred_allocation_is_a_warning() -> None:
    world = recorded("hami_json")
    entry(world).update(ids=[f"{uuid(2)}-5"])
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world, 1)["processes"].append(card(world)["processes"].pop(0))
    only(world, "WARN", "H6", "kubelet_preference")


def test_hamis_scaled_memory_is_a_warning() -> None:
    world = recorded("hami_text")
    node_notes(world)[REGISTER] = node_notes(world)[REGISTER].replace("16384", "32768")
    chosen(world, "15000,30", CUDA_DEVICE_MEMORY_LIMIT_0="15000m")
    only(world, "WARN", "H5", "oversubscribed")


def test_a_shared_gpu_of_an_exclusive_pod_fails() -> None:
    world = recorded("hami_json")
    chosen(world, "3000,100", CUDA_DEVICE_SM_LIMIT="100")
    chosen(world, f"4000,0:{uuid(2)},NVIDIA,4000,0", at=1, CUDA_DEVICE_SM_LIMIT="0")
    only(world, "FAIL", "H5", "not_exclusive")


def test_devices_of_init_containers_are_allocated_again() -> None:
    world = recorded("nvidia_exclusive")
    the_pod(world)["spec"]["initContainers"] = [container("init", {GPU: 1})]
    checkpoint(world)["entries"].append(copy.deepcopy(entry(world)) | {"container": "init"})
    clean(world)


def test_cdi_devices_in_annotations() -> None:
    world = recorded("nvidia_exclusive")
    entry(world).update(cdi_devices=[], annotations={"cdi.k8s.io/nvidia-device-plugin_x": f"nvidia.com/gpu={uuid(1)}"})
    clean(world)
    entry(world)["annotations"] = {"cdi.k8s.io/nvidia-device-plugin_x": f"nvidia.com/gpu={uuid(2)}"}
    only(world, "FAIL", "N3", "other_device")


def test_mig_strategy_single_announces_devices_as_cards() -> None:
    world = recorded("nvidia_mig_mixed")
    node(world)["metadata"]["labels"]["nvidia.com/mig.strategy"] = "single"
    world = json.loads(json.dumps(world).replace("nvidia.com/mig-1g.10gb", "nvidia.com/gpu"))
    for field in ("capacity", "allocatable"):
        node(world)["status"][field][GPU] = "2"
    clean(world)


def test_a_leftover_of_gpushare_beside_another_stack() -> None:
    world = recorded("nvidia_exclusive")
    for field in ("capacity", "allocatable"):
        node(world)["status"][field][contract.RESOURCE_COUNT] = "2"
    report = checked(world)
    assert "C1 FAIL: aliyun.com/gpu-count is left over from gpushare beside gpushare, nvidia" in found(report, "FAIL")


def test_a_node_without_gpus_is_ignored() -> None:
    world = recorded("ours_cdi")
    plain = {"metadata": {"name": "cpu1"}, "status": {"capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"}}}
    world["nodes"].append(plain)
    clean(world)
    plain["metadata"]["labels"] = {"gpushare": "true"}
    assert failing(checked(world)) == {"C1", "C9"}


# --------------------------------------------------------------------------- the report


def test_the_report_has_claimed_and_used_memory() -> None:
    world = recorded("ours_envvar")
    node(world)["metadata"].setdefault("annotations", {})[contract.NODE_LIMIT] = "off"
    (shown,) = checked(world)["nodes"]
    assert shown["memory_limit"] == "off"
    assert [shown[key] for key in ("name", "backend", "unit", "unit_mib")] == [NODE, "gpushare", "GiB", 1024]
    first, second = shown["cards"]
    assert [first[f"{key}_mib"] for key in ("total", "claimed", "used", "foreign")] == [16384, 2048, 1840, 40]
    assert first["pods"] == [
        {"pod": "default/work-1", "uid": pod_uid(1), "claimed_mib": 2048, "used_mib": 1500, "terminating": False}
    ]
    assert [(one["claimed_mib"], one["used_mib"], one["terminating"]) for one in second["pods"]] == [
        (12288, 4900, False),
        (6144, 0, True),
    ]


def test_the_report_of_shared_gpus() -> None:
    (shown,) = checked(recorded("nvidia_time_slicing"))["nodes"]
    assert (shown["backend"], shown["unit"]) == ("nvidia", "count")
    assert [one["claimed_mib"] for one in shown["cards"][0]["pods"]] == [4096, 4096]
    (shown,) = checked(recorded("nvidia_mig_mixed"))["nodes"]
    assert [one["claimed_mib"] for one in shown["cards"][0]["pods"]] == [9984, 9984]


def test_findings_are_sorted_by_level() -> None:
    world = recorded("ours_envvar")
    card(world, 1)["minor"] = 7
    card(world)["minor"] = 9
    world["extender"]["cp1"] = "refused"
    report = checked(world)
    assert [(finding["check"], finding["level"], finding["card"]) for finding in report["findings"]] == [
        ("G1", "FAIL", 0),
        ("G1", "FAIL", 1),
        ("G10", "UNKNOWN", None),
    ]
    assert report["time"] == "2026-11-22T12:00:00Z"
    assert report["counts"] == {"FAIL": 2, "WARN": 0, "UNKNOWN": 1, "PASS": 60}
    (first,) = [check for check in report["checks"] if check["id"] == "G1"]
    assert (first["result"], first["n"], first["fail"]) == ("FAIL", 2, 2)


def test_times_and_numbers() -> None:
    assert parse_time("2026-11-22T12:00:00Z") == parse_time("2026-11-22T20:00:00+08:00") == 1795348800
    assert parse_time("2026-11-22T12:00:00.123456Z") == 1795348800
    for text in ("", "2026-11-22", "2026-13-22T12:00:00Z", "0000-01-01T00:00:00Z", "2026-11-22T25:00:00Z"):
        assert parse_time(text) is None
    assert [parse_int(one) for one in ("7", "-1")] == [7, -1]
    assert {parse_int(one) for one in ("9" * 30, "", "x", "٣", None)} == {None}
    assert shorten("a\nb" + "c" * 100) == "a b" + "c" * 56 + "…"


def test_a_tenant_removed_the_claim_of_its_running_pod() -> None:
    """Its pod is found in the API, and what the node has prepared for it; with two samples, too."""
    world = recorded("claims_mib")
    removed = world["claims"].pop(0)["metadata"]
    report = checked(world)
    assert failing(report) == {"D4", "D11"}
    mine = {finding["cause"]: finding for finding in report["findings"] if finding["check"] == "D11"}
    assert mine.keys() == {"claim_gone", "not_tainted"}
    assert mine["claim_gone"]["key"] == removed["uid"] and mine["claim_gone"]["card"] == 0
    assert "3000 MiB of card 0" in mine["claim_gone"]["what"] and "default/work-1" in mine["claim_gone"]["what"]
    assert failing(checked(world, before=report)) == {"D4", "D11"}
    # Between the two samples of a claim that has just been prepared, it is there.
    assert not failing(checked(recorded("claims_mib"), before=report))


def test_a_running_pods_claim_is_freed() -> None:
    world = recorded("claims_mib")
    world["claims"][0]["status"].clear()
    (finding,) = [finding for finding in checked(world)["findings"] if finding["check"] == "D4"]
    assert (finding["level"], finding["cause"], finding["pod"]) == ("FAIL", "not_allocated", "default/work-1")
    assert finding["what"].startswith("the pod runs, and its claim ") and finding["what"].endswith("isn't allocated")


@pytest.mark.parametrize("what", ["folder", "record"])
def test_what_is_prepared_cannot_be_read(what: str) -> None:
    world = recorded("claims_mib")
    found = prepared(world)
    if what == "folder":
        found.update(state="unreadable", problem="the folder can't be read", records=[], specifications=[])
    else:
        found["records"].append({**found["records"][0], "uid": "another", "shares": [], "problem": "it is malformed"})
    report = checked(world)
    assert report["result"] == "UNKNOWN"
    ours = [finding for finding in report["findings"] if finding["check"] == "D11"]
    assert [(one["level"], one["cause"]) for one in ours] == [
        ("UNKNOWN", "no_data" if what == "folder" else "record_unreadable")
    ]
