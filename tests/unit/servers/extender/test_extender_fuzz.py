# SPDX-License-Identifier: GPL-3.0-or-later
"""Nearly valid requests and any annotations of pods: always an answer, and never a wrong booking."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, Start, eventually
from gpushare.api.client import KubeError
from gpushare.extender.bind import BindRequest, Outcome
from gpushare.extender.preemption import Preemption
from gpushare.extender.retry import RetryQueue
from gpushare.extender.routes import Api, Metrics
from gpushare.extender.state import State, node_row, pod_row
from gpushare.http.service import BadRequest, Request, Response
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason, Refusal
from gpushare.shared._core.types import JsonObject
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "a", "2", "-1", "1e3", "0,1", "9" * 400, [], {}, [None], {"": None}])
)
JSON_VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def requesting(units: int, **annotations: str) -> JsonObject:
    pod = make_pod("p", units, priority=5)
    pod["metadata"] |= {"uid": "p", "annotations": annotations}
    return pod


REQUESTS: dict[str, JsonObject] = {
    "filter": {
        "Pod": requesting(
            4, **{contract.POD_CARD_COUNT: "2", contract.POD_MODELS: "*", contract.POD_PLACEMENT: "spread"}
        ),
        "NodeNames": ["a", "b"],
        "Nodes": None,
    },
    "preempt": {
        "Pod": requesting(8),
        "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 1}, "who": {"Pods": None}},
        "NodeNameToVictims": None,
    },
    "bind": {"PodName": "p", "PodNamespace": "default", "PodUID": "p", "Node": "a"},
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@st.composite
def almost(draw: st.DrawFn, verb: str) -> JsonObject:
    """A request that is valid except in one to three places."""
    body = copy.deepcopy(REQUESTS[verb])
    for _change in range(draw(st.integers(1, 3))):
        all_places = list(places(body))
        if not all_places:
            break
        container, key = all_places[draw(st.integers(0, len(all_places) - 1))]
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(JSON_VALUES))
        elif isinstance(container, dict):
            moved = container.pop(key)
            container[draw(st.sampled_from(["", "uid", str(key).swapcase(), "Pods"]))] = moved
        else:
            del container[key]
    return body


class Refusing:
    """An API that has no objects and refuses every change."""

    def get(self, _path: str) -> JsonObject:
        raise KubeError(404, "NotFound", "not found")

    def post(self, _path: str, _body: JsonObject) -> JsonObject:
        raise KubeError(403, "Forbidden", "no right to that")


@pytest.fixture(scope="module")
def handlers() -> dict[str, Callable[[Request], Response]]:
    state = State()
    for name in "ab":
        state.node_changed("", None, node_row(make_node(name, 8, 8)))
    for uid, card, priority in (("v", 0, 0), ("w", 1, 9)):
        pod = make_pod(uid, 8, "a", card, priority=priority)
        pod["metadata"]["uid"] = uid
        state.pod_changed("", None, pod_row(pod))
    refusing: Any = Refusing()
    quiet: Any = type("Quiet", (), {"pod": lambda *_arguments: True})()
    preemption = Preemption(refusing, state, quiet)

    def bind(wanted: BindRequest) -> Outcome:
        assert wanted.name and wanted.namespace and wanted.node
        return Outcome("failed", Refusal(Reason.API_ERROR, "no"))

    refused = (preemption.refused, RetryQueue(refusing, state).refused)
    api = Api(state, bind, lambda: None, Metrics(CollectorRegistry()), preemption=preemption, refused=refused)
    return {path.rsplit("/", 1)[1]: handler for (_method, path), handler in api.routes().items()}


Handlers = dict[str, Callable[[Request], Response]]


def send(handlers: Handlers, verb: str, body: JsonObject) -> Response:
    return handlers[verb](Request("POST", f"/gpushare-scheduler/{verb}", "", json.dumps(body).encode()))


@pytest.mark.parametrize("verb", sorted(REQUESTS))
def test_valid_requests_are_accepted(handlers: Handlers, verb: str) -> None:
    answer = send(handlers, verb, REQUESTS[verb])
    assert answer.status == 200
    if verb == "preempt":
        assert json.loads(answer.body) == {
            "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "v"}], "NumPDBViolations": 0}}
        }
    if verb == "filter":
        assert json.loads(answer.body)["NodeNames"] == ["b"]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), verb=st.sampled_from(sorted(REQUESTS)))
def test_nearly_valid_requests_are_answered_or_refused(handlers: Handlers, data: st.DataObject, verb: str) -> None:
    body = data.draw(almost(verb))
    try:
        answer = send(handlers, verb, body)
    except BadRequest as error:
        assert 400 <= error.status < 500
        return
    value = json.loads(answer.body)
    assert answer.status == 200
    if verb == "filter" and not value["Error"]:
        # Each requested node is in exactly one of the three.
        names = body.get("NodeNames", body.get("nODEnAMES"))
        given_names = {*value["FailedNodes"], *value["FailedAndUnresolvableNodes"], *(value["NodeNames"] or [])}
        if isinstance(names, list):
            assert given_names == set(names)
    if verb == "preempt":
        for victims in value["NodeNameToMetaVictims"].values():
            assert victims["Pods"], "kube-scheduler refuses a response with a node without victims"


# ----------------------------------------------------------------- no wrong booking

ANNOTATIONS = st.dictionaries(
    st.sampled_from([*contract.POD_DEMANDS, *contract.POD_ANNOTATIONS]),
    st.sampled_from(["", "0", "1", "2", "3", "-1", "0,1", "1,0", "0,0", "binpack", "spread", "*", "test", "x", "true"])
    | st.text(max_size=6),
    max_size=4,
)
CONTAINERS = st.lists(st.sampled_from(["0", "1", "2", "3", "4", "6", "1k", "x", ""]), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(ANNOTATIONS, CONTAINERS, CONTAINERS, st.booleans(), st.integers(-3, 3)), min_size=1, max_size=8)
)
def test_no_annotation_of_a_pod_overbooks_a_card(
    api: ApiDouble, start: Start, pods: list[tuple[dict[str, str], list[str], list[str], bool, int]]
) -> None:
    if ("nodes", "", "a") not in api.objects:
        api.put("nodes", make_node("a", 8, 4, 6))
        api.client = start()  # type: ignore[attr-defined]
    client: Client = api.client  # type: ignore[attr-defined]
    made = []
    for number, (written, containers, init, bound_before, priority) in enumerate(pods):
        pod = make_pod(f"p{number}", 0, priority=priority)
        pod["metadata"]["annotations"] = written
        for key, units in (("containers", containers), ("initContainers", init)):
            pod["spec"][key] = [
                {"name": f"c{at}", "resources": {"limits": {contract.RESOURCE_MEMORY: unit}}}
                for at, unit in enumerate(units)
            ]
        pod = api.put("pods", pod)
        made.append(pod)
        passes = client.filter(pod, "a")["NodeNames"] == ["a"]
        error = client.bind(pod)
        assert bool(error) != passes, error
        if bound_before and passes:
            assert client.bind(pod) == ""
    cards = contract.node_cards(make_node("a", 8, 4, 6))
    used, unknown = contract.used_units(cards, api.pods())
    assert unknown == 0
    assert all(used[card.index] <= card.units for card in cards)
    for pod in made:
        now = api.pod(pod["metadata"]["name"])
        if contract.counts(now):
            demand = contract.demand(now)
            assert contract.shares(now) == dict.fromkeys(contract.booking(now).indices, demand.share)
            assert len(contract.shares(now)) == demand.count
        api.remove("pods", now["metadata"]["name"], "default")
    eventually(lambda: client.used() == [0, 0, 0] and client.extender.state.holds == 0)
