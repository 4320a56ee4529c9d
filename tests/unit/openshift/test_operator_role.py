# SPDX-License-Identifier: GPL-3.0-or-later
"""Role gpu_operator by real ansible-playbook and helm, on a real API server.

The chart and the operator are stand-ins: the latter labels its nodes and reports a state as the real controller did on
2026-11-29 (test_real_gpu_operator.py). Where KUBEGPU_GPU_OPERATOR names a checkout of NVIDIA's, its chart and its
controller run in another test.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from ansible_runs import ansible
from definitions import definitions
from own_cluster import RoleSteps, controllers
from real_apiserver import MERGE, ApiServer, Refused, own_api_server
from real_operators import Nodes, checkout, running
from simulation import Simulation
from test_nvidia_role import everything
from test_operator_setup import OlmOnServer

CHART = Path(__file__).parent / "operator_chart"
SPACE = "gpu-operator"
POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
# helm is built on first use, which takes minutes.
pytestmark = pytest.mark.long
SOFTWARE = {"gpu_operator": ["a", "b"], "roles": [], "provider": [], "openshift": False, "ours": False, "nodes": []}
BACKENDS = {"software": SOFTWARE, "extender": ["a"], "dra": [], "hami": [], "nvidia": ["b"]}


class Played(Simulation):
    """The operator: it labels the nodes that node feature discovery has found, and is ready."""

    def __init__(self, server: ApiServer, space: str = SPACE) -> None:
        super().__init__()
        self.server, self.space = server, space

    def _step(self) -> None:
        with contextlib.suppress(Refused):
            for policy in self.server.request("GET", POLICIES)["items"]:
                status = {"status": {"state": "ready", "namespace": self.space}}
                self.server.request("PATCH", f"{POLICIES}/{policy['metadata']['name']}/status", status, MERGE)
                for node in self.server.request("GET", "/api/v1/nodes")["items"]:
                    self._label(node["metadata"])

    def _label(self, metadata: dict) -> None:
        there = metadata.get("labels") or {}
        if there.get("kubegpu.share/node-software") == "gpu_operator":
            names = ("nvidia.com/gpu.present", *(f"nvidia.com/gpu.deploy.{one}" for one in ("driver", "device-plugin")))
            labels = {name: "true" for name in names if name not in there}
            if labels:
                path = f"/api/v1/nodes/{metadata['name']}?fieldManager=gpu-operator"
                self.server.request("PATCH", path, {"metadata": {"labels": labels}}, MERGE)


class Role(RoleSteps):
    """The role's steps, against one server."""

    def __init__(self, server, folder, helm, chart=CHART, **variables):
        self.server = server
        given = {
            **{"gpu_kubeconfig": str(server.kubeconfig), "gpu_operator_helm": helm, "gpu_operator_chart": str(chart)},
            **{"gpu_backends": BACKENDS, "gpu_operator_wait_timeout": 120, **variables},
        }
        super().__init__("gpu_operator", folder, **given)


@pytest.fixture
def server():
    with own_api_server() as started, controllers(started, "namespace", "garbage-collector"):
        for name in ("a", "b", "c"):
            started.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"users": "own"}}})
        yield started


def labels(server, name):
    found = server.request("GET", f"/api/v1/nodes/{name}")["metadata"]["labels"]
    return {key: value for key, value in found.items() if key.startswith("nvidia.com/")}


def test_from_nothing_to_nothing(server, tmp_path, helm):
    before = everything(server)
    role = Role(server, tmp_path, helm, gpu_operator_driver_repositories={"a.list": "deb [trusted=yes] http://m /"})
    assert role.step("cluster", "--check") > 0 and everything(server) == before
    with Played(server):
        # The namespace with the repositories, the nodes' labels and the release.
        assert role.step("cluster") == 3
        assert role.step("cluster") == 0
        [policy] = server.request("GET", POLICIES)["items"]
        assert policy["spec"]["cdi"] == {"enabled": False} and policy["spec"]["devicePlugin"] == {"enabled": True}
        assert policy["spec"]["driver"]["repoConfig"] == {"configMapName": "kubegpu-driver-repositories"}
        # The label that keeps the operator's plugin from gpushare's node was there before the operator.
        assert labels(server, "a")["nvidia.com/gpu.deploy.device-plugin"] == "false"
        assert labels(server, "b")["nvidia.com/gpu.deploy.device-plugin"] == "true" and labels(server, "c") == {}
        # A node that the operator has no longer isn't labelled as its own.
        software = {**SOFTWARE, "gpu_operator": ["a"], "provider": ["b"], "leaving": ["b"]}
        left = {"gpu_backends": {**BACKENDS, "software": software, "nvidia": []}}
        assert role.step("cluster", **left) > 0
        there = server.request("GET", "/api/v1/nodes/b")["metadata"]["labels"]
        assert there["nvidia.com/gpu.deploy.operands"] == "false" and "kubegpu.share/node-software" not in there
        assert role.step("cluster") > 0
        # helm's record is the same without it.
        server.request("DELETE", f"{POLICIES}/cluster-policy")
        assert role.step("cluster") == 1 and len(server.request("GET", POLICIES)["items"]) == 1
    # As preflight says it of an operator that no node needs.
    words = ("-m", "ansible.builtin.include_role", "-a", "name=kubegpu.share.gpu_operator", "-e")
    done = ansible(tmp_path, "ansible", "localhost", "-i", "hosts.yml", *words, "gpu_operator_step=remove")
    assert done.rc == 0 and everything(server) == before, done.text


def test_by_olm_from_nothing_to_nothing(server, tmp_path):
    server.install(
        *(definitions() / f"{name}.operators.coreos.com.yaml" for name in ("subscriptions", "operatorgroups"))
    )
    before = everything(server)
    software = {**SOFTWARE, "openshift": True, "gpu_operator": ["a"], "roles": ["b"]}
    role = Role(server, tmp_path, "", gpu_backends={**BACKENDS, "software": software})
    assert role.step("cluster", "--check") > 0 and everything(server) == before
    with OlmOnServer(server), Played(server, "nvidia-gpu-operator"):
        # The namespace, the nodes' labels, and what OLM installs.
        assert role.step("cluster") == 3
        assert role.step("cluster") == 0
        [policy] = server.request("GET", POLICIES)["items"]
        assert (
            policy["spec"]["cdi"]["enabled"] is False and policy["spec"]["operator"]["use_ocp_driver_toolkit"] is True
        )
        assert labels(server, "b") == {"nvidia.com/gpu.deploy.operands": "false"}
    assert role.step("remove") > 0
    # OLM leaves definitions.
    kept = {key: value for key, value in everything(server).items() if key[0] != "CustomResourceDefinition"}
    assert kept == {key: value for key, value in before.items() if key[0] != "CustomResourceDefinition"}


def test_an_operator_of_others_stays_and_is_named(server, tmp_path, helm):
    server.install(CHART / "crds/definitions.yaml")
    theirs = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "theirs"}}
    server.request("POST", POLICIES, {**theirs, "spec": {"driver": {"enabled": True}}})
    before = everything(server)
    role = Role(server, tmp_path, helm)
    done = role.run("cluster")
    assert done.rc == 0 and done.changed == 0 and "ClusterPolicy theirs" in done.text, done.text
    assert role.step("remove") == 0 and everything(server) == before
    server.request("DELETE", f"{POLICIES}/theirs")
    done = role.run("cluster", gpu_operator_state="external")
    assert done.rc != 0 and "gpu_operator_state is external" in done.text
    assert role.run("cluster", gpu_operator_cdi="true").rc != 0


def test_an_operator_of_ours_in_another_namespace_than_the_variables_is_not_forgotten(server, tmp_path):
    """The variable names another namespace than in the run that installed it."""
    labels = {"kubegpu.share/backend": "gpu_operator"}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "before", "labels": labels}})
    before = everything(server)
    role = Role(server, tmp_path, "")
    for step, words in (
        ("remove", "in before, another namespace than gpu_operator_namespace (gpu-operator), so it wasn't removed"),
        ("cluster", "gpu_operator_namespace: this collection has installed the GPU Operator in namespace before"),
    ):
        done = role.run(step)
        assert done.rc != 0 and words in " ".join(done.text.split()), done.text
    assert everything(server) == before


class Jobs(Nodes):
    """The pods of jobs end, too."""

    def _report(self, pod, ready):
        owners = pod["metadata"].get("ownerReferences") or []
        if not any(owner["kind"] == "Job" for owner in owners):
            return super()._report(pod, ready)
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        return self.server.request("PATCH", path, {"status": {"phase": "Succeeded"}}, MERGE)


@pytest.mark.parametrize("runtime", ["cri-o://1.36.3", "containerd://2.2.9"])
def test_nvidias_own_chart_and_controller(runtime, tmp_path, helm):
    """Its Deployments run in the simulated kubelet, and the controller's program beside the API server."""
    folder = checkout("KUBEGPU_GPU_OPERATOR", "gpu-operator")
    names = ("daemonset", "deployment", "replicaset", "job", "serviceaccount", "namespace", "garbage-collector")
    with own_api_server() as server, controllers(server, *names), Jobs(server, ("a", "b"), runtime):
        before = everything(server)
        flags = ("--metrics-bind-address=127.0.0.1:0", "--health-probe-bind-address=127.0.0.1:0")
        images = {"DRIVER_MANAGER_IMAGE": "i", "VALIDATOR_IMAGE": "i", "OPERATOR_NAMESPACE": SPACE}
        chart = folder / "deployments/gpu-operator"
        role = Role(server, tmp_path, helm, chart, gpu_operator_values={"operator": {"upgradeCRD": False}})
        # It waits for the definitions, which the chart brings.
        server.install(*sorted((chart / "crds").glob("nvidia.com_*.yaml")))
        with running(server, str(folder / "gpu-operator"), *flags, cwd=folder, **images):
            assert role.step("cluster") == 3
            assert role.step("cluster") == 0
            [policy] = server.request("GET", POLICIES)["items"]
            assert policy["status"]["state"] == "ready"
            assert labels(server, "a")["nvidia.com/gpu.deploy.device-plugin"] == "false"
        assert role.step("remove") > 0
        # kubelet reports a removed plugin's resource for minutes. The controller needs its definitions before the role.
        bare = lambda found: {key: value[:-1] for key, value in found.items() if key[0] != "CustomResourceDefinition"}  # noqa: E731
        assert bare(everything(server)) == bare(before)
