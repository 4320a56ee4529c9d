# SPDX-License-Identifier: GPL-3.0-or-later
"""The allocation of nodes of each backend and version, by snapshots of their annotations."""

from __future__ import annotations

import copy
import json

import pytest
from allocation_snapshots import (
    HAMI_JSON,
    HAMI_TEXT_7,
    HAMI_TEXT_9,
    T4,
    V100,
    allocation,
    asks,
    booked,
    given,
    hami_node,
    node,
    nvidia_node,
    ours,
    pod,
    upstream,
)
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import draw_bar, table
from ansible_collections.kubegpu.share.plugins.module_utils._check.snapshot import backends
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_of


def one(found):
    assert len(found["nodes"]) == 1
    return found["nodes"][0]


def cards(part):
    return [
        (card["uuid"], card["used"], card["total"], [pod["name"] for pod in card["pods"]]) for card in part["cards"]
    ]


# --------------------------------------------------------------------------- gpushare


@pytest.mark.parametrize(("made", "backend"), [(ours, "gpushare"), (upstream, "gpushare-upstream")])
def test_gpushare_of_this_collection_and_of_upstream(made, backend):
    shown = one(allocation([made()], [pod("a", [asks(mem=10)], annotations=booked(1, 10))]))
    assert (shown["backend"], shown["backends"], shown["problem"], shown["unit"]) == (backend, [backend], "", "GiB")
    assert [(card["used"], card["total"]) for card in shown["cards"]] == [(0, 16), (10, 16)]
    assert shown["cards"][0]["uuid"] == (T4 if backend == "gpushare" else "")
    assert shown["also"] == []


STATES = [
    (pod("p", [asks(mem=2)], on=None, phase="Pending"), "pending"),
    (pod("p", [asks(mem=2)], on=None, phase="Pending", annotations=booked(0, 2, "false")), "pending"),
    (pod("p", [asks(mem=2)], phase="Pending"), "unassigned"),
    (pod("p", [asks(mem=2)], phase="Running"), "unassigned"),
    (pod("p", [asks(mem=2)], annotations=booked(0, 2, "false"), phase="Pending"), "unassigned"),
    (pod("p", [asks(mem=2)], annotations=booked(0, 2, "true"), phase="Pending"), "assigned"),
    # On nodes of one card, upstream never marks a pod as assigned.
    (pod("p", [asks(mem=2)], annotations=booked(0, 2, "false"), phase="Running"), "assigned"),
    (pod("p", [asks(mem=2)], annotations=booked(0, 2), deletionTimestamp="2026-01-01T00:00:00Z"), "terminating"),
    (pod("p", [asks(mem=2)], phase="Succeeded", annotations=booked(0, 2)), None),
    (pod("p", [asks(mem=2)], phase="Failed", annotations=booked(0, 2)), None),
    (pod("p", [asks()], annotations=booked(0, 2)), None),
]


@pytest.mark.parametrize(
    ("given_pod", "state"), STATES, ids=lambda value: str(value) if not isinstance(value, dict) else ""
)
@pytest.mark.parametrize("made", [ours, upstream])
def test_the_states_of_a_pod(made, given_pod, state):
    found = allocation([made()], [given_pod])
    shown = one(found)
    rows = [each for card in shown["cards"] for each in card["pods"]] + shown["pending"] + found["waiting"]
    assert [each["state"] for each in rows] == ([state] if state else [])
    assert [each["uid"] for each in rows] == (["uid-p"] if state else [])
    assert shown["used"] == (2 if state not in (None, "pending") else 0)
    assert bool(found["waiting"]) == (state == "pending")


def test_units_by_container():
    several = pod(
        "p", [asks("a", mem=2), asks("log"), asks("b", mem=3)], annotations=booked(0, 5), inits=[asks("i", mem=1)]
    )
    (row,) = one(allocation([ours()], [several]))["cards"][0]["pods"]
    assert row["units"] == 5
    assert row["containers"] == [{"name": "i", "units": 1}, {"name": "a", "units": 2}, {"name": "b", "units": 3}]


# --------------------------------------------------------------------------- HAMi


@pytest.mark.parametrize("register", [HAMI_TEXT_7, HAMI_TEXT_9, HAMI_JSON], ids=["text7", "text9", "json"])
def test_hami_in_each_format_of_its_register(register):
    a = pod("a", [asks(gpu=1, gpumem=3000)], annotations=given(f"{T4},NVIDIA,3000,30:;"))
    b = pod("b", [asks(gpu=2, gpumem=1000)], annotations=given(f"{T4},NVIDIA,1000,0:{V100},NVIDIA,1000,10:;"))
    shown = one(allocation([hami_node(register)], [a, b]))
    assert (shown["backend"], shown["unit"], shown["problem"]) == ("hami", "MiB", "")
    assert cards(shown) == [(T4, 4000, 15360, ["a", "b"]), (V100, 1000, 32768, ["b"])]
    assert (shown["total"], shown["capacity"], shown["allocatable"], shown["used"]) == (48128, 48128, 15360, 5000)
    first, second = shown["cards"]
    assert (first["index"], first["model"], first["healthy"], first["slots"], first["slots_used"]) == (
        *(0, "NVIDIA-Tesla T4", True),
        *(10, 2),
    )
    assert (second["index"], second["healthy"], second["cores_used"], first["cores_used"]) == (1, False, 10, 30)
    assert [each["state"] for each in first["pods"]] == ["assigned", "assigned"]
    assert first["pods"][1]["containers"] == [{"name": "main", "units": 2000}]
    assert shown["slots"] == {"capacity": 20, "allocatable": 20}


def allocated(*containers):
    """The annotation of containers that each hold so many MiB and percent of the cores of the T4."""
    return "".join(f"{T4},NVIDIA,{container}:;" if container else ";" for container in containers)


HELD = given(allocated("3000,30"))
ONE, IJ, SIDECAR = [asks("i")], [asks("i"), asks("j")], [asks("s", always=True), asks("i")]
INIT = [
    # One after the other, then all others at once: the most of it.
    (IJ, ("5000,50", "7000,10", "2000,20", "1000,5"), "", (7000, 50, 2)),
    (ONE, ("1000,5", "2000,20", "1000,5"), "", (3000, 25, 2)),
    # When they have ended, what stays.
    (IJ, ("5000,50", "7000,10", "2000,20", ""), "ij", (2000, 20, 1)),
    (IJ, ("5000,50", "7000,10", "2000,20", ""), "i", (7000, 50, 1)),
    # Sidecars stay.
    (SIDECAR, ("1000,5", "2500,20", "2000,20", ""), "", (3500, 25, 2)),
    (SIDECAR, ("1000,5", "2500,20", "2000,20", ""), "i", (3000, 25, 2)),
    # Older versions list the other containers only.
    (ONE, ("1000,5", "2000,20"), "", (3000, 25, 2)),
]


@pytest.mark.parametrize(("inits", "containers", "ended", "held"), INIT)
def test_hami_counts_init_containers_as_its_scheduler_does(inits, containers, ended, held):
    annotations = given(allocated(*containers))
    made = pod("p", [asks("a"), asks("b")], annotations=annotations, inits=inits, phase="Pending")
    ends = {"terminated": {"exitCode": 0}}
    made["status"]["initContainerStatuses"] = [{"name": name, "state": ends} for name in ended]
    shown = one(allocation([hami_node()], [made]))
    card = shown["cards"][0]
    assert (card["used"], card["cores_used"], card["slots_used"]) == held and shown["used"] == held[0]


def test_hami_counts_terminating_and_no_ended_pods():
    pods = [
        pod("leaves", [asks(gpu=1)], annotations=HELD, deletionTimestamp="x"),
        pod("ended", [asks(gpu=1)], annotations=HELD, phase="Succeeded"),
    ]
    card = one(allocation([hami_node()], pods))["cards"][0]
    assert [(each["name"], each["state"]) for each in card["pods"]] == [("leaves", "terminating")]
    assert card["used"] == 3000


def test_hami_counts_an_unbound_pod_with_gpus():
    waiting = pod("p", [asks(gpu=1, gpumem=3000)], on=None, annotations=HELD, phase="Pending")
    found = allocation([hami_node()], [waiting])
    (row,) = one(found)["cards"][0]["pods"]
    assert (row["state"], row["units"], one(found)["used"]) == ("pending", 3000, 3000)
    assert [(each["name"], each["backend"], each["units"]) for each in found["waiting"]] == [("p", "hami", 3000)]


@pytest.mark.parametrize(
    ("asked", "annotations", "units", "words"),
    [
        ({"gpu": 2, "gpumem": 3000}, None, 6000, "no annotation hami.io/vgpu-devices-allocated"),
        ({"gpu": 1}, None, 0, "HAMi's scheduler didn't select"),
        ({"gpu": 1}, given(allocated("3000,30"), on="other"), 3000, "HAMi selected GPUs of other"),
        ({"gpu": 1}, given(""), 0, "names no GPU"),
        ({"gpu": 1}, given("x,y:;"), 0, "isn't UUID, vendor, MiB and cores"),
        ({"gpu": 1}, given(allocated("99999999999,0")), 0, "isn't UUID"),
        ({"gpu": 1}, given(allocated("-5,0")), 0, "isn't UUID"),
        ({"gpu": 1}, given(allocated("4294967296,0")), 0, "above"),
    ],
)
def test_a_pod_that_bypassed_hami_has_no_card(asked, annotations, units, words):
    shown = one(allocation([hami_node()], [pod("p", [asks(**asked)], annotations=annotations)]))
    (row,) = shown["pending"]
    assert row["units"] == shown["used"] == units
    assert words in row["problem"] and row["state"] == "unassigned"


def test_a_gpu_of_hami_that_the_node_lacks_is_pending():
    lost = pod("p", [asks(gpu=1)], annotations=given(f"GPU-gone,NVIDIA,3000,30:{T4},NVIDIA,10,0:;"))
    shown = one(allocation([hami_node()], [lost]))
    assert [(each["name"], each["units"]) for each in shown["pending"]] == [("p", 3000)]
    assert (shown["cards"][0]["used"], shown["used"]) == (10, 3010)


@pytest.mark.parametrize(
    "register",
    [
        f"{T4},10,15360,100,NVIDIA-T4,0:",
        f"{T4},ten,15360,100,NVIDIA-T4,0,true:",
        f"{T4},10,-1,100,NVIDIA-T4,0,true:",
        f"{T4},10,99999999999,100,NVIDIA-T4,0,true:",
        f"{T4},10,1,100,NVIDIA-T4,0,true:{T4},10,1,100,NVIDIA-T4,0,true:",
        "[{]",
        "[" * 100000,
        "{}",
        "[1]",
        *(json.dumps([{"id": T4, "devmem": mib}]) for mib in (10**400, float("nan"), 1.5, True, -1)),
        json.dumps([{"id": None}]),
        json.dumps([{"id": T4, "type": 5}]),
        '[{"id": "G", "devmem": ' + "9" * 5000 + "}]",
    ],
    ids=range(17),
)
def test_a_register_that_breaks_the_contract_is_a_problem_of_its_node(register):
    held = pod("p", [asks(gpu=1)], annotations=HELD)
    found = allocation([hami_node(register), hami_node(name="n2")], [held])
    broken, well = found["nodes"]
    assert "hami.io/node-nvidia-register" in broken["problem"] and len(broken["problem"]) < 200
    assert (broken["backend"], broken["cards"], [each["name"] for each in broken["pending"]]) == ("hami", [], ["p"])
    assert (well["problem"], well["total"]) == ("", 48128)
    assert "PROBLEM:    node annotation hami.io" in table(found)


def test_a_leftover_register_of_hami_is_ignored():
    left = hami_node()
    left["metadata"]["annotations"]["hami.io/node-handshake"] = "Deleted_2026.01.01 00:00:00"
    shown = one(allocation([left], []))
    assert (shown["backend"], shown["total"]) == ("nvidia", 20)
    assert "leftover of HAMi" in shown["problem"]


# --------------------------------------------------------------------------- NVIDIA's plugin


def test_nodes_of_nvidias_plugin_have_no_cards():
    labels = {"gpu.product": "Tesla-T4-SHARED", "gpu.memory": "15360", "gpu.count": "2"}
    labels |= {"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}
    pods = [pod("a", [asks(gpu=2)]), pod("b", [asks("x", gpu=1), asks("y", gpu=1)], phase="Pending")]
    found = allocation([nvidia_node(gpu=8, labels=labels)], pods)
    shown = one(found)
    assert (shown["backend"], shown["unit"], shown["cards"]) == ("nvidia", "count", [])
    assert (shown["total"], shown["used"]) == (8, 4)
    assert shown["gpus"] == {
        "product": "Tesla-T4-SHARED",
        "memory_mib": 15360,
        "count": 2,
        "replicas": 4,
        "sharing": "time-slicing",
        "mig_strategy": None,
    }
    assert shown["resources"] == [{"name": "nvidia.com/gpu", "capacity": 8, "allocatable": 8, "used": 4}]
    assert [(each["name"], each["units"], each["state"]) for each in shown["pending"]] == [
        ("a", 2, "assigned"),
        ("b", 2, "unassigned"),
    ]
    assert found["totals"] == [{"backend": "nvidia", "unit": "count", "total": 8, "used": 4}]
    text = table(found)
    assert "nvidia.com/gpu [#####.....] 4/8  Tesla-T4-SHARED, 15360 MiB, 2 cards, time-slicing, 4 replicas" in text
    assert "Allocated/Total GPUs of NVIDIA's plugin (count): 4/8 (50%)" in text


def test_mig_devices_and_renamed_resources_are_counted_for_themselves():
    pods = [pod("a", [asks(mig=1)]), pod("b", [asks(shared=2)]), pod("c", [asks()])]
    shown = one(allocation([nvidia_node(mig=7, shared=4)], pods))
    assert shown["resources"] == [
        {"name": "nvidia.com/gpu.shared", "capacity": 4, "allocatable": 4, "used": 2},
        {"name": "nvidia.com/mig-1g.5gb", "capacity": 7, "allocatable": 7, "used": 1},
    ]
    assert (shown["total"], shown["used"]) == (11, 3)


def test_init_and_sidecar_containers_are_counted_as_kubernetes_does():
    made = pod("p", [asks("a", gpu=1)], inits=[asks("i", gpu=3), asks("s", always=True, gpu=1), asks("j", gpu=1)])
    assert one(allocation([nvidia_node(gpu=8)], [made]))["used"] == 3
    made = pod("p", [asks("a", gpu=2)], inits=[asks("s", always=True, gpu=1), asks("j", gpu=1)])
    assert one(allocation([nvidia_node(gpu=8)], [made]))["used"] == 3


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "9" * 5000, "\N{ARABIC-INDIC DIGIT THREE}", None], ids=range(6))
def test_an_invalid_label_is_a_problem(value):
    shown = one(allocation([nvidia_node(gpu=2, labels={"gpu.replicas": value})], []))
    assert shown["gpus"]["replicas"] is None
    assert shown["problem"] == ("" if value is None else "label nvidia.com/gpu.replicas isn't an integer")


# --------------------------------------------------------------------------- several of them


def test_a_node_of_two_backends():
    both = ours(gpu=2)
    pods = [pod("a", [asks(mem=4)], annotations=booked(0, 4)), pod("b", [asks(gpu=1)]), pod("c", [asks(mem=1, gpu=1)])]
    found = allocation([both], pods)
    shown = one(found)
    assert (shown["backend"], shown["backends"]) == ("mixed", ["gpushare", "nvidia"])
    assert (shown["unit"], shown["total"], shown["used"]) == ("GiB", 32, 5)
    (other,) = shown["also"]
    assert (other["backend"], other["total"], other["used"]) == ("nvidia", 2, 2)
    assert [each["name"] for each in other["pending"]] == ["b", "c"]
    assert "Also nvidia:" in table(found)


@pytest.mark.parametrize(
    ("labels", "resources", "expected"),
    [
        # As long as nothing is allocatable of it.
        (
            {"gpushare": "true"},
            {"capacity": {"nvidia.com/gpu": "20"}, "allocatable": {"nvidia.com/gpu": "0"}},
            ["gpushare"],
        ),
        (
            {"gpushare": "true"},
            {"capacity": {"nvidia.com/gpu": "2"}, "allocatable": {"nvidia.com/gpu": "2"}},
            ["gpushare", "nvidia"],
        ),
        ({}, {"capacity": {"nvidia.com/gpu": "2"}, "allocatable": {"nvidia.com/gpu": "0"}}, ["gpushare", "nvidia"]),
    ],
)
def test_what_kubelet_still_reports_of_the_back_end_before_is_none_of_the_node(labels, resources, expected):
    switched = ours()
    switched["metadata"]["labels"] = labels
    for field, more in resources.items():
        switched["status"][field].update(more)
    assert one(allocation([switched], []))["backends"] == expected
    assert set(backends(node_of(switched))) == set(expected)


@pytest.mark.parametrize("backend", ["hami", "nvidia"])
def test_gpushares_units_of_before_are_none_of_another_back_ends_node(backend):
    switched = hami_node() if backend == "hami" else nvidia_node(gpu=2)
    for labels, expected in (({"kubegpu.share/backend": backend}, {backend}), ({}, {"gpushare-upstream", backend})):
        switched["metadata"]["labels"] = labels
        switched["status"]["capacity"]["aliyun.com/gpu-mem"] = "32"
        switched["status"]["allocatable"]["aliyun.com/gpu-mem"] = "0"
        assert set(one(allocation([switched], []))["backends"]) == set(backends(node_of(switched))) == expected


def test_totals_never_add_different_units():
    nodes = [nvidia_node("n3", gpu=8), hami_node(name="n2"), ours()]
    found = allocation(nodes, [])
    assert [(each["backend"], each["unit"], each["total"]) for each in found["totals"]] == [
        ("gpushare", "GiB", 32),
        ("hami", "MiB", 48128),
        ("nvidia", "count", 8),
    ]
    assert (found["unit"], found["total"]) == ("GiB", 32)
    assert [each["name"] for each in found["nodes"]] == ["n1", "n2", "n3"]
    text = table(found)
    assert "Allocated/Total GPU memory of the cluster (GiB): 0/32 (0%)" in text
    assert "Allocated/Total GPU memory of HAMi's nodes (MiB): 0/48128 (0%)" in text


def test_pods_of_a_node_without_gpu_resources():
    pods = [pod("a", [asks(mem=4)]), pod("b", [asks(gpu=1)]), pod("c", [], annotations=given(f"{T4},NVIDIA,1,1:;"))]
    shown = one(allocation([node()], pods))
    assert (shown["backend"], shown["backends"], shown["used"], shown["total"]) == ("none", [], 4, 0)
    assert [(each["backend"], each["used"]) for each in shown["also"]] == [("none", 1), ("none", 1)]


# --------------------------------------------------------------------------- invalid data


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ("[" * 100000, "kubegpu.share/cards can't be parsed"),
        ("[", "kubegpu.share/cards can't be parsed"),
        ({"units": 10**400}, "kubegpu.share/cards can't be parsed"),
        ({"reservedMiB": 10**400}, "kubegpu.share/cards has a number above"),
        ({"memoryMiB": -1}, "kubegpu.share/cards has a negative number"),
    ],
)
def test_cards_that_cant_be_read_are_a_problem_and_upstreams_rule_counts(cards, words):
    broken = ours()
    annotations = broken["metadata"]["annotations"]
    rows = json.loads(annotations[contract.NODE_CARDS])
    changed = json.dumps([{**row, **cards} for row in rows]) if isinstance(cards, dict) else cards
    annotations[contract.NODE_CARDS] = changed
    found = allocation([broken, ours("n2")], [pod("a", [asks(mem=4)], annotations=booked(0, 4))])
    assert words in found["nodes"][0]["problem"]
    assert (found["nodes"][0]["total"], found["nodes"][0]["used"]) == (32, 4)
    assert found["nodes"][1]["problem"] == "" and found["nodes"][1]["total"] == 32


def test_a_malformed_node_is_a_problem():
    found = allocation([{**ours(), "metadata": {"name": "n1", "annotations": [1]}}, ours("n2")], [])
    assert "its object in the API is malformed" in found["nodes"][0]["problem"]
    assert found["nodes"][1]["problem"] == "" and found["nodes"][1]["total"] == 32


def test_implausible_amounts_of_a_node_make_no_cards():
    found = allocation([node(mem="9E", count=5), node("n2", mem=10, count="3G"), node("n3", mem="9" * 40, count=1)], [])
    first, second, third = found["nodes"]
    assert "aliyun.com/gpu-count is above 128" in second["problem"]
    assert "aliyun.com/gpu-mem is above" in first["problem"] and "aliyun.com/gpu-mem is above" in third["problem"]
    assert [each["total"] for each in found["nodes"]] == [0, 0, 0]


@pytest.mark.parametrize("units", ["1e30", "9" * 30, "9" * 5000], ids=range(3))
@pytest.mark.parametrize("on", ["n1", None])
def test_an_implausible_request_of_a_pod_counts_nothing(units, on):
    found = allocation(
        [ours()], [pod("p", [asks(mem=units)], on=on), pod("q", [asks(mem=1)], annotations=booked(0, 1))]
    )
    rows = one(found)["pending"] + found["waiting"]
    assert [(each["name"], each["units"], each["containers"]) for each in rows] == [("p", 0, [])]
    assert rows[0]["problem"]
    assert one(found)["used"] == 1
    assert json.dumps(found)


HEALTHY = {
    "gpushare": ([ours()], [pod("a", [asks(mem=4)], annotations=booked(0, 4))]),
    "hami": ([hami_node()], [pod("a", [asks(gpu=1)], annotations=HELD, inits=[asks("i")])]),
    "nvidia": ([nvidia_node(gpu=2, labels={"gpu.count": "2"})], [pod("a", [asks(gpu=1)])]),
}
JUNK = [None, True, -1, 10**400, float("nan"), float("inf"), "", "x", "9" * 5000, "[" * 5000]
JUNK += [[], [None], [[]], {}, {"a": None}]


def places(value, path=()):
    """Yield the path of every value in a JSON document."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def put(value, path, junk):
    if not path:
        return junk
    changed = copy.deepcopy(value)
    at = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = junk
    return changed


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("what", [0, 1], ids=["node", "pod"])
def test_a_malformed_object_doesnt_affect_the_others(kind, what):
    healthy = HEALTHY[kind]
    well = one(allocation(*healthy))
    for path in places(healthy[what][0]):
        for junk in JUNK:
            broken = put(healthy[what][0], path, junk)
            if isinstance(broken, dict) and isinstance(broken.get("metadata"), dict):
                broken = put(broken, ("metadata", "name"), "broken" if path != ("metadata", "name") else junk)
            lists = [list(healthy[0]), list(healthy[1])]
            lists[what] = [broken, *lists[what]]
            found = allocation(*lists)
            assert isinstance(table(found), str) and isinstance(table(found, wide=True), str)
            assert len(json.dumps(found)) < 100000, (path, junk)
            shown = next(each for each in found["nodes"] if each["name"] == "n1")
            assert shown["total"] == well["total"], (path, junk)
            rows = [each for card in shown["cards"] for each in card["pods"]] + shown["pending"]
            assert "a" in [each["name"] for each in rows]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_a_value_that_is_no_object_is_ignored(junk):
    assert allocation([junk, ours()], [junk])["total"] == 32


# --------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("used", "total", "shown"),
    [
        (0, 16, ".........."),
        (1, 160, "#........."),
        (12, 16, "#######..."),
        (159, 160, "#########."),
        (16, 16, "##########"),
        (20, 16, "##########"),
        (0, 0, ".........."),
        (1, 0, "##########"),
    ],
)
def test_bars(used, total, shown):
    assert draw_bar(used, total) == f"[{shown}]"


def test_the_wide_table_is_complete_and_the_narrow_one_truncates_names():
    long = "a-very-long-name-of-a-deployment-that-somebody-has-chosen-6d5f7c8b9-x7k2p"
    held = pod(long, [asks("main", mem=2), asks("side", mem=1)], annotations=booked(0, 3))
    found = allocation([ours()], [held])
    narrow, wide = table(found), table(found, wide=True)
    assert long not in narrow and "a-very-long-name-of-a-deployment-...f7c8b9-x7k2p" in narrow
    row = next(line.split() for line in wide.splitlines() if line.startswith("team"))
    assert row == ["team", long, "Running", "assigned", f"uid-{long}", "main=2,side=1", "3", "0"]
    assert T4 in wide and T4 not in narrow
    assert "16384 MiB" in wide and "BACKEND:    gpushare" in wide
    assert narrow.isascii() and wide.isascii()
    assert not any(line != line.rstrip() for line in (narrow + wide).splitlines())


def test_hamis_table():
    held = pod("a", [asks(gpu=1)], annotations=given(f"{T4},NVIDIA,3072,30:;"))
    text = table(allocation([hami_node()], [held]), wide=True)
    assert "BACKEND:    hami" in text
    assert f"GPU0 [##........] 3072/15360  NVIDIA-Tesla T4, {T4}, slots 1/10, cores 30/100\n" in text
    assert f"GPU1 [..........] 0/32768     NVIDIA-Tesla V100, {V100}, slots 0/10, cores 0/100, UNHEALTHY\n" in text
