# SPDX-License-Identifier: GPL-3.0-or-later
"""The module gpu_operator with NVIDIA's real controller, where KUBEGPU_GPU_OPERATOR names its checkout.

The controller reads its manifests in /opt/gpu-operator, where its image has a copy of the checkout's ``assets``, and
of ``manifests`` in a folder of that name.

With KUBEGPU_GPU_OPERATOR_RECORD=<file> what the controller did is written to that file; recorded/gpu_operator_26_7.yml
was made so.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import operator_labels
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import gpu_operator as subject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import operator_plan, operator_setup
from real_apiserver import MERGE, ApiServer, own_api_server
from real_operators import PRESENT as PRESENT_BY_PCI
from real_operators import Nodes, anything, checkout, controller_manager, running
from simulation import module_of
from test_operator_plan import found, options

SPACE = "operator-of-nvidia"
POLICIES = "/apis/nvidia.com/v1/clusterpolicies"
POLICY = f"{POLICIES}/of-the-cluster"
VALIDATOR = "nvidia-operator-validator"
MONITORING = "monitoring.coreos.com"
DEPLOY = "nvidia.com/gpu.deploy."
CRIO, CONTAINERD = "cri-o://1.36.3", "containerd://2.2.9"
# The longest wait for the controller, in seconds.
MOST = float(os.environ.get("KUBEGPU_GPU_OPERATOR_SECONDS") or 120)


def component(**more: t.Any) -> dict[str, t.Any]:
    return {"repository": "registry.example", "image": "i", "version": "1", **more}


SPEC: dict[str, t.Any] = {
    "operator": {},
    "daemonsets": {},
    "driver": {"enabled": False},
    "toolkit": component(),
    "devicePlugin": component(enabled=True),
    "dcgm": {"enabled": False},
    "dcgmExporter": component(),
    "gfd": component(),
    "migManager": {"enabled": False},
    "nodeStatusExporter": {"enabled": False},
    "validator": component(),
}


SECOND = {"apiVersion": subject.API, "kind": subject.KIND, "metadata": {"name": "a-second"}, "spec": SPEC}
UNCHECKED = {"env": [{"name": name, "value": value} for name, value in subject.NO_PLUGIN_CHECK.items()]}


class Cluster:
    """Two nodes with cards, a ClusterPolicy and the controller."""

    def __init__(self, server: ApiServer, nodes: Nodes, ended: t.Callable[[], bool]) -> None:
        self.server, self.nodes, self.ended = server, nodes, ended
        self.kube = RealKube.of_module(module_of(server, subject.ARGUMENTS))

    def policy(self, spec: dict[str, t.Any]) -> None:
        self.server.request("PATCH", POLICY, {"spec": spec}, MERGE)

    def label(self, name: str, **labels: str | None) -> None:
        """Set deploy labels of a node, by their last parts."""
        change = {f"{DEPLOY}{key.replace('_', '-')}": value for key, value in labels.items()}
        self.server.request("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": change}}, MERGE)

    def pause(self, value: str) -> None:
        """Label the validators of both nodes."""
        for name in self.nodes.names:
            self.label(name, operator_validator=value)

    def labels(self, name: str) -> dict[str, str]:
        found = self.server.request("GET", f"/api/v1/nodes/{name}")["metadata"]["labels"]
        return {key.removeprefix(DEPLOY): value for key, value in found.items() if key.startswith(DEPLOY)}

    def spec(self) -> dict[str, t.Any]:
        return dict(self.server.request("GET", POLICY)["spec"])

    def state(self) -> str:
        return str((self.server.request("GET", POLICY).get("status") or {}).get("state") or "")

    def daemon_sets(self) -> dict[str, dict[str, t.Any]]:
        found = self.server.request("GET", f"/apis/apps/v1/namespaces/{SPACE}/daemonsets")["items"]
        return {one["metadata"]["name"]: one for one in found}

    def waiting(self) -> list[str]:
        """The DaemonSets with pods that aren't available."""
        found = {name: daemon_set.get("status") or {} for name, daemon_set in self.daemon_sets().items()}
        return sorted(name for name, one in found.items() if one.get("numberUnavailable"))

    def settle(self, state: str = "ready", kept: float = 4.0, most: float = MOST) -> bool:
        """Wait until the policy has a state for some seconds, and no pod is missing if it is ready."""
        since, end = None, time.monotonic() + most
        while time.monotonic() < end and not self.ended():
            there = self.state() == state and not (state == "ready" and self.waiting())
            since = (since or time.monotonic()) if there else None
            if since and time.monotonic() - since >= kept:
                return True
            time.sleep(0.2)
        return False

    def run(self, *nodes: str, state: str = "present") -> dict[str, t.Any]:
        params = {"state": state, "nodes": list(nodes), "timeout": int(MOST)}
        return subject.work(self.kube, params, False, Waiting(MOST, 1.0))


@contextlib.contextmanager
def cluster(
    runtime: str, labels: dict[str, dict[str, str]] | None = None, whole: dict[str, t.Any] | None = None, **spec: t.Any
) -> t.Iterator[Cluster]:
    """A cluster with the controller, once its ClusterPolicy is ready.

    :param labels: of nodes, before the controller starts.
    :param whole: the ClusterPolicy's specification; by default ``SPEC`` with ``spec``.
    """
    folder = checkout("KUBEGPU_GPU_OPERATOR", "gpu-operator")
    with own_api_server() as server:
        server.install(*sorted((folder / "config/crd/bases").glob("*.yaml")))
        kinds = {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"}
        extra = server.folder / "extra.yaml"
        extra.write_text(yaml.safe_dump_all(anything(plural, kind, MONITORING) for plural, kind in kinds.items()))
        server.install(extra)
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
        live = {"apiVersion": subject.API, "kind": subject.KIND, "metadata": {"name": "of-the-cluster"}}
        server.request("POST", POLICIES, {**live, "spec": whole or {**SPEC, **spec}})
        flags = ("--metrics-bind-address=127.0.0.1:0", "--health-probe-bind-address=127.0.0.1:0")
        program = str(folder / "gpu-operator")
        with (
            controller_manager(server),
            Nodes(server, ("a", "b"), runtime) as nodes,
            contextlib.ExitStack() as stack,
        ):
            for name, own in (labels or {}).items():
                server.request("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": own}}, MERGE)
            # Its chart names images by these; with OLM the ClusterServiceVersion does.
            images = {"DRIVER_MANAGER_IMAGE": "i", "VALIDATOR_IMAGE": "i"} if whole else {}
            controller = stack.enter_context(
                running(server, program, *flags, cwd=folder, OPERATOR_NAMESPACE=SPACE, **images)
            )
            made = Cluster(server, nodes, controller.ended)
            assert made.settle(), controller.log.read_text(errors="replace")[-3000:]
            yield made


# --------------------------------------------------------------------------- what the controller does


class Recorder:
    """Makes one change, and notes what follows until nothing more does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.found = cluster, {}

    def _generations(self) -> dict[str, int]:
        return {name: daemon_set["metadata"]["generation"] for name, daemon_set in self.cluster.daemon_sets().items()}

    def change(
        self, name: str, make: t.Callable[[], t.Any], state: str = "ready", kept: float = 8.0
    ) -> dict[str, t.Any]:
        """Record the states until one is kept for some seconds, and which DaemonSets are changed, made and deleted."""
        live = self.cluster
        before, old = self._generations(), {each: live.labels(each) for each in live.nodes.names}
        make()
        start, states = time.monotonic(), [live.state()]
        since, end = start, start + MOST
        while time.monotonic() < min(end, since + kept) or states[-1] != state:
            now = live.state()
            if now != states[-1]:
                states.append(now)
            if now != state or (state == "ready" and live.waiting()):
                since = time.monotonic()
            assert time.monotonic() < end, (name, states, live.waiting())
            time.sleep(0.1)
        after, new = self._generations(), {each: live.labels(each) for each in live.nodes.names}
        note: dict[str, t.Any] = {"states": states, "waiting": live.waiting()}
        note["changed"] = sorted(each for each, number in after.items() if before.get(each, number) != number)
        note["made"], note["deleted"] = sorted(set(after) - set(before)), sorted(set(before) - set(after))
        note["labels"] = {
            each: {key: value for key, value in new[each].items() if old[each].get(key) != value} for each in new
        }
        note["labels"] = {key: value for key, value in note["labels"].items() if value}
        self.found[name] = {key: value for key, value in note.items() if value}
        print(name, self.found[name], flush=True)
        return note


def test_what_the_controller_does() -> None:
    """The facts that the stand-in in test_gpu_operator.py replays."""
    found: dict[str, t.Any] = {}
    for runtime in (CRIO, CONTAINERD):
        with cluster(runtime) as live:
            recorder = Recorder(live)
            first = live.labels("a")
            assert set(first.values()) == {"true"} and live.labels("b") == first
            mode = {name: daemon_set["spec"]["template"]["spec"] for name, daemon_set in live.daemon_sets().items()}
            start = {
                "deploy_labels": sorted(first),
                "runtime_class": sorted(name for name, spec in mode.items() if spec.get("runtimeClassName")),
                "daemon_sets": sorted(mode),
            }
            recorder.change("cdi off", lambda: live.policy({"cdi": {"enabled": False}}))
            recorder.change("cdi on", lambda: live.policy({"cdi": {"enabled": True}}))
            recorder.change("validators paused", lambda: live.pause("false"))
            note = recorder.change(
                "cdi off, validators paused", lambda: live.policy({"cdi": {"enabled": False}}), "notReady", 20
            )
            # The toolkit's pods are there, and the others wait for the validators.
            assert note["waiting"] and subject.TOOLKIT not in note["waiting"]
            recorder.change("validators resumed", lambda: live.pause("true"))
            recorder.change("a validator's label removed", lambda: live.label("a", operator_validator=None), kept=12)
            assert "operator-validator" not in live.labels("a")
            recorder.change("plugin not checked", lambda: live.policy({"validator": {"plugin": UNCHECKED}}), kept=12)
            recorder.change("device plugin kept from a node", lambda: live.label("a", device_plugin="false"))
            assert live.labels("a")["device-plugin"] == "false"
            recorder.change("device plugin off", lambda: live.policy({"devicePlugin": {"enabled": False}}))
            recorder.change("a node stops", lambda: live.nodes.stop("a"), "notReady", 2)
            recorder.change("the node starts", lambda: live.nodes.start("a"))
            recorder.change("a validator of none", lambda: live.label("a", operator_validator="false"))
            recorder.change("its node stops", lambda: live.nodes.stop("a"), "notReady", 2)
            note = recorder.change("and starts", lambda: live.nodes.start("a"), "notReady", 15)
            assert note["waiting"]
            recorder.change("with its validator", lambda: live.label("a", operator_validator="true"))
            none = lambda: [live.label(name, container_toolkit="false") for name in ("a", "b")]  # noqa: E731
            recorder.change("no toolkit on any node", none)
            assert live.daemon_sets()[subject.TOOLKIT]["status"]["desiredNumberScheduled"] == 0
            live.label("a", device_plugin="paused-for-driver-upgrade")
            recorder.change("another spec", lambda: live.policy({"cdi": {"enabled": True}}))
            assert live.labels("a")["device-plugin"] == "paused-for-driver-upgrade"
            recorder.change("a second policy", lambda: live.server.request("POST", POLICIES, SECOND))
            status = live.server.request("GET", f"{POLICIES}/a-second").get("status") or {}
            found[runtime.partition(":")[0]] = {**start, "second_policy": status, "changes": recorder.found}
    target = os.environ.get("KUBEGPU_GPU_OPERATOR_RECORD")
    if target:
        head = {
            "component": "NVIDIA GPU Operator, the controller alone",
            "version": os.environ.get("KUBEGPU_GPU_OPERATOR_VERSION", ""),
            "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "by": "tests/unit/openshift/test_real_gpu_operator.py",
            "beside": "real kube-apiserver and DaemonSet controller of 1.36.3; kubelet played by real_operators.py",
        }
        Path(target).write_text("---\n" + yaml.safe_dump({**head, **found}, sort_keys=False, width=110))


# --------------------------------------------------------------------------- the module with it


@pytest.mark.parametrize("runtime", [CRIO, CONTAINERD])
def test_mixed_cluster_stays_ready_after_reboots(runtime: str) -> None:
    with cluster(runtime) as live:
        before = live.spec()
        assert live.run("a")["changed"] and live.settle()
        assert not live.run("a")["changed"]
        plugins = live.daemon_sets()["nvidia-device-plugin-daemonset"]["status"]
        assert plugins["desiredNumberScheduled"] == 1
        labels = live.labels("a"), live.labels("b")
        for name in ("a", "b"):
            reboot(live, name)
        # Also where the pods are replaced.
        live.server.request("DELETE", f"/api/v1/namespaces/{SPACE}/pods")
        assert live.settle()
        assert (live.labels("a"), live.labels("b")) == labels and not live.run("a")["changed"]
        assert live.run("a", "b")["changed"] and live.settle()
        live.run(state="absent")
        assert live.settle() and live.spec() == before


def reboot(live: Cluster, name: str) -> None:
    live.nodes.stop(name)
    assert live.settle("notReady", kept=0.5)
    live.nodes.start(name)
    assert live.settle(kept=8.0), live.waiting()


def test_node_for_virtual_machines() -> None:
    """The operator runs no device plugin for containers there, and labels it otherwise."""
    off = {"enabled": False}
    sandbox = {"sandboxWorkloads": {"enabled": True}, "vfioManager": component(), "sandboxDevicePlugin": component()}
    sandbox |= {"vgpuManager": off, "vgpuDeviceManager": off, "ccManager": off, "kataSandboxDevicePlugin": off}
    with cluster(CRIO, **sandbox) as live:
        change = {"metadata": {"labels": {operator_labels.WORKLOAD: "vm-passthrough"}}}
        live.server.request("PATCH", "/api/v1/nodes/b", change, MERGE)
        end = time.monotonic() + MOST
        while "device-plugin" in live.labels("b"):
            assert time.monotonic() < end
            time.sleep(0.2)
        assert live.settle()
        before, labels = live.spec(), live.labels("b")
        assert "operator-validator" not in labels and "vfio-manager" in labels
        assert live.run("a")["changed"] and live.settle()
        # All nodes with containers are gpushare's.
        assert live.spec()["devicePlugin"]["enabled"] is False and live.labels("b") == labels
        live.run(state="absent")
        assert live.settle() and live.spec() == before and live.labels("b") == labels


def test_node_that_its_user_takes_from_the_operator() -> None:
    with cluster(CONTAINERD) as live:
        before = live.spec()
        assert live.run("a")["changed"] and live.settle()
        live.server.request("PATCH", "/api/v1/nodes/a", {"metadata": {"labels": {subject.OPERANDS: "false"}}}, MERGE)
        end = time.monotonic() + MOST
        while set(live.labels("a")) != {"operands"}:
            assert time.monotonic() < end, live.labels("a")
            time.sleep(0.2)
        assert live.settle()
        assert live.run("a")["changed"] and live.settle()
        assert live.spec() == before and set(live.labels("a")) == {"operands"}
        assert not live.run("a")["changed"]


# --------------------------------------------------------------------------- the ClusterPolicy of role gpu_operator


def rendered(helm: str, values: dict[str, t.Any], folder: Path) -> dict[str, t.Any]:
    """The specification of the ClusterPolicy that NVIDIA's chart makes of the role's values."""
    chart = checkout("KUBEGPU_GPU_OPERATOR", "gpu-operator") / "deployments/gpu-operator"
    given = folder / "values.yml"
    given.write_text(yaml.safe_dump(values))
    shown = ("--show-only", "templates/clusterpolicy.yaml", "--values", str(given))
    command = [helm, "template", "gpu-operator", str(chart), "--namespace", SPACE, *shown]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(yaml.safe_load(text)["spec"])


@pytest.mark.long
@pytest.mark.parametrize("plugin", [[], ["b"]], ids=["all", "mixed"])
@pytest.mark.parametrize("runtime", [CRIO, CONTAINERD])
def test_policy_of_the_role_is_ready_after_replaced_pods_and_reboots(
    runtime: str, plugin: list[str], helm: str, tmp_path: Path
) -> None:
    shared = [name for name in ("a", "b") if name not in plugin]
    planned = operator_plan.plan(options(shared=shared, plugin=plugin), found())
    with cluster(runtime, planned["labels"], rendered(helm, planned["values"], tmp_path)) as live:
        before, sets = live.spec(), live.daemon_sets()
        assert before["cdi"]["enabled"] is False and before["driver"]["enabled"] is True
        assert {"nvidia-driver-daemonset", subject.TOOLKIT, VALIDATOR} <= set(sets)
        own = sets.get("nvidia-device-plugin-daemonset", {"status": {"desiredNumberScheduled": 0}})
        assert own["status"]["desiredNumberScheduled"] == len(plugin)
        assert operator_setup.not_ready(live.kube, ["a", "b"]) == ""
        # Nothing is left to do for the module.
        assert not live.run(*shared)["changed"]
        labels = live.labels("a"), live.labels("b")
        for name in ("a", "b"):
            reboot(live, name)
        live.server.request("DELETE", f"/api/v1/namespaces/{SPACE}/pods")
        assert live.settle()
        assert (live.labels("a"), live.labels("b")) == labels and live.spec() == before
        assert operator_setup.not_ready(live.kube, ["a", "b"]) == "" and not live.run(*shared)["changed"]
        for node in live.server.request("GET", "/api/v1/nodes")["items"]:
            left = operator_setup.left_on(node)["labels"]
            assert {subject.PRESENT, f"{DEPLOY}driver"} <= set(left) and operator_plan.NODE_LABEL not in left


def test_ready_says_nothing_of_nodes_that_no_discovery_has_labelled() -> None:
    """The controller is ready without any node, for which the role therefore looks at the nodes."""
    with cluster(CONTAINERD) as live:
        gone = {"metadata": {"labels": dict.fromkeys((PRESENT_BY_PCI, subject.PRESENT))}}
        for name in ("a", "b"):
            live.server.request("PATCH", f"/api/v1/nodes/{name}", gone, MERGE)
        live.policy({"driver": {"env": [{"name": "ANOTHER", "value": "spec"}]}})
        assert live.settle(kept=8.0)
        assert "found no card on a, b" in operator_setup.not_ready(live.kube, ["a", "b"])
