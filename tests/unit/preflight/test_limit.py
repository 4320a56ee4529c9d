# SPDX-License-Identifier: GPL-3.0-or-later
"""A --limit that leaves out what a playbook needs is refused: it would end well and have done nothing."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible_runs import ROOT, ansible, write_inventory

PLAYBOOKS = {path.stem: path for path in sorted((ROOT / "playbooks").glob("*.yml"))}
FIRST = "limit.yml"
GROUPS = {"gpu_nodes": ["gpu1", "gpu2"], "control_plane": ["cp1", "cp2"]}
LOCALHOST = "--limit gpu1 leaves out localhost, {}: add it (--limit 'localhost,gpu1')"
REFUSED = {
    "acceptance": ("gpu1", LOCALHOST.format("which creates the workloads")),
    "add_node": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "build_images": ("gpu1", LOCALHOST.format("where the image is built")),
    "init": ("gpu1", LOCALHOST.format("which writes the inventory")),
    "inspect": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "nodes": ("cp1", "--limit cp1 leaves out gpu_nodes, whose machines it prepares: add it (--limit 'gpu_nodes,cp1')"),
    "plan": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "preflight": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "readonly_access": ("gpu1", LOCALHOST.format("which creates the account")),
    "site": ("gpu1", LOCALHOST.format("which reads the cluster")),
    "switch": ("cp1", "--limit cp1 leaves out gpu_nodes, whose nodes it switches: add it (--limit 'gpu_nodes,cp1')"),
    "uninstall": (
        "cp1",
        "--limit cp1 leaves out localhost and gpu_nodes, where it would clean up: "
        "add it (--limit 'localhost,gpu_nodes,cp1')",
    ),
    "verify": ("gpu1", LOCALHOST.format("which runs the checks")),
}
# The others' first play is the same, which a test of the files shows.
USUAL = ("preflight", "nodes", "uninstall", "build_images")


def play(folder, playbook, *words, groups=GROUPS, **variables):
    write_inventory(folder, groups, **variables)
    return ansible(folder, "ansible-playbook", "-i", "hosts.yml", playbook, *words)


def first_import(path):
    """The first entry of a playbook, and of the one that it imports first."""
    first = yaml.safe_load(path.read_text())[0]
    imported = first.get("ansible.builtin.import_playbook")
    return first if imported in (None, FIRST) else first_import(path.with_name(imported))


def test_every_playbook_begins_with_the_refusal():
    assert set(REFUSED) == set(PLAYBOOKS) - {"limit"}
    for name in REFUSED:
        assert first_import(PLAYBOOKS[name])["ansible.builtin.import_playbook"] == FIRST, name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in REFUSED]
)
def test_a_limit_that_would_leave_nothing_to_do(tmp_path, name):
    limit, said = REFUSED[name]
    done = play(tmp_path, PLAYBOOKS[name], "--limit", limit)
    assert done.rc == 2 and said in done.text and "failed=1" in done.text, done.text
    assert done.text.count("TASK [") == 1, done.text


def test_a_group_without_hosts_is_nothing_to_do(tmp_path):
    done = play(tmp_path, PLAYBOOKS["nodes"], groups={"control_plane": ["cp1"]})
    assert done.rc == 2 and "The group gpu_nodes has no host: there is nothing to do" in done.text, done.text


def needs(tmp_path, *words, groups=GROUPS, **needed):
    """Run the refusal alone."""
    given = {"__preflight_needs": {"why": "which it needs", **needed}}
    done = play(tmp_path, PLAYBOOKS["limit"], "-e", json.dumps(given), *words, groups=groups)
    return done.rc, done.text


def test_a_run_without_a_limit_has_no_task_more(tmp_path):
    rc, text = needs(tmp_path, hosts=["localhost"], names=["localhost"])
    assert rc == 0 and "TASK [" not in text, text


@pytest.mark.parametrize("limit", ["localhost,gpu1", "gpu*,localhost,!gpu2", "@hosts.txt"])
def test_a_limit_with_localhost_in_any_form(tmp_path, limit):
    (tmp_path / "hosts.txt").write_text("gpu1\nlocalhost\n")
    rc, text = needs(tmp_path, "--limit", limit, hosts=["localhost"], names=["localhost"])
    assert rc == 0 and "skipped=1" in text, text


def test_a_pattern_of_many_hosts_is_not_listed(tmp_path):
    groups = {"gpu_nodes": [f"gpu{at}" for at in range(5)]}
    rc, text = needs(tmp_path, "--limit", "gpu*:!gpu4", groups=groups, hosts=["localhost"], names=["localhost"])
    assert rc == 2, text
    assert "--limit gpu*:!gpu4 leaves out localhost, which it needs: add it (--limit 'localhost,HOST,…')" in text, text


def test_each_host_may_be_needed(tmp_path):
    """As of uninstall.yml: a scheduler that keeps its configuration asks an extender that is gone."""
    rc, text = needs(tmp_path, "--limit", "localhost,cp1", hosts=["cp1", "cp2"], every=True)
    assert rc == 2 and "leaves out cp2, which it needs: add it (--limit 'cp2,cp1,localhost')" in text, text
    for hosts, limit in ((["cp1"], "localhost,cp1"), ([], "gpu1")):
        rc, text = needs(tmp_path, "--limit", limit, hosts=hosts, every=True)
        assert rc == 0, text


def test_add_node_takes_no_limit_without_a_node(tmp_path):
    """It would be site.yml for all nodes."""
    done = play(tmp_path, PLAYBOOKS["add_node"], "--limit", "localhost,cp1")
    assert done.rc == 2 and "Name the node that joins: -e add_node=NODE" in done.text, done.text
