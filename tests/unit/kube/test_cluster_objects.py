# SPDX-License-Identifier: GPL-3.0-or-later
"""A set of objects on a simulated API server: idempotence, drift, removal, check mode, waiting."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.objects import DIGEST
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import ref_of
from fake_clock import FakeClock
from fake_kube import FakeKube, actions, apply_set, settle
from hypothesis import given, settings
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
D, R, G = ref_of(DAEMONSET), ref_of(ROLE), ref_of(NODE)
ALL = [NODE, DAEMONSET, ROLE, NAMESPACE]


def headers(result):
    return [one["after_header"] for one in result["diff"]]


@pytest.fixture
def kube():
    return FakeKube(LIVE_NODE)


def test_creates_in_order_and_the_second_run_only_reads(kube):
    first = apply_set(kube, ALL)
    assert first["changed"]
    order = [line for line in kube.calls if line.startswith("PATCH")]
    assert order == ["PATCH Namespace n", "PATCH ClusterRole r", "PATCH DaemonSet n/d", "PATCH Node gpu1"]
    second = apply_set(kube, ALL)
    assert (second["changed"], second["diff"]) == (False, [])
    assert second["requests"] == {"GET": 4}
    assert set(actions(second).values()) == {"unchanged"}


def test_check_mode_predicts_everything_even_without_the_namespace(kube):
    predicted = apply_set(kube, ALL, check=True)
    assert predicted["requests"] == {"GET": 4}
    assert headers(predicted) == ["Namespace n", "ClusterRole r", "DaemonSet n/d", "Node gpu1"]
    real = apply_set(kube, ALL)
    assert predicted["diff"] == real["diff"]
    assert predicted["diff"][0]["before"] == ""
    assert "hostNetwork: true" in predicted["diff"][2]["after"]


def test_a_drift_is_one_patch_and_its_diff_shows_only_managed_fields(kube):
    apply_set(kube, ALL)
    kube.edit(D, ("f:spec", "f:template", "f:spec", "f:hostNetwork"), False)
    result = apply_set(kube, ALL)
    assert result["requests"]["PATCH"] == 1
    assert actions(result)["DaemonSet"] == "changed"
    (diff,) = result["diff"]
    assert "hostNetwork: false" in diff["before"] and "hostNetwork: true" in diff["after"]
    assert "restartPolicy" not in diff["before"], "a default of the API server isn't ours to show"
    assert not apply_set(kube, ALL)["changed"]


def test_fields_of_others_are_unchanged(kube):
    apply_set(kube, ALL)
    kube.edit(D, ("f:metadata", "f:labels"), {"theirs": "1"})
    container = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name": "c"}')
    kube.edit(D, (*container, "f:terminationMessagePolicy"), "File")
    assert not apply_set(kube, ALL)["changed"]


def test_fields_dropped_from_the_definition_are_removed(kube):
    apply_set(kube, ALL)
    less = copy.deepcopy(DAEMONSET)
    del less["spec"]["template"]["spec"]["hostNetwork"]
    result = apply_set(kube, [NAMESPACE, less])
    assert "hostNetwork: true" in result["diff"][0]["before"]
    assert "hostNetwork" not in result["diff"][0]["after"]
    assert "hostNetwork" not in kube.objects[D]["spec"]["template"]["spec"]
    assert not apply_set(kube, [NAMESPACE, less])["changed"]


def test_a_key_dropped_inside_a_rule_is_detected(kube):
    named = copy.deepcopy(ROLE)
    named["rules"][0]["resourceNames"] = ["only-this"]
    apply_set(kube, [named])
    assert apply_set(kube, [ROLE])["changed"]
    assert kube.objects[R]["rules"] == ROLE["rules"]
    assert not apply_set(kube, [ROLE])["changed"]


def test_a_manually_added_permission_is_removed(kube):
    apply_set(kube, [ROLE])
    kube.edit(R, ("f:rules",), [{**ROLE["rules"][0], "verbs": ["get", "delete"]}])
    assert apply_set(kube, [ROLE])["changed"]
    assert kube.objects[R]["rules"][0]["verbs"] == ["get"]


def test_nodes_are_only_labelled(kube):
    apply_set(kube, [NODE])
    assert kube.objects[G]["metadata"]["labels"] == {"theirs": "1", "gpushare": "true"}
    assert DIGEST not in kube.objects[G]["metadata"].get("annotations", {})
    removed = apply_set(kube, [NODE], state="absent")
    assert actions(removed) == {"Node": "changed"}
    assert kube.objects[G]["metadata"]["labels"] == {"theirs": "1"}
    assert not apply_set(kube, [NODE], state="absent")["changed"]


def test_a_missing_node_is_refused_before_any_change():
    kube = FakeKube()
    with pytest.raises(BadInput, match="Node gpu1 isn't in the cluster"):
        apply_set(kube, ALL)
    assert not kube.objects


def test_a_node_deleted_meanwhile_isnt_recreated(kube):
    old = kube.get

    def get(ref):
        live = old(ref)
        if ref == G:
            kube.objects.pop(G)
        return live

    kube.get = get
    with pytest.raises(ShareError, match="uid mismatch"):
        apply_set(kube, [NODE])
    assert G not in kube.objects


def test_a_manual_label_stays_when_ours_is_removed(kube):
    kube.edit(G, ("f:metadata", "f:labels", "f:gpushare"), "true")
    assert not apply_set(kube, [NODE])["changed"], "the label has the requested value"
    assert not apply_set(kube, [NODE], state="absent")["changed"]
    assert kube.objects[G]["metadata"]["labels"]["gpushare"] == "true"


def test_many_objects_of_one_kind_are_read_with_one_list():
    names = [f"gpu{number}" for number in range(50)]
    kube = FakeKube(*({**LIVE_NODE, "metadata": {"name": name}} for name in names))
    definitions = [{**NODE, "metadata": {**NODE["metadata"], "name": name}} for name in names]
    assert apply_set(kube, definitions)["requests"] == {"GET": 2, "PATCH": 50}
    assert apply_set(kube, definitions)["requests"] == {"GET": 1}


def test_removal_is_in_reverse_order_and_idempotent(kube):
    apply_set(kube, ALL)
    kube.calls.clear()
    predicted = apply_set(kube, ALL, state="absent", check=True)
    result = apply_set(kube, ALL, state="absent")
    assert predicted["diff"] == result["diff"]
    writes = [line for line in kube.calls if not line.startswith("GET")]
    assert writes == ["PATCH Node gpu1", "DELETE DaemonSet n/d", "DELETE ClusterRole r", "DELETE Namespace n"]
    assert set(kube.objects) == {G}
    again = apply_set(kube, ALL, state="absent")
    assert not again["changed"]
    assert actions(again)["DaemonSet"] == "absent"


def test_a_terminating_object_is_awaited_and_never_written(kube):
    apply_set(kube, ALL)
    kube.objects[D]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(ShareError, match="DaemonSet n/d is being deleted"):
        apply_set(kube, [NAMESPACE, DAEMONSET])
    assert not apply_set(kube, [DAEMONSET], state="absent")["changed"]
    with pytest.raises(NotInEffect, match="DaemonSet n/d still exists"):
        apply_set(kube, [DAEMONSET], state="absent", wait=True, waiting=clock())


def test_a_write_without_effect_is_an_error(kube):
    kube.apply = lambda definition, manager: {}
    with pytest.raises(NotInEffect, match="Namespace n") as error:
        apply_set(kube, [NAMESPACE])
    assert error.value.details["requests"] == {"GET": 2}


# --------------------------------------------------------------------------- waiting


def clock(*steps):
    """Return a wait on a simulated clock that calls the next step at each sleep."""
    todo, fake = list(steps), FakeClock()
    fake.listeners.append(lambda: todo and todo.pop(0)())
    return Waiting(timeout=5, sleep=fake.sleep, now=fake.now)


def test_the_wait_covers_the_rollout_and_the_resources_of_nodes(kube):
    apply_set(kube, ALL)
    steps = [
        lambda: None,
        lambda: settle(kube, D),
        lambda: kube.objects[G].update(status={"allocatable": {"x/y": "2"}}),
    ]
    result = apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock(*steps))
    # Four initial reads; then the DaemonSet and the node, until both are ready.
    assert result["requests"] == {"GET": 4 + 3 * 2}
    assert not result["changed"]


def test_the_wait_covers_a_daemonset_whose_pods_depend_on_the_new_label(kube):
    apply_set(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"].update(dict.fromkeys(("desiredNumberScheduled", "numberReady", "numberAvailable"), 0))
    announces = {"status": {"allocatable": {"x/y": "2"}}}

    def labelled():
        kube.objects[G].update(announces)
        kube.objects[D]["status"]["desiredNumberScheduled"] = 1

    steps = [lambda: None, labelled, lambda: settle(kube, D)]
    result = apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock(*steps))
    assert result["requests"] == {"GET": 4 + 2 + 2 + 2}


def test_a_daemonset_that_no_node_runs_is_never_in_effect(kube):
    """Control planes with other taints or labels than its pods are made for: nothing runs, and nothing is unready."""
    apply_set(kube, ALL)
    settle(kube, D)
    counts = ("desiredNumberScheduled", "updatedNumberScheduled", "numberReady", "numberAvailable")
    kube.objects[D]["status"].update(dict.fromkeys(counts, 0))
    without = [one for one in ALL if one["kind"] != "Node"]
    with pytest.raises(NotInEffect, match="no node matches its selectors and tolerations"):
        apply_set(kube, without, wait=True, waiting=clock())
    assert apply_set(kube, ALL, check=True, wait=True)["unready"]
    assert apply_set(kube, without, wait=True, min_nodes=0, waiting=clock())["changed"] is False
    settle(kube, D)
    with pytest.raises(NotInEffect, match="only 1 of 2 nodes match"):
        apply_set(kube, without, wait=True, min_nodes=2, waiting=clock())


def test_resources_of_no_node_are_refused(kube):
    with pytest.raises(BadInput, match="no Node is among the definitions"):
        apply_set(kube, [one for one in ALL if one["kind"] != "Node"], wait=True, node_resources={"x/y": 0})


def announces(kube, units):
    kube.objects[G].update(status={"allocatable": {"x/y": units}})


def rolling_out(kube):
    """An updated DaemonSet, while its node still announces what the former pod told kubelet."""
    apply_set(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"]["updatedNumberScheduled"] = 0
    announces(kube, "32")


def updated(kube):
    """The new pod is ready; kubelet's status is that from between the two."""
    settle(kube, D)
    announces(kube, "0")


def test_after_an_update_the_nodes_must_announce_their_resources_again(kube):
    rolling_out(kube)
    shown = []
    steps = [lambda: updated(kube), lambda: None, lambda: announces(kube, "32"), lambda: shown.append("too late")]
    apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock(*steps))
    assert kube.objects[G]["status"]["allocatable"] == {"x/y": "32"} and not shown


def test_after_an_update_a_node_that_announces_nothing_is_an_error(kube):
    rolling_out(kube)
    with pytest.raises(NotInEffect, match="within 5 s: Node gpu1 doesn't announce x/y"):
        apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock(lambda: updated(kube)))


def test_after_an_update_an_unavailable_api_server_ends_no_wait(kube):
    rolling_out(kube)

    def fails():
        updated(kube)
        kube.failures = [None, ShareError("connection refused")]

    apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock(fails, lambda: announces(kube, "32")))
    assert kube.objects[G]["status"]["allocatable"] == {"x/y": "32"}


@pytest.mark.parametrize("option", ["wait", "replace_unready"])
def test_a_ready_set_needs_no_more_requests(kube, option):
    apply_set(kube, ALL)
    settle(kube, D)
    assert apply_set(kube, ALL, waiting=clock(), **{option: True})["requests"] == {"GET": 4}


def test_check_mode_never_waits(kube):
    assert apply_set(kube, ALL, check=True, wait=True, waiting=clock())["changed"]


def test_the_api_server_may_be_unavailable_while_waiting(kube):
    apply_set(kube, ALL)
    kube.failures = [None] * 4 + [ShareError("connection refused")]
    steps = [lambda: None, lambda: settle(kube, D)]
    apply_set(kube, ALL, wait=True, waiting=clock(*steps))


STUCK = [{"name": "c", "ready": False, "state": {"running": {}}}]


def pod(name, **status):
    metadata = {"name": name, "namespace": "n", "labels": {"app": "d"}}
    about = {"spec": {"nodeName": "gpu1"}, "status": {"phase": "Pending", **status}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **about}


def test_the_error_has_reasons_and_the_log_of_pods_that_arent_ready(kube):
    apply_set(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"]["numberReady"] = 0
    waiting = {"name": "c", "state": {"waiting": {"reason": "ErrImageNeverPull", "message": "image i is not present"}}}
    kube.add(pod("d-image", containerStatuses=[waiting]))
    for number in range(4):
        kube.add(pod(f"d-{number}", containerStatuses=STUCK))
    kube.logs = {"d-0": "starting\n\nno  driver\n", "d-2": "too much"}
    with pytest.raises(NotInEffect, match="not in effect within 5 s") as error:
        apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock())
    text = str(error.value)
    for part in (
        "DaemonSet n/d: 0 of 1 pod is ready",
        "Node gpu1 doesn't announce x/y",
        "pod d-image on gpu1: container c is waiting: ErrImageNeverPull (image i is not present)",
        "log of pod d-0: starting | no driver",
    ):
        assert part in text
    assert "too much" not in text and error.value.details["changed"] is False


def half_ready(kube):
    apply_set(kube, ALL)
    settle(kube, D)
    kube.objects[D]["status"].update(numberReady=1, desiredNumberScheduled=3)
    kube.add(pod("d-stuck", containerStatuses=STUCK))
    kube.add(pod("d-pulling", containerStatuses=[{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]))
    kube.add(pod("d-good", containerStatuses=STUCK, conditions=[{"type": "Ready", "status": "True"}]))


def test_unready_pods_are_recreated(kube):
    half_ready(kube)
    predicted = apply_set(kube, ALL, check=True, replace_unready=True)
    made = kube.delete

    def delete(ref):
        made(ref)
        # The new pod has the whole wait to become ready.
        kube.add(pod("d-new", containerStatuses=STUCK))

    kube.delete = delete
    result = apply_set(kube, ALL, replace_unready=True)
    assert predicted["diff"] == result["diff"]
    assert headers(result) == ["Pod n/d-stuck"]
    assert "is running but not ready" in result["diff"][0]["before"]
    assert {ref.name for ref in kube.objects if ref.kind == "Pod"} == {"d-pulling", "d-good", "d-new"}


def test_unready_pods_stay_without_the_option_or_during_a_rollout(kube):
    half_ready(kube)
    assert not apply_set(kube, ALL)["changed"]
    other = copy.deepcopy(DAEMONSET)
    other["spec"]["template"]["spec"]["hostNetwork"] = False
    assert headers(apply_set(kube, [NAMESPACE, other], check=True, replace_unready=True)) == ["DaemonSet n/d"]


def test_a_node_without_a_pod_of_the_daemonset_is_reported(kube):
    apply_set(kube, ALL)
    settle(kube, D)
    with pytest.raises(NotInEffect, match="no pod of DaemonSet n/d is on gpu1"):
        apply_set(kube, ALL, wait=True, node_resources={"x/y": 0}, waiting=clock())


def test_a_node_that_announces_nothing_has_reasons_also_where_a_chart_deploys_what_announces(kube):
    node = kube.objects[G]
    node["spec"] = {
        "taints": [
            {"key": "team", "value": "a", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
            {"key": "soft", "effect": "PreferNoSchedule"},
        ]
    }
    node.setdefault("status", {})["conditions"] = [{"type": "Ready", "status": "Unknown", "message": "kubelet stopped"}]
    stuck = pod("plugin", containerStatuses=STUCK)
    stuck["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": "nvidia-device-plugin"}]
    kube.add(stuck)
    kube.add(pod("somebodys", containerStatuses=STUCK))
    kube.logs = {"plugin": "no driver"}
    with pytest.raises(NotInEffect, match="within 5 s: Node gpu1 doesn't announce x/y") as error:
        apply_set(kube, [NODE], wait=True, node_resources={"x/y": 0}, waiting=clock())
    text = str(error.value)
    for part in (
        "Node gpu1 isn't Ready: kubelet stopped; Node gpu1 has the taints team=a:NoSchedule; ",
        "pod plugin on gpu1: container c is running but not ready",
        "log of pod plugin: no driver",
    ):
        assert part in text
    assert "somebodys" not in text


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


# Each example applies up to three definitions three times; a quarter of the profile's examples takes a few seconds.
@settings(max_examples=(settings.default or settings()).max_examples // 4)
@given(st.lists(st.tuples(specs, specs), min_size=1, max_size=3))
def test_any_sequence_of_definitions_converges_and_is_idempotent(definitions):
    kube = FakeKube(NAMESPACE)
    others = {"theirs": "1"}
    for spec, foreign in definitions:
        definition = {**DAEMONSET, "spec": copy.deepcopy(spec)}
        apply_set(kube, [definition])
        kube.objects[D]["metadata"].setdefault("labels", {}).update(others)
        again = apply_set(kube, [definition])
        assert not again["changed"]
        assert again["requests"] == {"GET": 1}
        # Another manager replaces the whole spec; the desired fields are restored.
        kube.objects[D]["spec"] = copy.deepcopy(foreign)
        apply_set(kube, [definition])
        assert not apply_set(kube, [definition])["changed"]
    assert kube.objects[D]["metadata"]["labels"] == others
