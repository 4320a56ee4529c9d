# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults of nodes during a run: each is reported, and the node is unchanged or finished by the next run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from _lab import ROOT, Lab, until
from _snapshot import node_state

from lab import engine as engines

NODES = "playbooks/nodes.yml"
# A change of the runtime's configuration that one variable asks for.
CHANGE = ("-e", "runtime_set_default=false")
DROP_IN = "/etc/containerd/conf.d/99-kubegpu-nvidia.toml"
UNIT = "/run/systemd/system/containerd.service.d/kubegpu-test.conf"


@pytest.fixture
def node(lab: Lab) -> str:
    return lab.gpu_nodes[0]


@contextlib.contextmanager
def fault(lab: Lab, node: str, words: str) -> Iterator[None]:
    """Inject a fault into the simulated driver."""
    path = ROOT / lab.nodes[node]["hardware"] / "cards"
    healthy = path.read_text()
    cards = lab.cards(node)
    try:
        path.write_text(f"{healthy}fault {words}\n")
        yield
    finally:
        path.write_text(healthy)
    until(lambda: lab.cards(node) == cards and lab.allocatable(node) > 0, "the cards as before", 120)


@pytest.mark.parametrize(
    ("words", "id", "said"),
    [
        ("init:18", "driver-mismatch", "version mismatch"),
        pytest.param("slow:60", "driver-fails", "nvidia-smi didn't finish within 20 s", marks=pytest.mark.long),
    ],
)
def test_a_failing_driver_is_reported_and_nothing_changes(lab: Lab, node: str, words: str, id: str, said: str) -> None:
    before = node_state(lab, node)
    with fault(lab, node, words):
        done = lab.playbook(NODES, "--limit", node)
        assert done.rc != 0
        assert any(line.split()[1:3] == [id, node] for line in done.out.splitlines()), done.out[-6000:]
        sentence = [line for line in done.out.splitlines() if node in line and said in line]
        assert sentence, done.out[-6000:]
        assert done.recap[node]["changed"] == 0
    # The run at the end of the next test shows that nothing is left to do.
    assert node_state(lab, node) == before


def test_a_runtime_that_does_not_start_is_rolled_back(lab: Lab, node: str) -> None:
    before = node_state(lab, node)
    lab.ssh(
        node,
        f"mkdir -p $(dirname {UNIT}); printf '[Service]\\nExecStartPre=/bin/grep -q default_runtime_name {DROP_IN}\\n'"
        f" > {UNIT}; systemctl daemon-reload",
    )
    try:
        done = lab.playbook(NODES, "--limit", node, *CHANGE)
        assert done.rc != 0
        assert "it runs with the old one" in done.out, done.out[-6000:]
        assert lab.ssh(node, "systemctl is-active containerd").strip() == "active"
        assert node_state(lab, node) == before
    finally:
        lab.ssh(node, f"rm -f {UNIT}; systemctl daemon-reload")
    lab.playbook(NODES, "--limit", node).assert_unchanged()


@pytest.mark.long
def test_a_full_disk_changes_nothing(lab: Lab, node: str) -> None:
    before = node_state(lab, node)
    folder = "/etc/containerd/conf.d"
    # A file system of one page over the folder, filled: what is there can be read and nothing can be written.
    lab.ssh(
        node,
        f"cp -a {folder} /run/kubegpu-test && mount -t tmpfs -o size=8k,nr_inodes=4 none {folder}"
        f" && cp -a /run/kubegpu-test/. {folder}/ && (dd if=/dev/zero of={folder}/fill bs=4k 2>/dev/null; true)",
    )
    try:
        done = lab.playbook(NODES, "--limit", node, *CHANGE)
        assert done.rc != 0
        assert "No space left on device" in done.out, done.out[-6000:]
        assert lab.ssh(node, "systemctl is-active containerd").strip() == "active"
    finally:
        lab.ssh(node, f"umount {folder}; rm -rf /run/kubegpu-test")
    assert node_state(lab, node) == before
    lab.playbook(NODES, "--limit", node).assert_unchanged()


@pytest.mark.long
def test_a_node_lost_during_a_run_is_finished_by_the_next(lab: Lab, node: str) -> None:
    before = node_state(lab, node)
    container, engine = lab.nodes[node]["container"], engines.find()
    assert engine is not None
    # containerd starts late, so that the node is surely lost between its new configuration and the proof of it.
    lab.ssh(
        node,
        f"mkdir -p $(dirname {UNIT}); printf '[Service]\\nExecStartPre=/bin/sleep 15\\n' > {UNIT};"
        " systemctl daemon-reload",
    )
    watch = f"while grep -q default_runtime_name {DROP_IN}; do sleep 0.05; done"
    gone = threading.Thread(
        target=lambda: (engine.docker("exec", container, "sh", "-c", watch), engine.docker("kill", container))
    )
    gone.start()
    try:
        done = lab.playbook(NODES, "--limit", node, *CHANGE)
        assert done.rc != 0
        gone.join(60)
        assert not gone.is_alive() and not engine.containers()[container]
    finally:
        lab.manage("up")
        lab.ssh(node, f"rm -f {UNIT}; systemctl daemon-reload")
    # The record of what was there before outlived the node.
    assert "containerd.json" in lab.ssh(node, "ls /var/lib/kubegpu-share")
    again = lab.playbook(NODES, "--limit", node, *CHANGE)
    assert again.rc == 0, again.out[-6000:]
    assert "containerd.json" not in lab.ssh(node, "ls /var/lib/kubegpu-share")
    # And back to what it was. A pod keeps the runtime that it was made with, so the plugin's is made anew.
    assert lab.playbook(NODES, "--limit", node).rc == 0
    for pod in lab.server_pods("gpushare-device-plugin"):
        if pod["spec"]["nodeName"] == node:
            lab.api.delete(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}")
    until(lambda: lab.allocatable(node) > 0, "the cards announced again", 180)
    assert node_state(lab, node) == before
    lab.playbook(NODES, "--limit", node).assert_unchanged()


def test_faults_leave_nothing_behind(lab: Lab, node: str) -> None:
    assert lab.ssh(node, f"ls {UNIT} /run/kubegpu-test 2>/dev/null; true").strip() == ""
