# SPDX-License-Identifier: GPL-3.0-or-later
"""From the how-to's GPUShare to its three pods on one card.

The real ansible-operator with the operator's account and the real schema, the real server of claim templates,
kube-scheduler and controller of claims. No kubelet runs and there is no card: the DRA driver's slices are played, and
a pod ends where the scheduler has bound it with its share of a card.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import yaml
from dra_world import NAMESPACE, account, allocated
from gpushare.api.client import connect
from gpushare.templates.command import Templates
from operator_kit import running
from own_cluster import scheduler, until
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE
from test_operator_page import manifests

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator"))

import schema

pytestmark = pytest.mark.long
PODS = "/api/v1/namespaces/default/pods"


def test_from_a_resource_to_three_pods_on_a_card(tmp_path):
    wanted = yaml.safe_load(manifests()["gpushare.yml"])["spec"]
    deployment = yaml.safe_load(manifests()["three-pods.yml"])["spec"]
    names = [f"three-{number}" for number in range(deployment["replicas"])]
    with running(more=("resourceclaim",)) as operator:
        api = operator.api
        api.install(schema.CRD)
        room = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "110"}}
        api.request("PATCH", "/api/v1/nodes/gpu1/status", {"status": room}, MERGE)
        # Of the API server: nobody says that the node is ready.
        api.request("PATCH", "/api/v1/nodes/gpu1", {"spec": {"taints": None}}, MERGE)
        operator.start()
        operator.create(**{**wanted, "gpushareNodes": ["gpu1"]})
        operator.until_well()
        with scheduler(api):
            templates = Templates(
                connect(api.url, str(account(api, tmp_path / "account"))),
                namespace=NAMESPACE,
                registry=CollectorRegistry(),
            )
            templates.start()
            try:
                until(lambda: templates.leader.leading, 60)
                for name in names:
                    pod = copy.deepcopy(deployment["template"])
                    pod["metadata"]["name"] = name
                    api.request("POST", PODS, pod)
                for name in names:
                    until(lambda name=name: allocated(api, "default", name), 60)
                shares = [allocated(api, "default", name) for name in names]
                nodes = {api.request("GET", f"{PODS}/{name}")["spec"]["nodeName"] for name in names}
            finally:
                assert templates.stop()
        assert nodes == {"gpu1"}
        # Each has a share of 5 GiB, and all three are of one card of 16 GiB.
        assert [(len(one), one[0][2]) for one in shares] == [(1, "5Gi")] * 3
        assert len({one[0][1] for one in shares}) == 1
        assert operator.refusals() == []
