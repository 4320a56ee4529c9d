# SPDX-License-Identifier: GPL-3.0-or-later
"""A whole set of objects against a made-up API server: idempotence, drift, removal, check mode, waiting."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_objects import converge
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._objects import DIGEST, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting
from fake_kube import FakeKube, settle
from hypothesis import given
from hypothesis import strategies as st

NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n", "labels": {"a": "b"}}}
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "r"},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
}
DAEMONSET = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "d", "namespace": "n"},
    "spec": {
        "selector": {"matchLabels": {"app": "d"}},
        "template": {
            "metadata": {"labels": {"app": "d"}},
            "spec": {
                "hostNetwork": True,
                "containers": [
                    {
                        "name": "c",
                        "image": "i",
                        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                        "ports": [{"containerPort": 1}],
                        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 1}},
                        "resources": {"limits": {"cpu": "0.5", "memory": "1024Mi", "aliyun.com/gpu-mem": 2}},
                    }
                ],
                "volumes": [{"name": "v", "emptyDir": {}}],
            },
        },
    },
}
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu1", "labels": {"gpushare": "true"}}}
LIVE_NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu1", "labels": {"theirs": "1"}}, "spec": {}}
D, N, R, G = (
    Ref("apps/v1", "DaemonSet", "n", "d"),
    Ref("v1", "Namespace", "", "n"),
    Ref("rbac.authorization.k8s.io/v1", "ClusterRole", "", "r"),
    Ref("v1", "Node", "", "gpu1"),
)
ALL = [NODE, DAEMONSET, ROLE, NAMESPACE]


def go(kube, definitions, check=False, waiting=None, **params):
    full = {
        "definitions": copy.deepcopy(definitions),
        "state": "present",
        "wait": False,
        "wait_timeout": 5,
        "node_resources": [],
        "replace_unready": False,
        "field_manager": "kubegpu-share",
        **params,
    }
    kube.requests.clear()
    return converge(kube, full, check, waiting)


def actions(result):
    return {one["kind"]: one["action"] for one in result["objects"]}


def headers(result):
    return [one["after_header"] for one in result["diff"]]


@pytest.fixture
def kube():
    return FakeKube(LIVE_NODE)


def test_creates_in_order_and_the_second_run_only_reads(kube):
    first = go(kube, ALL)
    assert first["changed"]
    order = [line for line in kube.calls if line.startswith("PATCH")]
    assert order == ["PATCH Namespace n", "PATCH ClusterRole r", "PATCH DaemonSet n/d", "PATCH Node gpu1"]
    second = go(kube, ALL)
    assert (second["changed"], second["diff"]) == (False, [])
    assert second["requests"] == {"GET": 4}
    assert set(actions(second).values()) == {"unchanged"}


def test_check_mode_tells_everything_where_not_even_the_namespace_exists(kube):
    predicted = go(kube, ALL, check=True)
    assert predicted["requests"] == {"GET": 4}
    assert headers(predicted) == ["Namespace n", "ClusterRole r", "DaemonSet n/d", "Node gpu1"]
    real = go(kube, ALL)
    assert predicted["diff"] == real["diff"]
    assert predicted["diff"][0]["before"] == ""
    assert "hostNetwork: true" in predicted["diff"][2]["after"]


def test_a_drift_is_one_patch_and_its_diff_shows_only_our_fields(kube):
    go(kube, ALL)
    kube.edit(D, ("f:spec", "f:template", "f:spec", "f:hostNetwork"), False)
    result = go(kube, ALL)
    assert result["requests"]["PATCH"] == 1
    assert actions(result)["DaemonSet"] == "changed"
    (diff,) = result["diff"]
    assert "hostNetwork: false" in diff["before"] and "hostNetwork: true" in diff["after"]
    assert "restartPolicy" not in diff["before"], "a default of the API server isn't ours to show"
    assert not go(kube, ALL)["changed"]


def test_what_others_add_is_left_alone(kube):
    go(kube, ALL)
    kube.edit(D, ("f:metadata", "f:labels"), {"theirs": "1"})
    container = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name": "c"}')
    kube.edit(D, (*container, "f:terminationMessagePolicy"), "File")
    assert not go(kube, ALL)["changed"]


def test_fields_dropped_from_the_wish_are_removed(kube):
    go(kube, ALL)
    less = copy.deepcopy(DAEMONSET)
    del less["spec"]["template"]["spec"]["hostNetwork"]
    result = go(kube, [NAMESPACE, less])
    assert "hostNetwork: true" in result["diff"][0]["before"]
    assert "hostNetwork" not in result["diff"][0]["after"]
    assert "hostNetwork" not in kube.objects[D]["spec"]["template"]["spec"]
    assert not go(kube, [NAMESPACE, less])["changed"]


def test_a_key_dropped_inside_a_rule_is_seen(kube):
    named = copy.deepcopy(ROLE)
    named["rules"][0]["resourceNames"] = ["only-this"]
    go(kube, [named])
    assert go(kube, [ROLE])["changed"]
    assert kube.objects[R]["rules"] == ROLE["rules"]
    assert not go(kube, [ROLE])["changed"]


def test_a_right_added_by_hand_is_taken_away(kube):
    go(kube, [ROLE])
    kube.edit(R, ("f:rules",), [{**ROLE["rules"][0], "verbs": ["get", "delete"]}])
    assert go(kube, [ROLE])["changed"]
    assert kube.objects[R]["rules"][0]["verbs"] == ["get"]


def test_nodes_are_labelled_and_nothing_else(kube):
    go(kube, [NODE])
    assert kube.objects[G]["metadata"]["labels"] == {"theirs": "1", "gpushare": "true"}
    assert DIGEST not in kube.objects[G]["metadata"].get("annotations", {})
    gone = go(kube, [NODE], state="absent")
    assert actions(gone) == {"Node": "changed"}
    assert kube.objects[G]["metadata"]["labels"] == {"theirs": "1"}
    assert not go(kube, [NODE], state="absent")["changed"]


def test_a_node_that_isnt_there_is_refused_before_anything_changes():
    kube = FakeKube()
    with pytest.raises(BadInput, match="Node gpu1 isn't in the cluster"):
        go(kube, ALL)
    assert not kube.objects


def test_a_node_that_leaves_in_between_isnt_brought_back(kube):
    old = kube.get

    def get(ref):
        live = old(ref)
        if ref == G:
            kube.objects.pop(G)
        return live

    kube.get = get
    with pytest.raises(ShareError, match="uid mismatch"):
        go(kube, [NODE])
    assert G not in kube.objects


def test_a_label_set_by_hand_stays_when_ours_goes(kube):
    kube.edit(G, ("f:metadata", "f:labels", "f:gpushare"), "true")
    assert not go(kube, [NODE])["changed"], "it is as wished, whoever did it"
    assert not go(kube, [NODE], state="absent")["changed"]
    assert kube.objects[G]["metadata"]["labels"]["gpushare"] == "true"


def test_many_of_one_kind_are_one_list():
    names = [f"gpu{number}" for number in range(50)]
    kube = FakeKube(*({**LIVE_NODE, "metadata": {"name": name}} for name in names))
    wishes = [{**NODE, "metadata": {**NODE["metadata"], "name": name}} for name in names]
    assert go(kube, wishes)["requests"] == {"GET": 2, "PATCH": 50}
    assert go(kube, wishes)["requests"] == {"GET": 1}


def test_removal_goes_backwards_and_twice_is_nothing(kube):
    go(kube, ALL)
    kube.calls.clear()
    predicted = go(kube, ALL, state="absent", check=True)
    result = go(kube, ALL, state="absent")
    assert predicted["diff"] == result["diff"]
    writes = [line for line in kube.calls if not line.startswith("GET")]
    assert writes == ["PATCH Node gpu1", "DELETE DaemonSet n/d", "DELETE ClusterRole r", "DELETE Namespace n"]
    assert set(kube.objects) == {G}
    again = go(kube, ALL, state="absent")
    assert not again["changed"]
    assert actions(again)["DaemonSet"] == "absent"


def test_an_object_on_its_way_out_is_waited_for_and_never_written(kube):
    go(kube, ALL)
    kube.objects[D]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(ShareError, match="DaemonSet n/d is being deleted"):
        go(kube, [NAMESPACE, DAEMONSET])
    assert not go(kube, [DAEMONSET], state="absent")["changed"]
    with pytest.raises(NotInEffect, match="DaemonSet n/d is still there"):
        go(kube, [DAEMONSET], state="absent", wait=True, waiting=clock(kube))


def test_a_write_that_has_no_effect_is_a_failure(kube):
    kube.apply = lambda definition, manager: {}
    with pytest.raises(NotInEffect, match="Namespace n") as error:
        go(kube, [NAMESPACE])
    assert error.value.details["requests"] == {"GET": 2}


# --------------------------------------------------------------------------- waiting


def clock(kube, steps=()):
    """A clock that runs as fast as it is asked, and something that happens at each sleep."""
    todo, now = list(steps), [0.0]

    def sleep(seconds):
        now[0] += seconds
        if todo:
            todo.pop(0)()

    return Waiting(timeout=5, sleep=sleep, now=lambda: now[0])


def test_waits_for_the_rollout_and_for_what_nodes_announce(kube):
    go(kube, ALL)
    steps = [
        lambda: None,
        lambda: settle(kube, D),
        lambda: kube.objects[G].update(status={"allocatable": {"x/y": "2"}}),
    ]
    result = go(kube, ALL, wait=True, node_resources=["x/y"], waiting=clock(kube, steps))
    # Four to look; then what isn't there yet, and the DaemonSet for as long as a node isn't.
    assert result["requests"] == {"GET": 4 + 3 * 2}
    assert not result["changed"]


def test_a_daemonset_that_gets_its_pods_only_from_the_label_is_waited_for(kube):
    go(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"].update(dict.fromkeys(("desiredNumberScheduled", "numberReady", "numberAvailable"), 0))
    announces = {"status": {"allocatable": {"x/y": "2"}}}

    def labelled():
        kube.objects[G].update(announces)
        kube.objects[D]["status"]["desiredNumberScheduled"] = 1

    steps = [lambda: None, labelled, lambda: settle(kube, D)]
    result = go(kube, ALL, wait=True, node_resources=["x/y"], waiting=clock(kube, steps))
    assert result["requests"] == {"GET": 4 + 2 + 2 + 1}


def test_nothing_to_wait_for_asks_nothing_more(kube):
    go(kube, ALL)
    settle(kube, D)
    assert go(kube, ALL, wait=True, waiting=clock(kube))["requests"] == {"GET": 4}


def test_check_mode_never_waits(kube):
    assert go(kube, ALL, check=True, wait=True, waiting=clock(kube))["changed"]


def test_the_api_server_may_be_away_while_waiting(kube):
    go(kube, ALL)
    kube.failures = [None] * 4 + [ShareError("connection refused")]
    steps = [lambda: None, lambda: settle(kube, D)]
    go(kube, ALL, wait=True, waiting=clock(kube, steps))


def pod(name="d-1", node="gpu1", **status):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "n", "labels": {"app": "d"}},
        "spec": {"nodeName": node},
        "status": {"phase": "Pending", **status},
    }


def test_the_reason_is_told_in_the_words_of_pods_and_events(kube):
    go(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"]["numberReady"] = 0
    waiting = {"name": "c", "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "image i is not present"}}}
    kube.add(pod(containerStatuses=[waiting]))
    with pytest.raises(NotInEffect) as error:
        go(kube, ALL, wait=True, node_resources=["x/y"], waiting=clock(kube))
    text = str(error.value)
    for words in (
        "not in effect within 5 s",
        "DaemonSet n/d: 0 of 1 pod is ready",
        "Node gpu1 doesn't announce x/y",
        "pod d-1 on gpu1: container c waits: ErrImageNeverPull (image i is not present)",
    ):
        assert words in text
    assert error.value.details["changed"] is False


def test_a_pod_that_runs_without_being_ready_is_asked_for_its_log(kube):
    go(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"]["numberReady"] = 0
    for number in range(4):
        kube.add(pod(f"d-{number}", containerStatuses=[{"name": "c", "ready": False, "state": {"running": {}}}]))
    kube.logs = {"d-0": "starting\n\nno  driver\n", "d-2": "too much"}
    with pytest.raises(NotInEffect) as error:
        go(kube, ALL, wait=True, waiting=clock(kube))
    assert "log of pod d-0: starting | no driver" in str(error.value)
    assert "too much" not in str(error.value)


STUCK = [{"name": "c", "ready": False, "state": {"running": {}}}]


def half_ready(kube):
    go(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"].update(numberReady=1, desiredNumberScheduled=3)
    kube.add(pod("d-stuck", containerStatuses=STUCK))
    kube.add(pod("d-pulling", containerStatuses=[{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]))
    kube.add(pod("d-good", containerStatuses=STUCK, conditions=[{"type": "Ready", "status": "True"}]))


def test_pods_that_run_without_being_ready_are_made_anew(kube):
    half_ready(kube)
    predicted = go(kube, ALL, check=True, replace_unready=True)
    made = kube.delete

    def delete(ref):
        made(ref)
        # Its successor is young, and has all the time of the wait to become ready.
        kube.add(pod("d-new", containerStatuses=STUCK))

    kube.delete = delete
    result = go(kube, ALL, replace_unready=True)
    assert predicted["diff"] == result["diff"]
    assert headers(result) == ["Pod n/d-stuck"]
    assert "runs and isn't ready" in result["diff"][0]["before"]
    assert {ref.name for ref in kube.objects if ref.kind == "Pod"} == {"d-pulling", "d-good", "d-new"}


def test_pods_are_left_alone_where_nobody_asked_or_a_rollout_replaces_them(kube):
    half_ready(kube)
    assert not go(kube, ALL)["changed"]
    other = copy.deepcopy(DAEMONSET)
    other["spec"]["template"]["spec"]["hostNetwork"] = False
    assert headers(go(kube, [NAMESPACE, other], check=True, replace_unready=True)) == ["DaemonSet n/d"]


def test_looking_for_such_pods_costs_nothing_where_all_are_ready(kube):
    go(kube, ALL)
    settle(kube, D)
    assert go(kube, ALL, replace_unready=True)["requests"] == {"GET": 4}


def test_a_node_without_a_pod_of_the_daemonset_is_told(kube):
    go(kube, ALL)
    settle(kube, D)
    with pytest.raises(NotInEffect, match="no pod of DaemonSet n/d is on gpu1"):
        go(kube, ALL, wait=True, node_resources=["x/y"], waiting=clock(kube))


names = st.sampled_from(["a", "b", "c"])
scalars = st.sampled_from(["1", "2", "x"])
keyed = st.lists(names, unique=True, max_size=3).flatmap(
    lambda found: st.tuples(*(st.dictionaries(st.sampled_from(["value", "image"]), scalars) for _name in found)).map(
        lambda items: [{"name": name, **item} for name, item in zip(found, items, strict=True)]
    )
)
trees = st.recursive(
    st.dictionaries(names, scalars | st.lists(scalars, max_size=2), max_size=3),
    lambda inner: st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
specs = st.fixed_dictionaries({}, optional={"x": trees, "env": keyed, "y": trees, "rules": st.lists(trees, max_size=2)})


@given(st.lists(st.tuples(specs, specs), min_size=1, max_size=3))
def test_whatever_is_wished_for_in_a_row_each_wish_is_fulfilled_and_stays_so(wishes):
    kube = FakeKube(NAMESPACE)
    others = {"theirs": "1"}
    for spec, foreign in wishes:
        wish = {**DAEMONSET, "spec": copy.deepcopy(spec)}
        go(kube, [wish])
        kube.objects[D]["metadata"].setdefault("labels", {}).update(others)
        again = go(kube, [wish])
        assert not again["changed"]
        assert again["requests"] == {"GET": 1}
        # Somebody puts another whole spec there; what we wish for comes back.
        kube.objects[D]["spec"] = copy.deepcopy(foreign)
        go(kube, [wish])
        assert not go(kube, [wish])["changed"]
    assert kube.objects[D]["metadata"]["labels"] == others
