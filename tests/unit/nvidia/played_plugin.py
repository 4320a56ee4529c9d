# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulation of kubelets and of NVIDIA's device plugin on a real API server with a real DaemonSet controller.

Pods of DaemonSets run on the nodes that the controller chose. A node with a pod of the plugin announces its cards as
the configuration says that its label names; one without has nothing allocatable, and soon no capacity.
"""

from __future__ import annotations

import contextlib
import time
import typing as t

import yaml
from real_apiserver import MERGE, ApiServer, Refused
from simulation import Simulation

CONFIG = "nvidia.com/device-plugin.config"
# The DaemonSets of NVIDIA's chart and of its GPU Operator.
PLUGINS = ("nvidia-device-plugin", "nvidia-device-plugin-daemonset")


class PlayedPlugin(Simulation):
    """Acts from a thread until the context ends.

    :param cards: of each node.
    :param mig: number of MIG devices by profile, for nodes with the strategy mixed.
    :param config_map: where the configurations are; those of the chart by default.
    :ivar asleep: kubelets start and end no pod.
    """

    def __init__(
        self, server: ApiServer, namespace: str, cards: int = 2, mig: dict[str, int] | None = None, config_map: str = ""
    ) -> None:
        super().__init__()
        self.server, self.namespace, self.cards, self.mig = server, namespace, cards, mig or {}
        self.config_map = config_map or f"{PLUGINS[0]}-configs"
        self.asleep = False

    def _before(self) -> None:
        """Act as other components; nothing here."""

    def _step(self) -> None:
        # Other simulations answer faster; nothing here is in a hurry, and the machine may be busy.
        time.sleep(0.2)
        # An object may go between two requests.
        with contextlib.suppress(Refused):
            self._before()
            serving = set()
            for pod in self._get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]:
                self._pod(pod)
                plugins = [
                    owner_reference
                    for owner_reference in pod["metadata"].get("ownerReferences") or []
                    if owner_reference["name"] in PLUGINS
                ]
                if plugins and pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"):
                    serving.add(pod["spec"]["nodeName"])
            for node in self._get("/api/v1/nodes")["items"]:
                self._node(node, node["metadata"]["name"] in serving)

    def _get(self, path: str) -> t.Any:
        return self.server.request("GET", path)

    def _pod(self, pod: dict[str, t.Any]) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        if self.asleep:
            return
        if pod["metadata"].get("deletionTimestamp"):
            self.server.request("DELETE", path, {"gracePeriodSeconds": 0})
        elif not pod["spec"].get("nodeName"):
            required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            [name] = required["nodeSelectorTerms"][0]["matchFields"][0]["values"]
            target = {"apiVersion": "v1", "kind": "Node", "name": name}
            self.server.request(
                "POST", f"{path}/binding", {"metadata": {"name": pod["metadata"]["name"]}, "target": target}
            )
        elif (pod.get("status") or {}).get("phase") != "Running":
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            self.server.request("PATCH", f"{path}/status", {"status": status}, MERGE)

    def _node(self, node: dict[str, t.Any], serving: bool) -> None:
        wanted = self._announced(node) if serving else {}
        status = node.get("status") or {}
        patch: dict[str, t.Any] = {}
        for field in ("capacity", "allocatable"):
            has = {name: value for name, value in (status.get(field) or {}).items() if name.startswith("nvidia.com/")}
            # What was announced before stays there with nothing.
            new = {**dict.fromkeys(has, "0"), **wanted}
            if new != has:
                patch[field] = new
        if patch:
            self.server.request("PATCH", f"/api/v1/nodes/{node['metadata']['name']}/status", {"status": patch}, MERGE)

    def _announced(self, node: dict[str, t.Any]) -> dict[str, str]:
        if not self.config_map:
            return {"nvidia.com/gpu": str(self.cards)}
        maps = self._get(f"/api/v1/namespaces/{self.namespace}/configmaps/{self.config_map}")["data"]
        # Without the label the plugin has the default.
        config = yaml.safe_load(maps.get(node["metadata"]["labels"].get(CONFIG)) or next(iter(maps.values())))
        sharing = config.get("sharing") or {}
        shared = sharing.get("timeSlicing") or sharing.get("mps") or {"resources": []}
        found = {"nvidia.com/gpu": self.cards}
        if config["flags"]["migStrategy"] == "mixed":
            found = {f"nvidia.com/mig-{profile}": number for profile, number in self.mig.items()}
        for resource in shared["resources"]:
            number = found.pop(resource["name"], 0) * resource["replicas"]
            found[resource["name"] + (".shared" if shared["renameByDefault"] else "")] = number
        return {name: str(number) for name, number in found.items()}


class PlayedGpuOperator(PlayedPlugin):
    """NVIDIA's GPU Operator beside that: its plugin's DaemonSet has the ConfigMap that the ClusterPolicy names.

    Its MIG manager applies the MIG layout that a node's label names, some time after it.

    :ivar applies: the MIG manager acts.
    """

    NAMESPACE = "nvidia-gpu-operator"

    def __init__(self, server: ApiServer, **more: t.Any) -> None:
        super().__init__(server, self.NAMESPACE, **more)
        self._applied: dict[str, str] = {}
        self._seen = 0
        self.applies = True

    def _before(self) -> None:
        policies = self._get("/apis/nvidia.com/v1/clusterpolicies")["items"]
        [policy] = [one for one in policies if one["metadata"]["name"] == "cluster-policy"]
        self.config_map = ((policy["spec"].get("devicePlugin") or {}).get("config") or {}).get("name", "")
        path = f"/apis/apps/v1/namespaces/{self.NAMESPACE}/daemonsets/{PLUGINS[1]}"
        annotations = {"metadata": {"annotations": {"config": self.config_map}}}
        if self._get(path)["spec"]["template"]["metadata"].get("annotations") != annotations["metadata"]["annotations"]:
            self.server.request("PATCH", path, {"spec": {"template": annotations}}, MERGE)
        # It labels nodes again when the ClusterPolicy's specification changes, and notices no label that is removed.
        generation, self._seen = self._seen, policy["metadata"]["generation"]
        for node in self._get("/api/v1/nodes")["items"]:
            name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
            wanted, state = labels.get("nvidia.com/mig.config"), "nvidia.com/mig.config.state"
            if self.applies and wanted and self._applied.get(name) != wanted and labels.get(state) == "pending":
                self._applied[name] = wanted
                body = {"metadata": {"labels": {state: "success"}}}
                self.server.request("PATCH", f"/api/v1/nodes/{name}", body, MERGE)
            missing = "nvidia.com/gpu.deploy.device-plugin" not in labels
            if labels.get("nvidia.com/gpu.present") == "true" and missing and generation != self._seen:
                body = {"metadata": {"labels": {"nvidia.com/gpu.deploy.device-plugin": "true"}}}
                self.server.request("PATCH", f"/api/v1/nodes/{name}", body, MERGE)
