# SPDX-License-Identifier: GPL-3.0-or-later
"""switch.yml onto and off a node whose driver and toolkit this collection's GPU Operator has, on a real API server.

The controllers of Kubernetes are real; kubelet and gpushare's device plugin are played. The operator is a stand-in that
makes its device plugin's DaemonSet as the real controller did on 2026-11-29, or NVIDIA's own chart and controller where
KUBEGPU_GPU_OPERATOR names its checkout.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from own_cluster import ROOT, RoleSteps, controllers, run_playbook, until
from real_apiserver import MERGE, Refused, own_api_server
from real_operators import Nodes, checkout, running
from simulated_driver import CARDS, VERSION, compiled
from test_operator_role import CHART, POLICIES, SPACE, Played

# helm is built on first use, which takes minutes.
pytestmark = pytest.mark.long
NODE = "/api/v1/nodes/gpu1"
CARD, MEMORY = "nvidia.com/gpu", "aliyun.com/gpu-mem"
SETS = f"/apis/apps/v1/namespaces/{SPACE}/daemonsets"
PLUGIN = "nvidia-device-plugin-daemonset"
TENANTS = "/api/v1/namespaces/default/pods"
CONTROLLERS = ("namespace", "garbage-collector", "daemonset", "deployment", "replicaset", "job", "serviceaccount")
DEPLOY = "nvidia.com/gpu.deploy.device-plugin"


class Kubelet(Nodes):
    """Kubelet of gpu1, and the scheduler: pods of tenants run where a card is announced and the node isn't cordoned.

    ``canaries`` are the resources of pods that have proven a switch, and ``sold`` each moment in which both device
    plugins announced the card.
    """

    def __init__(self, server, runtime):
        super().__init__(server, ["gpu1"], runtime, **{"kubernetes.io/hostname": "gpu1"})
        self.canaries, self.sold = [], []

    def _step(self):
        super()._step()
        with contextlib.suppress(Refused):
            node = self.server.request("GET", NODE)
            here = [pod for pod in self._pods() if pod["spec"].get("nodeName") == "gpu1"]
            serving = [
                pod
                for pod in here
                if pod["metadata"].get("labels", {}).get("app.kubernetes.io/name") == "gpushare-device-plugin"
                and pod["status"].get("phase") == "Running"
            ]
            units = "32" if serving else "0"
            allocatable = node["status"].get("allocatable") or {}
            if allocatable.get(MEMORY) != units:
                status = {"capacity": {MEMORY: "32"}, "allocatable": {MEMORY: units}}
                self.server.request("PATCH", f"{NODE}/status", {"status": status}, MERGE)
                if serving:
                    self.server.request(
                        "PATCH", NODE, {"metadata": {"annotations": {"kubegpu.share/cards": "[]"}}}, MERGE
                    )
            if serving and allocatable.get(CARD, "0") != "0":
                self.sold.append(node["metadata"]["labels"])

    def _pod(self, pod):
        tenants = pod["metadata"].get("labels", {}).get("app") == "tenant"
        if tenants and not pod["spec"].get("nodeName"):
            node = self.server.request("GET", NODE)
            [resource] = pod["spec"]["containers"][0]["resources"]["limits"]
            free = node["status"].get("allocatable", {}).get(resource, "0") != "0"
            if node["spec"].get("unschedulable") or not free:
                return
        super()._pod(pod)

    def _report(self, pod, ready):
        metadata = pod["metadata"]
        if metadata["name"].startswith("gpushare-switch-") or any(
            owner["kind"] == "Job" for owner in metadata.get("ownerReferences") or []
        ):
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
            self.server.request("PATCH", path, {"status": {"phase": "Succeeded"}}, MERGE)
            if metadata["name"].startswith("gpushare-switch-"):
                self.canaries.append(*pod["spec"]["containers"][0]["resources"]["limits"])
        else:
            super()._report(pod, ready)


class Operator(Played):
    """Its device plugin's DaemonSet is there while the ClusterPolicy enables it."""

    def _step(self):
        super()._step()
        with contextlib.suppress(Refused):
            for policy in self.server.request("GET", POLICIES)["items"]:
                self._plugin(policy["spec"].get("devicePlugin") or {})

    def _plugin(self, wanted):
        path = f"{SETS}/{PLUGIN}"
        live = self.server.ask("GET", path)[0] == 200
        config = (wanted.get("config") or {}).get("name", "")
        if wanted.get("enabled") is False:
            if live:
                self.server.request("DELETE", path)
            return
        labels, env = {"app": PLUGIN}, [{"name": "CONFIG", "value": config}]
        spec = {"nodeSelector": {DEPLOY: "true"}, "containers": [{"name": "c", "image": "i", "env": env}]}
        template = {"metadata": {"labels": labels}, "spec": spec}
        made = {"metadata": {"name": PLUGIN}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
        if not live:
            self.server.request("POST", SETS, made)
        elif self.server.request("GET", path)["spec"]["template"]["spec"]["containers"][0]["env"] != env:
            self.server.request("PATCH", path, {"spec": {"template": template}}, MERGE)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """NVML of a node without a process."""
    library = compiled(tmp_path / "driver", VERSION)
    (tmp_path / "cards").write_text(CARDS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library if library.is_dir() else library.parent))
    monkeypatch.setenv("KUBEGPU_SIM_CARDS", str(tmp_path / "cards"))


class Cluster:
    """One node whose software is the operator's, and that gpushare's extender has."""

    def __init__(self, server, kubelet, folder, helm, chart, **variables):
        self.server, self.kubelet, self.folder = server, kubelet, folder
        self.given = {
            **{"gpu_kubeconfig": str(server.kubeconfig), "gpu_node_software": "gpu_operator"},
            **{"gpu_operator_helm": helm, "gpu_operator_chart": str(chart), "gpu_operator_wait_timeout": 120},
            **{"nvidia_device_plugin_helm": helm, "nvidia_device_plugin_wait_timeout": 60},
            **{"nvidia_device_plugin_mps_root": f"{folder}/mps", "nvidia_device_plugin_kubelet_root": str(folder)},
            **{"gpushare_image_delivery": "registry", "gpushare_wait_timeout": 60, "switch_canary_timeout": 60},
            **{"switch_clean_timeout": 60, "switch_canary_image": "i", **variables},
        }

    def begin(self):
        """Install the operator, and have gpushare on the node; the extender is there."""
        software = {"gpu_operator": ["gpu1"], "roles": [], "provider": [], "openshift": False, "ours": False}
        backends = {"software": software, "extender": ["gpu1"], "dra": [], "hami": [], "nvidia": []}
        role = RoleSteps("gpu_operator", self.folder, **self.given, gpu_backends=backends)
        assert role.step("cluster") > 0
        self.server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpushare-system"}})
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        self.server.apply({**lease, "metadata": {"name": "gpushare-ledger", "namespace": "gpushare-system"}})
        role = {"role": "kubegpu.share.gpushare", "gpushare_component": "device_plugin"}
        play = {"hosts": "localhost", "gather_facts": False, "roles": [{**role, "gpushare_component_nodes": ["gpu1"]}]}
        done = run_playbook(self.folder, [play], **self.given)
        assert done.rc == 0, done.text

    def switch(self, backend):
        # The machine is this one, which may have no card.
        given = {**self.given, "gpu_backend": backend, "preflight_ignore": ["no-gpu"]}
        play = ROOT / "playbooks/switch.yml"
        return run_playbook(self.folder, play, "--limit", "gpu1", groups={"gpu_nodes": ["gpu1"]}, **given)

    def announced(self):
        allocatable = self.server.request("GET", NODE)["status"]["allocatable"]
        return {name for name in (CARD, MEMORY) if allocatable.get(name, "0") != "0"}

    def deployed(self, resource):
        """A tenant's Deployment of one pod with a share or a card."""
        labels, limits = {"app": "tenant"}, {resource: 1}
        spec = {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]}
        template = {"metadata": {"labels": labels}, "spec": spec}
        body = {"metadata": {"name": "tenant"}, "spec": {"selector": {"matchLabels": labels}, "template": template}}
        self.server.request("POST", "/apis/apps/v1/namespaces/default/deployments", body)
        until(lambda: [pod for pod in self.tenants() if pod["spec"].get("nodeName")])

    def tenants(self):
        return self.server.request("GET", f"{TENANTS}?labelSelector=app=tenant")["items"]


@contextlib.contextmanager
def nvidias_own(server, runtime):
    """NVIDIA's chart and its controller."""
    folder = checkout("KUBEGPU_GPU_OPERATOR", "gpu-operator")
    flags = ("--metrics-bind-address=127.0.0.1:0", "--health-probe-bind-address=127.0.0.1:0")
    images = {"DRIVER_MANAGER_IMAGE": "i", "VALIDATOR_IMAGE": "i", "OPERATOR_NAMESPACE": SPACE}
    chart = folder / "deployments/gpu-operator"
    # It waits for the definitions, which the chart brings.
    server.install(*sorted((chart / "crds").glob("nvidia.com_*.yaml")))
    with running(server, str(folder / "gpu-operator"), *flags, cwd=folder, **images):
        yield chart, {"gpu_operator_values": {"operator": {"upgradeCRD": False}}}


@contextlib.contextmanager
def stand_in(server, runtime):
    with Operator(server):
        yield CHART, {}


@pytest.mark.parametrize(
    ("operator", "runtime"),
    [
        (stand_in, "containerd://2.2.9"),
        (nvidias_own, "containerd://2.2.9"),
        (nvidias_own, "cri-o://1.36.3"),
    ],
)
def test_the_last_node_goes_to_nvidias_plugin_and_back(operator, runtime, driver, tmp_path, helm):
    with (
        own_api_server() as server,
        controllers(server, *CONTROLLERS),
        Kubelet(server, runtime) as kubelet,
        operator(server, runtime) as (chart, values),
    ):
        cluster = Cluster(server, kubelet, tmp_path, helm, chart, **values)
        cluster.begin()
        until(lambda: cluster.announced() == {MEMORY})
        for to, resource in (("nvidia", CARD), ("gpushare", MEMORY), ("nvidia", CARD)):
            kubelet.canaries.clear()
            done = cluster.switch(to)
            assert done.rc == 0, done.text
            node = server.request("GET", NODE)
            assert "unschedulable" not in node["spec"] and kubelet.canaries == [resource], done.text
            assert cluster.announced() == {resource} and kubelet.sold == []
            assert node["metadata"]["labels"].get(DEPLOY) == ("true" if resource == CARD else "false")
            if to == "nvidia" and not cluster.tenants():
                # Evicted, it waits: no node announces what it asks for.
                cluster.deployed(CARD)
        again = cluster.switch(to)
        assert again.rc == 0 and again.changed == 0, again.text
        [policy] = server.request("GET", POLICIES)["items"]
        assert policy["status"]["state"] == "ready"
        assert json.loads(policy["metadata"].get("annotations", {}).get("kubegpu.share/before", "{}")) == {}
