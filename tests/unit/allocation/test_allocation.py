# SPDX-License-Identifier: GPL-3.0-or-later
"""The allocation compared with kubectl inspect's algorithm, and where it differs on purpose."""

from __future__ import annotations

import json

import allocation_snapshots as api
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.compute import percent
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import table
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_unit
from hypothesis import given
from hypothesis import strategies as st

MEMORY, COUNT = contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT


def node(name="gpu1", memory=32, count=2, cards=None):
    annotations = {} if cards is None else {contract.NODE_CARDS: contract.cards_to_annotation(cards)}
    return api.node(name, annotations, mem=memory, count=count)


def card(index, units, memory=0, healthy=True):
    return contract.Card(index, f"GPU-{index}{index}", index, memory or units * 1024, units, healthy, "Model")


def pod(name, units, on="gpu1", index=None, phase="Running", assigned=True, terminating=False, containers=None):
    booked = {contract.POD_INDEX: str(index), contract.POD_ASSIGNED: str(assigned).lower()}
    asked = [
        api.asks(f"c{at}", **({"mem": container} if container else {}))
        for at, container in enumerate(containers or [units])
    ]
    leaving = {"deletionTimestamp": "x"} if terminating else {}
    return api.pod(name, asked, on, {} if index is None else booked, phase, **leaving)


# --------------------------------------------------------------------------- kubectl inspect gpushare -d


def inspect(nodes, pods):
    """The numbers that kubectl inspect gpushare -d prints: columns and sums of each node, and the cluster's sums."""
    shown, cluster_used, cluster_total = {}, 0, 0
    for node in nodes:
        resources = node["status"]["allocatable"]
        memory, count = int(resources.get(MEMORY, 0)), int(resources.get(COUNT, 0))
        if memory <= 0:
            continue
        devices = dict.fromkeys(range(count), 0)
        rows = {}
        for each in pods:
            ended = each["status"]["phase"] in ("Succeeded", "Failed")
            if ended or each["spec"].get("nodeName") != node["metadata"]["name"]:
                continue
            held = sum(int(c["resources"].get("limits", {}).get(MEMORY, 0)) for c in each["spec"]["containers"])
            if held <= 0:
                continue
            try:
                device = int(each["metadata"]["annotations"][contract.POD_INDEX])
            except (KeyError, ValueError):
                device = -1
            devices[device] = devices.get(device, 0) + held
            rows[each["metadata"]["name"]] = (device if 0 <= device < count else -1, held)
        used = sum(devices.values())
        shown[node["metadata"]["name"]] = {
            "cards": [(devices[at], memory // count) for at in range(count)],
            "pods": rows,
            "used": used,
            "total": memory,
            "percent": int(used / memory * 100),
        }
        cluster_used, cluster_total = cluster_used + used, cluster_total + memory
    return shown, cluster_used, cluster_total


pods_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=1, max_size=3),
        st.sampled_from(["gpu1", "gpu2", "gpu10", "other", None]),
        st.sampled_from([None, 0, 1, 2, 3, -1, "x"]),
        st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
        st.booleans(),
    ),
    max_size=14,
)
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 80)), min_size=3, max_size=3)


@given(pods_of, sizes, st.booleans())
def test_the_numbers_are_those_of_kubectl_inspect(described, cluster, annotated):
    nodes = [api.node("other")]
    for name, (count, units) in zip(("gpu1", "gpu2", "gpu10"), cluster, strict=True):
        cards = [card(at, units) for at in range(count)] if annotated else None
        nodes.append(node(name, count * units, count, cards))
    pods = [
        pod(f"p{at}", 0, on, index, phase, terminating=leaving, containers=containers)
        for at, (containers, on, index, phase, leaving) in enumerate(described)
    ]
    expected, used, total = inspect(nodes, pods)
    found = api.allocation(nodes, pods)
    ours = {node["name"]: node for node in found["nodes"] if node["total"]}
    assert list(ours) == ["gpu1", "gpu2", "gpu10"]
    for name, inspected in expected.items():
        one = ours[name]
        assert [(each["used"], each["total"]) for each in one["cards"]] == inspected["cards"]
        assert (one["used"], one["total"]) == (inspected["used"], inspected["total"])
        assert percent(one["used"], one["total"]) == inspected["percent"]
        rows = {each["name"]: (at["index"], each["units"]) for at in one["cards"] for each in at["pods"]}
        rows.update({each["name"]: (-1, each["units"]) for each in one["pending"]})
        assert rows == inspected["pods"]
    # Pods on a node without device plugin count here; inspect ignores that node.
    stray = sum(node["used"] for node in found["nodes"] if not node["total"])
    assert (found["used"] - stray, found["total"]) == (used, total)
    assert table(found) and json.loads(json.dumps(found)) == found


# --------------------------------------------------------------------------- differences from upstream


def test_unequal_cards_have_their_own_sizes():
    found = api.allocation([node(memory=12, count=2, cards=[card(0, 10, 11175), card(1, 1, 2002)])], [])
    assert [(card["total"], card["used"]) for card in found["nodes"][0]["cards"]] == [(10, 0), (1, 0)]
    assert found["total"] == 11


def test_the_fields_of_a_pod():
    pods = [pod("late", 2, index=1, assigned=False, terminating=True), pod("lost", 1, index=7), pod("new", 3)]
    found = api.allocation([node()], pods)["nodes"][0]
    assert found["cards"][1]["pods"] == [
        {
            **{"namespace": "team", "name": "late", "uid": "uid-late", "phase": "Running", "problem": ""},
            **{"units": 2, "containers": [{"name": "c0", "units": 2}]},
            **{"assigned": False, "terminating": True, "state": "terminating"},
        }
    ]
    assert [one["name"] for one in found["pending"]] == ["lost", "new"]


def test_pending_pods_have_the_schedulers_reason():
    waiting = pod("w", 20, on=None, phase="Pending")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "no card\nhas 20"}]
    found = api.allocation([node()], [waiting, pod("none", 0, on=None)])
    (row,) = found["waiting"]
    assert row.items() >= {"namespace": "team", "name": "w", "units": 20, "reason": "no card has 20"}.items()
    assert (row["state"], row["phase"], row["backend"]) == ("pending", "Pending", "gpushare")
    assert found["used"] == 0


@pytest.mark.parametrize(
    ("cards", "unit"),
    [
        ([card(0, 16, 16384)], "GiB"),
        ([card(0, 16384, 16384)], "MiB"),
        ([card(0, 140, 143771)], "GiB"),  # kubectl inspect calls this one MiB
        ([contract.Card(0, "", 0, 0, 15)], "GiB"),
        ([contract.Card(0, "", 0, 0, 15000)], "MiB"),
        ([card(0, 7, 16384)], "GiB"),
        ([card(0, 1, 1024), card(1, 2048, 2048)], None),
        ([], None),
    ],
)
def test_the_unit_follows_from_the_cards_sizes(cards, unit):
    assert node_unit(cards) == unit


# --------------------------------------------------------------------------- the table


def test_the_table():
    cards = [card(0, 16), card(1, 16, healthy=False)]
    pods = [pod("binpack-0", 2, index=0), pod("binpack-1", 1, index=0, terminating=True), pod("big", 8, index=1)]
    waiting = pod("huge", 99, on=None, phase="Pending")
    found = api.allocation([node(cards=cards), node("gpu2", 16, 1)], [*pods, waiting])
    assert (
        table(found)
        == """\
NAME:       gpu1
IPADDRESS:  192.0.2.7
GPU0 [#.........] 3/16  Model
GPU1 [#####.....] 8/16  Model, UNHEALTHY

NAMESPACE        POD        STATUS       GPU0(Allocated)  GPU1(Allocated)
team             binpack-0  Running      2                0
team             binpack-1  Terminating  1                0
team             big        Running      0                8
Allocated/Total                          3/16             8/16

Allocated/Total of the node (GiB): 11/32 (34%)
-------------------------------------------------------------------------
NAME:       gpu2
IPADDRESS:  192.0.2.7
GPU0 [..........] 0/16

NAMESPACE        POD  STATUS  GPU0(Allocated)
Allocated/Total               0/16

Allocated/Total of the node (GiB): 0/16 (0%)
-------------------------------------------------------------------------
Waiting for a card:
  team/huge requests 99: not scheduled yet
Allocated/Total GPU memory of the cluster (GiB): 11/48 (22%)
"""
    )


def test_pods_without_a_card_have_their_own_column():
    text = table(api.allocation([node(count=1)], [pod("lost", 3)]))
    lines = [line.split() for line in text.splitlines()]
    assert ["NAMESPACE", "POD", "STATUS", "GPU0(Allocated)", "PENDING(Allocated)"] in lines
    assert ["team", "lost", "Running", "0", "3"] in lines
    assert ["Allocated/Total", "0/32", "3"] in lines


def test_the_table_of_a_cluster_without_shares():
    text = table(api.allocation([{"metadata": {"name": "cp1"}, "status": {}}], []))
    assert text.startswith("No node advertises shared GPU memory")
    assert len(text.splitlines()) == 1


def test_a_pod_of_several_cards_is_on_each_of_them_and_one_row() -> None:
    both = pod("both", 12, index=0)
    both["metadata"]["annotations"][contract.POD_INDICES] = "0,1"
    cards = [card(0, 16), contract.Card(1, "GPU-11", 1, 16384, 16, False, "Model", "MIG is on")]
    found = api.allocation([node(cards=cards)], [both, pod("one", 3, index=1)])
    shown = found["nodes"][0]
    assert [(card["used"], [(each["name"], each["units"]) for each in card["pods"]]) for card in shown["cards"]] == [
        (6, [("both", 6)]),
        (9, [("both", 6), ("one", 3)]),
    ]
    assert (shown["used"], shown["pending"]) == (15, [])
    text = table(found)
    assert [line.split() for line in text.splitlines() if line.startswith("team")] == [
        ["team", "both", "Running", "6", "6"],
        ["team", "one", "Running", "0", "3"],
    ]
    assert "GPU1 [#####.....] 9/16  Model, UNHEALTHY: MIG is on" in text
    assert "GPU1 [#####.....] 9/16  Model, 16384 MiB, GPU-11, UNHEALTHY: MIG is on" in table(found, wide=True)


def test_a_share_on_a_missing_card_is_pending() -> None:
    both = pod("both", 12, index=0)
    both["metadata"]["annotations"][contract.POD_INDICES] = "0,5"
    shown = api.allocation([node(cards=[card(0, 16)])], [both])["nodes"][0]
    assert (shown["cards"][0]["used"], shown["used"]) == (6, 12)
    assert [(each["name"], each["units"]) for each in shown["pending"]] == [("both", 6)]
