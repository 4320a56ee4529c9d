# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards for virtual machines on one node, shares on the other: there and back under a pod every two seconds.

The cards' drivers, VFIO, KubeVirt and the machines are SIMULATED or stand-ins (_virtual.py, virt_handler.py); kubelet,
API server and scheduler are real. The module restores the first state at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from _lab import RESOURCE, Done, JsonObject, Lab, until
from _pods import body, container, units_of
from _snapshot import node_state
from _switching import Load
from _virtual import INSTANCES, KUBEVIRT, changeable_cards, drivers, kubevirt, machine

from lab import hardware

SPACE = "lab-virtual"
# What KubeVirt announces of the lab's cards: vendor and device.
MACHINE = "nvidia.com/10DE_1EB8"
LABEL, MARK = "kubegpu.share/backend", "kubegpu.share/switch"
RULE = "/etc/udev/rules.d/10-kubegpu-vfio.rules"
RECORD = "/var/lib/kubegpu-share/passthrough.json"
# Of a node with shares alone.
HOST = {"nvidia", "snd_hda_intel"}

pytestmark = pytest.mark.long


class Nodes:
    """The lab with a back end for each node.

    :param of: the value of gpu_backend by node.
    :param before: what the second node was before this collection set it up.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
        # Further variables by node.
        self.variables: dict[str, JsonObject] = {}
        self.before: JsonObject = {}
        self._inventory, self._report = folder / "virtual.yml", folder / "report.json"

    def arguments(self) -> list[str]:
        hosts = {name: {"gpu_backend": backend, **self.variables.get(name, {})} for name, backend in self.of.items()}
        given = {"maintenance_force": True, "maintenance_delete_emptydir_data": True}
        self._inventory.write_text(
            yaml.safe_dump({"all": {"children": {"lab_virtual": {"hosts": hosts, "vars": given}}}})
        )
        return ["-i", str(self._inventory)]

    def play(self, playbook: str, *more: str) -> Done:
        return self.lab.playbook(f"playbooks/{playbook}.yml", *self.arguments(), *more, seconds=1200)

    def run(self, playbook: str, *more: str) -> Done:
        done = self.play(playbook, *more)
        assert done.rc == 0, done.out[-8000:]
        return done

    def verified(self, functions: int = 0) -> None:
        """Require that verify.yml finds nothing, and that site.yml has nothing to do.

        :param functions: how many of the nodes VFIO has.
        """
        self._report.unlink(missing_ok=True)
        done = self.run("verify", "-e", f"verify_json={self._report}")
        report = json.loads(self._report.read_text())
        wrong = [found for found in report["findings"] if found["level"] in ("FAIL", "UNKNOWN")]
        assert wrong == [] and report["result"] in ("PASS", "WARN"), done.out[-8000:]
        compared = {check["id"]: check["n"] for check in report["checks"]}
        assert compared["C1"] > 0 and compared["V1"] == functions, compared
        assert all((compared[check] > 0) == (functions > 0) for check in ("V2", "V3")), compared
        self.run("site").assert_unchanged()

    def switch(self, node: str, to: str, killed: Callable[[], bool]) -> None:
        """Switch a node by two runs, bring the cluster's parts in line, and require a consistent cluster.

        :param killed: becomes true where the first run is killed.
        """
        self.of[node] = to
        limit = ("--limit", node)
        self.lab.interrupted_playbook("playbooks/switch.yml", *self.arguments(), *limit, moment=killed, seconds=600)
        live = self.lab.api.node(node)
        assert live["metadata"]["annotations"][MARK] == (to if to != "gpushare" else "extender")
        assert live["spec"]["unschedulable"] is True
        refused = self.play("site")
        assert refused.rc != 0 and "switch-unfinished" in refused.out, refused.out[-6000:]
        self.run("switch", *limit)
        live = self.lab.api.node(node)
        assert MARK not in live["metadata"]["annotations"] and not live["spec"].get("unschedulable")
        self.run("site")
        virtual = [driver for driver in drivers(self.lab, node).values() if driver == "vfio-pci"]
        self.verified(len(virtual))

    def allocatable(self, node: str, resource: str) -> int:
        return int(self.lab.api.node(node)["status"]["allocatable"].get(resource, "0"))

    def announces(self, node: str, shared: int, machines: int) -> None:
        """Wait until a node announces so many cards for shares, each whole, and so many for virtual machines."""

        def found() -> bool:
            own = self.lab.cards(node) if shared else []
            assert len(own) == shared and all(card["healthy"] for card in own), own
            now = (self.lab.allocatable(node), self.allocatable(node, MACHINE))
            assert now == (sum(card["units"] for card in own), machines), now
            return True

        until(found, f"{node} announces {shared} cards for shares and {machines} for virtual machines", 90)

    def given_twice(self) -> set[str]:
        """Return the nodes whose cards pods and virtual machines could get at once, or which have a misplaced pod."""
        live = {node["metadata"]["name"]: node for node in self.lab.api.items("/api/v1/nodes")}
        found = set()
        for name in self.of:
            free = live[name]["status"]["allocatable"]
            if all(int(free.get(resource, "0")) for resource in (RESOURCE, MACHINE)):
                found.add(name)
        virtual = {name for name in self.of if live[name]["metadata"]["labels"].get(LABEL) == "passthrough"}
        for pod in self.lab.api.pods(SPACE):
            if units_of(pod) and pod["spec"].get("nodeName") in virtual and "deletionTimestamp" not in pod["metadata"]:
                found.add(f"{pod['spec']['nodeName']} ({pod['metadata']['name']})")
        return found

    def create(self, wanted: JsonObject) -> str:
        self.lab.api.call("POST", f"/api/v1/namespaces/{SPACE}/pods", wanted)
        name: str = wanted["metadata"]["name"]
        self.lab.api.wait_running(SPACE, [name], 180)
        return name

    def start(self, name: str, node: str) -> str:
        """Start a virtual machine with a card, and return the IOMMU group that it has open."""
        self.create(machine(self.lab, SPACE, name, node, MACHINE))
        handles = self.lab.inside(SPACE, name, "c0", "sh", "-c", "ls -l /proc/1/fd")
        group = re.search(r"/dev/vfio/(\d+)", handles)
        assert group is not None, handles
        return group[1]

    def there(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.lab.api.pods(SPACE)}

    def delete(self, *names: str) -> None:
        for name in names:
            self.lab.api.delete(f"/apis/kubevirt.io/v1/namespaces/{SPACE}/{INSTANCES}/{name}")
            self.lab.api.delete(f"/api/v1/namespaces/{SPACE}/pods/{name}")
        until(lambda: not self.there() & set(names), f"{names} gone", 60)

    def permitted(self) -> list[str]:
        """Return the resources that KubeVirt's object permits."""
        [item] = self.lab.api.items(KUBEVIRT)
        devices = item["spec"].get("configuration", {}).get("permittedHostDevices", {})
        return [row["resourceName"] for row in devices.get("pciHostDevices") or []]

    def of_cards(self, node: str) -> dict[str, str]:
        """Return who has each card for virtual machines of a node, by address, as inspect.yml says it."""
        shown = self.run("inspect", "-e", "inspect_machines=true").out
        rows = re.findall(r"^\W*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d) .* vfio-pci +\d+ +(.*?)\W*$", shown, re.M)
        assert node in shown and rows, shown[-6000:]
        return dict(rows)

    def left(self, node: str) -> str:
        """Return what is left of role passthrough on a machine."""
        return self.lab.ssh(node, f"ls {RULE} {RECORD} 2>/dev/null; true")

    def state(self, node: str) -> JsonObject:
        """Return what uninstall.yml has to leave as it was: of the machine, and of the node in the API."""
        live = self.lab.api.node(node)
        own = re.compile(r"kubegpu\.share/|^gpushare$|aliyun|nvidia")
        return {
            **{name: value for name, value in node_state(self.lab, node).items() if name != "images"},
            "labels": {
                key: one for key, one in live["metadata"]["labels"].items() if not key.startswith("kubevirt.io/")
            },
            "annotations": sorted(key for key in live["metadata"]["annotations"] if own.search(key)),
            "taints": live["spec"].get("taints", []),
            "cordoned": live["spec"].get("unschedulable", False),
            # kubelet itself goes on to show the size of a resource whose plugin is gone.
            "resources": {key: n for key, n in live["status"]["allocatable"].items() if own.search(key) and n != "0"},
            "drivers": drivers(self.lab, node),
        }


@pytest.fixture(scope="module")
def nodes(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(lab, tmp_path_factory.mktemp("virtual"))
    node = lab.gpu_nodes[1]
    # Alone, this module begins with a lab that nothing has touched.
    made.run("uninstall", "--limit", node)
    with changeable_cards(lab, node):
        made.before = made.state(node)
        # The node has a kernel now: nouveau's blacklist, and what else roles do for a machine that boots.
        made.run("site")
        with kubevirt(lab, lab.image()), lab.api.namespace(SPACE):
            try:
                made.verified()
                yield made
            finally:
                made.delete(*made.there())
                made.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
                made.variables = {}
                made.run("passthrough", "-e", "passthrough_state=absent", "--limit", node)
                # site.yml refuses while a switch is incomplete, and has to set up a node that was uninstalled.
                if MARK in lab.api.node(node)["metadata"]["annotations"]:
                    made.run("switch")
                made.run("site")
                made.run("switch")
                made.run("site")
                assert set(drivers(lab, node).values()) == HOST
    made.run("site")
    made.verified()


def test_one_card_of_a_node_is_for_machines_and_the_other_is_shared(nodes: Nodes, lab: Lab) -> None:
    node = lab.gpu_nodes[1]
    # The second card, and its audio function.
    card, audio = hardware.bus_address(1), "0000:02:00.1"
    before, cards = drivers(lab, node), len(lab.nodes[node]["cards"])
    for name in lab.gpu_nodes:
        nodes.announces(name, cards, 0)
    pod = nodes.create(body("shares", container(lab, 3), node=node))
    nodes.variables[node] = {"passthrough_cards": [card]}
    # Persistence mode has the card: it would go at the next boot.
    lab.ssh(node, "systemctl stop nvidia-persistenced")
    nodes.run("site")
    assert drivers(lab, node) == {**before, card: "vfio-pci", audio: "vfio-pci"}
    assert RULE.lstrip("/") in lab.ssh(node, "lsinitramfs /boot/initrd.img-*")
    assert lab.ssh(node, "systemctl is-active nvidia-persistenced").strip() == "active"
    assert nodes.permitted() == [MACHINE]
    nodes.announces(node, cards - 1, 1)

    assert nodes.start("vm", node) == "2"
    assert lab.devices(node, lab.api.pod(SPACE, pod)) == [["nvidia0"]]
    nodes.verified(2)
    assert nodes.of_cards(node) == {card: f"virtual machine {SPACE}/vm"}

    # The machine has it.
    refused = nodes.play("passthrough", "-e", "passthrough_state=absent", "--limit", node)
    assert refused.rc != 0 and "held_by_vm" in refused.out, refused.out[-6000:]
    refused = nodes.play("uninstall", "--limit", node, "-e", "uninstall_with_pods=true")
    assert refused.rc != 0 and "Nothing was changed" in refused.out, refused.out[-6000:]
    assert drivers(lab, node)[card] == "vfio-pci" and pod in nodes.there()
    nodes.delete("vm")
    assert nodes.of_cards(node) == {card: "free"}

    nodes.run("passthrough", "-e", "passthrough_state=absent", "--limit", node)
    assert drivers(lab, node) == before and nodes.left(node) == ""
    nodes.variables = {}
    nodes.run("site")
    assert nodes.permitted() == []
    nodes.announces(node, cards, 0)
    assert lab.devices(node, lab.api.pod(SPACE, pod)) == [["nvidia0"]]
    nodes.delete(pod)
    nodes.verified()


def test_there_and_back_under_load(nodes: Nodes, lab: Lab) -> None:
    shared, switched = lab.gpu_nodes[:2]
    load = Load(lab, SPACE, nodes.given_twice, units=1)
    kept = nodes.create(body("kept", container(lab, 3), node=shared))
    evicted = nodes.create(body("evicted", container(lab, 3), node=switched))
    cards = len(lab.nodes[switched]["cards"])
    before = lab.api.pod(SPACE, kept)["status"]["startTime"]
    with load.running():
        # Killed as soon as the first function has changed its driver.
        nodes.switch(switched, "passthrough", lambda: "vfio-pci" in drivers(lab, switched).values())
        assert evicted not in nodes.there()
        # Each card with its audio function.
        assert set(drivers(lab, switched).values()) == {"vfio-pci"}
        assert lab.api.node(switched)["metadata"]["labels"][LABEL] == "passthrough"
        assert nodes.permitted() == [MACHINE]
        nodes.announces(switched, 0, cards)
        nodes.announces(shared, cards, 0)
        assert lab.api.pod(SPACE, kept)["status"]["startTime"] == before

        groups = {name: nodes.start(name, switched) for name in ("vm", "other-vm")}
        assert sorted(groups.values()) == ["1", "2"]
        nodes.verified(2 * cards)
        holders = {f"0000:0{group}:00.0": f"virtual machine {SPACE}/{name}" for name, group in groups.items()}
        assert nodes.of_cards(switched) == holders

        # A virtual machine has a card: the node isn't switched, and everything of the machine is as before.
        nodes.delete("other-vm")
        nodes.of[switched] = "gpushare"
        refused = nodes.play("switch", "--limit", switched)
        assert refused.rc != 0 and f"{SPACE}/vm is a virtual machine with a card" in refused.out, refused.out[-6000:]
        assert "vm" in nodes.there() and set(drivers(lab, switched).values()) == {"vfio-pci"}
        nodes.delete("vm")

        nodes.switch(switched, "gpushare", lambda: "vfio-pci" not in drivers(lab, switched).values())
        assert set(drivers(lab, switched).values()) == HOST
        assert nodes.permitted() == [] and nodes.left(switched) == ""
        for name in (shared, switched):
            nodes.announces(name, cards, 0)
        nodes.delete(nodes.create(body("again", container(lab, 3), node=switched)))
    assert load.wrong == [] and load.made > 20 and load.samples > 100
    # Two switches evict at most the one that has come between the last look and the cordon.
    assert load.evicted <= 4
    assert lab.api.pod(SPACE, kept)["status"]["startTime"] == before
    nodes.delete(kept)


def test_uninstall_leaves_the_node_as_it_was(nodes: Nodes, lab: Lab) -> None:
    shared, node = lab.gpu_nodes[:2]
    pod = nodes.create(body("kept", container(lab, 3), node=shared))
    nodes.of[node] = "passthrough"
    nodes.run("switch", "--limit", node)
    nodes.announces(node, 0, len(lab.nodes[node]["cards"]))
    nodes.run("uninstall", "--limit", node)
    assert nodes.left(node) == ""

    def as_it_was() -> bool:
        now = nodes.state(node)
        assert {key: value for key, value in now.items() if value != nodes.before[key]} == {}
        return True

    until(as_it_was, f"{node} is as it was", 60)
    assert nodes.run("uninstall", "--limit", node).recap[node]["changed"] == 0
    # The other node's cards, and its pod.
    nodes.announces(shared, len(lab.nodes[shared]["cards"]), 0)
    assert lab.api.pod(SPACE, pod)["status"]["phase"] == "Running"
    nodes.delete(pod)
