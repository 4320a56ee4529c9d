# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading, ordering, comparing and showing objects."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _objects as objects
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput


def secret(**data):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "data": data}


def test_reads_maps_texts_and_lists_in_the_order_of_creation():
    text = """
apiVersion: v1
kind: Node
metadata: {name: gpu1}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: d, namespace: n}
---
# nothing
---
apiVersion: v1
kind: List
items:
  - {apiVersion: v1, kind: Namespace, metadata: {name: n}}
"""
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "r", "namespace": "n"},
    }
    found = objects.read([text, [role], None])
    assert [one["kind"] for one in found] == ["Namespace", "ClusterRole", "DaemonSet", "Node"]
    assert "namespace" not in found[1]["metadata"], "the API server would drop it and the object never be as wished"
    assert objects.read(text) == objects.read([text])


def test_secret_text_becomes_data_and_nulls_vanish_and_a_namespace_is_filled_in():
    given = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"a": "b"},
        "data": {"c": "ZA=="},
    }
    found = objects.read({**given, "type": None})
    assert found == [{**secret(c="ZA==", a="Yg=="), "metadata": {"name": "s", "namespace": "default"}}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a: [", "not YAML"),
        (["just words", 3], "neither an object nor YAML"),
        ({"kind": "Pod", "metadata": {"name": "x"}}, "lacks apiVersion, kind or metadata.name"),
        ([secret(), secret()], "Secret n/s is there twice"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": {1}}}, "isn't plain data"),
    ],
)
def test_bad_definitions_are_told_in_one_sentence(given, words):
    with pytest.raises(BadInput, match=words) as error:
        objects.read(given)
    assert str(error.value).startswith("definitions: ")
    assert "\n" not in str(error.value)


def wrap(spec, **metadata):
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "d", "namespace": "n", **metadata},
        "spec": spec,
    }


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({}, {"emptyDir": {}}, True),
        ({}, {"args": []}, True),
        ({"args": ["x"]}, {"args": []}, False),
        ({"args": ["x", "y"]}, {"args": ["y", "x"]}, False),
        (
            {"limits": {"cpu": "500m", "aliyun.com/gpu-mem": "2"}},
            {"limits": {"cpu": "0.5", "aliyun.com/gpu-mem": 2}},
            True,
        ),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}}, False),
        ({"args": ["500m"]}, {"args": ["0.5"]}, False),
        ({"env": [{"name": "x", "value": "1"}, {"name": "injected"}]}, {"env": [{"name": "x", "value": "1"}]}, True),
        ({"env": [{"name": "b"}, {"name": "a"}]}, {"env": [{"name": "a"}, {"name": "b"}]}, True),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "a"}, {"name": "b"}]}, False),
        ({"ports": [{"containerPort": 1, "protocol": "TCP"}]}, {"ports": [{"containerPort": 1}]}, True),
        (
            {"ports": [{"containerPort": 1, "protocol": "TCP"}]},
            {"ports": [{"containerPort": 1, "protocol": "UDP"}]},
            False,
        ),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}, False),
        ({"items": [{"path": "p", "mode": 420}]}, {"items": [{"path": "p"}]}, True),
    ],
)
def test_a_wish_is_fulfilled_when_the_live_object_holds_it(live, desired, same):
    wish = wrap(desired)
    assert (objects.ours(wrap(live), wish) == wish) is same


OWNED = {
    "f:metadata": {"f:labels": {"f:kept": {}, "f:old": {}}},
    "f:spec": {
        "f:hostNetwork": {},
        "f:containers": {
            'k:{"name":"c"}': {".": {}, "f:name": {}, "f:image": {}, "f:workingDir": {}},
            'k:{"name":"gone"}': {".": {}, "f:name": {}, "f:image": {}},
        },
        "f:ports": {'k:{"containerPort":1,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
        "f:finalizers": {'v:"mine"': {}, 'v:"dropped"': {}},
    },
}


def test_what_we_owned_and_no_longer_wish_for_is_seen_and_what_others_own_is_not():
    live = wrap(
        {
            "hostNetwork": True,
            "theirs": 1,
            "containers": [
                {"name": "c", "image": "i", "workingDir": "/w", "tty": True},
                {"name": "gone", "image": "j", "tty": True},
                {"name": "injected", "image": "k"},
            ],
            "ports": [{"containerPort": 1, "protocol": "TCP"}],
            "finalizers": ["mine", "dropped", "theirs"],
        },
        labels={"kept": "1", "old": "2", "theirs": "3"},
        managedFields=[{"manager": "kubegpu-share", "operation": "Apply", "fieldsV1": OWNED}],
    )
    desired = wrap(
        {"containers": [{"name": "c", "image": "i"}], "ports": [{"containerPort": 1}], "finalizers": ["mine"]},
        labels={"kept": "1"},
    )
    now = objects.ours(live, desired)
    assert now["metadata"]["labels"] == {"kept": "1", "old": "2"}
    assert now["spec"]["hostNetwork"] is True
    assert "theirs" not in now["spec"]
    assert now["spec"]["containers"] == [
        {"name": "c", "image": "i", "workingDir": "/w"},
        {"name": "gone", "image": "j"},
    ]
    assert now["spec"]["ports"] == [{"containerPort": 1}]
    assert now != desired
    for entry in ({"manager": "kubectl", "operation": "Apply"}, {"manager": "kubegpu-share", "operation": "Update"}):
        live["metadata"]["managedFields"] = [{**entry, "fieldsV1": OWNED}]
        assert "hostNetwork" not in objects.ours(live, desired)["spec"], "not ours"


def test_the_digest_tells_of_a_smaller_wish_and_nodes_carry_none():
    wider = objects.stamped(wrap({"rules": [{"verbs": ["get"], "resourceNames": ["x"]}]}))
    narrower = objects.stamped(wrap({"rules": [{"verbs": ["get"]}]}))
    assert wider["metadata"]["annotations"] != narrower["metadata"]["annotations"]
    assert objects.ours(wider, narrower) != narrower, "a key dropped inside a list that is one value"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
    assert objects.stamped(node) == node


def test_secret_values_are_never_shown():
    before, after = objects.shown(secret(a="b2xk", b="c2FtZQ=="), secret(a="bmV3", b="c2FtZQ==", c="bW9yZQ=="))
    assert "a: (hidden)" in before and "a: (hidden, another value)" in after and "b: (hidden)" in after
    for value in ("b2xk", "bmV3", "c2FtZQ", "bW9yZQ"):
        assert value not in before + after
    assert objects.shown(None, secret(a="bmV3"))[0] == ""
    assert "bmV3" not in objects.shown(secret(a="bmV3"), None)[0]


@pytest.mark.parametrize(
    ("one", "other"), [("1", 1), ("1k", "1000"), ("1e3", "1k"), ("1Ki", "1024"), ("100m", "0.1"), ("5u", "0.000005")]
)
def test_quantities_of_one_amount(one, other):
    assert objects.amount(one) is not None
    assert objects.amount(one) == objects.amount(other)


def test_not_a_quantity():
    assert objects.amount("1 GiB") is None
    assert objects.amount("true") is None
