# SPDX-License-Identifier: GPL-3.0-or-later
"""Each problem of the options, the cluster and its machines has one finding, which names the variable."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import resolve
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as operator
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import Claims
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options, described, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.findings import PROBLEM, Finding
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import NodeOptions
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import collect
from fake_kube import FakeKube
from gpu_nodes import CARD, MODES, gpu_node

UUID = "GPU-5a4d7f2e-0000-4000-8000-00000000000"


def node(name, capacity=None, annotations=None, runtime="containerd://2.2.9", ready="True", labels=None, free=None):
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"other/large": "x", **(annotations or {})}, "labels": labels or {}},
        "status": {
            "capacity": {"cpu": "8", **(capacity or {})},
            "allocatable": {"cpu": "8", **(capacity or {}), **(free or {})},
            "conditions": [{"type": "Ready", "status": ready}],
            "nodeInfo": {"containerRuntimeVersion": runtime},
        },
    }


def cards(units, memory):
    return {contract.NODE_CARDS: contract.cards_to_annotation([contract.Card(0, UUID + "0", 0, memory, units)])}


def facts(memory=16384, count=2, gpus=2, family="debian", arch="amd64"):
    rows = [
        {
            **MODES,
            "index": at,
            "uuid": f"{UUID}{at}",
            "address": f"0000:{at:02x}:00.0",
            "minor": at,
            "memory_mib": memory,
            "persistence": True,
        }
        for at in range(count)
    ]
    return gpu_node(
        distribution__family=family,
        distribution__arch=arch,
        gpus=[{**CARD, "address": f"0000:0{at}:00.0"} for at in range(gpus)],
        driver__module_version=None,
        driver__cards=rows,
        nouveau__images=[],
    )


def given_away(*drivers):
    """A machine without NVIDIA's driver, whose cards have these."""
    known = facts(count=0)
    return {**known, "gpus": [{**card, "driver": one} for card, one in zip(known["gpus"], drivers, strict=True)]}


def gpu_pod(name="p", on="gpu1"):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": on, "containers": [{"resources": {"limits": {contract.RESOURCE_MEMORY: "2"}}}]},
        "status": {"phase": "Running"},
    }


# A driver that limits memory.
R615 = NodeOptions(driver_version="615.71.09")
HOSTS = (Host("gpu1", "gpu1", "gpu_nodes", facts(), R615), Host("cp1", "cp1", "control_plane", facts(gpus=0, count=0)))


def found(options=None, objects=None, hosts=HOSTS, version="v1.36.3", ignore=()):
    options = options or Options()
    kube = FakeKube(*(objects or [node("gpu1"), node("cp1")]))
    kube.version_answer = {"gitVersion": version}
    unit = options.memory_unit if options.memory_unit in contract.MIB_PER_UNIT else None
    cluster = cluster_of(collect(kube, {"memory_unit": unit, "scheduler": None}))
    return examine(options, cluster, hosts, ignore)


def with_gpu1(**changes):
    return (Host(**{**vars(HOSTS[0]), **changes}), HOSTS[1])


COREOS = {
    **facts(family="redhat"),
    "distribution": {"id": "rhel", "name": "Red Hat Enterprise Linux CoreOS 4.20", "family": "redhat", "arch": "amd64"},
}
OLD_EXTENDER = "registry.cn-hangzhou.aliyuncs.com/acs/k8s-gpushare-schd-extender:1.11-d170d8a"
OLD_PLUGIN = "registry.cn-hangzhou.aliyuncs.com/acs/k8s-gpushare-plugin:v2-1.11-aff8a23"


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        ({"options": Options(extender_image=OLD_EXTENDER)}, "gpushare_extender_image", "a build of 2019"),
        ({"options": Options(device_plugin_image=OLD_PLUGIN)}, "gpushare_device_plugin_image", "v1.36.3"),
        ({"hosts": ()}, "gpu_nodes", "names no host"),
        ({"hosts": with_gpu1(node="gpu9")}, "gpu_nodes", "gpu1 (gpu_node_name: gpu9) isn't a node"),
        ({"objects": [node("cp1")]}, "gpu_nodes", "gpu1 isn't a node of the cluster, whose nodes are cp1"),
        ({"objects": [node("gpu1")]}, "control_plane", "cp1 isn't a node of the cluster"),
        ({"hosts": with_gpu1(facts=facts(gpus=0))}, "gpu_nodes", "gpu1 has no NVIDIA GPU on its PCI bus"),
        ({"hosts": with_gpu1(facts=given_away("vfio-pci", "nvgrace_gpu_vfio_pci"))}, "gpu_backend",
         "gpu1 is to share its cards by gpushare, and VFIO has all of them for virtual machines: 0000:00:00.0, "),
        ({"hosts": with_gpu1(facts=facts(family="arch"))}, "gpu_nodes", "only the families debian or redhat or suse"),
        ({"hosts": with_gpu1(facts=COREOS)}, "gpu_nodes", "gpu1 runs Red Hat Enterprise Linux CoreOS 4.20, whose"),
        ({"hosts": with_gpu1(facts=facts(arch="riscv64"))}, "gpu_nodes", "has the architecture riscv64"),
        ({"objects": [node("gpu1", runtime="rkt://1.30"), node("cp1")]}, "gpu_nodes", "runs rkt://1.30"),
        ({"objects": [node("gpu1", runtime="cri-o://1.36.0"), node("cp1")]}, "gpushare_image_delivery",
         "gpu1 runs cri-o, and images are imported into containerd only"),
        ({"objects": [node("gpu1", {"nvidia.com/gpu": "2"}), node("cp1")]}, "gpu_nodes",
         "announces nvidia.com/gpu already"),
        ({"objects": [node("gpu1", {"nvidia.com/mig-1g.5gb": "7"}), node("cp1")]}, "gpu_nodes",
         "nvidia.com/mig-1g.5gb"),
        ({"options": Options(memory_unit="MiB"), "hosts": with_gpu1(facts=facts(memory=81920))}, "gpushare_memory_unit",
         "has cards of 163840 units: MiB makes a list"),
        ({"hosts": with_gpu1(facts=facts(memory=512))}, "gpushare_memory_unit", "with 512 MiB, less than one GiB"),
        ({"objects": [node("gpu1", annotations=cards(16384, 16384)), node("cp1"), gpu_pod()]}, "gpushare_memory_unit",
         "GiB isn't the present unit of node gpu1, and 1 pod there (default/p)"),
        ({"hosts": (*HOSTS, Host("twin", "gpu1", "gpu_nodes", facts(), R615))}, "gpu_node_name",
         "gpu1, twin have the same node name, gpu1"),
    ],
)  # fmt: skip
def test_one_problem_has_one_text_that_names_the_variable(arguments, variable, message):
    findings = found(**arguments)
    problems = findings.problems
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{variable}: ")
    # CoreOS's sentence is that of the roles, and ends with what to do.
    assert [finding.id for finding in findings if finding.severity == PROBLEM and not finding.do] in ([], ["coreos"])
    assert message in problems[0]
    assert "\n" not in problems[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": Options(extender_image=OLD_EXTENDER, device_plugin_image=OLD_PLUGIN), "version": "v1.15.12"},
        {"options": Options(extender_image="example.org/gpushare-extender:c0b6141")},
        {"objects": [node("gpu1", {"nvidia.com/gpu": "0"}), node("cp1", {"nvidia.com/gpu": "4"})]},
        {"objects": [node("gpu1", annotations=cards(16, 16384)), node("cp1"), gpu_pod()]},
        {"objects": [node("gpu1", annotations=cards(16384, 16384)), node("cp1"), gpu_pod(on="other")]},
        {"options": Options(memory_unit="MiB")},
        {"hosts": with_gpu1(facts=None)},
        {"hosts": (HOSTS[0],)},
        {"hosts": with_gpu1(facts=given_away("vfio-pci", "nvidia"))},
        {"options": Options(nodes=["cp1"]), "hosts": with_gpu1(facts=given_away("vfio-pci", "vfio-pci"))},
    ],
)
def test_no_problem(arguments):
    assert found(**arguments).problems == []


def test_hosts_that_arent_in_the_cluster_yet_are_a_note_where_others_join():
    lost = {"id": "unreachable", "user": "", "reason": "timed out"}
    others = (Host("new", "gpu7", "gpu_nodes", trouble=lost), Host("cp2", "cp2", "control_plane"))
    made = found(Options(nodes=["gpu1", "gpu7", "gpu8"], alone=["gpu1"]), hosts=(*HOSTS, *others))
    assert [(one.id, one.severity) for one in made] == [("not-joined", "note")]
    assert made[0].text.endswith("only gpu1 may change, since they aren't in the cluster yet: new, cp2, gpu8")
    # The one that joins has to be there.
    assert (
        found(Options(alone=["gpu7"]), hosts=(*HOSTS, others[0])).problems[1].startswith("gpu_nodes: host new (gpu_no")
    )
    assert len(found(hosts=(*HOSTS, *others)).problems) == 3


# OpenShift's CoreOS and managed nodes are no machines of the inventory.
def named(*nodes, **changes):
    return Options(**{"nodes": nodes, "image_delivery": "registry", **changes})


@pytest.mark.parametrize(("options", "hosts"), [(None, HOSTS), (named("gpu1"), ()), (named("gpu1"), (HOSTS[1],))])
def test_no_finding_without_a_problem(options, hosts):
    """The second and third have nodes outside the inventory, named in a variable; the facts aren't changed."""
    before = copy.deepcopy(hosts)
    assert list(found(options, hosts=hosts)) == [] and before == hosts


@pytest.mark.parametrize(
    ("nodes", "live", "delivery", "sentence"),
    [
        (
            ["gpu9", "gpu9"],
            node("gpu1"),
            "registry",
            "gpushare_nodes: gpu9 isn't a node of the cluster, whose nodes are",
        ),
        (["gpu1"], node("gpu1", runtime="rkt://1.30"), "registry", "gpushare_nodes: node gpu1 runs rkt://1.30"),
        (["gpu1"], node("gpu1", runtime="cri-o://1.33"), "import", "gpushare_image_delivery: node gpu1 runs cri-o"),
        (["gpu1"], node("gpu1"), "import", "gpushare_image_delivery: node gpu1 is no host of the inventory"),
        (
            ["gpu1"],
            node("gpu1", {"nvidia.com/gpu": "2"}),
            "registry",
            "gpushare_nodes: node gpu1 announces nvidia.com/gpu",
        ),
        # A scheduler runs there, too.
        (["cp1"], node("gpu1"), "registry", "gpushare_nodes: node cp1 announces volcano.sh/vgpu-number already"),
    ],
)
def test_nodes_outside_the_inventory_are_examined_by_the_cluster(nodes, live, delivery, sentence):
    crowded = {"volcano.sh/vgpu-number": "1"} if nodes == ["cp1"] else None
    result = found(named(*nodes, image_delivery=delivery), [live, node("cp1", crowded)], hosts=(HOSTS[1],))
    assert len(result.problems) == 1, result.problems
    assert result.problems[0].startswith(sentence)


def test_a_machine_whose_cards_are_not_shared_may_announce_them_otherwise():
    assert found(named("cp1"), [node("gpu1", {"nvidia.com/gpu": "2"}), node("cp1")]).problems == []
    assert found(named("cp1"), [node("gpu1", runtime="rkt://1.30"), node("cp1")]).problems != []


SERVED = {operator.PLUGIN: "true"}


@pytest.mark.parametrize(
    ("operator_removes", "labels", "resource", "problems"),
    [
        (True, SERVED, "nvidia.com/gpu", 0),
        (True, SERVED, "nvidia.com/mig-1g.5gb", 0),
        # Taken away a moment ago; kubelet goes on for a while.
        (True, {operator.PLUGIN: "false"}, "nvidia.com/gpu", 0),
        (True, {}, "nvidia.com/gpu", 1),
        (True, SERVED, "nvidia.com/gpumem", 1),
        (False, SERVED, "nvidia.com/gpu", 1),
    ],
)
def test_resources_that_the_gpu_operator_will_remove_are_no_problem(operator_removes, labels, resource, problems):
    objects = [node("gpu1", {resource: "2"}, labels=labels), node("cp1")]
    assert len(found(named("gpu1", gpu_operator=operator_removes), objects, hosts=()).problems) == problems


def test_all_problems_are_reported_at_once():
    assert len(found(None, [node("gpu1", runtime="rkt://1.30")], with_gpu1(facts=facts(gpus=0))).problems) == 3


def test_a_node_that_isnt_ready_is_a_warning_and_unknown_cards_are_noted():
    assert found(objects=[node("gpu1", ready="False"), node("cp1")]).texts("warning") == [
        "node gpu1 isn't Ready; run 'kubectl describe node gpu1': its conditions have the reason"
    ]
    result = found(Options(memory_unit="MiB"), hosts=with_gpu1(facts=facts(count=0)))
    assert result.problems == []
    assert "gpushare_memory_unit: host gpu1 lists no card before its driver is loaded" in result.texts("note")[0]


def test_pods_are_read_only_where_a_unit_changes():
    # Besides the version, the nodes and the slices.
    for noted, requests in ((cards(16, 16384), 3), (cards(16384, 16384), 4), ({}, 3)):
        kube = FakeKube(node("gpu1", annotations=noted), gpu_pod())
        result = collect(kube, {"memory_unit": "GiB", "scheduler": None})
        assert result["requests"] == {"GET": requests}
        assert (result["sharing_pods"] is None) is (requests == 3)
    assert result["nodes"][0]["annotations"] == {}, "annotations of others can be large"


CROWDED = {"objects": [node("gpu1", {"nvidia.com/gpu": "2"}), node("cp1")]}


@pytest.mark.parametrize(
    ("ignore", "left"),
    [((), 1), (["foreign-plugin"], 0), (["foreign-plugin@gpu1"], 0), (["foreign-plugin@cp1"], 1), (["no-gpu"], 1)],
)
def test_a_finding_is_ignored_by_id_and_by_host(ignore, left):
    result = found(**CROWDED, ignore=ignore)
    assert len(result.problems) == left
    assert [one.severity for one in result] == ["problem" if left else "ignored"]


@pytest.mark.parametrize("word", ["foreign", "wrong-value", "no-gpu-nodes@gpu1", ""])
def test_an_unknown_id_to_ignore_is_refused(word):
    with pytest.raises(BadInput, match=f"preflight_ignore: '{word}' isn't the id of a finding that can be ignored"):
        found(ignore=[word])


def test_refusals_of_the_roles_are_reported():
    plans = (Finding("driver-refused", "problem", "a card of 2014"), Finding("runtime-warning", "warning", "hm"))
    hosts = with_gpu1(plans=plans)
    assert found(hosts=hosts).problems == ["a card of 2014"]
    assert found(hosts=hosts).texts("warning") == ["hm"]
    assert found(hosts=hosts, ignore=["driver-refused"]).problems == []


def test_the_machines_alone_can_be_examined():
    result = examine(Options(), None, with_gpu1(node="gpu9", facts=facts(gpus=0)))
    assert [one.id for one in result] == ["no-gpu"]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_list_has_the_worst_first_and_fits_a_terminal(width):
    broken = {**facts(count=0, gpus=1), "sources_stale": [{"file": "/etc/apt/sources.list.d/nvidia-docker.list"}]}
    result = found(**CROWDED, hosts=with_gpu1(facts=broken))
    entries = list(result.entries(width))
    lines = [line for _severity, text in entries for line in text.splitlines()]
    assert [line.split() for line in lines if not line.startswith(" ")] == [
        ["problem", "foreign-plugin", "gpu1"],
        ["note", "stale-sources", "gpu1"],
        ["note", "unknown-cards", "gpu1"],
    ]
    assert [severity for severity, _text in entries] == ["problem", "note", "note"]
    assert width - 20 < max(map(len, lines)) <= width or (width > 120 and max(map(len, lines)) <= 120)
    # What was found and what to do stand on lines of their own.
    assert any(line.startswith("         announces nvidia.com/gpu already") for line in lines)
    assert any(line.startswith("         → remove that plugin") for line in lines)
    assert list(found().entries(width)) == []


def test_hosts_with_the_same_finding_share_an_entry():
    hosts = [Host(f"gpu{at}", f"gpu{at}", "gpu_nodes", facts(gpus=0), R615) for at in range(30)]
    result = examine(Options(), None, hosts)
    [(_severity, text)] = result.entries(160)
    first, *rest = text.splitlines()
    assert first == "problem  no-gpu  " + ", ".join(f"gpu{at}" for at in range(8)) + ", and 22 more"
    assert rest[0] == "         has no NVIDIA GPU on its PCI bus (gpu_nodes)"
    assert [line[:11] for line in rest[1:]] == ["         → "]
    assert [one["hosts"] for one in (each.result() for each in result)] == [[f"gpu{at}"] for at in range(30)]


@pytest.mark.parametrize(
    ("id", "user", "words", "ignorable"),
    [
        ("unreachable", "kube", "host gpu1 can't be reached as kube: No route to host; mend its address", False),
        ("unreachable", "", "host gpu1 can't be reached: No route to host;", False),
        ("not-root", "kube", "host gpu1 runs modules as kube, and the roles need root there; set ansible_become", True),
        ("no-escalation", "kube", "host gpu1 is reached as kube, who can't become root: No route to host; run", True),
        ("no-facts", "root", "host gpu1 returns no facts: No route to host; mend", False),
    ],
)
def test_a_host_without_facts_is_a_finding_among_the_others(id, user, words, ignorable):
    silent = with_gpu1(facts=None, trouble={"id": id, "user": user, "reason": "No route to host"})
    result = found(hosts=silent, objects=[node("gpu1", runtime="rkt://1.30"), node("cp1")])
    assert [one.id for one in result] == [id, "runtime"]
    assert result.problems[0].startswith(words)
    assert (id in described()) is ignorable


def test_every_finding_has_a_meaning():
    assert all(meaning.endswith(".") for meaning in described().values())


KEPT = {"address": "0000:00:00.0", "uuid": "", "name": "", "entry": "0000:00:00.0"}


def excluding(cards=(), unmatched=(), unnamed=False, **more):
    node_facts = facts(**more)
    node_facts["driver"]["excluded"] = {"cards": list(cards), "unmatched": list(unmatched), "unnamed": unnamed}
    return node_facts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cards": [KEPT]}, []),
        (
            {"unmatched": ["nvidia t400*"]},
            [("exclude-unmatched", "problem", "gpu_exclude: nvidia t400* names no card")],
        ),
        # Of a card that no driver lists only the address is known.
        ({"unmatched": ["nvidia t400*"], "unnamed": True}, [("exclude-unmatched", "warning", "names no card yet")]),
        (
            {"unmatched": ["0000:3c:00.0"], "unnamed": True},
            [("exclude-unmatched", "problem", "0000:3c:00.0 names no card; correct it, or remove it")],
        ),
        # Every card of the machine: nothing is left to share.
        (
            {"cards": [KEPT], "gpus": 0, "count": 0},
            [("no-gpu", "problem", "host gpu1 has no card beside those that it keeps: 0000:00:00.0")],
        ),
    ],
)
def test_what_gpu_exclude_names(given, expected):
    result = found(hosts=with_gpu1(facts=excluding(**given)))
    assert [(one.id, one.severity) for one in result] == [one[:2] for one in expected]
    assert all(text in one.text for one, (_id, _severity, text) in zip(result, expected, strict=True))


def test_an_entry_of_a_group_may_name_cards_of_some_machines():
    entry = "nvidia t400*"
    named = {**KEPT, "entry": entry}
    hosts = [Host("gpu1", "gpu1", "gpu_nodes", excluding(cards=[named]), R615)]
    hosts += [Host("gpu2", "gpu2", "gpu_nodes", excluding(unmatched=[entry]), R615)]
    objects = [node("gpu1"), node("gpu2")]
    assert [one.id for one in found(hosts=hosts, objects=objects)] == []
    hosts[0] = Host("gpu1", "gpu1", "gpu_nodes", excluding(unmatched=[entry]), R615)
    [one] = found(hosts=hosts, objects=objects)
    assert (one.id, one.hosts) == ("exclude-unmatched", ("gpu1", "gpu2"))


@pytest.mark.parametrize("backend", ["hami", "nvidia", ""])
def test_a_back_end_that_takes_every_card_is_refused_where_one_is_to_be_kept(backend):
    hosts = with_gpu1(facts=excluding(cards=[KEPT]))
    options = Options(device_plugin_image="example.org/plugin:1")
    if backend:
        having = {**resolve([], cluster_of(collect(FakeKube(), {"memory_unit": None, "scheduler": None})))}
        having["nodes"] = [{"node": "gpu1"}]
        options = Options(claims=Claims(backends={**having, backend: ["gpu1"]}))
    result = [one for one in examine(options, None, hosts) if one.id == "exclude-unsupported"]
    assert [(one.severity, one.host, one.fields["cards"]) for one in result] == [("problem", "gpu1", ["0000:00:00.0"])]
    assert "preflight_ignore: [exclude-unsupported@gpu1]" in result[0].text
    assert not [one for one in examine(options, None, HOSTS) if one.id == "exclude-unsupported"]
