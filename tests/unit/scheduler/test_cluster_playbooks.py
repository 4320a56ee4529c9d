# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks on a real API server: uninstall's refusal, and namespaces of ours and of others.

Its controllers are real, too; no pods run, since no node belongs to the control plane.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dedicated_kit import until
from real_apiserver import MERGE, ApiServer, Missing

ROOT = Path(__file__).resolve().parents[3]
SPACES = "/api/v1/namespaces"
DAEMONS = "/apis/apps/v1/namespaces/{}/daemonsets/gpushare-extender"
CONTROLLERS = "daemonset-controller,garbage-collector-controller,namespace-controller"
ENFORCE = "pod-security.kubernetes.io/enforce"


class Cluster:
    def __init__(self):
        self.api, self._controllers = ApiServer(), None

    def __enter__(self):
        self.api.start()
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        flags = [f"--kubeconfig={self.api.kubeconfig}", f"--controllers={CONTROLLERS}"]
        flags += ["--leader-elect=false", "--secure-port=0", "--profiling=false"]
        with (self.api.folder / "controllers.log").open("wb") as log:
            self._controllers = subprocess.Popen(
                [*tied, self.api.programs["kube-controller-manager"], *flags], stdout=log, stderr=subprocess.STDOUT
            )
        self.api.request("POST", "/api/v1/nodes", {"metadata": {"name": "gpu1"}})
        amounts = {"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1"}
        status = {"status": {"capacity": amounts, "allocatable": amounts}}
        self.api.request("PATCH", "/api/v1/nodes/gpu1/status", status, MERGE)
        return self

    def __exit__(self, *_):
        if self._controllers:
            self._controllers.terminate()
            self._controllers.wait(20)
        self.api.remove()

    def there(self, path):
        return self.api.ask("GET", path)[0] == 200

    def play(self, folder, playbook, *words, hosts=(), **variables):
        """Run ansible-playbook with these hosts in gpu_nodes."""
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        given = {"gpu_kubeconfig": str(self.api.kubeconfig), **local, **variables}
        inventory = {"all": {"vars": given}, "gpu_nodes": {"hosts": {name: {} for name in hosts}}}
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
            "ANSIBLE_HOME": str(folder / "home"),
            "ANSIBLE_NOCOLOR": "1",
        }
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", str(playbook), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def role(self, folder, state, **variables):
        """The role gpushare alone, for the extender; return the number of changed tasks and the output."""
        role = {"role": "kubegpu.share.gpushare", "gpushare_component": "extender", "gpushare_state": state}
        play = {"hosts": "localhost", "gather_facts": False, "roles": [role]}
        (folder / "play.yml").write_text(yaml.safe_dump([play]))
        given = {"gpushare_image_delivery": "registry", "gpushare_wait_timeout": 30, **variables}
        rc, text = self.play(folder, "play.yml", **given)
        assert rc == 0, text
        return int(re.search(r"changed=(\d+)", text).group(1)), text


@pytest.fixture(scope="module")
def cluster():
    try:
        made = Cluster()
    except Missing as missing:
        pytest.skip(str(missing))
    with made:
        yield made


@pytest.fixture
def holder(cluster):
    """A pod that holds a share of the card of gpu1."""
    container = {"name": "c", "image": "i", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}
    space = cluster.api.namespace("holders")
    path = f"{SPACES}/{space}/pods"
    spec = {"nodeName": "gpu1", "containers": [container]}
    cluster.api.request("POST", path, {"metadata": {"name": "holder"}, "spec": spec})
    yield
    cluster.api.request("DELETE", f"{path}/holder?gracePeriodSeconds=0")


def test_uninstall_refuses_while_pods_hold_a_share(cluster, holder, tmp_path):
    playbook = ROOT / "playbooks" / "uninstall.yml"
    for words, hosts, variables in (
        # As on OpenShift and with managed nodes: no node is a machine of the inventory.
        ((), (), {"gpushare_nodes": ["gpu1"]}),
        ((), ("gpu1",), {}),
        # A machine alone.
        (("--limit", "gpu1"), ("gpu1", "gpu2"), {}),
        # The cluster's side alone; it takes from all nodes that are named.
        (("--limit", "localhost,gpu2"), ("gpu2",), {"gpushare_nodes": ["gpu1"]}),
    ):
        rc, text = cluster.play(tmp_path, playbook, *words, hosts=hosts, **variables)
        assert rc != 0, text
        assert "Pods use a share of a card on gpu1: delete them first" in " ".join(text.split()), text
        assert "changed=0" in text and not re.search(r"changed=[1-9]", text)


@pytest.mark.long
def test_preflight_validates_nodes_outside_the_inventory(cluster, tmp_path):
    """gpu_nodes and control_plane are empty, as on OpenShift."""
    playbook = ROOT / "playbooks" / "preflight.yml"
    given = {"gpushare_image_delivery": "registry", "scheduler_mode": "dedicated"}
    for names, words in (
        (["gpu1", "gpu7"], "gpushare_nodes: gpu7 isn't a node of the cluster, whose nodes are gpu1"),
        (["gpu1"], "gpushare_nodes: node gpu1 runs an unknown container runtime"),
        ([], "gpu_nodes: the group names no host, and gpushare_nodes no node"),
    ):
        rc, text = cluster.play(tmp_path, playbook, gpushare_nodes=names, **given)
        assert rc != 0 and words in " ".join(text.split()), text
    rc, text = cluster.play(tmp_path, playbook, gpushare_nodes=["gpu1"], preflight_ignore=["runtime"], **given)
    assert rc == 0 and "changed=0" in text, text


def test_uninstall_removes_our_namespace_and_restores_labels_of_others(cluster, tmp_path):
    assert cluster.role(tmp_path, "present")[0] == 1
    metadata = cluster.api.request("GET", f"{SPACES}/gpushare-system")["metadata"]
    assert metadata["annotations"]["kubegpu.share/created"] == "true"
    assert cluster.role(tmp_path, "present")[0] == 0
    assert cluster.role(tmp_path, "absent")[0] == 1
    until(lambda: not cluster.there(f"{SPACES}/gpushare-system"))

    labels = {"team": "a", ENFORCE: "baseline"}
    name = cluster.api.namespace("theirs", labels)
    before = cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{name}/rolebindings"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    cluster.api.request("POST", path, {"metadata": {"name": "theirs"}, "roleRef": role})
    assert cluster.role(tmp_path, "present", gpushare_namespace=name)[0] == 1
    assert cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]["labels"][ENFORCE] == "privileged"
    assert cluster.role(tmp_path, "present", gpushare_namespace=name)[0] == 0
    changed, text = cluster.role(tmp_path, "absent", gpushare_namespace=name)
    assert changed == 2, text
    after = cluster.api.request("GET", f"{SPACES}/{name}")["metadata"]
    assert not cluster.there(DAEMONS.format(name)) and cluster.there(f"{path}/theirs")
    assert (after["labels"], after.get("annotations", {})) == (before["labels"], before.get("annotations", {}))
    assert not after.get("deletionTimestamp")
    assert cluster.role(tmp_path, "absent", gpushare_namespace=name)[0] == 0
