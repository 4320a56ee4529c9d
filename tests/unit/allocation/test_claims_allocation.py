# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds what by claims, in one table with nodes of other back ends, and how many requests that takes."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
from allocation_snapshots import allocation, asks, booked, node, ours, pod
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import collect, table
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import direct
from dra_objects import claim, pod_uid, slices_of, turned
from kube_api import Api, connect, forget_environment, kubeconfig, module

LABEL = {contract.NODE_LABEL: contract.NODE_LABEL_VALUE}
CARDS = [contract.Card(at, f"GPU-5a4d7f2{at}-0000-4000-8000-00000000000{at}", at, 16384, 16) for at in (0, 1)]
FOUR, PAIR, SPREAD = Shape((4,)), Shape((4, 2)), Shape((8,), cards=2)
GRID = Shape((4, 2), cards=2)


def dra_node(name="gpu1"):
    return node(name, labels=LABEL)


def by_claims(pods, claims, cards=CARDS, nodes=(), **more):
    return allocation([dra_node(), *nodes], pods, slices_of("gpu1", cards, **more), claims)


def on_cards(entry):
    return [[(one["name"], one["units"]) for one in card["pods"]] for card in entry["cards"]]


def test_pods_hold_what_their_claims_are_allocated():
    found = by_claims(
        [turned(1, FOUR), turned(2, PAIR), turned(3, SPREAD)],
        [claim(1, FOUR, CARDS[:1]), claim(2, PAIR, [CARDS[0]] * 2), claim(3, SPREAD, CARDS)],
        limits="enforced",
    )
    (entry,) = found["nodes"]
    assert (entry["backend"], entry["unit"], entry["memory_limit"], entry["problem"]) == ("dra", "GiB", "enforced", "")
    assert on_cards(entry) == [[("work-1", 4), ("work-2", 6), ("work-3", 4)], [("work-3", 4)]]
    assert [(card["used"], card["total"], card["uuid"]) for card in entry["cards"]] == [
        (14, 16, CARDS[0].uuid),
        (4, 16, CARDS[1].uuid),
    ]
    assert (found["unit"], found["total"], found["used"]) == ("GiB", 32, 18)
    several = entry["cards"][0]["pods"][1]
    assert several["containers"] == [{"name": "main-0", "units": 4}, {"name": "main-1", "units": 2}]
    assert (several["state"], several["assigned"], several["problem"]) == ("assigned", True, "")
    assert entry["pending"] == [] and found["waiting"] == []


def test_a_containers_requests_of_several_cards_are_counted_once():
    (entry,) = by_claims([turned(1, GRID)], [claim(1, GRID, [CARDS[0], CARDS[0], CARDS[1], CARDS[1]])])["nodes"]
    assert on_cards(entry) == [[("work-1", 3)], [("work-1", 3)]]
    [held, _other] = [card["pods"][0] for card in entry["cards"]]
    assert held["containers"] == [{"name": "main-0", "units": 4}, {"name": "main-1", "units": 2}]


def test_a_card_with_mig_is_shown_with_its_reason():
    divided = dataclasses.replace(CARDS[0], healthy=False, code="MIGEnabled", reason="MIG is on")
    found = by_claims([], [], cards=[divided, CARDS[1]])
    (entry,) = found["nodes"]
    assert (entry["total"], entry["allocatable"]) == (32, 16)
    assert re.search(r"^GPU0 \S+ 0/16 +UNHEALTHY: MIGEnabled$", table(found), re.MULTILINE), table(found)


def test_a_node_of_each_kind_is_in_one_table():
    extender_pod = pod("b", [asks(mem=10)], on="n1", annotations=booked(1, 10))
    found = by_claims([turned(1, FOUR), extender_pod], [claim(1, FOUR, CARDS[:1])], nodes=[ours("n1")])
    assert [(one["name"], one["backend"], one["used"]) for one in found["nodes"]] == [
        ("gpu1", "dra", 4),
        ("n1", "gpushare", 10),
    ]
    assert [(one["backend"], one["used"]) for one in found["totals"]] == [("gpushare", 10), ("dra", 4)]
    # The columns are kubectl-inspect's.
    text = table(found)
    header = ["NAMESPACE", "POD", "STATUS", "GPU0(Allocated)", "GPU1(Allocated)"]
    assert [line.split() for line in text.splitlines()].count(header) == 2
    assert ["default", "work-1", "Running", "4", "0"] in [line.split() for line in text.splitlines()]
    assert "Allocated/Total GPU memory by claims (GiB): 4/32 (12%)" in text


def test_a_node_that_announces_its_cards_twice_shows_both():
    both = ours("gpu1")
    both["metadata"]["labels"] = LABEL
    found = allocation([both], [turned(1, FOUR)], slices_of("gpu1", CARDS), [claim(1, FOUR, CARDS[:1])])
    (entry,) = found["nodes"]
    assert (entry["backend"], entry["backends"]) == ("mixed", ["gpushare", "dra"])
    assert [(one["backend"], one["used"]) for one in entry["also"]] == [("dra", 4)]
    # kubelet still reports a device plugin that was removed; it allocates nothing any more.
    left = node("gpu1", labels=LABEL, mem=32)
    left["status"]["allocatable"]["aliyun.com/gpu-mem"] = "0"
    (entry,) = allocation([left], [], slices_of("gpu1", CARDS), [])["nodes"]
    assert (entry["backend"], entry["also"]) == ("dra", [])


@pytest.mark.parametrize(
    ("given", "claims", "units"),
    [
        pytest.param(turned(1, PAIR, on="", named=False), [], 6, id="no claim yet, by the template's name"),
        pytest.param(turned(1, FOUR, on=""), [claim(1, FOUR)], 4, id="a claim that isn't allocated"),
    ],
)
def test_a_waiting_pod_has_what_it_asks_for_and_the_schedulers_reason(given, claims, units):
    given["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "cannot allocate  claims"}]
    found = by_claims([given], claims)
    (row,) = found["waiting"]
    assert (row["units"], row["backend"], row["state"]) == (units, "dra", "pending")
    assert row["reason"] == "cannot allocate claims"
    assert found["used"] == 0


def test_pods_of_one_claim_share_its_memory():
    users = {"work-1": pod_uid(1), "work-2": pod_uid(2)}
    second = turned(2, FOUR)
    second["status"]["resourceClaimStatuses"][0]["resourceClaimName"] = "work-1-gpu-mem-x1"
    (entry,) = by_claims([turned(1, FOUR), second], [claim(1, FOUR, CARDS[:1], pods=users)])["nodes"]
    assert on_cards(entry) == [[("work-1", 4), ("work-2", 0)], []] and entry["used"] == 4
    assert "shares claim work-1-gpu-mem-x1 with pod work-1" in entry["cards"][0]["pods"][1]["problem"]


def test_a_pod_with_the_class_as_an_extended_resource_holds_its_card():
    """kube-scheduler makes the claim (DRAExtendedResource, on from 1.36), and the pod's status alone names it."""
    made = claim(1, Shape((16,)), CARDS[:1])
    made["spec"]["devices"]["requests"][0]["name"] = "container-0-request-0"
    made["status"]["allocation"]["devices"]["results"][0]["request"] = "container-0-request-0"
    whole = turned(1, Shape((16,)))
    del whole["spec"]["resourceClaims"], whole["status"]["resourceClaimStatuses"]
    whole["spec"]["containers"][0]["resources"] = {
        "limits": {"deviceclass.resource.kubernetes.io/gpu.kubegpu.share": "1"}
    }
    mapping = {
        "containerName": "main-0",
        "resourceName": "deviceclass.resource.kubernetes.io/gpu.kubegpu.share",
        "requestName": "container-0-request-0",
    }
    whole["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": made["metadata"]["name"],
        "requestMappings": [mapping],
    }
    (entry,) = by_claims([whole], [made])["nodes"]
    assert on_cards(entry) == [[("work-1", 16)], []]
    [held] = entry["cards"][0]["pods"]
    assert (held["problem"], held["containers"]) == ("", [{"name": "main-0", "units": 16}])


def test_a_claim_that_no_pod_uses_holds_its_memory():
    (entry,) = by_claims([], [claim(1, FOUR, CARDS[:1])])["nodes"]
    (row,) = entry["cards"][0]["pods"]
    assert (row["name"], row["units"], row["state"]) == ("work-1-gpu-mem-x1", 4, "unassigned")
    assert "no pod but a claim, which holds memory although work-1 doesn't use it" in row["problem"]
    assert entry["used"] == 4


def test_a_claim_of_another_pod_gives_nothing():
    given = claim(1, FOUR, CARDS[:1], pods={"other": pod_uid(9)})
    (entry,) = by_claims([turned(1, FOUR)], [given])["nodes"]
    (row,) = entry["pending"]
    assert (row["name"], row["units"]) == ("work-1", 0) and "isn't reserved for it" in row["problem"]
    assert entry["used"] == 4


def test_claims_of_other_drivers_are_left_out():
    foreign = claim(1, FOUR, CARDS[:1])
    foreign["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "gpu.nvidia.com"
    foreign["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.nvidia.com"
    theirs = turned(1, FOUR)
    theirs["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = "a-whole-card"
    found = by_claims([theirs], [foreign])
    assert found["used"] == 0 and on_cards(found["nodes"][0]) == [[], []] and found["nodes"][0]["pending"] == []


def test_unhealthy_cards_and_limits_that_are_not_enforced():
    sick = [CARDS[0], dataclasses.replace(CARDS[1], healthy=False, code="CardLost", reason="is lost")]
    (entry,) = by_claims([], [], sick, limits="DriverTooOld")["nodes"]
    assert [(card["healthy"], card["reason"]) for card in entry["cards"]] == [(True, ""), (False, "CardLost")]
    assert (entry["capacity"], entry["allocatable"]) == (32, 16)
    assert entry["memory_limit"] == "unenforced: DriverTooOld"


def test_units_of_mib_and_a_pool_that_is_not_complete():
    cards = [dataclasses.replace(CARDS[0], units=16000)]
    found = allocation(
        [dra_node()], [turned(1, FOUR)], slices_of("gpu1", cards, "MiB"), [claim(1, FOUR, cards, unit="MiB")]
    )
    (entry,) = found["nodes"]
    assert (entry["unit"], entry["total"], entry["used"]) == ("MiB", 16000, 4)
    old, new = slices_of("gpu1", CARDS), slices_of("gpu1", CARDS[:1], generation=2)
    new[0]["spec"]["pool"]["resourceSliceCount"] = 2
    new[0]["metadata"]["name"] = "gpu1-other"
    (entry,) = allocation([dra_node()], [], [*old, *new], [])["nodes"]
    assert len(entry["cards"]) == 1 and entry["problem"].startswith("1 of the 2 ResourceSlices of its pool are there")


# --------------------------------------------------------------------------- requests

CLAIMS, SLICES = "/apis/resource.k8s.io/v1/resourceclaims", "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def api():
    server = Api()
    server.lists = {
        "/api/v1/nodes": [dra_node(), ours("n1")],
        "/api/v1/pods": [turned(1, FOUR), *(pod(f"other-{at}", [asks()]) for at in range(20))],
        SLICES: slices_of("gpu1", CARDS),
        CLAIMS: [claim(1, FOUR, CARDS[:1])],
    }
    yield server
    server.close()


@pytest.fixture(params=["direct", "client"])
def kube(api, monkeypatch, tmp_path, request):
    forget_environment(monkeypatch, tmp_path)
    return connect(api.url) if request.param == "client" else direct.connect(module(kubeconfig=kubeconfig(api.url)))


def test_claims_are_two_more_requests(api, kube):
    found = collect(kube)
    assert found["requests"] == {"GET": 4}
    assert [path for path, _query in api.asked] == ["/api/v1/nodes", "/api/v1/pods", SLICES, CLAIMS]
    assert [(each["name"], each["used"]) for each in found["nodes"]] == [("gpu1", 4), ("n1", 0)]


def test_they_are_not_read_where_none_can_be(api, kube):
    api.lists["/api/v1/nodes"], api.lists["/api/v1/pods"] = [ours("n1")], [pod("plain", [asks()])]
    assert collect(kube)["requests"] == {"GET": 2}


@pytest.mark.parametrize(
    ("status", "problem"), [(404, ""), (403, "the cards that it may divide by claims are unknown: ")]
)
def test_claims_that_cannot_be_read(api, kube, status, problem):
    api.lists["/api/v1/pods"] = []
    api.failures = [None, None, status, status]
    found = collect(kube)
    shown = {each["name"]: each["problem"] for each in found["nodes"]}
    assert shown.get("gpu1", "").startswith(problem) and shown["n1"] == ""
    api.failures = [None, None, 500, 500]
    with pytest.raises(ShareError):
        collect(kube)


def test_malformed_objects_are_left_out(api, kube):
    broken = copy.deepcopy(api.lists[SLICES][0])
    broken["spec"]["pool"] = 7
    api.lists[SLICES].append(broken)
    api.lists[CLAIMS].append({"metadata": {"name": "x"}, "spec": [], "status": 1})
    assert [(each["name"], each["used"]) for each in collect(kube)["nodes"]] == [("gpu1", 4), ("n1", 0)]
