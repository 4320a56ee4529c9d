# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards for virtual machines on one node, shares on the other: there and back under a pod every two seconds.

The cards' drivers, VFIO, KubeVirt and the machines are SIMULATED or stand-ins (_virtual.py, virt_handler.py); kubelet,
API server and scheduler are real. The module restores the first state at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from _lab import RESOURCE, ApiError, Done, JsonObject, Lab, until
from _pods import body, container
from _switching import Load
from _virtual import KUBEVIRT, changeable_cards, drivers, kubevirt, machine

from lab import hardware

SPACE, PERMIT = "lab-virtual", "tests/lab/permit.yml"
# What KubeVirt announces of the lab's cards: vendor and device.
MACHINE = "nvidia.com/10DE_1EB8"
LABEL = "kubegpu.share/backend"
RULE = "/etc/udev/rules.d/10-kubegpu-vfio.rules"
RECORD = "/var/lib/kubegpu-share/passthrough.json"

pytestmark = pytest.mark.long


class Nodes:
    """The lab with a back end for each node.

    :param of: the value of gpu_backend by node.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
        # Further variables by node.
        self.variables: dict[str, JsonObject] = {}
        self._inventory = folder / "virtual.yml"

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

    def verified(self) -> None:
        """Require that verify.yml finds nothing, and that site.yml has nothing to do."""
        done = self.run("verify")
        assert not re.search(r"^(FAIL|UNKNOWN) ", done.out, re.MULTILINE), done.out[-8000:]
        self.run("site").assert_unchanged()

    def switch(self, node: str, to: str, *more: str) -> None:
        """Switch a node, bring the cluster's parts in line, and require a consistent cluster."""
        self.of[node] = to
        self.run("switch", "--limit", node, *more)
        self.run("site")
        self.verified()

    def allocatable(self, node: str, resource: str) -> int:
        return int(self.lab.api.node(node)["status"]["allocatable"].get(resource, "0"))

    def given_twice(self) -> set[str]:
        """Return the nodes whose cards pods and virtual machines could get at once."""
        return {name for name in self.of if self.allocatable(name, RESOURCE) and self.allocatable(name, MACHINE)}

    def create(self, wanted: JsonObject) -> str:
        self.lab.api.call("POST", f"/api/v1/namespaces/{SPACE}/pods", wanted)
        name: str = wanted["metadata"]["name"]
        self.lab.api.wait_running(SPACE, [name], 180)
        return name

    def there(self) -> set[str]:
        return {pod["metadata"]["name"] for pod in self.lab.api.pods(SPACE)}

    def delete(self, *names: str) -> None:
        for name in names:
            self.lab.api.delete(f"/api/v1/namespaces/{SPACE}/pods/{name}")
        until(lambda: not self.there() & set(names), f"{names} gone", 60)

    def permitted(self) -> list[str]:
        """Return the resources that KubeVirt's object permits."""
        [item] = self.lab.api.items(KUBEVIRT)
        devices = item["spec"].get("configuration", {}).get("permittedHostDevices", {})
        return [row["resourceName"] for row in devices.get("pciHostDevices") or []]


@pytest.fixture(scope="module")
def nodes(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(lab, tmp_path_factory.mktemp("virtual"))
    node = lab.gpu_nodes[1]
    image = lab.image()
    with changeable_cards(lab, node), kubevirt(lab, image), lab.api.namespace(SPACE):
        try:
            # The node has a kernel now: nouveau's blacklist, and what else roles do for a machine that boots.
            made.run("site")
            yield made
        finally:
            for pod in made.there():
                made.delete(pod)
            made.of = dict.fromkeys(lab.gpu_nodes, "gpushare")
            made.variables = {}
            made.run("passthrough", "-e", "passthrough_state=absent", "--limit", node)
            made.run("site")
            made.run("switch")
            made.run("site")
            assert set(drivers(lab, node).values()) == {"nvidia", "snd_hda_intel"}
    made.run("site")
    made.verified()


def test_one_card_of_a_node_is_for_machines_and_the_other_is_shared(nodes: Nodes, lab: Lab) -> None:
    node = lab.gpu_nodes[1]
    # The second card, and its audio function.
    card, audio = hardware.bus_address(1), "0000:02:00.1"
    before = drivers(lab, node)
    nodes.variables[node] = {"gpu_exclude": [card], "passthrough_cards": [card]}
    nodes.run("site")
    until(lambda: len(lab.cards(node)) == 1, f"{node} shares a card", 90)
    # Persistence mode has the card: it would go at the next boot.
    lab.ssh(node, "systemctl stop nvidia-persistenced")
    nodes.run("passthrough", "--limit", node)
    assert drivers(lab, node) == {**before, card: "vfio-pci", audio: "vfio-pci"}
    assert RULE.lstrip("/") in lab.ssh(node, "lsinitramfs /boot/initrd.img-*")
    lab.ssh(node, "systemctl start nvidia-persistenced")
    permitted = [{"selector": "10DE:1EB8", "resource": MACHINE, "external_provider": False}]
    lab_wide = ("-e", json.dumps({"kubevirt_devices_pci": permitted}))
    assert lab.playbook(PERMIT, *nodes.arguments(), *lab_wide).rc == 0
    assert nodes.permitted() == [MACHINE]
    until(lambda: nodes.allocatable(node, MACHINE) == 1, f"{node} announces a card for machines", 60)

    vm = nodes.create(machine(lab, "vm", node, MACHINE))
    pod = nodes.create(body("shares", container(lab, 3), node=node))
    group = re.search(r"/dev/vfio/(\d+)", lab.inside(SPACE, vm, "c0", "sh", "-c", "ls -l /proc/1/fd"))
    assert group is not None and group[1] == "2"
    assert lab.devices(node, lab.api.pod(SPACE, pod)) == [["nvidia0"]]
    nodes.verified()
    assert "vm" in nodes.run("inspect").out

    # The machine has it.
    refused = nodes.play("passthrough", "-e", "passthrough_state=absent", "--limit", node)
    assert refused.rc != 0 and "held_by_vm" in refused.out, refused.out[-6000:]
    assert drivers(lab, node)[card] == "vfio-pci"
    nodes.delete(vm)
    nodes.run("passthrough", "-e", "passthrough_state=absent", "--limit", node)
    assert drivers(lab, node) == before
    until(lambda: nodes.allocatable(node, MACHINE) == 0, f"{node} announces no card for machines", 60)
    assert lab.playbook(PERMIT, *nodes.arguments(), "-e", "kubevirt_devices_state=absent").rc == 0
    assert nodes.permitted() == []
    assert lab.ssh(node, f"ls {RULE} {RECORD} 2>/dev/null; true") == ""
    nodes.variables = {}
    nodes.run("site")
    until(lambda: len(lab.cards(node)) == 2, f"{node} shares both cards", 90)
    assert pod in nodes.there()
    nodes.delete(pod)
    nodes.verified()


def test_there_and_back_under_load(nodes: Nodes, lab: Lab) -> None:
    shared, switched = lab.gpu_nodes[:2]
    load = Load(lab, SPACE, nodes.given_twice)
    kept = nodes.create(body("kept", container(lab, 3), node=shared))
    evicted = nodes.create(body("evicted", container(lab, 3), node=switched))
    cards = len(lab.cards(switched))
    before = lab.api.pod(SPACE, kept)["status"]["startTime"]
    with load.running():
        nodes.switch(switched, "passthrough")
        assert evicted not in nodes.there()
        # Each card with its audio function.
        assert drivers(lab, switched) == dict.fromkeys(drivers(lab, switched), "vfio-pci")
        assert lab.api.node(switched)["metadata"]["labels"][LABEL] == "passthrough"
        assert nodes.permitted() == [MACHINE]
        until(lambda: nodes.allocatable(switched, MACHINE) == cards, f"{cards} cards for virtual machines", 60)
        assert lab.allocatable(switched) == 0 and lab.allocatable(shared) > 0
        assert lab.api.pod(SPACE, kept)["status"]["startTime"] == before

        vm = nodes.create(machine(lab, "vm", switched, MACHINE))
        group = re.search(r"/dev/vfio/(\d+)", lab.inside(SPACE, vm, "c0", "sh", "-c", "ls -l /proc/1/fd"))
        assert group is not None
        nodes.verified()
        shown = nodes.run("inspect").out
        assert "vm" in shown and switched in shown

        # A virtual machine has a card: the node isn't switched, and everything of the machine is as before.
        nodes.of[switched] = "gpushare"
        refused = nodes.play("switch", "--limit", switched)
        assert refused.rc != 0 and "vm" in refused.out, refused.out[-6000:]
        assert vm in nodes.there() and set(drivers(lab, switched).values()) == {"vfio-pci"}
        nodes.delete(vm)

        nodes.switch(switched, "gpushare")
        assert set(drivers(lab, switched).values()) == {"nvidia", "snd_hda_intel"}
        assert nodes.permitted() == [] and nodes.allocatable(switched, MACHINE) == 0
        assert lab.ssh(switched, f"ls {RULE} {RECORD} 2>/dev/null; true") == ""
        until(lambda: lab.allocatable(switched) > 0, f"{switched} shares its cards again", 90)
        nodes.delete(nodes.create(body("again", container(lab, 3), node=switched)))
    assert load.wrong == [] and load.made > 20 and load.samples > 100
    nodes.delete(kept)


def test_uninstall_returns_the_cards(nodes: Nodes, lab: Lab) -> None:
    node = lab.gpu_nodes[1]
    nodes.switch(node, "passthrough")
    assert set(drivers(lab, node).values()) == {"vfio-pci"}
    nodes.run("uninstall", "--limit", node)
    assert set(drivers(lab, node).values()) <= {"", "nvidia", "snd_hda_intel"}
    assert lab.ssh(node, f"ls {RULE} {RECORD} 2>/dev/null; true") == ""
    assert LABEL not in lab.api.node(node)["metadata"]["labels"]
    with pytest.raises((ApiError, KeyError)):
        _ = lab.api.node(node)["metadata"]["annotations"]["kubegpu.share/cards"]
