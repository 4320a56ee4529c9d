# SPDX-License-Identifier: GPL-3.0-or-later
"""A second person's path: an empty home, PyPI, the tarball, the lab as the cluster, and README's commands as written.

It begins with a cluster that knows nothing of the collection, and ends with it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from _lab import LAB, ROOT, Lab

from lab.inventory import inventory

sys.path.insert(0, str(ROOT / "tests"))

import built_collection
import reader
import readme

pytestmark = pytest.mark.long


def ssh_arguments(variables: dict[str, str]) -> str:
    """Return what a user has in his own SSH configuration: the key, and the machines' keys."""
    key = shlex.quote(variables["ansible_ssh_private_key_file"])
    return f"{variables['ansible_ssh_common_args']} -o IdentityFile={key}"


def options(state: dict[str, object]) -> str:
    """Return the lab's own options, which a user would write into his inventory: its repositories and its image."""
    own = yaml.safe_load((ROOT / "inventories/lab/group_vars/all.yml").read_text())
    del own["gpu_kubeconfig"]
    return yaml.safe_dump({**inventory(state)["all"]["vars"], **own}, sort_keys=False)


def test_readme_leads_from_an_empty_directory_to_a_cluster_that_shares_cards(lab: Lab, tmp_path: Path) -> None:
    bare = lab.playbook("playbooks/uninstall.yml")
    assert bare.rc == 0, bare.out[-4000:]
    state = json.loads((LAB / "state.json").read_text())
    described = inventory(state)
    [*_others, variables] = described["_meta"]["hostvars"].values()
    person = reader.Reader(tmp_path, ANSIBLE_SSH_ARGS=ssh_arguments(variables))
    built_collection.build(tmp_path)
    (tmp_path / ".kube").mkdir()
    shutil.copy(LAB / "kubeconfig", tmp_path / ".kube/config")
    install, _git, init, usual, rest = (block.commands for block in readme.on_a_cluster())

    person.types(install)
    person.types(init)
    written = yaml.safe_load((tmp_path / "inventory/hosts.yml").read_text())
    found = {group: sorted(written[group]["hosts"]) for group in ("gpu_nodes", "control_plane")}
    assert found == {group: sorted(described[group]["hosts"]) for group in found}
    with (tmp_path / "inventory/group_vars/all/main.yml").open("a") as file:
        file.write(options(state))

    said = {command: person.types([command]) for command in usual}
    [site, inspect] = [said[command] for command in usual if command.endswith((".site", ".inspect"))]
    assert sum(map(int, re.findall(r"changed=(\d+)", site))) > 0
    assert "Allocated/Total GPU memory of the cluster" in inspect
    assert str(ROOT / "roles") not in site
    assert all(lab.allocatable(name) > 0 for name in lab.gpu_nodes)

    for command in rest:
        person.types([command])
    assert all(lab.allocatable(name) == 0 for name in lab.gpu_nodes)
