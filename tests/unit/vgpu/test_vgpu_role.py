# SPDX-License-Identifier: GPL-3.0-or-later
"""Role vgpu in ansible-playbook: who installs the vGPU manager, and that a node with its vGPUs isn't connected to.

Its driver is installed by role driver, for which a role stands that says what it was given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._node import gpus
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu import facts
from ansible_runs import ansible
from test_vgpu import Node, entry, layout, run

ROOT = Path(__file__).resolve().parents[3]
PLAY = """
- hosts: all
  gather_facts: false
  roles: [kubegpu.share.vgpu]
"""
SAY = """
- ansible.builtin.debug:
    msg: >-
      {{ inventory_hostname }} gets driver {{ driver_state }} {{ driver_source }} {{ driver_version }}
      {{ driver_runfile }} {{ driver_runfile_sha256 }}.
"""
FILE = "/files/NVIDIA-Linux-x86_64-570.133.10-vgpu-kvm.run"


def gpu_node(node: Node, version: str = "") -> dict[str, Any]:
    return {
        "python": {"version": "3.11.2", "executable": "/usr/bin/python3"},
        "gpus": gpus.pci(node)[0],
        "driver": {"version": version, "excluded": {"cards": []}},
        "vgpu": facts.facts(node),
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vgpu")
    ours = folder / "collections/ansible_collections/kubegpu/share"
    for name in ("node_facts", "driver"):
        (ours / "roles" / name / "tasks").mkdir(parents=True)
        (ours / "roles" / name / "tasks/main.yml").write_text("[]\n" if name == "node_facts" else SAY)
    (ours / "meta").symlink_to(ROOT / "meta")
    (ours / "plugins").symlink_to(ROOT / "plugins")
    (ours / "roles/vgpu").symlink_to(ROOT / "roles/vgpu")
    made, bare, dead = Node("vendor"), Node("vendor"), Node("vendor")
    run(made, entry(A10_4Q=2))
    dead.folders.clear()
    file = {"vgpu_manager_file": FILE, "vgpu_manager_sha256": "0" * 64}
    hosts = {
        "made": {"gpu_node": gpu_node(made, "570.133.10"), **file},
        "foreign": {"gpu_node": gpu_node(bare), **file, "vgpu_state": "external"},
        "undone": {"gpu_node": gpu_node(bare), **file, "vgpu_state": "absent"},
        "dry": {"gpu_node": gpu_node(bare), **file},
        "dead": {"gpu_node": gpu_node(dead)},
    }
    common = {
        "vgpu_layout": "mine",
        "vgpu_layouts": layout(entry(A10_4Q=2)),
        "ansible_host": "192.0.2.1",
        "ansible_python_interpreter": sys.executable,
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": common}}))
    (folder / "play.yml").write_text(PLAY)
    words = ("-i", "hosts.yml", "play.yml", "--check")
    done = ansible(folder, "ansible-playbook", *words, ANSIBLE_COLLECTIONS_PATH=str(folder / "collections"))
    assert "PLAY RECAP" in done.text, done.text[-3000:]
    return done.text


def test_the_vgpu_manager_is_role_drivers(text):
    for host, state in (("made", "present"), ("dry", "present"), ("undone", "absent")):
        assert f"{host} gets driver {state} runfile 570.133.10 {FILE} {'0' * 64}." in text
    assert "foreign gets driver" not in text and "dead gets driver" not in text


def test_nodes_without_a_change_arent_connected_to_and_others_are_refused_in_check_mode(text):
    recap = text.split("PLAY RECAP")[1]
    for host in ("made", "foreign", "undone", "dry"):
        assert f"{host} " in recap and f"[{host}]: FAILED" not in text and f"[{host}]: UNREACHABLE" not in text, text
    assert "this machine's init isn't systemd" in text.split("fatal: [dead]: FAILED")[1].split("\n\n")[0], text[-3000:]
