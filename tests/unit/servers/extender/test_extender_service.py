# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's interface for schedulers: real HTTP, watches and bindings against the API double."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, Start, bind_request, eventually
from gpushare.api.mirror import STALE_SECONDS
from gpushare.http.limits import Limits
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

IDX, ASSIGNED = "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_ASSIGNED"


# ----------------------------------------------------------------- filter


def test_filter_accepts_and_returns_node_names(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("big", 16, 16))
    api.put("nodes", make_node("full", 16))
    api.put("nodes", make_node("small", 2))
    api.put("pods", make_pod("there", 13, "full", 0))
    client = start()
    assert client.filter(make_pod("p", 5), "big", "full", "small") == {
        "Nodes": None,
        "NodeNames": ["big"],
        "FailedNodes": {"full": "InsufficientGPUMemory: largest free share on one card is 3 of 5 GiB"},
        "FailedAndUnresolvableNodes": {"small": "CardTooSmall: largest healthy card holds 2 of 5 GiB"},
        "Error": "",
    }


def test_filter_accepts_and_returns_whole_nodes(api: ApiDouble, start: Start) -> None:
    big, small = make_node("big", 16), make_node("small", 2)
    api.put("nodes", big)
    api.put("nodes", small)
    client = start()
    body = {"Pod": make_pod("p", 5), "Nodes": {"metadata": {}, "items": [big, small]}, "NodeNames": None}
    status, value = client.json("POST", "/gpushare-scheduler/filter", body)
    assert (status, value["Nodes"]["items"], value["NodeNames"]) == (200, [big], None)
    assert list(value["FailedAndUnresolvableNodes"]) == ["small"]


def test_lowercase_keys_of_old_schedulers_are_accepted(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("big", 16))
    body = {"pod": make_pod("p", 5), "nodenames": ["big"]}
    assert start().json("POST", "/gpushare-scheduler/filter", body)[1]["NodeNames"] == ["big"]


def test_a_pod_without_a_request_fits_any_node_and_is_bound_without_a_card(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("plain"))
    pod = api.put("pods", make_pod("p", 0))
    client = start()
    assert client.filter_and_bind(pod, "plain") == ""
    assert api.pod("p")["spec"]["nodeName"] == "plain"
    assert not api.pod("p")["metadata"].get("annotations")


def with_init(units: int, init: int, **annotations: str) -> JsonObject:
    pod = make_pod("p", units)
    pod["metadata"]["annotations"] = annotations
    pod["spec"]["initContainers"] = [{"name": "i", "resources": {"limits": {contract.RESOURCE_MEMORY: str(init)}}}]
    return pod


def test_fault_06_init_containers_count_by_kubernetes_rule(start: Start) -> None:
    refused = start(16).filter(with_init(4, 20), "a")
    assert "holds 16 of 20 GiB" in refused["FailedAndUnresolvableNodes"]["a"]


def test_fault_06_a_pod_whose_init_container_alone_requests_memory_is_bound(api: ApiDouble, start: Start) -> None:
    client = start(16)
    assert client.filter_and_bind(api.put("pods", with_init(0, 9))) == ""
    eventually(lambda: client.used() == [9])


# ----------------------------------------------------------------- bind


def test_bind_packs_cards_and_writes_the_contract(api: ApiDouble, start: Start) -> None:
    client = start(16, 16)
    for name, units, card in (("p", 6, 0), ("q", 12, 1), ("r", 4, 1), ("s", 4, 0)):
        pod = api.put("pods", make_pod(name, units))
        assert client.bind(pod) == ""
        bound = api.pod(name)
        annotations = bound["metadata"]["annotations"]
        assert bound["spec"]["nodeName"] == "a"
        assert set(contract.POD_ANNOTATIONS) - set(annotations) == {contract.POD_INDICES, contract.POD_ALLOCATION}
        assert (annotations[IDX], annotations[ASSIGNED]) == (str(card), "false")
        assert (annotations[contract.POD_UNITS], annotations[contract.POD_CARD_UNITS]) == (str(units), "16")
        assert int(annotations[contract.POD_ASSUME_TIME]) > 10**18
    eventually(lambda: client.extender.state.holds == 0)
    assert client.used() == [10, 16]


def test_spread_selects_the_emptiest_card(api: ApiDouble, start: Start) -> None:
    client = start(16, 16, placement="spread")
    for name in "pq":
        assert client.bind(api.put("pods", make_pod(name, 2))) == ""
    assert client.used() == [2, 2]


def test_units_come_from_the_api_and_not_from_the_request(api: ApiDouble, start: Start) -> None:
    client = start(16)
    body = {**bind_request(api.put("pods", make_pod("p", 7))), "Pod": make_pod("p", 1)}
    assert client.json("POST", "/gpushare-scheduler/bind", body) == (200, {"Error": ""})
    assert api.pod("p")["metadata"]["annotations"][contract.POD_UNITS] == "7"


def larger(pod: JsonObject) -> None:
    pod["spec"] = make_pod("p", 9)["spec"]


@pytest.mark.parametrize(
    ("change", "node", "code"),
    [
        (lambda pod: pod["metadata"].update(uid="x"), "a", "PodReplaced"),
        (lambda pod: pod["spec"].update(nodeName="b"), "a", "PodBoundElsewhere"),
        (lambda pod: pod["status"].update(phase="Failed"), "a", "PodFinished"),
        (lambda pod: pod["metadata"].update(deletionTimestamp="x"), "a", "PodTerminating"),
        (lambda pod: None, "who", "NodeUnknown"),
        (larger, "a", "CardTooSmall"),
        (None, "a", "PodNotFound"),
    ],
)
def test_a_refused_bind_has_a_reason_code(
    api: ApiDouble, start: Start, change: Callable[[JsonObject], None] | None, node: str, code: str
) -> None:
    client = start(8)
    pod = api.put("pods", make_pod("p", 2))
    if change:
        api.change("pods", "p", "default", change)
    else:
        api.remove("pods", "p", "default")
    assert client.bind(pod, node).startswith(f"{code}: ")
    assert not api.asked("POST", "/binding$")
    assert client.extender.state.holds == 0


def test_fault_07_an_unhealthy_card_is_assigned_to_no_pod(api: ApiDouble, start: Start) -> None:
    """It is assigned again when it recovers; the only source is the plugin's annotation of its node."""
    client = start(16, 8)
    large, small = api.put("pods", make_pod("large", 16)), api.put("pods", make_pod("small", 2))
    assert client.filter(large, "a")["NodeNames"] == ["a"]
    api.put("nodes", make_node("a", 16, 8, unhealthy=(0,)))
    eventually(lambda: client.node("a")["devs"][0]["healthy"] is False)
    refused = client.filter(large, "a")
    assert refused["FailedAndUnresolvableNodes"] == {"a": "CardTooSmall: largest healthy card holds 8 of 16 GiB"}
    assert client.bind(large) == "CardTooSmall: node a: largest healthy card holds 8 of 16 GiB"
    # The strategy would choose the unhealthy card: both are empty, and it is the first.
    assert client.bind(small) == ""
    assert contract.booking(api.pod("small")).index == 1  # type: ignore[union-attr]
    api.put("nodes", make_node("a", 16, 8))
    eventually(lambda: client.filter(large, "a")["NodeNames"] == ["a"])
    assert client.bind(large) == ""


def test_cards_that_kubelet_cannot_share_equally_are_refused(api: ApiDouble, start: Start) -> None:
    """On every node, permanently, and with the annotation's name: the plugin would refuse it after the bind."""
    api.put("nodes", make_node("b", 16, 16))
    client = start(16, 16)
    pod = api.put("pods", with_init(4, 8, **{contract.POD_CARD_COUNT: "2"}))
    answer = client.filter(pod, "a", "b")
    refusal = (
        "InvalidAnnotation: kubegpu.share/card-count: its container main asks for 4 units and would be given a part of "
        "the 8 that an init container had, of any card"
    )
    assert (answer["NodeNames"], answer["FailedNodes"]) == ([], {})
    assert answer["FailedAndUnresolvableNodes"] == {"a": refusal, "b": refusal}
    assert refusal in client.bind(pod)
    assert not api.asked("POST", "/binding$")


def test_a_refusal_at_bind_is_exactly_one_event(api: ApiDouble, start: Start) -> None:
    client = start(8)
    pod = api.put("pods", make_pod("p", 9))
    for _try in range(5):
        assert client.bind(pod) == "CardTooSmall: node a: largest healthy card holds 8 of 9 GiB"
    event = eventually(lambda: api.asked("POST", "/events$"))[0]
    assert (event["reason"], event["type"]) == ("GPUMemoryRefused", "Warning")
    assert event["involvedObject"]["uid"] == pod["metadata"]["uid"]
    assert "8 of 9 GiB" in event["message"]
    assert len(api.asked("POST", "/events$")) == 1


def test_a_repeated_bind_succeeds_without_a_second_binding(api: ApiDouble, start: Start) -> None:
    client = start(8)
    pod = api.put("pods", make_pod("p", 5))
    assert client.bind(pod) == ""
    assert client.bind(pod) == ""
    eventually(lambda: client.extender.state.holds == 0)
    assert client.bind(pod) == ""
    assert client.used() == [5]
    assert len(api.asked("POST", "/binding$")) == 1


# ----------------------------------------------------------------- upstream's faults


def test_fault_03_used_above_total_is_reported(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("mib", 4096, "a", 0))
    client = start(15, 15)
    node = client.node("a")
    assert (node["totalGPU"], node["usedGPU"]) == (30, 4096)
    assert [(card["totalGPU"], card["usedGPU"]) for card in node["devs"]] == [(15, 4096), (15, 0)]
    assert client.metric('gpushare_card_booked_units{card="0",node="a",uuid="GPU-a-0"}') == 4096
    assert client.metric('gpushare_card_capacity_units{card="0",node="a",uuid="GPU-a-0"}') == 15
    pod = api.put("pods", make_pod("p", 1))
    assert client.bind(pod) == ""
    assert api.pod("p")["metadata"]["annotations"][IDX] == "1"


def test_fault_05_the_card_is_the_annotations_index_and_its_uuid(api: ApiDouble, start: Start) -> None:
    node = make_node("a", 4, 8)
    cards = contract.node_cards(node)
    # NVML's order and the minors of the device nodes differ, and index 0 isn't there.
    moved = [
        contract.Card(index=2, uuid=cards[0].uuid, minor=1, memory_mib=4096, units=4),
        contract.Card(index=1, uuid=cards[1].uuid, minor=0, memory_mib=8192, units=8),
    ]
    node["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation(moved)
    api.put("nodes", node)
    api.put("pods", make_pod("there", 3, "a", 2))
    client = start()
    pod = api.put("pods", make_pod("p", 5))
    assert client.bind(pod) == ""
    assert api.pod("p")["metadata"]["annotations"][IDX] == "1"
    shown = [(card["id"], card["uuid"], card["usedGPU"]) for card in client.node("a")["devs"]]
    assert shown == [(1, "GPU-a-1", 5), (2, "GPU-a-0", 3)]


def test_fault_11_nodes_are_never_stale(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("a"))
    client = start()

    def refusal() -> str:
        answer = client.filter(make_pod("p", 4), "a")
        return str({**answer["FailedNodes"], **answer["FailedAndUnresolvableNodes"]}.get("a", "none"))

    assert refusal() == "NoGPUMemory: the node announces no GPU memory"
    assert client.node("a")["devs"] == []
    api.put("nodes", make_node("a", 8))
    eventually(lambda: refusal() == "none")
    api.put("nodes", make_node("a", 8, unhealthy=(0,)))
    eventually(lambda: refusal().startswith("NoHealthyCard: "))
    api.put("nodes", make_node("a", 2))
    eventually(lambda: refusal().startswith("CardTooSmall: "))
    api.remove("nodes", "a")
    eventually(lambda: refusal().startswith("NodeUnknown: "))


def test_fault_11_an_unknown_node_is_404(api: ApiDouble, start: Start) -> None:
    status, value = start(8).json("GET", "/gpushare-scheduler/inspect/who")
    assert (status, value["nodes"]) == (404, [])
    assert "who" in value["error"]


def test_fault_11_inspect_and_filter_while_everything_changes(api: ApiDouble, start: Start) -> None:
    for number in range(10):
        api.put("nodes", make_node(f"n{number}", 16, 16))
    client = start(limits=Limits(connections=16))
    pods = [api.put("pods", make_pod(f"p{number}", 1 + number % 4)) for number in range(100)]
    names = [f"n{number}" for number in range(10)]
    errors: list[str] = []
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.wait(0.0005):
            number += 1
            api.put("nodes", make_node(f"x{number % 5}", 4 + number % 3))
            api.put("pods", make_pod(f"y{number % 7}", 1, f"x{number % 5}", number % 2, namespace=f"z{number}"))
            if number % 3 == 0:
                api.remove("nodes", f"x{number % 5}")

    def inspect(number: int) -> None:
        for path in ("", f"/n{number % 10}", f"/x{number % 5}"):
            status, value = client.json("GET", f"/gpushare-scheduler/inspect{path}")
            if status not in (200, 404):
                errors.append(f"inspect{path}: {status}")
            for node in value["nodes"]:
                total = sum(card["usedGPU"] for card in node["devs"]) + node["unplaced"]["usedGPU"]
                pods_total = sum(pod["usedGPU"] for card in [*node["devs"], node["unplaced"]] for pod in card["pods"])
                if not node["usedGPU"] == total == pods_total:
                    errors.append(f"torn: {node}")
        value = client.filter(make_pod("q", 3), *names)
        if value["Error"] or len(value["NodeNames"]) + len(value["FailedNodes"]) != 10:
            errors.append(f"filter: {value}")

    churner = threading.Thread(target=churn)
    churner.start()
    try:
        with ThreadPoolExecutor(200) as pool:
            jobs = [pool.submit(inspect, number) for number in range(200)]
            jobs += [pool.submit(client.bind, pods[number], names[number % 10]) for number in range(100)]
            for job in jobs:
                job.result()
    finally:
        stop.set()
        churner.join()
    assert not errors, errors[:3]
    eventually(lambda: client.extender.state.holds == 0)
    for name in names:
        here = [pod for pod in api.pods() if contract.pod_node(pod) == name]
        used, unknown = contract.used_units(contract.node_cards(make_node(name, 16, 16)), here)
        assert here and max(used.values()) <= 16 and unknown == 0
        assert client.used(name) == list(used.values())


# ----------------------------------------------------------------- its state


def test_not_ready_before_nodes_and_pods_are_listed(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("p", 5, "a", 0))
    api.fail("GET", r"/pods\?", 500, times=10**6)
    client = start(8, ready=False)
    eventually(lambda: client.extender.nodes.synced and client.extender.pods.error)
    status, body, _headers = client.raw("GET", "/readyz")
    assert (status, b"pods" in body, b"injected" in body) == (503, True, True)
    assert client.raw("GET", "/healthz")[0] == 200
    assert "NotReady: " in client.filter(make_pod("q", 1), "a")["Error"]
    assert "NotReady: " in client.bind(make_pod("q", 1))
    assert client.json("GET", "/gpushare-scheduler/inspect")[0] == 503
    api.failures.clear()
    eventually(lambda: client.raw("GET", "/readyz")[0] == 200)
    assert client.used() == [5]


def test_a_restart_rebuilds_the_state(api: ApiDouble, start: Start) -> None:
    first = start(16, 16)
    for number, units in enumerate((3, 14, 2, 9)):
        assert first.bind(api.put("pods", make_pod(f"p{number}", units))) == ""
    before = first.node("a")
    first.extender.stop()
    assert start().node("a") == before


def test_an_outage_and_lost_history_change_nothing_that_lasts(api: ApiDouble, start: Start) -> None:
    client = start(16, 16)
    pod = api.put("pods", make_pod("p", 5))
    assert client.bind(pod) == ""
    eventually(lambda: client.extender.state.holds == 0)
    with api.outage():
        eventually(lambda: client.extender.pods.error and client.extender.nodes.error)
        assert client.used() == [5, 0], "the last state stays"
        assert client.filter(make_pod("q", 5), "a")["NodeNames"] == ["a"]
        assert "can't be read" in client.bind(make_pod("q", 5))
        api.remove("pods", "p", "default")
        api.put("pods", make_pod("r", 7, "a", 1))
        api.compact()
    eventually(lambda: client.used() == [0, 7])
    assert client.extender.pods.lists == 3, "at the start, for the first bind, and after the outage"


def test_inspect_is_upstreams_json(api: ApiDouble, start: Start) -> None:
    api.put("nodes", make_node("plain"))
    api.put("nodes", make_node("b", 10))
    placed = api.put("pods", make_pod("binpack-1-0", 3, "a", 0))
    stray = api.put("pods", make_pod("stray", 2, "a"))
    status, value = start(10, 10).json("GET", "/gpushare-scheduler/inspect")
    assert status == 200
    assert [node["name"] for node in value["nodes"]] == ["a", "b"]
    node = value["nodes"][0]
    assert (node["totalGPU"], node["usedGPU"]) == (20, 5)
    first = node["devs"][0]
    assert {key: first[key] for key in ("id", "totalGPU", "usedGPU", "pods")} == {
        "id": 0,
        "totalGPU": 10,
        "usedGPU": 3,
        "pods": [{"name": "binpack-1-0", "namespace": "default", "usedGPU": 3, "uid": placed["metadata"]["uid"]}],
    }
    assert node["unplaced"] == {
        "id": -1,
        "usedGPU": 2,
        "pods": [{"name": "stray", "namespace": "default", "usedGPU": 2, "uid": stray["metadata"]["uid"]}],
    }


def test_binds_are_confirmed_while_the_hourly_list_is_slow(api: ApiDouble, start: Start) -> None:
    """A booking leaves the ledger when the watch delivers its pod; in a large cluster the list takes a minute."""
    client = start(16)
    assert client.filter_and_bind(api.put("pods", make_pod("first", 1))) == ""
    eventually(lambda: client.extender.state.holds == 0)
    reached, resume = api.pause("GET", r"/api/v1/pods\?.*limit=50")
    client.extender.pods._next_list = 0.0
    for number in range(4):
        assert client.filter_and_bind(api.put("pods", make_pod(f"p{number}", 1))) == ""
        eventually(lambda: client.extender.state.holds == 0)
    assert reached.wait(5)
    lists = client.extender.pods.lists
    resume.set()
    eventually(lambda: client.extender.pods._listing is not None and client.extender.pods._listing.done)
    assert client.filter_and_bind(api.put("pods", make_pod("last", 1))) == ""
    eventually(lambda: client.extender.pods.lists == lists + 1)
    assert client.used() == [6]


def test_metrics_count_requests(api: ApiDouble, start: Start) -> None:
    api.put("pods", make_pod("stray", 1, "a"))
    client = start(8)
    client.filter(make_pod("p", 5), "a")
    client.filter(make_pod("p", 9), "a")
    client.bind(api.put("pods", make_pod("p", 5)))
    client.raw("POST", "/gpushare-scheduler/filter", b"{")
    for result in ("passed", "refused", "invalid"):
        assert client.metric(f'gpushare_extender_requests_total{{result="{result}",verb="filter"}}') == 1
    assert client.metric('gpushare_extender_requests_total{result="bound",verb="bind"}') == 1
    assert client.metric('gpushare_extender_request_seconds_count{verb="filter"}') == 3
    assert client.metric('gpushare_node_unplaced_units{node="a"}') == 1
    assert client.metric('gpushare_mirror_objects{objects="nodes"}') == 1


# ----------------------------------------------------------------- any bytes

POD_KEYS = ["spec", "containers", "initContainers", "restartPolicy", "resources", "limits", "requests"]
KEYS = ["Pod", "Nodes", "NodeNames", "items", "metadata", "name", "uid", "PodName", "PodNamespace", "PodUID", "Node"]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from([*KEYS, *POD_KEYS, contract.RESOURCE_MEMORY]) | st.text(), inner)
    ),
    max_leaves=30,
)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def served(api: ApiDouble, start: Start) -> Client:
    return start(8)


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURES)
@given(
    body=st.binary() | JSON_VALUES.map(json.dumps).map(str.encode), path=st.sampled_from(["filter", "bind", "preempt"])
)
def test_any_body_is_answered_without_a_500(served: Client, body: bytes, path: str) -> None:
    status, value = served.json_of("POST", f"/gpushare-scheduler/{path}", body)
    assert status == 200 or (400 <= status < 500 and value["error"])


@settings(max_examples=50, deadline=None, suppress_health_check=FIXTURES)
@given(
    path=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
    method=st.sampled_from(["GET", "POST", "PUT"]),
)
def test_any_path_is_answered_without_a_500(served: Client, path: str, method: str) -> None:
    for prefix in ("/", "/gpushare-scheduler/", "/gpushare-scheduler/inspect/"):
        assert served.raw(method, prefix + path)[0] < 500


HUGE = b'{"Pod":{"spec":{"containers":[{"resources":{"limits":{"aliyun.com/gpu-mem":"%s"}}}]}},"NodeNames":["a"]}'


NOT_LISTS = b'{"Pod":{"spec":{"containers":7}},"NodeNames":[]}'
BROKEN = [b"", b"null", b"[]", b"{}", b"[" * 100_000, NOT_LISTS, b"\xff\xfe", HUGE % (b"9" * 9000)]


def test_broken_requests(served: Client) -> None:
    for path in ("filter", "bind", "preempt"):
        for body in BROKEN:
            status, value = served.json_of("POST", f"/gpushare-scheduler/{path}", body)
            assert 400 <= status < 500 and value["error"], (path, body[:20])


def test_there_is_nothing_below_filter_and_bind(served: Client) -> None:
    body = {"Pod": make_pod("p", 5), "NodeNames": ["a"]}
    assert served.json("POST", "/gpushare-scheduler/filter/more", body)[0] == 404


def test_names_that_would_change_the_path_are_refused(served: Client, api: ApiDouble) -> None:
    for name in ("..", "a/b", "A", "", "a" * 300, "a\n"):
        for key in ("PodName", "PodNamespace", "Node"):
            body = {"PodName": "p", "PodNamespace": "default", "PodUID": "", "Node": "a", key: name}
            assert served.json("POST", "/gpushare-scheduler/bind", body)[0] == 400, (key, name)
    assert not [path for _method, path, _body in api.requests if "/pods/" in path]


def test_nothing_is_scheduled_by_an_outdated_state(api: ApiDouble, start: Start) -> None:
    """An error makes kube-scheduler try again, whereas refused nodes would make the pod wait for an event."""
    client = start(8)
    pod = api.put("pods", make_pod("p", 3))
    assert client.filter(pod, "a")["NodeNames"] == ["a"]
    now = [time.monotonic()]
    client.extender.pods._clock = lambda: now[0]
    now[0] += STALE_SECONDS + 1
    found = client.filter(pod, "a")
    assert found["Error"].startswith("StaleState: the gpushare extender's pods may be outdated, since the API sent")
    assert (found.get("NodeNames"), found.get("FailedNodes")) == (None, None)
    assert client.bind(pod).startswith("StaleState: ")
    preempt = {"Pod": pod, "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "u"}], "NumPDBViolations": 0}}}
    assert client.json("POST", "/gpushare-scheduler/preempt", preempt)[0] == 503
    status, body, _headers = client.raw("GET", "/readyz")
    assert status == 503 and b"may be outdated" in body
    assert client.used() == [0], "the last known state is still shown"
    assert not api.pod("p")["spec"].get("nodeName")
    # Any event of the collection is a sign of life.
    api.put("pods", make_pod("q", 1, "a"))
    eventually(lambda: client.extender.refusal() is None)
    assert client.filter_and_bind(pod) == ""
