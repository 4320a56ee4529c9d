# SPDX-License-Identifier: GPL-3.0-or-later
"""Role passthrough in ansible-playbook: kernel arguments before cards, and whom it leaves to role maintenance.

The binding plans from facts; the module of the kernel's arguments is scripted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough import facts as passthrough_facts
from ansible_runs import ansible
from pci_machine import AUDIO, CARD, Machine

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = """
import json, pathlib
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        with open(pathlib.Path({folder!r}) / "log", "a") as log:
            given = {{key: value for key, value in self._task.args.items() if key != "observed"}}
            log.write(json.dumps([task_vars["inventory_hostname"], given]) + chr(10))
        return {{"changed": True, "arguments": ["intel_iommu=on"], "reboot_required": True, "loader": "grub-bls"}}
"""
PLAY = """
- hosts: all
  gather_facts: false
  roles: [kubegpu.share.passthrough]
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "left to maintenance: {{ groups['kubegpu_maintenance'] | default([]) | sort | join(' ') }}."
      run_once: true
"""


def node(machine: Machine, groups: int) -> dict[str, Any]:
    return {
        "distribution": {"family": "debian"},
        "kernel": {"installed": ["6.1"]},
        "iommu": {"groups": groups},
        "boot": {"loader": "grub-drop-in", "refused": ""},
        "passthrough": passthrough_facts.facts(machine),
    }


def hosts() -> dict[str, Any]:
    off, bound = Machine(), Machine()
    for address in (CARD, AUDIO):
        del off.links[f"/sys/bus/pci/devices/{address}/iommu_group"]
    bound.present(CARD)
    without = {"gpu_node": node(off, 0)}
    return {
        "reboot": {**without, "gpu_maintenance": "reboot"},
        "drain": {**without, "gpu_maintenance": "drain", "passthrough_iommu_arguments": ["iommu=pt"]},
        "wrong": {**without, "passthrough_cards": [CARD, "0000:77:00.0"]},
        "misspelt": {**without, "passthrough_cards": ["first"]},
        "text": {**without, "passthrough_iommu_arguments": "intel_iommu=on"},
        "alone": {**without, "passthrough_iommu_arguments": []},
        "bound": {"gpu_node": node(bound, 20), "gpu_maintenance": "reboot"},
        "undone": {"gpu_node": node(Machine(), 20), "passthrough_state": "absent", "gpu_maintenance": "reboot"},
        "kept": {"gpu_node": node(Machine(), 20), "passthrough_state": "absent", "passthrough_iommu_arguments": []},
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """What the module was asked for, by host, and the output."""
    folder = tmp_path_factory.mktemp("passthrough")
    ours = folder / "collections/ansible_collections/kubegpu/share"
    for name in ("plugins/action", "plugins/modules", "roles/node_facts/tasks"):
        (ours / name).mkdir(parents=True)
    (ours / "meta").symlink_to(ROOT / "meta")
    for name in ("filter", "module_utils", "plugin_utils", "action/pci_binding.py", "modules/pci_binding.py"):
        (ours / "plugins" / name).symlink_to(ROOT / "plugins" / name)
    (ours / "plugins/action/kernel_arguments.py").write_text(ARGUMENTS.format(folder=str(folder)))
    (ours / "plugins/modules/kernel_arguments.py").write_text("")
    for name in ("__init__.py", "passthrough"):
        (ours / "roles" / name).symlink_to(ROOT / "roles" / name)
    (ours / "roles/node_facts/tasks/main.yml").write_text("[]\n")
    common = {"passthrough_cards": [CARD], "ansible_host": "192.0.2.1", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts(), "vars": common}}))
    (folder / "play.yml").write_text(PLAY)
    words = ("-i", "hosts.yml", "play.yml")
    done = ansible(folder, "ansible-playbook", *words, ANSIBLE_COLLECTIONS_PATH=str(folder / "collections"))
    assert "PLAY RECAP" in done.text, done.text[-3000:]
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "log").read_text().splitlines():
        host, given = json.loads(line)
        calls.setdefault(host, []).append(given)
    return calls, done.text


def test_kernel_arguments_come_first_and_only_where_there_are_no_groups(played):
    calls, text = played
    assert calls == {
        "reboot": [{"iommu": True, "arguments": []}],
        "drain": [{"iommu": False, "arguments": ["iommu=pt"]}],
        "undone": [{"state": "absent"}],
    }
    for host in ("reboot", "drain", "bound", "undone", "kept"):
        assert f"{host} " in text.split("PLAY RECAP")[1] and f"fatal: [{host}]" not in text, text[-3000:]
    assert text.count("get their drivers only after a reboot: its kernel has no IOMMU groups") == 2
    assert "left to maintenance: reboot." in text


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("wrong", "0000:77:00.0 in passthrough_cards is no NVIDIA card"),
        ("misspelt", "'first' is neither a PCI address"),
        ("text", "is neither auto nor a list"),
        ("alone", "has no IOMMU group: switch on VT-d"),
    ],
)
def test_what_is_wrong_is_said_before_anything_changes(played, host, said):
    calls, text = played
    found = text.split(f"fatal: [{host}]")
    assert len(found) == 2 and said in found[1].split("\n\n")[0], text[-3000:]
    assert host not in calls
