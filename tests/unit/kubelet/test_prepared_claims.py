# SPDX-License-Identifier: GPL-3.0-or-later
"""What the DRA driver has prepared on a node, and the claims in kubelet's PodResources, as both write them."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import claim_templates as templates
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.checkpoint import prepared_claims
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.devices import collect, parse_pod_resources
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import NodeKubelet
from dra_objects import DRIVER, claim, claim_uid, prepare, share_id
from gpushare.kubelet import wire

CARDS = [contract.Card(at, f"GPU-5a4d7f2{at}", at, 16384, 16) for at in (0, 1)]
PAIR = templates.Shape((4, 2))


@pytest.fixture
def node(tmp_path):
    """A node on which the driver has prepared one claim of two containers."""
    prepare(claim(1, PAIR, [CARDS[0]] * 2), CARDS, tmp_path / "kubelet", tmp_path / "cdi")
    return tmp_path


def found(node):
    return prepared_claims(NodeKubelet(), str(node / "kubelet"), str(node / "cdi"))


def record(node):
    return node / "kubelet" / "plugins" / DRIVER / "claims" / f"{claim_uid(1)}.json"


def specification(node):
    return node / "cdi" / f"{DRIVER}-claim-{claim_uid(1)}.json"


def test_records_and_specifications_of_the_driver(node):
    shown = found(node)
    assert (shown["state"], shown["problem"]) == ("ok", "")
    shares = [
        {"request": f"gpu-{at}", "device": "gpu-5a4d7f20", "share": share_id(1, at), "mib": mib}
        for at, mib in enumerate((4096, 2048))
    ]
    about = {"uid": claim_uid(1), "namespace": "default", "name": "work-1-gpu-mem-x1"}
    assert shown["records"] == [{**about, "shares": shares, "problem": ""}]
    (specified,) = shown["specifications"]
    assert (specified["uid"], specified["recorded"], specified["problem"]) == (claim_uid(1), True, "")
    assert [env[contract.CONTAINER_UNITS] for env in specified["envs"]] == ["4", "2"]


def test_damage_is_reported_for_its_claim_alone(node):
    # What an interrupted write has left is nobody's.
    record(node).with_name(".x.json.tmp").write_text("")
    changed = json.loads(specification(node).read_text())
    changed["devices"][0]["containerEdits"]["env"] = ["NVIDIA_VISIBLE_DEVICES=all"]
    specification(node).write_text(json.dumps(changed))
    (specified,) = found(node)["specifications"]
    assert not specified["recorded"] and specified["envs"][0] == {"NVIDIA_VISIBLE_DEVICES": "all"}
    specification(node).write_text("{")
    assert "can't be read" in found(node)["specifications"][0]["problem"]
    specification(node).unlink()
    assert found(node)["specifications"] == [] and len(found(node)["records"]) == 1
    for text in ("[", "[]", '{"claim": {"uid": "other"}}', "7"):
        record(node).write_text(text)
        (recorded,) = found(node)["records"]
        assert recorded["problem"] and recorded["shares"] == [], text


def test_a_node_without_the_driver(tmp_path, monkeypatch):
    assert found(tmp_path)["state"] == "missing"
    assert collect(NodeKubelet(), str(tmp_path), ["nvidia.com/"])["prepared"]["state"] == "missing"

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    shown = found(tmp_path)
    assert (shown["state"], shown["records"]) == ("unreadable", []) and "Permission denied" in shown["problem"]


# kubelet's own messages, with the fields of 1.36.
MESSAGES = wire.Messages(
    {
        "v1": {
            "ClaimResource": {
                "driver_name": (2, "string"),
                "pool_name": (3, "string"),
                "device_name": (4, "string"),
                "share_id": (5, "string"),
            },
            "DynamicResource": {
                "claim_name": (2, "string"),
                "claim_namespace": (3, "string"),
                "claim_resources": (4, "ClaimResource[]"),
            },
            "ContainerResources": {"name": (1, "string"), "dynamic_resources": (5, "DynamicResource[]")},
            "PodResources": {
                "name": (1, "string"),
                "namespace": (2, "string"),
                "containers": (3, "ContainerResources[]"),
            },
            "ListPodResourcesResponse": {"pod_resources": (1, "PodResources[]")},
        }
    }
)


def test_claims_in_pod_resources():
    response = MESSAGES["v1.ListPodResourcesResponse"]()
    container = response.pod_resources.add(namespace="default", name="work-1").containers.add(name="main-0")
    given = container.dynamic_resources.add(claim_name="c", claim_namespace="default")
    for driver, device in (("gpu.nvidia.com", "gpu-0"), (DRIVER, "gpu-5a4d7f20")):
        given.claim_resources.add(driver_name=driver, pool_name="gpu1", device_name=device, share_id="s")
    response.pod_resources.add(namespace="default", name="without").containers.add(name="c")
    (pod,) = parse_pod_resources(wire.encode(response), ["aliyun.com/gpu-"])["pods"]
    expected = {"namespace": "default", "claim": "c", "pool": "gpu1", "device": "gpu-5a4d7f20", "share": "s"}
    assert pod["containers"] == [{"name": "main-0", "devices": [], "claims": [expected]}]
