# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's GPU Operator beside gpushare: the real ClusterPolicy definition, and a simulated operator."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as subject
from definitions import definitions
from real_apiserver import MERGE, Refused
from simulation import Simulation

POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
POLICY = f"{POLICIES}/gpu-cluster-policy"
PODS = "/api/v1/namespaces/default/pods"
EMPTY = {name: {} for name in ("daemonsets", "dcgm", "dcgmExporter", "driver", "gfd", "nodeStatusExporter", "operator")}


class Played(Simulation):
    """Report notReady after each change of the spec, and ready a moment later unless it is broken."""

    def __init__(self, server, broken=False):
        super().__init__()
        self.server, self.broken, self.generation = server, broken, None
        self.validators = set()

    def _step(self):
        with contextlib.suppress(Refused):
            live = self.server.request("GET", POLICY)
            if live["metadata"]["generation"] != self.generation:
                self._report("notReady")
                for node in self.server.request("GET", "/api/v1/nodes")["items"]:
                    if node["metadata"].get("labels", {}).get(subject.VALIDATOR) == "false":
                        self.validators.add(node["metadata"]["name"])
                self._end.wait(0.1)
                disabled = (live["spec"].get("devicePlugin") or {}).get("enabled") is False
                if not (self.broken and disabled):
                    self._report("ready")
                self.generation = live["metadata"]["generation"]

    def _report(self, state):
        error = {"type": "Error", "status": "True", "reason": "OperandNotReady", "message": "toolkit isn't ready"}
        conditions = [{**error, "lastTransitionTime": "2026-11-21T12:00:00Z"}] if self.broken else []
        self.server.request("PATCH", f"{POLICY}/status", {"status": {"state": state, "conditions": conditions}}, MERGE)


def node(server, name, present=True, runtime="cri-o://1.33.4"):
    labels = {subject.PRESENT: "true", subject.PLUGIN: "true", subject.VALIDATOR: "true"} if present else {}
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    about = dict.fromkeys(
        ("architecture", "bootID", "kernelVersion", "kubeProxyVersion", "kubeletVersion", "machineID", "osImage"), "x"
    )
    about |= {"operatingSystem": "linux", "systemUUID": "x", "containerRuntimeVersion": runtime}
    server.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"nodeInfo": about}}, MERGE)


def pod(server, name, on="", resource="nvidia.com/gpu", **spec):
    container = {"name": "a", "image": "i", "resources": {"limits": {resource: 1}}}
    body = {"containers": [container], **({"nodeName": on} if on else {}), **spec}
    server.request("POST", PODS, {"metadata": {"name": name}, "spec": body})


def policy(server, **spec):
    body = {**EMPTY, "toolkit": {}, "devicePlugin": {"enabled": True}, **spec}
    resource = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "gpu-cluster-policy"}}
    server.request("POST", POLICIES, {**resource, "spec": body})


@pytest.fixture
def kube(openshift):
    for path in ("/api/v1/nodes", f"{PODS}?gracePeriodSeconds=0", POLICIES):
        openshift.request("DELETE", path)
    for name in ("worker-1", "worker-2"):
        node(openshift, name)
    node(openshift, "master-0", present=False)
    module = SimpleNamespace(
        params={**dict.fromkeys(subject.ARGUMENTS), "kubeconfig": str(openshift.kubeconfig)}, no_log_values=set()
    )
    return RealKube.of_module(module)


def run(kube, *nodes, state="present", check=False, timeout=20.0):
    params = {"state": state, "nodes": list(nodes), "timeout": 900}
    return subject.work(kube, params, check, subject.Waiting(timeout=timeout, pause=0.15))


def spec(server):
    live = server.request("GET", POLICY)["spec"]
    return (live.get("devicePlugin") or {}).get("enabled"), (live.get("cdi") or {}).get("enabled")


def labels(server, name):
    found = server.request("GET", f"/api/v1/nodes/{name}")["metadata"]["labels"]
    return found.get(subject.PLUGIN), found.get(subject.VALIDATOR)


def test_device_plugin_and_cdi_disabled_and_restored(kube, openshift):
    policy(openshift, cdi={})
    assert spec(openshift) == (True, True)
    with Played(openshift) as operator:
        before = run(kube, "worker-1", "worker-2", check=True)
        assert spec(openshift) == (True, True)
        done = run(kube, "worker-1", "worker-2")
        assert done["changed"] and done["diff"] == before["diff"] and len(done["reasons"]) == 2
        assert spec(openshift) == (False, False)
        # On CRI-O the validator is paused while the runtime's mode changes.
        assert operator.validators == {"worker-1", "worker-2"}
        assert labels(openshift, "worker-1") == ("true", "true")
        assert not run(kube, "worker-1", "worker-2")["changed"]
        assert run(kube, state="absent")["changed"]
        assert spec(openshift) == (True, True)
        assert subject.BEFORE not in openshift.request("GET", POLICY)["metadata"].get("annotations", {})
        assert not run(kube, state="absent")["changed"]


def test_mixed_cluster_disables_plugin_by_node_label(kube, openshift):
    policy(openshift, cdi={"enabled": False})
    pod(openshift, "theirs", on="worker-2")
    with Played(openshift):
        assert run(kube, "worker-1")["changed"]
        assert spec(openshift) == (True, False)
        assert labels(openshift, "worker-1") == ("false", "false") and labels(openshift, "worker-2") == ("true", "true")
        assert not run(kube, "worker-1")["changed"]
        run(kube, state="absent")
        assert labels(openshift, "worker-1") == ("true", "true")


def test_pods_that_need_nvidias_resources_refused(kube, openshift):
    policy(openshift, cdi={})
    pod(openshift, "training", on="worker-1")
    with pytest.raises(BadInput, match="gpushare_nodes: pod default/training asks for NVIDIA's own resources"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/training?gracePeriodSeconds=0")
    pod(openshift, "waits", resource="nvidia.com/mig-1g.5gb")
    with pytest.raises(BadInput, match="default/waits"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/waits?gracePeriodSeconds=0")
    resource = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "nvidia-cdi"},
        "handler": "c",
    }
    openshift.apply(resource)
    pod(openshift, "by-cdi", resource="cpu", runtimeClassName="nvidia-cdi")
    with pytest.raises(BadInput, match="gpu_operator: pod default/by-cdi use a runtime class of CDI"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/by-cdi?gracePeriodSeconds=0")
    openshift.request("PATCH", POLICY, {"spec": {"cdi": {"nriPluginEnabled": True}}}, MERGE)
    with pytest.raises(BadInput, match="nriPluginEnabled"):
        run(kube, "worker-1", "worker-2")
    assert spec(openshift) == (True, True)


def test_unready_operator_rolls_back(kube, openshift):
    policy(openshift, cdi={})
    with Played(openshift, broken=True):
        with pytest.raises(NotInEffect, match=r"its state is notReady: toolkit isn't ready; it was rolled back"):
            run(kube, "worker-1", "worker-2", timeout=1.5)
        assert spec(openshift) == (True, True) and labels(openshift, "worker-1") == ("true", "true")


def test_cdi_kept_without_toolkit_or_default(kube, openshift):
    policy(openshift, toolkit={"enabled": False}, cdi={})
    with Played(openshift):
        run(kube, "worker-1", "worker-2")
        assert spec(openshift) == (False, True)
    definition = yaml.safe_load((definitions() / "clusterpolicies.nvidia.com.yaml").read_text())
    assert subject._cdi_by_default(definition)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    schema["cdi"]["properties"]["enabled"]["default"] = False
    assert not subject._cdi_by_default(definition)


def test_missing_operator_or_nodes_or_several_policies(kube, openshift):
    assert run(kube, "worker-1") == {"changed": False, "diff": [], "policy": "", "reasons": []}
    policy(openshift)
    with pytest.raises(BadInput, match=r"gpushare_nodes: none of them .* whose nodes are worker-1, worker-2"):
        run(kube, "elsewhere")
    resource = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "second"}}
    openshift.request("POST", POLICIES, {**resource, "spec": {**EMPTY, "toolkit": {}, "devicePlugin": {}}})
    with pytest.raises(BadInput, match=r"several ClusterPolicies .gpu-cluster-policy, second."):
        run(kube, "worker-1")
