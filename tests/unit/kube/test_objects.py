# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing, ordering, comparing and printing objects."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube import compare, objects


def secret(**data):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "data": data}


def test_parses_mappings_texts_and_lists_in_the_order_of_creation():
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
    metadata = {"name": "r", "namespace": "n"}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": metadata}
    found = objects.parse([text, [role], None])
    assert [one["kind"] for one in found] == ["Namespace", "ClusterRole", "DaemonSet", "Node"]
    assert "namespace" not in found[1]["metadata"], "the API server would drop it, and each run would report a change"
    assert objects.parse(text) == objects.parse([text])


def test_string_data_becomes_data_nulls_are_dropped_and_the_namespace_is_set():
    given = {**secret(c="ZA=="), "metadata": {"name": "s"}, "stringData": {"a": "b"}, "type": None}
    found = objects.parse(given)
    assert found == [{**secret(c="ZA==", a="Yg=="), "metadata": {"name": "s", "namespace": "default"}}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a: [", "not YAML"),
        (["just words", 3], "neither an object nor YAML"),
        ({"kind": "Pod", "metadata": {"name": "x"}}, "lacks apiVersion, kind or metadata.name"),
        ([secret(), secret()], "Secret n/s is defined twice"),
        ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": {1}}}, "isn't plain data"),
    ],
)
def test_invalid_definitions_are_refused_in_one_line(given, message):
    with pytest.raises(BadInput, match=message) as error:
        objects.parse(given)
    assert str(error.value).startswith("definitions: ")
    assert "\n" not in str(error.value)


def wrap(spec, **more):
    metadata = {"name": "d", "namespace": "n", **more}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": spec}


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
        ({"limits": {"a": "500m", "b": "2", "c": "1k"}}, {"limits": {"a": "0.5", "b": 2, "c": "1000"}}, True),
        ({"limits": {"a": "1e3", "b": "1Ki", "c": "5u"}}, {"limits": {"a": "1k", "b": 1024, "c": "0.000005"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}}, False),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1 GiB"}}, False),
        ({"args": ["500m"]}, {"args": ["0.5"]}, False),
        ({"env": [{"name": "x", "value": "1"}, {"name": "injected"}]}, {"env": [{"name": "x", "value": "1"}]}, True),
        ({"env": [{"name": "b"}, {"name": "a"}]}, {"env": [{"name": "a"}, {"name": "b"}]}, True),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "a"}, {"name": "b"}]}, False),
        ({"ports": [{"containerPort": 1, "protocol": "TCP"}]}, {"ports": [{"containerPort": 1}]}, True),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "UDP"}]}, False),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}, False),
        ({"items": [{"path": "p", "mode": 420}]}, {"items": [{"path": "p"}]}, True),
    ],
)
def test_a_definition_is_in_effect_if_the_live_object_contains_it(live, desired, same):
    desired = wrap(desired)
    assert (compare.managed_part(wrap(live), desired) == desired) is same


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


def test_owned_fields_that_are_no_longer_set_are_detected():
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
    now = compare.managed_part(live, desired)
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
        assert "hostNetwork" not in compare.managed_part(live, desired)["spec"], "not ours"


def test_the_digest_detects_dropped_fields_and_nodes_have_none():
    wider = objects.with_digest(wrap({"rules": [{"verbs": ["get"], "resourceNames": ["x"]}]}))
    narrower = objects.with_digest(wrap({"rules": [{"verbs": ["get"]}]}))
    assert wider["metadata"]["annotations"] != narrower["metadata"]["annotations"]
    assert compare.managed_part(wider, narrower) != narrower, "a key dropped inside a list that is one value"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
    assert objects.with_digest(node) == node


def test_secret_values_are_hidden():
    before, after = objects.diff_texts(secret(a="b2xk", b="c2FtZQ=="), secret(a="bmV3", b="c2FtZQ==", c="bW9yZQ=="))
    assert "a: (hidden)" in before and "a: (hidden, another value)" in after and "b: (hidden)" in after
    for value in ("b2xk", "bmV3", "c2FtZQ", "bW9yZQ"):
        assert value not in before + after
    assert objects.diff_texts(None, secret(a="bmV3"))[0] == ""
    assert "bmV3" not in objects.diff_texts(secret(a="bmV3"), None)[0]
