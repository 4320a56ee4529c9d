# SPDX-License-Identifier: GPL-3.0-or-later
"""Role nvidia_device_plugin by real ansible-playbook and helm, on a real API server with real controllers.

The chart is the stand-in beside this file; $KUBEGPU_NVIDIA_CHART names NVIDIA's own, where somebody has it. kubelets
and the plugin are simulated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from definitions import definitions
from own_cluster import RoleSteps, controllers, run_playbook, until
from played_plugin import PlayedGpuOperator, PlayedPlugin
from real_apiserver import MERGE, Refused, own_api_server
from test_nvidia_plan import CDI, LAYOUTS, containerd, planned

CHART = Path(os.environ.get("KUBEGPU_NVIDIA_CHART") or Path(__file__).parent / "chart")
NAMESPACE = "nvidia-device-plugin"
RELEASE = "nvidia-device-plugin"
# helm is built on first use, which takes minutes.
pytestmark = pytest.mark.long
NODES = ("gpu1", "gpu2", "cpu1")
SHARED = {"exclusive": {}, "quarters": {"sharing": "time-slicing", "replicas": 4, "rename": True}}
DIVIDED = {"divided": {"mig_strategy": "mixed", "mig_layout": "seven"}}
SEVEN = {**LAYOUTS, "mig-configs": {"seven": LAYOUTS["mig-configs"]["seven"]}}
# Kinds of everything that a run may create; Events and what controllers make of pods come and go.
KINDS = (
    "namespaces,nodes,clusterroles,clusterrolebindings,runtimeclasses,crds,configmaps,secrets,serviceaccounts,"
    "daemonsets,controllerrevisions,pods,services"
)


@pytest.fixture
def server():
    with own_api_server() as started, controllers(started, "daemonset", "namespace", "garbage-collector"):
        for name in NODES:
            body = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
            started.request("POST", "/api/v1/nodes", body)
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            numbers = {field: {"cpu": "4", "pods": "20", "memory": "8Gi"} for field in ("capacity", "allocatable")}
            started.request(
                "PATCH",
                f"/api/v1/nodes/{name}/status",
                {"status": {**ready, **numbers}},
                MERGE,
            )
            # The controller that would remove it doesn't run.
            started.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, MERGE)
        yield started


class Role(RoleSteps):
    """The role's steps, against one server."""

    def __init__(self, server, folder, helm, **variables):
        self.server = server
        given = {
            "gpu_kubeconfig": str(server.kubeconfig),
            "nvidia_device_plugin_helm": helm,
            "nvidia_device_plugin_chart": str(CHART),
            "nvidia_device_plugin_nodes": ["gpu1", "gpu2"],
            "nvidia_device_plugin_wait_timeout": 60,
            "nvidia_device_plugin_capacity_timeout": 20,
            **variables,
        }
        super().__init__("nvidia_device_plugin", folder, **given)


def everything(server):
    """What the cluster has: names of objects, and labels, annotations and resources of nodes and namespaces."""
    found = {}
    for item in yaml.safe_load(server.kubectl("get", KINDS, "--all-namespaces", "-o", "yaml").stdout)["items"]:
        metadata = item["metadata"]
        name = (item["kind"], metadata.get("namespace", ""), metadata["name"])
        kept = item["kind"] in ("Node", "Namespace")
        details = [metadata.get("labels"), metadata.get("annotations")] if kept else []
        found[name] = [*details, sorted(item.get("status", {}).get("capacity", {}))]
    return found


def node(server, name):
    return server.request("GET", f"/api/v1/nodes/{name}")


def allocatable(server, name):
    resources = node(server, name)["status"]["allocatable"]
    return {key: value for key, value in resources.items() if key.startswith("nvidia.com/") and value != "0"}


def daemons(server):
    found = server.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets")["items"]
    return {one["metadata"]["name"]: one["status"]["desiredNumberScheduled"] for one in found}


def test_from_nothing_to_nothing(server, tmp_path, helm):
    before = everything(server)
    with PlayedPlugin(server, NAMESPACE):
        role = Role(server, tmp_path, helm, nvidia_device_plugin_configurations=SHARED)
        # The nodes' label that no kubelet may set, the namespace and the release.
        assert role.step("cluster") == 3
        assert role.step("cluster") == 0
        assert set(daemons(server).values()) == {0}, "no node has its label yet"
        assert role.step("nodes", nvidia_device_plugin_node_configurations={"gpu2": "quarters"}) == 1
        assert allocatable(server, "gpu1") == {"nvidia.com/gpu": "2"}
        assert allocatable(server, "gpu2") == {"nvidia.com/gpu.shared": "8"}
        assert allocatable(server, "cpu1") == {}
        # helm's record is the same without them.
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
        before_deletion = daemons(server)
        for name in before_deletion:
            server.request("DELETE", f"{path}/{name}")
        until(lambda: not daemons(server))
        assert role.step("cluster", "--check") == 1 and not daemons(server)
        assert role.step("cluster") == 1
        until(lambda: daemons(server) == before_deletion)
        assert role.step("cluster") == 0
        assert role.step("nodes", nvidia_device_plugin_node_configurations={"gpu2": "quarters"}) == 0
        # Another configuration of one node; its label of before goes, and no other node's changes.
        version = node(server, "gpu1")["metadata"]["managedFields"]
        assert role.step("nodes", nvidia_device_plugin_default="exclusive") == 1
        until(lambda: allocatable(server, "gpu2") == {"nvidia.com/gpu": "2"})
        assert node(server, "gpu1")["metadata"]["managedFields"] == version
        # One node leaves.
        assert role.step("remove_nodes", nvidia_device_plugin_nodes=["gpu2"]) == 3
        assert not [key for key in node(server, "gpu2")["metadata"]["labels"] if key.startswith("nvidia.com/")]
        assert not [key for key in node(server, "gpu2")["status"]["capacity"] if key.startswith("nvidia.com/")]
        assert allocatable(server, "gpu1") == {"nvidia.com/gpu": "2"}
        assert role.step("remove_nodes", nvidia_device_plugin_nodes=["gpu2"]) == 0
        # And the rest.
        assert role.step("remove") > 0
        until(lambda: everything(server) == before)
        assert role.step("remove") == 0


def test_the_dcgm_exporter_has_a_service_monitor_where_there_may_be_one(server, tmp_path, helm):
    monitors = f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/servicemonitors"
    with PlayedPlugin(server, NAMESPACE):
        exporter = {"nvidia_device_plugin_dcgm_exporter_chart": str(Path(__file__).parent / "exporter_chart")}
        exporter["nvidia_device_plugin_dcgm_exporter_image"] = "r.example.org/dcgm-exporter:1"
        exporter["nvidia_device_plugin_image_pull_secrets"] = ["registry"]
        role = Role(server, tmp_path, helm, nvidia_device_plugin_dcgm_exporter=True, **exporter)
        assert role.step("cluster") > 0 and role.step("cluster") == 0
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/dcgm-exporter"
        template = server.request("GET", path)["spec"]["template"]
        assert template["spec"]["containers"][0]["image"] == "r.example.org/dcgm-exporter:1"
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert template["spec"]["containers"][0]["env"] == [{"name": "KUBERNETES_VIRTUAL_GPUS", "value": "true"}]
        names = {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"}
        schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
        version = {"name": "v1", "served": True, "storage": True, "schema": schema}
        spec = {"group": "monitoring.coreos.com", "names": names, "scope": "Namespaced", "versions": [version]}
        about = {"metadata": {"name": "servicemonitors.monitoring.coreos.com"}, "spec": spec}
        definition = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        server.apply({**definition, **about}, manager="theirs")
        until(lambda: server.ask("GET", monitors)[0] == 200)
        assert role.step("cluster", nvidia_device_plugin_dcgm_exporter_service_monitor="false") == 0
        assert role.step("cluster") > 0 and role.step("cluster") == 0
        [monitor] = server.request("GET", monitors)["items"]
        # Else the pods that have the cards had another label than the dashboard asks for.
        assert monitor["spec"]["endpoints"][0]["honorLabels"] is True
        assert role.step("cluster", nvidia_device_plugin_dcgm_exporter=False) > 0
        assert "dcgm-exporter" not in daemons(server)
        role.step("remove")


def test_a_dcgm_exporter_that_somebody_else_has_installed_stays(server, tmp_path, helm):
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    words = [f"--namespace={NAMESPACE}", "--set=serviceMonitor.enabled=false"]
    theirs = [helm, "install", "dcgm-exporter", Path(__file__).parent / "exporter_chart", *words]
    subprocess.run(theirs, env={**os.environ, "KUBECONFIG": str(server.kubeconfig)}, check=True, capture_output=True)
    with PlayedPlugin(server, NAMESPACE):
        role = Role(server, tmp_path, helm)
        role.step("cluster")
        assert role.step("cluster") == 0 and "dcgm-exporter" in daemons(server)
        role.step("remove")
        assert [*daemons(server)] == ["dcgm-exporter"]


def test_feature_discoverys_definitions_go_if_they_came_with_the_chart(server, tmp_path, helm):
    before = everything(server)
    with PlayedPlugin(server, NAMESPACE):
        role = Role(server, tmp_path, helm, nvidia_device_plugin_gfd=True)
        role.step("cluster")
        assert role.step("cluster") == 0
        assert any("nfd" in name for kind, _namespace, name in everything(server) if kind == "CustomResourceDefinition")
        role.step("remove")
        until(lambda: everything(server) == before)
        # Somebody else's stay.
        for file in sorted((Path(__file__).parent / "chart/charts/node-feature-discovery/crds").glob("*.yaml")):
            server.apply(yaml.safe_load(file.read_text()), manager="theirs")
        theirs = everything(server)
        role.step("cluster")
        role.step("remove")
        until(lambda: everything(server) == theirs)


def test_a_helm_that_was_killed_is_completed(server, tmp_path, helm):
    before = everything(server)
    with PlayedPlugin(server, NAMESPACE) as played:
        role = Role(server, tmp_path, helm)
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        # The second one is by the role, before helm.
        labels = {"nvidia.com/gpu.present": "true", "node-restriction.kubernetes.io/kubegpu-share": "nvidia"}
        label = {"metadata": {"labels": labels}}
        # Of one pod helm waits for none, since one may be unavailable.
        for name in ("gpu1", "gpu2"):
            server.request("PATCH", f"/api/v1/nodes/{name}", label, MERGE)
        theirs = everything(server)
        played.asleep = True
        _kill_in_the_middle(helm, role, server)
        assert statuses(server) == ["pending-install"]
        played.asleep = False
        role.step("cluster")
        assert statuses(server) == ["deployed"] and role.step("cluster") == 0
        # The same with an upgrade.
        played.asleep = True
        _kill_in_the_middle(helm, role, server, "--set=image.tag=other")
        assert statuses(server) == ["deployed", "pending-upgrade"]
        played.asleep = False
        role.step("cluster")
        assert "pending-upgrade" not in statuses(server)
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{RELEASE}"
        images = [
            container["image"] for container in server.request("GET", path)["spec"]["template"]["spec"]["containers"]
        ]
        assert not [image for image in images if image.endswith(":other")]
        role.step("remove")
        # The namespace was there before.
        until(lambda: set(everything(server)) == set(theirs))
    assert set(theirs) - set(before) == {("Namespace", "", NAMESPACE)}


def _kill_in_the_middle(helm, role, server, *words):
    values = role.folder / "values.yml"
    values.write_text(yaml.safe_dump(planned()["values"]))
    count, placed = len(statuses(server)), [f"--namespace={NAMESPACE}"]
    process = subprocess.Popen(
        [helm, "upgrade", "--install", RELEASE, CHART, *placed, f"--values={values}", *words, "--wait"],
        env={**os.environ, "KUBECONFIG": str(server.kubeconfig)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: len(statuses(server)) > count and len(daemons(server)) > 1, 60)
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.wait()


def statuses(server):
    secrets = server.request("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets?labelSelector=owner=helm")["items"]
    return sorted(secret["metadata"]["labels"]["status"] for secret in secrets)


def test_the_runtime_class_is_the_roles_only_where_nobody_has_it(server, tmp_path, helm):
    before = everything(server)
    facts = {"gpu1": {"gpu_node": containerd(CDI)}}
    with PlayedPlugin(server, NAMESPACE):
        role = Role(server, tmp_path, helm, nvidia_device_plugin_nodes=["gpu1"])
        play = [
            {
                "hosts": "gpu_nodes",
                "gather_facts": False,
                "tasks": [{"ansible.builtin.set_fact": facts["gpu1"]}],
            },
            {
                "hosts": "localhost",
                "gather_facts": False,
                "roles": [
                    {"role": "kubegpu.share.nvidia_device_plugin", "nvidia_device_plugin_step": step}
                    for step in ("cluster", "nodes")
                ],
            },
        ]
        done = run_playbook(role.folder, play, groups={"gpu_nodes": ["gpu1"]}, **role.variables)
        assert done.rc == 0, done.text
        assert node(server, "gpu1")["metadata"]["labels"]["nvidia.com/device-plugin.config"] == "exclusive-cdi-cri"
        assert ("RuntimeClass", "", "nvidia") in everything(server)
        [pod] = [
            item
            for item in server.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
            if "mps" not in item["metadata"]["name"]
        ]
        assert pod["spec"]["runtimeClassName"] == "nvidia"
        role.step("remove")
        until(lambda: everything(server) == before)


@pytest.fixture
def operator(server):
    """The GPU Operator's ClusterPolicy, by its real definition, and the DaemonSet of its plugin on two nodes."""
    server.install(definitions() / "clusterpolicies.nvidia.com.yaml")
    namespace = PlayedGpuOperator.NAMESPACE
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    parts = (
        "operator",
        "daemonsets",
        "driver",
        "toolkit",
        "devicePlugin",
        "dcgm",
        "dcgmExporter",
        "nodeStatusExporter",
    )
    spec = {**{part: {} for part in (*parts, "gfd")}, "mig": {"strategy": "single"}}
    policy = {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "cluster-policy"},
        "spec": spec,
    }
    server.apply(policy, manager="theirs")
    path = "/apis/nvidia.com/v1/clusterpolicies/cluster-policy/status"
    server.request("PATCH", path, {"status": {"state": "ready", "namespace": namespace}}, MERGE)
    for name in ("gpu1", "gpu2"):
        labels = {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.device-plugin": "true"}
        server.request("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}}, MERGE)
    labels = {"app": "nvidia-device-plugin-daemonset"}
    pod = {
        "nodeSelector": {"nvidia.com/gpu.deploy.device-plugin": "true"},
        "containers": [{"name": "nvidia-device-plugin", "image": "example.org/plugin:1"}],
    }
    daemonset = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    server.request(
        "POST",
        f"/apis/apps/v1/namespaces/{namespace}/daemonsets",
        {"metadata": {"name": "nvidia-device-plugin-daemonset"}, "spec": daemonset},
    )
    return server


def test_what_the_gpu_operator_hasnt_done_is_named(operator, tmp_path):
    with PlayedGpuOperator(operator, mig={"1g.10gb": 7}) as played:
        role = Role(
            operator,
            tmp_path,
            "",
            nvidia_device_plugin_configurations=DIVIDED,
            nvidia_device_plugin_mig_layouts=SEVEN,
        )

        def message(step):
            done = role.run(step, nvidia_device_plugin_wait_timeout=5)
            assert done.rc != 0
            return " ".join(done.text.split())

        played.asleep = True
        text = message("cluster")
        assert "within 5 seconds. DaemonSet nvidia-gpu-operator/nvidia-device-plugin-daemonset: of 2 pods " in text
        played.asleep = played.applies = False
        role.step("cluster")
        assert "MIG manager hasn't applied the MIG layout of gpu1, gpu2 within 5 seconds" in message("nodes")
        played.applies = True
        role.step("nodes")
        played.asleep = True
        pod = operator.request("GET", f"/api/v1/namespaces/{played.NAMESPACE}/pods")["items"][0]["metadata"]["name"]
        text = message("remove_nodes")
        assert (
            "pods of namespace nvidia-gpu-operator are still on nodes that the plugin leaves: " in text and pod in text
        )


def test_resources_that_another_plugin_announced_are_no_proof_of_the_operators(operator, tmp_path):
    """Its plugin matches no node, and what the nodes announced before is still there."""
    with PlayedGpuOperator(operator) as played:
        role = Role(operator, tmp_path, "")
        role.step("cluster")
        role.step("nodes")
        done = role.run("nodes", nvidia_device_plugin_nodes=[])
        assert done.rc != 0 and "nvidia_device_plugin_nodes: no node is named" in done.text, done.text
        played.asleep = True
        path = f"/apis/apps/v1/namespaces/{played.NAMESPACE}/daemonsets/nvidia-device-plugin-daemonset"
        selector = {"nvidia.com/gpu.deploy.device-plugin": None, "example.org/cards": "none"}
        operator.request("PATCH", path, {"spec": {"template": {"spec": {"nodeSelector": selector}}}}, MERGE)
        until(lambda: operator.request("GET", path)["status"]["desiredNumberScheduled"] == 0)
        assert allocatable(operator, "gpu1")
        done = role.run("nodes", nvidia_device_plugin_wait_timeout=5)
        assert done.rc != 0 and "no node matches its selectors" in " ".join(done.text.split()), done.text


def policy_of(server):
    return server.request("GET", "/apis/nvidia.com/v1/clusterpolicies/cluster-policy")["spec"]


def test_the_gpu_operator_gets_the_configurations_and_its_own_back(operator, tmp_path):
    before = policy_of(operator)
    # The operator reports no state of a ClusterPolicy that it doesn't use.
    second = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "a-second"}, "spec": before}
    operator.apply(second, manager="theirs")
    divided = {**SHARED, **DIVIDED}
    with PlayedGpuOperator(operator, mig={"1g.10gb": 7}):
        role = Role(
            operator,
            tmp_path,
            "",
            nvidia_device_plugin_configurations=divided,
            nvidia_device_plugin_mig_layouts=SEVEN,
            nvidia_device_plugin_node_configurations={"gpu1": "quarters", "gpu2": "divided"},
        )
        role.step("cluster")
        assert role.step("cluster") == 0
        configured = policy_of(operator)
        assert configured["mig"]["strategy"] == "mixed"
        assert configured["migManager"]["config"]["name"].startswith("kubegpu-mig-parted-")
        role.step("nodes")
        assert allocatable(operator, "gpu1") == {"nvidia.com/gpu.shared": "8"}
        assert allocatable(operator, "gpu2") == {"nvidia.com/mig-1g.10gb": "7"}
        assert node(operator, "gpu2")["metadata"]["labels"]["nvidia.com/mig.config.state"] == "success"
        assert role.step("nodes") == 0
        # Other configurations are another ConfigMap, by which the operator notices them.
        role.step("cluster", nvidia_device_plugin_configurations={**divided, "more": {}})
        name = policy_of(operator)["devicePlugin"]["config"]["name"]
        assert name != configured["devicePlugin"]["config"]["name"]
        role.step("remove_nodes", nvidia_device_plugin_nodes=["gpu1"])
        assert allocatable(operator, "gpu1") == {}
        labels = node(operator, "gpu1")["metadata"]["labels"]
        assert labels["nvidia.com/gpu.deploy.device-plugin"] == "false"
        # Without its files no other pod of the operator starts after a reboot.
        assert labels["nvidia.com/gpu.deploy.operator-validator"] == "true"
        assert policy_of(operator) != before
        restored(role, before)


def restored(role, before):
    """Remove everything, and validate that the operator is as it was."""
    role.step("remove")
    assert policy_of(role.server) == before
    assert not {name[2] for name in everything(role.server) if name[0] == "ConfigMap" and "kubegpu" in name[2]}
    until(lambda: allocatable_without_config(role.server))
    policy = role.server.request("GET", "/apis/nvidia.com/v1/clusterpolicies/cluster-policy")["metadata"]
    assert not [name for name in policy.get("annotations") or {} if name.startswith("kubegpu.share/")]


def test_nodes_of_the_operators_gpucluster_are_refused_and_those_of_its_policy_are_not(operator, tmp_path):
    """Its definition has no schema here; the kind, group, version and scope are NVIDIA's."""
    names = {"kind": "GPUCluster", "listKind": "GPUClusterList", "plural": "gpuclusters", "singular": "gpucluster"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    operator.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "gpuclusters.nvidia.com"},
            "spec": {"group": "nvidia.com", "names": names, "scope": "Cluster", "versions": [version]},
        }
    )
    clusters = "/apis/nvidia.com/v1alpha1/gpuclusters"
    until(lambda: operator.ask("GET", clusters)[0] == 200)
    one = {"apiVersion": "nvidia.com/v1alpha1", "kind": "GPUCluster", "metadata": {"name": "gpu-cluster"}}
    until(lambda: operator.ask("POST", clusters, {**one, "spec": {"draDriver": {}}})[0] == 201)

    def refused():
        done = Role(operator, tmp_path, "").run("cluster")
        text = " ".join(done.text.split())
        return done.rc != 0 and "GPUCluster gpu-cluster lets the GPU Operator allocate the cards of" in text, text

    with PlayedGpuOperator(operator):
        # The nodes are the ClusterPolicy's, as they were.
        assert not refused()[0]
        mode = {"nvidia.com/gpu-operator.resource-allocation.mode": "dra"}
        operator.request("PATCH", "/api/v1/nodes/gpu2", {"metadata": {"labels": mode}}, MERGE)
        done, text = refused()
        assert done and "the cards of gpu2 by claims" in text and "mode=device-plugin" in text
    operator.request("DELETE", "/apis/nvidia.com/v1/clusterpolicies/cluster-policy")
    done, text = refused()
    assert done and "the cards of gpu1, gpu2 by claims" in text and "create a ClusterPolicy" in text


def allocatable_without_config(server):
    return node(server, "gpu1")["metadata"]["labels"].get("nvidia.com/gpu.deploy.device-plugin") == "true"


def test_configurations_of_others_are_not_replaced(operator, tmp_path):
    theirs = {"spec": {"devicePlugin": {"config": {"name": "theirs", "default": "any"}}}}
    operator.request("PATCH", "/apis/nvidia.com/v1/clusterpolicies/cluster-policy", theirs, MERGE)
    done = Role(operator, tmp_path, "").run("cluster")
    assert done.rc != 0 and "from ConfigMap theirs" in done.text
    assert policy_of(operator)["devicePlugin"]["config"]["name"] == "theirs"


def test_check_mode_and_a_named_problem_change_nothing(server, tmp_path, helm):
    before = everything(server)
    role = Role(server, tmp_path, helm, nvidia_device_plugin_gfd=True)
    for step in ("cluster", "nodes", "remove_nodes", "remove"):
        changed = role.step(step, "--check")
        # The label that no kubelet may set is part of both, since neither has really run.
        assert changed == {"cluster": 3, "nodes": 2}.get(step, 0), step
    done = role.run("cluster", nvidia_device_plugin_configurations={"c": {"sharing": "mps", "replicas": 1}})
    assert done.rc != 0 and "nvidia_device_plugin_configurations.c.replicas: a shared card has 2 or more" in done.text
    assert everything(server) == before


VARIANTS = {
    "exclusive": planned(),
    "shared": planned(SHARED),
    "mps": planned({"m": {"sharing": "mps", "replicas": 4}}, gfd=True),
    "mig": planned({"m": {"mig_strategy": "mixed", "mig_layout": "unequal"}}, mig_layouts=LAYOUTS),
    "cdi": planned(facts={"gpu1": containerd(CDI)}),
    "users": planned(values={"tolerations": [], "mps": {"root": "/var/mps"}}, image="example.org/plugin:v1"),
}


def test_the_api_server_accepts_what_every_variant_renders(server, tmp_path, helm):
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for name, variant in VARIANTS.items():
        assert variant["problems"] == [], name
        values = tmp_path / f"{name}.yml"
        values.write_text(yaml.safe_dump(variant["values"]))
        done = subprocess.run(
            [helm, "template", RELEASE, CHART, f"--namespace={NAMESPACE}", f"--values={values}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        try:
            server.apply(*(document for document in yaml.safe_load_all(done.stdout) if document), dry_run=True)
        except Refused as error:
            pytest.fail(f"{name}: {error}")
