# SPDX-License-Identifier: GPL-3.0-or-later
"""Taints that users' nodes with GPUs have: what keeps the pods of each back end, and of users, away from them."""

from __future__ import annotations

import time
import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_backends
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.cluster import cluster_of
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import Node
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.claims import Claims
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options, examine
from gpushare_objects import rendered
from test_claims import read
from test_preflight import node

SKU = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
GPU = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
NARROW = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
VARIABLES = {
    "extender": "gpushare_tolerations",
    "dra": "gpushare_tolerations",
    "hami": "hami_tolerations",
    "nvidia": "nvidia_device_plugin_tolerations",
}


def examined(asked: dict[str, str], *nodes: t.Any, **given: t.Any) -> t.Any:
    cluster = read(asked, *nodes, **given)
    claims = Claims(cluster["given"], cluster["capacity"], cluster["backends"], (), cluster["releases"])
    options = Options(image_delivery="registry", claims=claims)
    return examine(options, cluster_of(cluster), [Host(name, name, "gpu_nodes") for name in asked])


def tainted(name: str, *taints: dict[str, str]) -> t.Any:
    one = node(name)
    one["spec"] = {"taints": list(taints)}
    return one


@pytest.mark.parametrize("backend", list(VARIABLES))
@pytest.mark.parametrize(
    ("taints", "value", "refused"),
    [
        ([SKU], None, False),
        ([SKU], NARROW, True),
        ([GPU], NARROW, False),
        ([{"key": "dedicated", "value": "ml", "effect": "NoExecute"}], NARROW, True),
        ([{**SKU, "effect": "PreferNoSchedule"}], NARROW, False),
        ([SKU], [{"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}], False),
        ([SKU], [{"key": "sku", "value": "cpu"}], True),
        # Others' that end by themselves.
        ([{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}], NARROW, False),
        ([{"key": "node.cilium.io/agent-not-ready", "effect": "NoExecute"}], NARROW, False),
    ],
)
def test_a_node_that_its_back_end_would_stay_away_from_stops_the_run(
    backend: str, taints: list[dict[str, str]], value: t.Any, refused: bool
) -> None:
    variable = VARIABLES[backend]
    given = {"values": {} if value is None else {variable: value}}
    found = {one.id: one for one in examined({"gpu1": backend}, tainted("gpu1", *taints), **given)}
    assert ("taint-servers" in found) is refused
    if refused:
        one = found["taint-servers"]
        assert (one.severity, one.host) == ("problem", "gpu1")
        assert one.text.startswith(f"{variable}: node gpu1 has {taints[0]['key']}={taints[0]['value']}:")
        assert one.text.endswith(f"or add {{key: {taints[0]['key']}, operator: Exists}}")


def test_users_are_told_once_which_tolerations_their_pods_need() -> None:
    nodes = [tainted("gpu1", SKU), tainted("gpu2", SKU), tainted("gpu3", GPU), tainted("gpu4")]
    asked = dict.fromkeys(("gpu1", "gpu2", "gpu3", "gpu4"), "extender")
    told = [one for one in examined(asked, *nodes) if one.id == "taint-pods"]
    assert [(one.severity, one.fields["nodes"], one.fields["taints"]) for one in told] == [
        ("note", ["gpu1", "gpu2"], ["sku=gpu:NoSchedule"]),
        ("note", ["gpu3"], ["nvidia.com/gpu:NoSchedule"]),
    ]
    assert "acceptance_tolerations" in told[0].text


@pytest.mark.parametrize(
    ("value", "place", "severity"), [(None, ["sku"], ""), (NARROW, [], "problem"), ([{"key": "sku"}], [], "problem")]
)
def test_the_server_of_claim_templates_has_a_place_where_every_node_has_a_taint(
    value: t.Any, place: list[str], severity: str
) -> None:
    """Servers and nodes with GPUs are tainted: its pods tolerate the keys of the nodes that it is given."""
    control = tainted("cp1", {"key": "mine", "value": "x", "effect": "NoSchedule"})
    control["metadata"]["labels"] = {"node-role.kubernetes.io/control-plane": ""}
    values = {"imported": None, "gpushare_dra_templates_nodes": []}
    given = {"values": values if value is None else {**values, "gpushare_tolerations": value}}
    made = read({"gpu1": "dra"}, tainted("gpu1", SKU), control, **given)["backends"]["templates"]
    assert (made["place"], made["taints"]) == ("gpu_nodes", place)
    found = {one.id: one for one in examined({"gpu1": "dra"}, tainted("gpu1", SKU), control, **given)}
    text = found["templates-place"].text
    assert "since it doesn't tolerate the taints of cp1 (mine=x:NoSchedule)" in text and "\n" not in text
    assert (found["taint-servers"].severity if "taint-servers" in found else "") == severity
    [pod] = [template["spec"]["template"]["spec"] for template in templates(made) if template["kind"] == "Deployment"]
    assert [toleration["key"] for toleration in pod["tolerations"]] == [
        *node_backends.TOLERATED,
        "nvidia.com/gpu",
        *place,
    ]
    assert all(toleration["operator"] == "Exists" for toleration in pod["tolerations"])


def templates(place: t.Any) -> t.Any:
    return rendered("dra", __gpushare_templates=place, __gpushare_allocation="dra")


def test_named_nodes_of_the_control_plane_are_a_place_whatever_their_taints() -> None:
    control = tainted("cp1", {"key": "mine", "effect": "NoSchedule"})
    values = {"imported": None, "gpushare_dra_templates_nodes": ["cp1"]}
    asked = ({"gpu1": "dra"}, node("gpu1"), control)
    assert read(*asked, values=values)["backends"]["templates"]["taints"] == ["mine"]
    found = {one.id for one in examined(*asked, values=values)}
    assert not found & {"templates-nodes", "templates-place"}
    narrow = {**values, "gpushare_tolerations": NARROW}
    [one] = [one for one in examined(*asked, values=narrow) if one.id == "templates-nodes"]
    assert "gpushare-dra-templates tolerates none of the taints of cp1 (mine:NoSchedule)" in one.text


def test_a_node_of_thousands_of_taints_adds_none_to_a_deployment() -> None:
    """A kubelet chooses its node's taints when it registers; the API server takes some ten thousand of them."""
    many = [{"key": f"k{number}", "effect": "NoSchedule"} for number in range(20_000)]
    nodes: t.Any = [
        Node("taken", taints=tuple(many)),
        Node("gpu1", taints=(SKU, {"key": "other", "effect": "NoExecute"})),
    ]
    begun = time.process_time()
    found = node_backends.server_place((), nodes, None, ("taken", "gpu1"))
    assert (found["place"], found["taints"]) == (node_backends.GPU_NODES, ["other", "sku"])
    named = node_backends.server_place(("taken", "gpu1"), nodes, None, (), [{"key": "sku", "operator": "Exists"}])
    assert (named["place"], named["taints"]) == (node_backends.NAMED, ["sku"])
    assert time.process_time() - begun < 10
