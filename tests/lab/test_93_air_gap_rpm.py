# SPDX-License-Identifier: GPL-3.0-or-later
"""dnf takes an archive's packages by HTTP, on a machine whose packets to anything else are counted.

The machine is the lab's: a real package manager, and packages, keys and the rest of the system as lab/README.md has it.
It resolves the packages itself before its network is closed, as a machine of the same kind would outside. The lab's
SUSE has no repository of its distribution, without which nothing can be resolved as for an empty machine: zypper is
in ``tests/unit/airgap/test_airgap_rpm.py``, which needs no lab, and so is what somebody changes on the way.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import _airgap as airgap
import pytest
import yaml
from _closed import ELSEWHERE, ELSEWHERE_6, Closed, Member, joined, members_of, served
from _lab import ROOT, Done, JsonObject, Lab

from lab import engine as engines
from lab.inventory import machines

pytestmark = pytest.mark.long

FILES = 103
VERSION = "580.95.05"
NAME = "el9-containerd"
# The distribution's own repositories, of which the closed network has no server.
REPOSITORIES, ASIDE = "/etc/yum.repos.d", "/root/repositories-aside"


class Machine:
    """A machine with its archive, which is made, brought to a server of the closed network, and named by variables."""

    def __init__(self, lab: Lab, name: str, folder: Path, files: Member) -> None:
        self.lab, self.name, self.folder, self.files = lab, name, folder, files
        self.state: JsonObject = lab.state["machines"][name]
        self.url = f"http://{files.address}:{airgap.FILES_PORT}"
        self.inventory = folder / "inventory/hosts.yml"
        found = machines(lab.state)
        host = {name: {key: value for key, value in found["_meta"]["hostvars"][name].items() if key != "lab_packages"}}
        places = self.state["packages"]
        own = {
            "driver_version": VERSION,
            **{f"{role}_repo_key_sha256": places[f"{role}_key_sha256"] for role in ("driver", "toolkit")},
        }
        groups = {group: {"hosts": host} for group in ("gpu_nodes", "airgap_package_hosts")}
        own_file = self.inventory.parent / "group_vars/all/00-own.yml"
        own_file.parent.mkdir(parents=True)
        own_file.write_text(yaml.safe_dump(own))
        self.inventory.write_text(yaml.safe_dump({"all": {"children": groups}}))

    def playbook(self, name: str, **variables: object) -> Done:
        done = self.lab.playbook(
            f"playbooks/{name}.yml", "-e", json.dumps(variables), inventory=str(self.inventory), seconds=1200
        )
        assert done.rc == 0, done.out[-8000:]
        return done

    def shell(self, script: str) -> str:
        engine = engines.find()
        assert engine is not None
        return engine.out("exec", self.state["container"], "sh", "-c", script)

    def carried(self) -> None:
        """Make the archive, and give it to the server inside."""
        needed, made = self.folder / "needed.yml", self.folder / "archive"
        self.playbook("airgap_list", airgap_output=str(needed), airgap_kubernetes="v1.37.2")
        known = airgap.listed(needed)
        # Of what compiles, the lab's distribution has a stub of dkms alone.
        gone = [row for row in known["items"] if row["id"].startswith("packages/compilers/") and row["name"] != "dkms"]
        kept = [row for row in known["items"] if row not in gone]
        needed.write_text(yaml.safe_dump({**known, "items": kept}, sort_keys=False))
        airgap.of_the_labs_repositories(needed, self.lab.state["repository"]["url"], self.state["packages"])
        kinds = ["apt", "rpm", "file"]
        self.playbook("airgap_download", airgap_needed=str(needed), airgap_folder=str(made), airgap_kinds=kinds)
        self.playbook(
            "airgap_push",
            airgap_folder=str(made),
            airgap_unsigned=True,
            airgap_files_folder=str(self.folder / "served"),
            airgap_files_url=self.url,
        )

    @contextlib.contextmanager
    def without_repositories(self) -> Iterator[None]:
        """Take the distribution's repositories off, as who closes a network does."""
        self.shell(f"mv {REPOSITORIES} {ASIDE} && mkdir {REPOSITORIES}")
        try:
            yield
        finally:
            self.shell(f"cp -a {ASIDE}/. {REPOSITORIES}/ && rm -rf {ASIDE}")


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    command = [sys.executable, "-m", "lab", "machine"]
    done = subprocess.run([*command, "up", NAME], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    try:
        lab.load()
        with joined(lab, "files", FILES) as files:
            yield Machine(lab, NAME, tmp_path, files)
    finally:
        subprocess.run([*command, "down", NAME], cwd=ROOT, capture_output=True, check=True)
        lab.load()


def test_driver_and_toolkit_come_from_the_served_folder(lab: Lab, machine: Machine) -> None:
    if key := machine.state["packages"].get("own_key"):
        # The signing key of its distribution, which any installed machine has.
        machine.shell(f"rpm --import {lab.state['repository']['url']}{key}")
    machine.carried()
    [member] = members_of({machine.name: machine.state})
    closed = Closed(lab, member, machine.files)
    serving = served(machine.files, machine.folder / "served", airgap.FILES_PORT)
    with machine.without_repositories(), serving as requests, closed.closed():
        assert closed.tried(member) == [f"{machine.name}: tcp {member.address} > {ELSEWHERE}:443"]
        found = closed.tried(member, ELSEWHERE_6)
        assert found == [f"{machine.name}: tcp {member.address_6} > [{ELSEWHERE_6}]:443"]
        machine.playbook("nodes")
        assert closed.asked() == []
        assert VERSION in machine.shell("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
        assert "nvidia-container-toolkit" in machine.shell("rpm -qa")
        asked = "\n".join(requests)
        assert '.rpm HTTP/1.1" 200' in asked and 'repomd.xml HTTP/1.1" 200' in asked, asked[-2000:]
        # Which signature each repository has, its own package manager checks.
        texts = machine.shell(f"cat {REPOSITORIES}/*.repo")
        assert texts.count(machine.url) >= 2 and "gpgcheck=1" in texts and "gpgcheck=0\nrepo_gpgcheck=0" not in texts
        machine.playbook("nodes").assert_unchanged()
        assert closed.asked() == []
