# SPDX-License-Identifier: GPL-3.0-or-later
"""Simulated coreutils and a run of ansible-playbook, for the toolkit's tests."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_runs import Ran, ansible
from node_fakes import FakeSystem

ROOT = Path(__file__).resolve().parents[3]


def add_coreutils(machine: FakeSystem) -> None:
    """Let cp, mv, rm, cmp and stat work on the machine's files; no file belongs to a package."""

    def cp(argv):
        machine.step()
        machine.files[argv[-1]] = machine.files[argv[-2]]
        return Done(0, "", "")

    def mv(argv):
        machine.step()
        machine.files[argv[-1]] = machine.files.pop(argv[-2])
        return Done(0, "", "")

    def rm(argv):
        machine.step()
        for path in [file for file in machine.files if file.startswith(argv[2] + "/")]:
            del machine.files[path]
        return Done(0, "", "")

    def cmp(argv):
        return Done(0 if machine.files.get(argv[2], 1) == machine.files.get(argv[3], 2) else 1, "", "")

    machine.commands |= {"mkdir": Done(0, "", ""), "stat": Done(0, "640 0:0\n", "")}
    machine.commands |= {"cp -a": cp, "mv": mv, "rm -r": rm, "cmp": cmp}
    machine.commands["dpkg -S"] = Done(1, "", "no path found")


def run_playbook(folder: Path, hosts: dict[str, dict[str, object]], play: dict[str, object], **environment: str) -> Ran:
    """Run a play without facts for all hosts of an inventory.

    :param folder: gets the inventory and the playbook.
    :returns: the exit status and the output.
    """
    (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    (folder / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, **play}]))
    return ansible(folder, "ansible-playbook", "-i", "hosts.json", "play.yml", **environment)
