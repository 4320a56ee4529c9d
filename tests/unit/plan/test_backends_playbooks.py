# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks in a cluster of several back ends, by the real ansible-playbook and helm on a real API server.

The charts, kubelet, HAMi's webhook and both device plugins are stand-ins. The nodes are no hosts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from own_cluster import ROOT, controllers, run_playbook, until
from played_plugin import PlayedPlugin
from real_apiserver import MERGE, own_api_server
from simulated_driver import CARDS, VERSION, compiled
from standin_cluster import NODE, Cluster, chart

pytestmark = pytest.mark.long

PLAYBOOKS = ROOT / "playbooks"
OTHER = "other"
NVIDIA_CHART = Path(os.environ.get("KUBEGPU_NVIDIA_CHART") or ROOT / "tests/unit/nvidia/chart")
CONTROLLERS = ("deployment", "replicaset", "daemonset", "garbage-collector", "namespace")


CANARY = "kubegpu.share/switch-canary"
# Namespace, scheduler and limits of each.
CANARIES = []


def label(found):
    return (found["metadata"].get("labels") or {}).get("kubegpu.share/backend")


class Hami(Cluster):
    """HAMi's, unless the node is NVIDIA's."""

    def _node(self):
        if label(self.api.request("GET", f"/api/v1/nodes/{NODE}")) != "nvidia":
            super()._node()


class Plugin(PlayedPlugin):
    """NVIDIA's, on nodes that aren't HAMi's. Beside it, the pods that prove a switch end."""

    def _node(self, node, serving):
        if label(node) != "hami":
            super()._node(node, serving)

    def _pod(self, pod):
        if CANARY not in (pod["metadata"].get("labels") or {}):
            super()._pod(pod)

    def _before(self):
        for pod in self._get(f"/api/v1/pods?labelSelector={CANARY}")["items"]:
            metadata, spec = pod["metadata"], pod["spec"]
            if pod["status"].get("phase") == "Pending" and not metadata.get("deletionTimestamp"):
                limits = spec["containers"][0]["resources"]["limits"]
                CANARIES.append((metadata["namespace"], spec["schedulerName"], limits))
                path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
                self.server.request("PATCH", path, {"status": {"phase": "Succeeded"}}, MERGE)


@pytest.fixture(scope="module")
def cluster():
    with own_api_server() as api, controllers(api, *CONTROLLERS), Hami(api).running() as made:
        for name in (NODE, OTHER):
            numbers = {field: {"cpu": "4", "pods": "20", "memory": "8Gi"} for field in ("capacity", "allocatable")}
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            api.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": {**ready, **numbers}}, MERGE)
        with Plugin(api, "nvidia-device-plugin"):
            yield made


@pytest.fixture
def usual(cluster, helm):
    webhook = {"customURL": {"enabled": True, "host": "127.0.0.1", "port": cluster.port}}
    return {
        "gpu_kubeconfig": str(cluster.api.kubeconfig),
        "hami_helm": helm,
        "hami_chart_ref": str(chart()),
        "hami_injection": "class",
        "hami_wait_timeout": 90,
        "hami_values": {"scheduler": {"admissionWebhook": webhook}},
        "nvidia_device_plugin_helm": helm,
        "nvidia_device_plugin_chart": str(NVIDIA_CHART),
        "nvidia_device_plugin_wait_timeout": 90,
        "nvidia_device_plugin_capacity_timeout": 20,
    }


@pytest.fixture
def play(usual, tmp_path):
    def run(name, *words, other="nvidia", **variables):
        given = {
            **usual,
            "gpushare_nodes": [NODE, OTHER],
            "preflight_ignore": ["runtime"],
            "verify_grace": 0,
            **variables,
        }
        groups = {"pool": {NODE: {"gpu_backend": "hami"}, OTHER: {"gpu_backend": other}}}
        return run_playbook(tmp_path, PLAYBOOKS / name, *words, groups=groups, **given)

    return run


def node(cluster, name):
    found = cluster.api.request("GET", f"/api/v1/nodes/{name}")
    labels = found["metadata"].get("labels") or {}
    return labels.get("kubegpu.share/backend"), found["status"]["allocatable"].get("nvidia.com/gpu", "0")


def namespaces(cluster):
    return {item["metadata"]["name"] for item in cluster.api.request("GET", "/api/v1/namespaces")["items"]}


def planned(play, folder, **variables):
    done = play("plan.yml", "-e", "plan_output=plan.json", **variables)
    assert done.rc == 0 and done.changed == 0, done.text
    plan = json.loads((folder / "plan.json").read_text())
    return {(step["stage"], step["role"]) for step in plan["cluster"]["steps"]}


def test_two_back_ends_in_one_cluster(cluster, play, tmp_path):
    before = namespaces(cluster)
    nvidia = {("nvidia", "nvidia_device_plugin"), ("nvidia", "helm_release")}
    assert planned(play, tmp_path) == {("hami", "hami"), *nvidia}
    assert namespaces(cluster) == before

    done = play("site.yml")
    assert done.rc == 0, done.text
    assert (node(cluster, NODE), node(cluster, OTHER)) == (("hami", "10"), ("nvidia", "2"))
    # Nothing of gpushare was looked for.
    assert "scheduler_mode is" not in done.text and "gpushare-system" not in namespaces(cluster)
    webhook = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hami-webhook"
    assert cluster.api.request("GET", webhook)["webhooks"][0]["clientConfig"]["caBundle"]

    again = play("site.yml")
    assert again.rc == 0 and again.changed == 0, again.text
    assert "Nothing to change" in again.text and "PLAY [Deploy HAMi" in again.text, again.text
    assert "Run step" not in again.text, "no role ran"

    # A node keeps what it has.
    other = play("site.yml", other="hami")
    assert other.rc == 0 and other.changed == 0 and "other has nvidia now" in " ".join(other.text.split()), other.text

    # The last node of NVIDIA's plugin leaves, and its parts with it.
    role = {"role": "kubegpu.share.nvidia_device_plugin", "nvidia_device_plugin_step": "remove_nodes"}
    given = {"gpu_kubeconfig": str(cluster.api.kubeconfig), "nvidia_device_plugin_nodes": [OTHER]}
    left = {"hosts": "localhost", "gather_facts": False, "roles": [{**role, **given}]}
    assert run_playbook(tmp_path, [left], nvidia_device_plugin_capacity_timeout=20).rc == 0
    only = {"gpushare_nodes": [NODE]}
    # HAMi's webhook takes all pods again.
    assert planned(play, tmp_path, **only) == {("leaving", "nvidia_device_plugin"), ("hami", "hami")}
    done = play("site.yml", **only)
    assert done.rc == 0, done.text
    until(lambda: namespaces(cluster) == {*before, "hami-system"}, 60)
    again = play("site.yml", **only)
    assert again.rc == 0 and again.changed == 0, again.text

    removed = play("uninstall.yml", **only)
    assert removed.rc == 0, removed.text
    until(lambda: namespaces(cluster) == before, 60)
    assert node(cluster, NODE) == (None, "0")
    assert play("uninstall.yml", **only).changed == 0


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """NVML of a node without a process."""
    library = compiled(tmp_path / "driver", VERSION)
    (tmp_path / "cards").write_text(CARDS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library if library.is_dir() else library.parent))
    monkeypatch.setenv("KUBEGPU_SIM_CARDS", str(tmp_path / "cards"))


def test_a_node_is_switched_to_hami_and_from_it_to_nvidias_plugin(cluster, usual, driver, tmp_path):
    cluster.api.request(
        "PATCH", f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"kubernetes.io/hostname": NODE}}}, MERGE
    )
    folders = {"hami_library_folder": str(tmp_path), "nvidia_device_plugin_mps_root": f"{tmp_path}/run/mps"}
    folders["nvidia_device_plugin_kubelet_root"] = str(tmp_path)

    def switch(backend, **variables):
        play = {"hosts": NODE, "gather_facts": False, "serial": 1, "roles": ["kubegpu.share.switch"]}
        given = {**usual, **folders, "gpu_backend": backend, "switch_canary_timeout": 60, **variables}
        return run_playbook(tmp_path, [play], groups={"gpu_nodes": [NODE]}, **given)

    CANARIES.clear()
    failed = switch(
        "hami", hami_values={"scheduler": {"admissionWebhook": {"customURL": {"enabled": False}}}}, hami_wait_timeout=5
    )
    assert failed.rc != 0 and "Run the same command again" in failed.text, failed.text
    found = cluster.api.request("GET", f"/api/v1/nodes/{NODE}")
    assert found["spec"]["unschedulable"] and found["metadata"]["annotations"]["kubegpu.share/switch"] == "hami"
    done = switch("hami")
    assert done.rc == 0, done.text
    assert node(cluster, NODE) == ("hami", "10")
    assert [(canary, scheduler) for canary, scheduler, _limits in CANARIES] == [("default", "hami-scheduler")]
    assert CANARIES[0][2]["nvidia.com/gpumem"] == "256"
    assert switch("hami").changed == 0

    CANARIES.clear()
    (tmp_path / "vgpu").mkdir()
    done = switch("nvidia")
    assert done.rc == 0, done.text
    assert node(cluster, NODE) == ("nvidia", "2")
    assert CANARIES == [("nvidia-device-plugin", "default-scheduler", {"nvidia.com/gpu": "1"})]
    assert not (tmp_path / "vgpu").exists(), "HAMi's files are gone from the machine"
    found = cluster.api.request("GET", f"/api/v1/nodes/{NODE}")
    assert not found["spec"].get("unschedulable"), found["spec"]
    assert not [
        name
        for name in found["metadata"]["annotations"]
        if name.startswith(("kubegpu.share/switch", "hami.io/node-nvidia"))
    ]

    # As uninstall.yml does for single machines.
    include = {"name": "kubegpu.share.switch", "tasks_from": "leave", "rolespec_validate": False}
    leave = [{"hosts": NODE, "gather_facts": False, "tasks": [{"ansible.builtin.include_role": include}]}]
    for changes in (True, False):
        left = run_playbook(tmp_path, leave, groups={"gpu_nodes": [NODE]}, **usual, **folders)
        assert left.rc == 0 and bool(left.changed) == changes, left.text
        until(lambda: node(cluster, NODE) == (None, "0"), 30)
    assert "nvidia-device-plugin" in namespaces(cluster), "the parts of other nodes stay"
