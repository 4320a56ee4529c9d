# SPDX-License-Identifier: GPL-3.0-or-later
"""Which new pods are turned into claims where nodes of both allocations are there, on a real API server."""

from __future__ import annotations

import json

import pytest
from gpushare_objects import rendered
from own_cluster import until
from real_apiserver import own_api_server
from test_dra_admission import container, essence, pod, turned

LABEL = "kubegpu.share/allocation"


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        started.apply(*rendered("dra_admission", "admission", gpushare_claims="asked", gpushare_admission="deny"))
        for name, value in (("moved", "dra"), ("stays", "extender")):
            labels = {LABEL: value}
            started.apply(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
            )
        until(lambda: "resourceClaims" in ask(started, "moved", share())[1])
        until(lambda: ask(started, "moved", share(spread=True))[0] == 403)
        yield started


def ask(server, namespace, wanted):
    return server.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", wanted)


def share(label=None, select=None, spread=False, **spec):
    annotations = {"kubegpu.share/placement": "spread"} if spread else None
    wanted = pod(container("c", 4), annotations=annotations, **spec)
    if label:
        wanted["metadata"]["labels"] = {LABEL: label}
    if select:
        wanted["spec"]["nodeSelector"] = {"gpushare": select}
    return wanted


@pytest.mark.parametrize(
    ("namespace", "label", "select", "claim"),
    [
        ("default", None, None, False),
        ("moved", None, None, True),
        ("stays", None, None, False),
        # The nodes that a pod selects are more than its namespace's label, and its own label more than both.
        ("default", None, "dra", True),
        ("moved", None, "true", False),
        ("default", "dra", None, True),
        ("stays", "dra", "true", True),
        ("moved", "extender", "dra", False),
        # Another value is no wish.
        ("moved", None, "other", True),
        ("default", None, "other", False),
        ("moved", "other", None, False),
    ],
)
def test_a_pod_is_turned_where_it_or_its_namespace_asks_for_it(server, namespace, label, select, claim):
    wanted = share(label, select)
    status, text = ask(server, namespace, wanted)
    assert status == 201, text
    expected = turned(wanted) if claim else wanted["spec"]
    assert essence(json.loads(text)["spec"])[0] == expected.get("resourceClaims", [])
    limits = json.loads(text)["spec"]["containers"][0]["resources"].get("limits", {})
    assert limits == ({} if claim else {"aliyun.com/gpu-mem": "4"})


def test_what_claims_cannot_do_is_refused_only_where_a_claim_is_asked_for(server):
    """The extender spreads."""
    assert ask(server, "default", share(spread=True))[0] == 201
    status, text = ask(server, "moved", share(spread=True))
    assert status == 403 and "aliyun.com/gpu-mem can't be turned into a claim" in text


@pytest.mark.parametrize("namespace", ["default", "moved"])
def test_the_attack_policy_knows_a_share_of_either_allocation(server, namespace):
    """CUDA_VERSION gives a container without a share every card."""
    env = [{"name": "CUDA_VERSION", "value": "12"}]
    until(lambda: ask(server, namespace, pod(container("c", env=env)))[0] == 403)
    status, text = ask(server, namespace, pod(container("c", 4, env=env)))
    assert status == 201, text
