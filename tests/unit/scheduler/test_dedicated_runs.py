# SPDX-License-Identifier: GPL-3.0-or-later
"""The dedicated scheduler at work: real kube-schedulers and extenders against a real API server, with their rights.

The containers of two pods run as processes. Each has the service account's token and the ConfigMap's text with its own
kubeconfig and extender port.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from dedicated_kit import NAME, NAMESPACE, apply, containers_of, one, rendered
from own_cluster import ROOT, until
from ports import free_port
from real_apiserver import MERGE, own_api_server

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NAME}"
NODE = "gpu1"


class Replica:
    """The processes of one pod of the Deployment."""

    def __init__(self, server, kubeconfig, folder):
        folder.mkdir()
        self.folder, self.extender_port, self.port = folder, free_port(), free_port()
        self.scheduler_spec, self.extender_spec = containers_of()
        config = yaml.safe_load(one(rendered("workload"), "ConfigMap")["data"]["config.yaml"])
        config["clientConnection"] = {"kubeconfig": str(kubeconfig)}
        # So that a killed leader isn't waited for as long as in a cluster.
        config["leaderElection"] |= {"leaseDuration": "4s", "renewDeadline": "3s", "retryPeriod": "500ms"}
        text = yaml.safe_dump(config).replace(":12345/", f":{self.extender_port}/")
        (folder / "config.yaml").write_text(text)
        command = self._own(self.extender_spec["command"])
        assert command[0] == "gpushare-extender"
        self.extender = self._start(
            "extender",
            [
                *(sys.executable, "-m", "gpushare.extender.command", *command[1:]),
                *(f"--api-server={server.url}", f"--service-account={kubeconfig.parent}"),
            ],
        )
        program, *arguments = self.scheduler_spec["command"]
        self.scheduler = self._start(
            "scheduler",
            [
                server.programs[program],
                *(word.replace("/etc/kubernetes/gpushare-scheduler", str(folder)) for word in arguments),
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
            ],
        )

    def _start(self, name, command):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "images" / "gpushare" / "src")}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, env=environment)

    def _own(self, words):
        """A command of the pod with a port and a socket of this replica."""
        socket_of_pod = ("/tmp/status.sock", str(self.folder / "status.sock"))
        return [word.replace("12345", str(self.extender_port)).replace(*socket_of_pod) for word in words]

    def probe(self, name):
        """Whether the extender's probe, run in its container as kubelet does, succeeds."""
        command = self.extender_spec[name]["exec"]["command"]
        return (
            subprocess.run(
                [sys.executable, *self._own(command)[1:]], capture_output=True, timeout=5, check=False
            ).returncode
            == 0
        )

    def health(self, name):
        path = self.scheduler_spec[name]["httpGet"]["path"]
        asked = ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", f"https://127.0.0.1:{self.port}{path}"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout == "200"

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def end(self):
        for process in (self.scheduler, self.extender):
            if process.poll() is None:
                process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def server():
    with own_api_server() as started:
        apply(started, rendered())
        gpu_node(started)
        yield started


@pytest.fixture(scope="module")
def kubeconfig(server, tmp_path_factory):
    """A kubeconfig with the rights of the pod's service account."""
    folder = server.token(tmp_path_factory.mktemp("account"), NAMESPACE, NAME)
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": (folder / "token").read_text()}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def replicas(server, kubeconfig, tmp_path_factory):
    """Two pods, the first of which leads."""
    folder, running = tmp_path_factory.mktemp("pods"), []
    try:
        running.append(Replica(server, kubeconfig, folder / "first"))
        first = until(lambda: holder(server), 60)
        running.append(Replica(server, kubeconfig, folder / "second"))
        until(lambda: all(each.health("readinessProbe") and each.probe("readinessProbe") for each in running), 60)
        assert holder(server) == first
        yield running
    finally:
        for each in running:
            each.end()


def gpu_node(server):
    labels = {"kubernetes.io/hostname": NODE, contract.NODE_LABEL: contract.NODE_LABEL_VALUE}
    cards = [contract.Card(n, f"GPU-0000000{n}-0000-0000-0000-000000000000", n, 16384, 16) for n in range(2)]
    annotations = {contract.NODE_CARDS: contract.cards_to_annotation(cards)}
    metadata = {"name": NODE, "labels": labels, "annotations": annotations}
    server.request("POST", "/api/v1/nodes", {"metadata": metadata})
    amounts = {
        "cpu": "8",
        "memory": "32Gi",
        "pods": "110",
        contract.RESOURCE_MEMORY: "32",
        contract.RESOURCE_COUNT: "2",
    }
    ready = {"type": "Ready", "status": "True", "reason": "t", "message": "t"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    server.request("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, MERGE)
    # Every new node is taken for one that isn't ready yet.
    server.request("PATCH", f"/api/v1/nodes/{NODE}", {"spec": {"taints": None}}, MERGE)


def holder(server):
    status, text = server.ask("GET", LEASE)
    return yaml.safe_load(text)["spec"].get("holderIdentity") if status == 200 else None


def make(server, name, units, scheduler=NAME):
    resources = {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}
    spec = {"schedulerName": scheduler, "containers": [{"name": "c", "image": "i", "resources": resources}]}
    server.request("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": name}, "spec": spec})


def bound(server, name):
    pod = server.request("GET", f"/api/v1/namespaces/default/pods/{name}")
    return pod if pod["spec"].get("nodeName") else None


@pytest.fixture(scope="module")
def shared(server, replicas):
    """A pod that the first leader's extender gave a card."""
    make(server, "shared", 10)
    return until(lambda: bound(server, "shared"), 30)


def test_pod_gets_a_card_from_the_leaders_extender(shared, replicas):
    assert shared["spec"]["nodeName"] == NODE
    assert shared["metadata"]["annotations"][contract.POD_INDEX] in ("0", "1")
    assert shared["metadata"]["annotations"][contract.POD_UNITS] == "10"
    assert "bound" in replicas[0].log("extender")
    assert "bound" not in replicas[1].log("extender")


def test_pod_too_large_for_any_card_waits(server, replicas):
    make(server, "too-large", 17)

    def failed_events():
        events = server.request("GET", "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name=too-large")
        return [each for each in events["items"] if each["reason"] == "FailedScheduling"]

    event = until(failed_events, 30)[0]
    assert (event.get("reportingComponent") or event["source"]["component"]) == NAME
    assert not bound(server, "too-large")
    server.request("DELETE", "/api/v1/namespaces/default/pods/too-large?gracePeriodSeconds=0")


def test_pods_without_memory_and_of_other_schedulers(server, replicas):
    make(server, "plain", 0)
    make(server, "theirs", 0, scheduler="default-scheduler")
    assert contract.POD_INDEX not in (until(lambda: bound(server, "plain"), 30)["metadata"].get("annotations") or {})
    assert not bound(server, "theirs")


def test_probe_fails_for_a_hanging_extender(replicas):
    assert replicas[1].probe("livenessProbe")
    replicas[1].extender.send_signal(signal.SIGSTOP)
    try:
        assert not replicas[1].probe("livenessProbe")
    finally:
        replicas[1].extender.send_signal(signal.SIGCONT)
    until(lambda: replicas[1].probe("readinessProbe"), 10)


@pytest.mark.long
def test_second_replica_takes_over_from_a_killed_leader(server, replicas, shared):
    first, second = replicas
    before = holder(server)
    first.scheduler.kill()
    first.extender.kill()
    assert not first.probe("livenessProbe")
    make(server, "after", 10)
    pod = until(lambda: bound(server, "after"), 30)
    assert holder(server) not in (None, "", before)
    # The second one's extender has the allocations of the first one.
    assert {each["metadata"]["annotations"][contract.POD_INDEX] for each in (pod, shared)} == {"0", "1"}
    assert "bound" in second.log("extender")


@pytest.mark.long
def test_terminated_leader_releases_its_lease(server, replicas, kubeconfig, tmp_path):
    third = Replica(server, kubeconfig, tmp_path / "third")
    try:
        until(lambda: third.health("readinessProbe") and third.probe("readinessProbe"), 60)
        before = holder(server)
        replicas[1].scheduler.terminate()
        assert replicas[1].scheduler.wait(15) is not None
        until(lambda: holder(server) not in (None, "", before), 10)
    finally:
        third.end()


def test_no_request_was_forbidden(replicas):
    for replica in replicas:
        for name in ("scheduler", "extender"):
            denied = re.findall(r"(?im)^.*\b(?:forbidden|unauthorized)\b.*$", replica.log(name))
            assert not denied, denied[:3]
