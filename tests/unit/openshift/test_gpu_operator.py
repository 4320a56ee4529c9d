# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA's GPU Operator beside gpushare: the real ClusterPolicy definition, and the operator's state played."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _gpu_operator as subject
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from definitions import definitions
from real_apiserver import MERGE, Refused

POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
POLICY = f"{POLICIES}/gpu-cluster-policy"
PODS = "/api/v1/namespaces/default/pods"
EMPTY = {name: {} for name in ("daemonsets", "dcgm", "dcgmExporter", "driver", "gfd", "nodeStatusExporter", "operator")}


class Played:
    """Says notReady after each change of the spec, and ready a moment later, if it can."""

    def __init__(self, server, broken=False):
        self.server, self.broken, self.generation = server, broken, None
        self.validators = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _follow(self):
        while not self._end.wait(0.02):
            with contextlib.suppress(Refused):
                live = self.server.request("GET", POLICY)
                if live["metadata"]["generation"] != self.generation:
                    self._tell("notReady")
                    for node in self.server.request("GET", "/api/v1/nodes")["items"]:
                        if node["metadata"].get("labels", {}).get(subject.VALIDATOR) == "false":
                            self.validators.add(node["metadata"]["name"])
                    self._end.wait(0.1)
                    disabled = (live["spec"].get("devicePlugin") or {}).get("enabled") is False
                    if not (self.broken and disabled):
                        self._tell("ready")
                    self.generation = live["metadata"]["generation"]

    def _tell(self, state):
        error = {"type": "Error", "status": "True", "reason": "OperandNotReady", "message": "toolkit isn't ready"}
        told = [{**error, "lastTransitionTime": "2026-11-21T12:00:00Z"}] if self.broken else []
        self.server.request("PATCH", f"{POLICY}/status", {"status": {"state": state, "conditions": told}}, MERGE)


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
    wish = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "gpu-cluster-policy"}}
    server.request("POST", POLICIES, {**wish, "spec": body})


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


def test_where_all_cards_are_gpushares_its_plugin_and_cdi_go_and_come_back(kube, openshift):
    policy(openshift, cdi={})
    assert spec(openshift) == (True, True)
    with Played(openshift) as operator:
        before = run(kube, "worker-1", "worker-2", check=True)
        assert spec(openshift) == (True, True)
        done = run(kube, "worker-1", "worker-2")
        assert done["changed"] and done["diff"] == before["diff"] and len(done["why"]) == 2
        assert spec(openshift) == (False, False)
        # On CRI-O the validator is away while the way to the cards changes, and back afterwards.
        assert operator.validators == {"worker-1", "worker-2"}
        assert labels(openshift, "worker-1") == ("true", "true")
        assert not run(kube, "worker-1", "worker-2")["changed"]
        assert run(kube, state="absent")["changed"]
        assert spec(openshift) == (True, True)
        assert subject.BEFORE not in openshift.request("GET", POLICY)["metadata"].get("annotations", {})
        assert not run(kube, state="absent")["changed"]


def test_on_a_mixed_cluster_only_gpushares_nodes_lose_it(kube, openshift):
    policy(openshift, cdi={"enabled": False})
    pod(openshift, "theirs", on="worker-2")
    with Played(openshift):
        assert run(kube, "worker-1")["changed"]
        assert spec(openshift) == (True, False)
        assert labels(openshift, "worker-1") == ("false", "false") and labels(openshift, "worker-2") == ("true", "true")
        assert not run(kube, "worker-1")["changed"]
        run(kube, state="absent")
        assert labels(openshift, "worker-1") == ("true", "true")


def test_nodes_that_leave_and_come_are_followed(kube, openshift):
    policy(openshift, cdi={"enabled": False})
    with Played(openshift) as operator:
        run(kube, "worker-1", "worker-2")
        assert spec(openshift) == (False, False) and labels(openshift, "worker-1") == ("true", "true")
        assert run(kube, "worker-1")["changed"]
        assert spec(openshift) == (True, False)
        assert labels(openshift, "worker-1") == ("false", "false") and labels(openshift, "worker-2") == ("true", "true")
        before = openshift.request("GET", POLICY)["metadata"]["annotations"]
        operator.broken = True
        with pytest.raises(NotInEffect, match="taken back"):
            run(kube, "worker-1", "worker-2", timeout=1.5)
        assert spec(openshift) == (True, False) and labels(openshift, "worker-1") == ("false", "false")
        assert openshift.request("GET", POLICY)["metadata"]["annotations"] == before
        operator.broken = False
        assert run(kube, "worker-2")["changed"]
        assert labels(openshift, "worker-1") == ("true", "true") and labels(openshift, "worker-2") == ("false", "false")
        run(kube, state="absent")
        assert labels(openshift, "worker-2") == ("true", "true") and spec(openshift) == (True, False)


def test_pods_that_would_be_stranded_are_named(kube, openshift):
    policy(openshift, cdi={})
    pod(openshift, "training", on="worker-1")
    with pytest.raises(BadInput, match="gpushare_nodes: pod default/training asks for NVIDIA's own resources"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/training?gracePeriodSeconds=0")
    pod(openshift, "waits", resource="nvidia.com/mig-1g.5gb")
    with pytest.raises(BadInput, match="default/waits"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/waits?gracePeriodSeconds=0")
    wish = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia-cdi"}, "handler": "c"}
    openshift.apply(wish)
    pod(openshift, "by-cdi", resource="cpu", runtimeClassName="nvidia-cdi")
    with pytest.raises(BadInput, match="gpu_operator: pod default/by-cdi run by a runtime class of CDI's"):
        run(kube, "worker-1", "worker-2")
    openshift.request("DELETE", f"{PODS}/by-cdi?gracePeriodSeconds=0")
    openshift.request("PATCH", POLICY, {"spec": {"cdi": {"nriPluginEnabled": True}}}, MERGE)
    with pytest.raises(BadInput, match="nriPluginEnabled"):
        run(kube, "worker-1", "worker-2")
    assert spec(openshift) == (True, True)


def test_what_the_operator_isnt_content_with_is_taken_back(kube, openshift):
    policy(openshift, cdi={})
    with Played(openshift, broken=True):
        with pytest.raises(NotInEffect, match=r"its state is notReady: toolkit isn't ready; it was taken back"):
            run(kube, "worker-1", "worker-2", timeout=1.5)
        assert spec(openshift) == (True, True) and labels(openshift, "worker-1") == ("true", "true")


def test_a_toolkit_of_ones_own_and_older_releases_keep_their_cdi(kube, openshift):
    policy(openshift, toolkit={"enabled": False}, cdi={})
    with Played(openshift):
        run(kube, "worker-1", "worker-2")
        assert spec(openshift) == (False, True)
    definition = yaml.safe_load((definitions() / "clusterpolicies.nvidia.com.yaml").read_text())
    assert subject._cdi_by_default(definition)
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    schema["cdi"]["properties"]["enabled"]["default"] = False
    assert not subject._cdi_by_default(definition)


def test_a_run_that_was_killed_while_the_validator_was_away_brings_it_back(kube, openshift):
    policy(openshift, cdi={})

    class Killed(BaseException):
        pass

    class Dies:
        def __init__(self, after):
            self.left = after

        def __getattr__(self, name):
            return getattr(kube, name)

        def patch(self, ref, body, subresource=""):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return kube.patch(ref, body, subresource)

    with Played(openshift):
        for number in range(8):
            with contextlib.suppress(Killed):
                params = {"state": "present", "nodes": ["worker-1", "worker-2"], "timeout": 900}
                subject.work(Dies(number), params, False, subject.Waiting(timeout=20, pause=0.3))
            run(kube, "worker-1", "worker-2")
            assert spec(openshift) == (False, False)
            assert labels(openshift, "worker-1") == labels(openshift, "worker-2") == ("true", "true"), number
            run(kube, state="absent")
            assert spec(openshift) == (True, True)
            assert labels(openshift, "worker-1") == labels(openshift, "worker-2") == ("true", "true"), number


def test_without_the_operator_there_is_nothing_to_do(kube, openshift):
    assert run(kube, "worker-1") == {"changed": False, "diff": [], "policy": "", "why": []}
    policy(openshift)
    with pytest.raises(BadInput, match=r"gpushare_nodes: none of them .* it has worker-1, worker-2"):
        run(kube, "elsewhere")
    wish = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "second"}}
    openshift.request("POST", POLICIES, {**wish, "spec": {**EMPTY, "toolkit": {}, "devicePlugin": {}}})
    with pytest.raises(BadInput, match=r"several ClusterPolicies .gpu-cluster-policy, second."):
        run(kube, "worker-1")
