# SPDX-License-Identifier: GPL-3.0-or-later
"""What "enforced" promises, by the plugin's real process, real control groups and the simulated driver of branch R615.

The container toolkit is older than 1.20.1: it sets no limit. The container sees every card, as with
NVIDIA_VISIBLE_DEVICES=all. The driver refuses a limit below what a container holds.
"""

from __future__ import annotations

import os
import subprocess
import typing as t
from pathlib import Path

import pytest
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import R615, identifier
from plugin_fakes import NODE, Node, make_pod, until
from test_limits_real import VERSION_2, namespaces
from test_plugin_process import Process

PODS = f"/sys/fs/cgroup/kubepods-process{os.getpid()}.slice"
SCRIPT = f'mount --make-rprivate / && {VERSION_2} && mkdir -p "$0" && echo $$ > "$0/cgroup.procs" && exec "$@"'


def inside(folder: str) -> tuple[str, ...]:
    """Return the words that run a command in this cgroup, with version 2 mounted in a namespace of its own."""
    return "unshare", "-m", "sh", "-c", SCRIPT, folder


class Container:
    """A container's processes; ``id`` as the runtime makes it."""

    def __init__(self, process: Process, driver: Path, number: int) -> None:
        self._process, self._driver = process, driver
        # The plugin finds a container by its ID alone, whichever run has made it.
        self.id = identifier(os.getpid() << 32 | number)
        self.folder = f"{PODS}/cri-containerd-{self.id}.scope"
        self.programs: list[subprocess.Popen[str]] = []

    def hold(self, mib: int, card: int) -> str:
        """Run a program that allocates so much memory and keeps it; return its output."""
        program = subprocess.Popen(
            [*inside(self.folder), str(self._driver / "nvidia-smi"), "simulated-allocation", str(mib), "-i", str(card)],
            env=self._process.driver_environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.programs.append(program)
        assert program.stdout is not None
        return program.stdout.readline().strip()

    def release(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
        self.programs = []


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory, drivers: dict[str, Path]) -> t.Iterator[Process]:
    namespaces()
    one = Process(tmp_path_factory.mktemp("p"), drivers[R615] / "usr" / "lib64", R615)
    # As in a pod: it tries its first limit on its own cgroup.
    one.started_by = inside(f"{PODS}/cri-containerd-{identifier(99)}.scope")
    yield one
    one.close()
    emptied = f'{VERSION_2} && find {PODS} -depth -type d -exec rmdir "{{}}" ";"'
    subprocess.run(["unshare", "-m", "sh", "-c", f"mount --make-rprivate / && {emptied}"], check=True)


def limits(node: Node) -> list[str]:
    return [card.limit for card in contract.node_cards(node.kube.node())]


def state(node: Node) -> str:
    return str(node.kube.node()["metadata"]["annotations"].get(contract.NODE_LIMIT))


def messages(node: Node, name: str) -> dict[str, str]:
    return {event["reason"]: event["message"] for event in node.kube.events if event["involvedObject"]["name"] == name}


def test_scenario_g_foreign_memory_is_none_or_an_event_and_the_node_is_not_enforced(
    process: Process, drivers: dict[str, Path]
) -> None:
    node = process.node
    node.kubelet.start()
    process.start()
    until(lambda: node.kubelet.registered and state(node) == "enforced" and limits(node) == ["enforced"] * 2, 60)
    pod = make_pod("greedy", 2, booked=0)
    node.kube.put(pod)
    node.kubelet.add(pod)
    container = Container(process, drivers[R615], 1)
    try:
        # Before the plugin has seen it.
        assert container.hold(700, card=1) == "holding 700 MiB"
        started = node.kube.pod("greedy")
        running = {"name": "c0", "containerID": f"containerd://{container.id}", "state": {"running": {}}}
        started["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z", "containerStatuses": [running]}
        node.kube.put(started)
        until(lambda: limits(node) == ["enforced", "ForeignMemoryHeld"], 60, "the card of others isn't enforced")
        until(lambda: "GpuMemoryExceeded" in messages(node, "greedy") and "GpuMemoryExceeded" in messages(node, NODE))
        text = "ForeignMemoryHeld: container c0 of pod default/greedy holds 700 MiB of card 1, which it wasn't given"
        for name in ("greedy", NODE):
            assert messages(node, name)["GpuMemoryExceeded"].startswith(text)
        assert state(node).startswith(f"unenforced: {text}")
        # It gets no more of that card, and its share of its own.
        assert container.hold(2, card=1) == "Insufficient Memory"
        assert container.hold(2049, card=0) == "Insufficient Memory" and container.hold(2000, card=0).startswith("hold")
        container.release()
        until(lambda: state(node) == "enforced" and limits(node) == ["enforced"] * 2, 90, "enforced again")
        assert container.hold(2, card=1) == "Insufficient Memory"
    finally:
        container.release()
    assert "Traceback" not in process.log
