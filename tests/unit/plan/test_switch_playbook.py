# SPDX-License-Identifier: GPL-3.0-or-later
"""Role switch by the real ansible-playbook on a real API server, with the simulated NVML of the lab.

No kubelet and no server runs: a thread does in the API what they would do on the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import threading
from pathlib import Path

import pci_machine
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import facts as passthrough_facts
from own_cluster import ROOT, controllers, run_playbook, until
from plan_kit import facts
from real_apiserver import MERGE, Refused, own_api_server
from simulated_driver import CARDS, VERSION, compiled

NODE = "/api/v1/nodes/gpu1"
SETS = "/apis/apps/v1/namespaces/gpushare-system/daemonsets"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
PODS = "/api/v1/namespaces/gpushare-system/pods"
DEFAULT_PODS = "/api/v1/namespaces/default/pods"
MEMORY = "aliyun.com/gpu-mem"
LABEL = {"dra": "dra", "extender": "true"}
MARKS = {"kubegpu.share/switch", "kubegpu.share/switch-from", "kubegpu.share/switch-cordoned"}


def slice_of_the_driver():
    pool = {"name": "gpu1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.kubegpu.share", "nodeName": "gpu1", "pool": pool, "devices": []}
    return {"metadata": {"name": "gpu1-0"}, "spec": spec}


class Machine:
    """The node gpu1. ``sold`` lists each moment at which both allocations gave its cards away."""

    def __init__(self, server):
        self.server, self.sold, self.canaries = server, [], []
        self.works = True

    def node(self):
        return self.server.request("GET", NODE)

    def label(self):
        return self.node()["metadata"].get("labels", {}).get("gpushare")

    def serve(self):
        label = self.label()
        sets = {item["metadata"]["name"]: item for item in self.server.request("GET", SETS)["items"]}
        announced = "32" if label == "true" and "gpushare-device-plugin" in sets else "0"
        cards = "[]" if announced == "32" else None
        if self.node()["status"].get("allocatable", {}).get(MEMORY) != announced:
            status = {"capacity": {MEMORY: "32"}, "allocatable": {MEMORY: announced}}
            self.server.request("PATCH", f"{NODE}/status", {"status": status}, MERGE)
            if cards:
                self.server.request("PATCH", NODE, {"metadata": {"annotations": {"kubegpu.share/cards": cards}}}, MERGE)
        there = [item["metadata"]["name"] for item in self.server.request("GET", SLICES)["items"]]
        if label == "dra" and "gpushare-dra-driver" in sets and not there:
            self.server.request("POST", SLICES, slice_of_the_driver())
        if there and announced == "32":
            self.sold.append(label)
        for path, one in [(f"{SETS}/{name}", one) for name, one in sets.items()]:
            counts = dict.fromkeys(
                (
                    "currentNumberScheduled",
                    "desiredNumberScheduled",
                    "updatedNumberScheduled",
                    "numberReady",
                    "numberAvailable",
                ),
                1,
            )
            self.report(path, one, {**counts, "numberMisscheduled": 0})
        templates = "/apis/apps/v1/namespaces/gpushare-system/deployments/gpushare-dra-templates"
        with contextlib.suppress(Refused):
            counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 2)
            self.report(templates, self.server.request("GET", templates), counts)
        for pod in self.server.request("GET", PODS)["items"]:
            name = pod["metadata"]["name"]
            if self.works and name.startswith("gpushare-switch-") and pod["status"].get("phase") == "Pending":
                self.canaries.append((label, bool(pod["spec"].get("resourceClaims"))))
                self.server.request("PATCH", f"{PODS}/{name}/status", {"status": {"phase": "Succeeded"}}, MERGE)

    def report(self, path, live, counts):
        status = {"observedGeneration": live["metadata"]["generation"], **counts}
        if status.items() - live.get("status", {}).items():
            self.server.request("PATCH", f"{path}/status", {"status": status}, MERGE)

    @contextlib.contextmanager
    def served(self):
        stopped = threading.Event()

        def run():
            while not stopped.wait(0.3):
                with contextlib.suppress(Refused):
                    self.serve()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield self
        finally:
            stopped.set()
            thread.join()


@pytest.fixture(scope="module")
def machine():
    with own_api_server() as server, controllers(server, "namespace", "garbage-collector"):
        for name in ("gpu1", "gpu2"):
            server.request(
                "POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
            )
        server.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}}
        )
        # The other node has the extender, whose parts are there.
        server.request("PATCH", "/api/v1/nodes/gpu2", {"metadata": {"labels": {"gpushare": "true"}}}, MERGE)
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpushare-system"}})
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        server.apply({**lease, "metadata": {"name": "gpushare-ledger", "namespace": "gpushare-system"}})
        server.apply(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": "gpushare-system"},
            }
        )
        with Machine(server).served() as made:
            yield made


@pytest.fixture
def driver(tmp_path, monkeypatch):
    library = compiled(tmp_path / "driver", VERSION)
    (tmp_path / "cards").write_text(CARDS)
    folder = library if library.is_dir() else library.parent
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("KUBEGPU_SIM_CARDS", str(tmp_path / "cards"))
    assert os.environ["LD_LIBRARY_PATH"]


def switch(machine, folder, to, *words, **variables):
    given = {
        "gpu_kubeconfig": str(machine.server.kubeconfig),
        "gpushare_allocation": to,
        "gpushare_image_delivery": "registry",
        "gpushare_wait_timeout": 60,
        "switch_clean_timeout": 30,
        "switch_canary_timeout": 10,
        **variables,
    }
    play = {"hosts": "gpu1", "gather_facts": False, "serial": 1, "roles": ["kubegpu.share.switch"]}
    return run_playbook(folder, [play], *words, groups={"gpu_nodes": ["gpu1", "gpu2"]}, **given)


def labelled(machine, folder, allocation):
    """Have the role label the node; the field is its own then."""
    done = node_component(machine, folder, gpushare_node_allocation=allocation)
    assert done.rc == 0, done.text


def node_component(machine, folder, **variables):
    role = {"role": "kubegpu.share.gpushare", "gpushare_component": "node", "gpushare_component_nodes": ["gpu1"]}
    play = {"hosts": "localhost", "gather_facts": False, "roles": [{**role, **variables}]}
    return run_playbook(folder, [play], gpu_kubeconfig=str(machine.server.kubeconfig))


def pod(server, name, units=None):
    resources = {"limits": {MEMORY: units}} if units else {}
    spec = {
        "nodeName": "gpu1",
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "i", "resources": resources}],
    }
    server.request("POST", DEFAULT_PODS, {"metadata": {"name": name}, "spec": spec})


def pods(server):
    return {item["metadata"]["name"] for item in server.request("GET", DEFAULT_PODS)["items"]}


def finished(machine, cordoned=False):
    """A kill leaves neither a mark without the cordon nor the cordon without a mark."""
    node = machine.node()
    return not MARKS & {*node["metadata"].get("annotations", {})} and cordoned is bool(
        node["spec"].get("unschedulable")
    )


def test_a_claim_that_stays_prepared_is_named(tmp_path):
    # The files that find looks for are a role's variable, which a parameter of the include replaces.
    unread = {"__gpushare_claim_files": {"paths": {}, "patterns": []}}
    cases = {
        "prepared": ({}, "After 5 seconds node gpu1 still has prepared claims: {claims}/c1.json."),
        "not listed": (unread, "After 5 seconds node gpu1 doesn't list the files of its claims: argument 'paths' is"),
        # The wait has ended: the next task asks the cluster, which isn't there.
        "none": ({}, "/nowhere"),
    }
    given = {"switch_allocator": "dra", "switch_node_name": "gpu1", "switch_clean_timeout": 5}
    tasks = []
    for name, (more, _said) in cases.items():
        claims = tmp_path / name / "plugins" / "gpu.kubegpu.share" / "claims"
        claims.mkdir(parents=True)
        include = {"ansible.builtin.include_role": {"name": "kubegpu.share.gpushare", "tasks_from": "backend_remove"}}
        include["vars"] = {"gpushare_kubelet_root": str(tmp_path / name), **more}
        shown = {"ansible.builtin.debug": {"msg": "said {{ ansible_failed_result.msg }}"}}
        tasks.append({"block": [include], "rescue": [shown]})
    (tmp_path / "prepared/plugins/gpu.kubegpu.share/claims/c1.json").touch()
    play = {"hosts": "localhost", "gather_facts": False, "tasks": tasks}
    done = run_playbook(tmp_path, [play], gpu_kubeconfig="/nowhere", **given)
    messages = re.findall(r'"msg": "said (.*)"', done.text)
    assert len(messages) == len(cases), done.text
    for (name, (_more, said)), message in zip(cases.items(), messages, strict=True):
        assert said.format(claims=tmp_path / name / "plugins/gpu.kubegpu.share/claims") in message, message
        assert ("After 5 seconds" in message) is (name != "none")


@pytest.mark.long
def test_a_node_goes_back(machine, driver, tmp_path):
    server = machine.server
    labelled(machine, tmp_path, "dra")
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    server.apply({**lease, "metadata": {"name": "gpushare-dra-templates", "namespace": "gpushare-system"}})
    server.request("POST", SLICES, slice_of_the_driver())
    machine.canaries.clear()
    back = switch(machine, tmp_path, "extender")
    assert back.rc == 0, back.text
    assert finished(machine) and machine.label() == "true" and machine.canaries == [("true", False)]
    assert server.request("GET", SLICES)["items"] == [] and machine.sold == []


@pytest.mark.long
def test_a_node_goes_over_goes_on_after_a_failure(machine, driver, tmp_path):
    server = machine.server
    labelled(machine, tmp_path, "extender")
    pod(server, "shares", 2)
    pod(server, "plain")
    refused = switch(machine, tmp_path, "dra")
    assert refused.rc != 0 and "no controller that makes it again" in refused.text, refused.text
    assert "Run the same command again" in refused.text and pods(server) == {"shares", "plain"}
    assert machine.label() == "true" and machine.node()["spec"]["unschedulable"]

    # The proof fails: the node stays cordoned, with the new allocation on it and nothing of the former one.
    machine.works = False
    failed = switch(machine, tmp_path, "dra", switch_force=True)
    assert failed.rc != 0 and "and is Pending after 10 s: it printed no reason" in " ".join(failed.text.split())
    assert pods(server) == {"plain"}
    node = machine.node()
    assert node["metadata"]["annotations"]["kubegpu.share/switch"] == "dra" and node["spec"]["unschedulable"]
    assert "kubegpu.share/cards" not in node["metadata"]["annotations"] and machine.label() == "dra"

    machine.works = True
    machine.canaries.clear()
    done = switch(machine, tmp_path, "dra")
    assert done.rc == 0, done.text
    assert finished(machine) and machine.label() == "dra" and {*machine.canaries} == {("dra", True)}
    # The other node still has the extender: only who asks for a claim gets one.
    wanted = {
        "metadata": {"name": "new"},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": {MEMORY: 1}}}]},
    }
    assert "resourceClaims" not in server.ask("POST", "/api/v1/namespaces/default/pods?dryRun=All", wanted)[1]
    again = switch(machine, tmp_path, "dra")
    assert again.rc == 0 and again.changed == 0, again.text

    assert pods(server) == {"plain"} and machine.sold == []


@pytest.mark.long
def test_a_node_whose_cards_are_in_use_outside_of_pods_gets_nothing_new(machine, driver, tmp_path):
    cards = tmp_path / "cards"
    begin(machine, tmp_path, "dra")
    cards.write_text(f"{CARDS}process 1 {os.getpid()} 100\n")
    done = switch(machine, tmp_path, "extender")
    assert done.rc != 0 and machine.label() is None, done.text
    assert "isn't clean for" in done.text and "No card was given away" in done.text
    # Of no card there is no process either.
    cards.write_text(CARDS.partition("card ")[0])
    done = switch(machine, tmp_path, "extender")
    assert done.rc != 0 and "can't be proven clean: NVML lists no card." in " ".join(done.text.split()), done.text
    cards.write_text(CARDS)
    assert switch(machine, tmp_path, "dra").rc == 0 and finished(machine)


# Beside a play it is loaded by itself. It ends ansible-playbook, which has no time to clean anything up.
KILLER = """
import os, pathlib, signal
from ansible.plugins.callback import CallbackBase

class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "notification", "killer"

    def v2_runner_on_ok(self, result):
        killed = pathlib.Path(os.environ["KILLED"])
        where = f"{result._task.get_path()} {result._task.get_name()}\\n"
        if result.is_changed() and where not in killed.read_text():
            with killed.open("a") as file:
                file.write(where)
            os.kill(os.getpid(), signal.SIGKILL)
"""


SELECTED = {"app.kubernetes.io/name": "gpushare-device-plugin"}
PLUGIN = {
    "metadata": {"name": "gpushare-device-plugin"},
    "spec": {
        "selector": {"matchLabels": SELECTED},
        "template": {"metadata": {"labels": SELECTED}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
    },
}


def begin(machine, folder, allocation):
    """Have the node one allocation alone, whatever the test before has left."""
    server = machine.server
    labelled(machine, folder, allocation)
    if allocation == "extender":
        server.request("DELETE", SLICES)
        # Unless the role has deployed it before.
        server.ask("POST", SETS, PLUGIN)
        until(lambda: machine.node()["status"]["allocatable"].get(MEMORY) == "32")
    else:
        server.request("PATCH", NODE, {"metadata": {"annotations": {"kubegpu.share/cards": None}}}, MERGE)
        server.ask("POST", SLICES, slice_of_the_driver())
        until(lambda: machine.node()["status"]["allocatable"].get(MEMORY) == "0")
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        server.apply({**lease, "metadata": {"name": "gpushare-dra-templates", "namespace": "gpushare-system"}})
    machine.sold.clear()
    machine.canaries.clear()


@pytest.mark.long
@pytest.mark.parametrize("to", ["extender", "dra"])
def test_killed_after_each_change_the_same_command_goes_on(machine, driver, tmp_path, monkeypatch, to):
    """Each run is killed after the first task that has changed something and that none was killed after before.

    Between two changes a kill leaves the same behind.
    """
    begin(machine, tmp_path, {"dra": "extender", "extender": "dra"}[to])
    if to == "dra":
        pod(machine.server, "shares-a-card", 2)
    (tmp_path / "callback_plugins").mkdir()
    (tmp_path / "callback_plugins" / "killer.py").write_text(KILLER)
    killed = tmp_path / "killed"
    killed.write_text("")
    monkeypatch.setenv("KILLED", str(killed))
    for _run in range(40):
        done = switch(machine, tmp_path, to, switch_force=True)
        assert machine.sold == [], killed.read_text()
        if done.rc == 0:
            break
        assert done.rc == -signal.SIGKILL, done.text
        # The node's mark is there from its first change to its last; before that, whose the set-up is was recorded.
        mark = machine.node()["metadata"].get("annotations", {}).get("kubegpu.share/switch")
        before = [line for line in killed.read_text().splitlines() if "Keep the record of who owns" not in line] == []
        assert mark == to or (finished(machine) and (before or machine.label() == LABEL[to])), killed.read_text()
    after = killed.read_text()
    assert done.rc == 0 and finished(machine) and machine.label() == LABEL[to], after
    assert "shares-a-card" not in pods(machine.server)
    assert (LABEL[to], to == "dra") in machine.canaries
    for change in (
        "Annotate the node as being switched",
        "Cordon the node",
        *(["Evict the pods that have a card"] if to == "dra" else []),
        "Run a pod with a card on the node",
        "Delete the pod that proves",
        "Uncordon the node and remove the annotation",
    ):
        assert change in after, after
    again = switch(machine, tmp_path, to)
    assert again.rc == 0 and again.changed == 0, again.text


def through_the_api(machine, folder, to, *words, node="gpu1", **variables):
    """Run switch.yml for a node that is no host of the inventory."""
    given = {
        "gpu_kubeconfig": str(machine.server.kubeconfig),
        "gpushare_nodes": ["gpu1", "gpu2"],
        "gpushare_allocation": to,
        "gpushare_image_delivery": "registry",
        "gpushare_wait_timeout": 60,
        "preflight_ignore": ["runtime", "node-not-ready"],
        "switch_clean_timeout": 30,
        "switch_canary_timeout": 10,
        **variables,
    }
    return run_playbook(folder, ROOT / "playbooks/switch.yml", "-e", f"switch_nodes={node}", *words, **given)


@pytest.mark.parametrize(
    ("node", "more", "said"),
    [
        ("gpu9", {}, "switch_nodes: gpu9 isn't in gpushare_nodes, whose nodes are gpu1, gpu2"),
        ("gpu1", {"groups": {"gpu_nodes": ["gpu1"]}}, "switch_nodes: gpu1 is a host of the inventory: name it by"),
    ],
)
def test_only_nodes_whose_machines_are_not_reached_are_switched_through_the_api(tmp_path, node, more, said):
    given = {"gpushare_nodes": ["gpu1", "gpu2"], "gpu_kubeconfig": "/nowhere"}
    done = run_playbook(tmp_path, ROOT / "playbooks/switch.yml", "-e", f"switch_nodes={node}", **given, **more)
    assert done.rc != 0 and said in " ".join(done.text.split()), done.text


@pytest.mark.long
def test_a_node_whose_machine_is_not_reached_goes_over_and_back(machine, tmp_path):
    server = machine.server
    labelled(machine, tmp_path, "extender")
    refused = through_the_api(machine, tmp_path, "dra", gpu_backend="nvidia", nvidia_device_plugin_helm="/bin/true")
    assert refused.rc != 0 and "only extender and claims change so" in " ".join(refused.text.split()), refused.text
    assert finished(machine) and machine.label() == "true"
    for to, label in (("dra", "dra"), ("extender", "true")):
        machine.canaries.clear()
        pod(server, f"held-{to}", "4" if to == "dra" else None)
        done = through_the_api(machine, tmp_path, to, "-e", "switch_force=true")
        assert done.rc == 0, done.text
        assert finished(machine) and machine.label() == label, done.text
        assert machine.canaries == [(label, to == "dra")] and machine.sold == []
        # NVML isn't asked, and nothing is searched on this machine.
        assert "List the processes that use a card" not in done.text or "skipping: [gpu1]" in done.text
        assert (f"held-{to}" in pods(server)) is (to == "extender")
        again = through_the_api(machine, tmp_path, to)
        assert again.rc == 0 and again.changed == 0, again.text
    assert server.request("GET", SLICES)["items"] == []
    server.request("DELETE", f"{DEFAULT_PODS}/held-extender", {"gracePeriodSeconds": 0})


def test_the_playbook_validates_before_it_takes_over_one_node_at_a_time():
    text = (ROOT / "playbooks" / "switch.yml").read_text()
    assert text.index("kubegpu.share.preflight") < text.index("serial: 1") < text.index("kubegpu.share.switch\n")


# ---------------------------------------------------------------- virtual machines

RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


@pytest.mark.long
def test_a_node_that_kata_isnt_ready_for_isnt_drained(machine, driver, tmp_path):
    server = machine.server
    begin(machine, tmp_path, "extender")
    pod(server, "stays", 2)
    before = machine.node()["metadata"]
    # Of this machine: Kata isn't installed.
    refused = virtual(machine, tmp_path, "kata", node_facts(tmp_path), switch_force=True)
    text = " ".join(refused.text.split())
    assert refused.rc != 0 and "Kata's shim isn't at /opt/kata" in text and "Cordon the node" not in text, refused.text
    # A machine that has all of it, and another RuntimeClass than is asked for.
    body = {"metadata": {"name": "kata-qemu-nvidia-gpu"}, "handler": "runc"}
    server.request("POST", RUNTIME_CLASSES, body)
    codes = ["no_kvm", "no_shim", "no_config", "no_handler", "not_loaded", "kubelet_gate", "kubelet_timeout"]
    has_all = "-e", json.dumps({"__kata_managed": codes})
    refused = virtual(machine, tmp_path, "kata", node_facts(tmp_path), *has_all)
    server.request("DELETE", f"{RUNTIME_CLASSES}/kata-qemu-nvidia-gpu")
    text = " ".join(refused.text.split())
    assert refused.rc != 0 and "has the handler runc and not kata-qemu-nvidia-gpu" in text, refused.text
    assert "Cordon the node" not in text and finished(machine) and "stays" in pods(server)
    after = machine.node()["metadata"]
    assert (after["labels"], after.get("annotations")) == (before["labels"], before.get("annotations"))
    server.request("DELETE", f"{DEFAULT_PODS}/stays", {"gracePeriodSeconds": 0})


LAUNCHER = {"kubevirt.io": "virt-launcher"}


def node_facts(tmp_path, *bound):
    """The facts of a machine whose cards are on VFIO; ones of this machine would be its own."""
    stand_in = pci_machine.Machine()
    if bound:
        stand_in.present(*bound)
    found = facts("debian-12-bare", Path(tempfile.mkdtemp(dir=tmp_path)))
    found["iommu"]["groups"] = 20
    return {**found, "gpus": gpus.pci(stand_in)[0], "passthrough": passthrough_facts.facts(stand_in)}


def virtual(machine, folder, to, known, *words, **variables):
    # The driver and the blacklist would be this machine's.
    own = {"gpu_node": known, "gpu_node_software": "provider", "nouveau_state": "absent", "nouveau_keep_file": True}
    given = {"gpushare_allocation": "extender", "gpu_backend": to, **own, **variables}
    return switch(machine, folder, "extender", *words, **given)


@pytest.mark.long
def test_a_node_goes_to_virtual_machines_and_back_when_none_has_a_card(machine, driver, tmp_path):
    server = machine.server
    begin(machine, tmp_path, "extender")
    pod(server, "shares-again", 2)
    bound = node_facts(tmp_path, pci_machine.CARD, pci_machine.TWIN)
    # A run that was killed has bound all cards, so that NVML has none.
    cards = tmp_path / "cards"
    cards.write_text(CARDS.partition("card ")[0])
    done = virtual(machine, tmp_path, "passthrough", bound, switch_force=True)
    cards.write_text(CARDS)
    assert done.rc == 0, done.text
    labels = machine.node()["metadata"]["labels"]
    assert finished(machine) and "gpushare" not in labels and "shares-again" not in pods(server)
    assert labels["kubegpu.share/backend"] == "passthrough" and machine.canaries == []
    again = virtual(machine, tmp_path, "passthrough", bound)
    assert again.rc == 0 and again.changed == 0, again.text

    # A virtual machine is stopped by its owner, and by nobody else.
    spec = {"nodeName": "gpu1", "terminationGracePeriodSeconds": 0}
    spec["containers"] = [{"name": "c", "image": "i", "resources": {"limits": {"nvidia.com/10DE_2236": "1"}}}]
    owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": "a", "uid": "u-a"}
    metadata = {"name": "virt-launcher-a", "labels": LAUNCHER, "ownerReferences": [owner]}
    server.request("POST", DEFAULT_PODS, {"metadata": metadata, "spec": spec})
    free = node_facts(tmp_path)
    refused = virtual(machine, tmp_path, "gpushare", free, switch_force=True, switch_delete_emptydir_data=True)
    text = " ".join(refused.text.split())
    assert refused.rc != 0 and "default/virt-launcher-a is a virtual machine with a card" in text, refused.text
    assert "Nothing was evicted" in text and "Run the same command again" in text and "virt-launcher-a" in pods(server)
    node = machine.node()
    assert node["metadata"]["labels"]["kubegpu.share/backend"] == "passthrough" and node["spec"]["unschedulable"]
    assert machine.label() is None

    server.request("DELETE", f"{DEFAULT_PODS}/virt-launcher-a", {"gracePeriodSeconds": 0})
    done = virtual(machine, tmp_path, "gpushare", free)
    assert done.rc == 0, done.text
    assert finished(machine) and machine.label() == "true" and machine.canaries == [("true", False)]
    assert "kubegpu.share/backend" not in machine.node()["metadata"]["labels"] and machine.sold == []
