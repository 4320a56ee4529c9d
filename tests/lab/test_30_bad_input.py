# SPDX-License-Identifier: GPL-3.0-or-later
"""Unusable input is refused before anything changes, in one sentence that names the variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from _lab import ROOT, Done, Lab
from _snapshot import everything

SITE = "playbooks/site.yml"


def refused(done: Done, variable: str) -> str:
    """Assert that a run failed without a change; return what it says of the variable, in one line."""
    assert done.rc != 0, done.out[-4000:]
    assert done.recap, done.out[-4000:]
    assert {host: sums["changed"] for host, sums in done.recap.items() if sums["changed"]} == {}
    assert "Traceback" not in done.out
    # An entry of preflight's list, or the failure of a task.
    entries = re.split(r"(?m)^(?=problem |warning |note |TASK |\[ERROR\])", done.out)
    said = [entry for entry in entries if variable in entry and entry.startswith(("problem ", "[ERROR]"))]
    assert said, f"no failure names {variable}:\n{done.out[-6000:]}"
    return " ".join(said[0].split())


def extended(lab: Lab, folder: Path, group: str, host: str, address: str) -> str:
    """Return options for the lab's inventory with one more host."""
    source = folder / "more.yml"
    access = lab.state["ssh"]
    variables = {
        "ansible_host": address,
        "ansible_user": access["user"],
        "ansible_ssh_private_key_file": str(ROOT / access["key"]),
        "ansible_ssh_common_args": f"-F none -o UserKnownHostsFile={ROOT / access['known_hosts']}",
    }
    source.write_text(yaml.safe_dump({group: {"hosts": {host: variables}}}))
    return str(source)


@pytest.fixture(scope="module", autouse=True)
def nothing_changes(lab: Lab) -> Iterator[None]:
    before = everything(lab)
    yield
    assert everything(lab) == before


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "content", [pytest.param(None, marks=LONG), pytest.param("not a kubeconfig", marks=LONG), "wrong port"]
)
def test_unusable_kubeconfig(lab: Lab, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if content == "wrong port":
        path.touch(mode=0o600)
        path.write_text((ROOT / lab.state["kubeconfig"]).read_text().replace(":6443", ":6444"))
    elif content:
        path.write_text(content)
    refused(lab.playbook(SITE, "-e", f"gpu_kubeconfig={path}"), "gpu_kubeconfig")


@pytest.mark.long
def test_gpu_node_that_is_not_in_the_cluster(lab: Lab, tmp_path: Path) -> None:
    more = extended(lab, tmp_path, "gpu_nodes", "ghost", lab.nodes[lab.gpu_nodes[0]]["address"])
    said = refused(lab.playbook(SITE, "-i", more), "gpu_node")
    assert "ghost" in said


@pytest.mark.long
def test_node_without_a_gpu(lab: Lab, tmp_path: Path) -> None:
    name = lab.control_planes[0]
    more = extended(lab, tmp_path, "gpu_nodes", name, lab.nodes[name]["address"])
    said = refused(lab.playbook(SITE, "-i", more), "gpu_nodes")
    assert name in said
