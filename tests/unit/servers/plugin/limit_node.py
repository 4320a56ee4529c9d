# SPDX-License-Identifier: GPL-3.0-or-later
"""A program in a mount namespace of its own: a node with real cgroups, the real nvidia-ml-py and NVIDIA's real hook.

Simulated are the card, the driver (lab/driver, as branch R615), kubelet and the runtime: a container's cgroup is
created with a process in it, and ``nvidia-cdi-hook apply-cuda-memory-limits`` runs as by a runtime.

usage: limit_node.py SCENARIO..., with settings in the environment. It prints one line of JSON, the reports by scenario.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

from gpushare.kubelet.pod_resources import Entry
from gpushare.node.cgroups import NodeCgroups
from gpushare.nvml.limits import NvidiaLimits
from gpushare.plugin.leftovers import ENDING_SECONDS, Leftovers
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.shared._contracts import gpushare as contract

ROOT = Path("/sys/fs/cgroup")
FOLDER = Path(os.environ["LIMIT_FOLDER"])
HOOK = os.environ["LIMIT_HOOK"]
DRIVER = Path(os.environ["LIMIT_DRIVER"])
FIRST, SECOND = os.environ["LIMIT_CARDS"].split(",")
CARDS = (contract.Card(0, FIRST, 1, 16384, 16), contract.Card(1, SECOND, 3, 8192, 8))
# Two runs in one hierarchy have different names.
PODS = ROOT / f"kubepods-test{os.getpid()}.slice"


def identifier(number: int) -> str:
    # The plugin finds a container by its ID alone, whichever run has made it.
    return f"{os.getpid():032x}{number:032x}"


class Container:
    """A container's cgroup with a process in it."""

    def __init__(self, number: int) -> None:
        self.id = identifier(number)
        self.folder = PODS / "kubepods-podaa_bb.slice" / f"cri-containerd-{self.id}.scope"
        self.folder.mkdir(parents=True)
        self.programs: list[subprocess.Popen[str]] = []
        self.process = self.run("sleep", "600")
        # A runtime runs hooks only once the process is in its cgroup.
        for _turn in range(1000):
            if str(self.process.pid) in (self.folder / "cgroup.procs").read_text().split():
                return
            time.sleep(0.02)
        raise TimeoutError(f"{self.process.pid} isn't in {self.folder}")

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Run a program in the container's cgroup, as exec does."""
        script = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
        one = subprocess.Popen(
            ["sh", "-c", script, "sh", str(self.folder), *command], stdout=subprocess.PIPE, text=True
        )
        self.programs.append(one)
        return one

    def hold(self, mib: int, card: int = 0) -> str:
        """Run a program that allocates so much memory and keeps it; return its output."""
        smi = self.run(str(DRIVER / "nvidia-smi"), "simulated-allocation", str(mib), "-i", str(card))
        assert smi.stdout is not None
        return smi.stdout.readline().strip()

    def hook(self, environment: t.Mapping[str, str], *cards: str) -> tuple[int, str]:
        """Run NVIDIA's hook as the runtime does when it creates the container; return exit status and last line."""
        bundle = FOLDER / f"bundle-{self.id}"
        bundle.mkdir(exist_ok=True)
        spec = {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "process": {"env": [f"{name}={value}" for name, value in environment.items()]},
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        state = {"ociVersion": "1.0.2", "id": self.id, "pid": self.process.pid, "bundle": str(bundle)}
        arguments = [f"--gpu-id={uuid}" for uuid in cards or (FIRST,)]
        done = subprocess.run(
            [HOOK, "apply-cuda-memory-limits", f"--driver-root={DRIVER}", *arguments],
            input=json.dumps(state), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return done.returncode, lines[-1] if lines else ""

    def end(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()
        self.programs = []
        # The kernel removes the processes from the cgroup a moment after they are reaped.
        for _turn in range(100):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.02)


class Node:
    def __init__(self, mode: str = "auto") -> None:
        self.containers: dict[str, tuple[Container, int, tuple[str, ...]]] = {}
        self.made: list[Container] = []
        self.mode = mode
        self.plugin: subprocess.Popen[str] | None = None

    def start(self) -> LimitEnforcer:
        """Start the plugin in this process, in a cgroup of its own."""
        own = PODS / "kubepods-podplugin.slice" / f"cri-containerd-{identifier(99)}.scope"
        own.mkdir(parents=True, exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        self.enforcer = LimitEnforcer(self.mode, "GiB", NvidiaLimits(), NodeCgroups(str(ROOT)))
        self.enforcer.probe(CARDS)
        return self.enforcer

    def create(self, name: str, units: int, *cards: str) -> Container:
        one = Container(len(self.made) + 1)
        self.made.append(one)
        self.containers[name] = (one, units, cards or (FIRST,))
        return one

    def listed(self) -> tuple[list[t.Any], list[Entry]]:
        """Return the pods of the API, and kubelet's list."""
        pods, listing, slots = [], [], dict.fromkeys((FIRST, SECOND), 0)
        shorts = contract.short_uuids([FIRST, SECOND])
        for name, (container, units, cards) in self.containers.items():
            given = []
            for uuid in cards:
                given += [contract.device_id(shorts[uuid], slots[uuid] + k) for k in range(units)]
                slots[uuid] += units
            wants = {contract.RESOURCE_MEMORY: str(len(given))}
            pods.append(
                {
                    "metadata": {"namespace": "default", "name": name, "uid": name},
                    "spec": {"nodeName": "n", "containers": [{"name": "x", "resources": {"limits": wants}}]},
                    "status": {
                        "phase": "Running",
                        "containerStatuses": [
                            {"name": "x", "containerID": f"containerd://{container.id}", "state": {"running": {}}}
                        ],
                    },
                }
            )
            listing.append(Entry(f"default/{name}", {"x": tuple(given)}))
        return pods, listing

    def once(self) -> list[str]:
        found = self.enforcer.once(CARDS, *self.listed())
        return [f"{one.reason}: {one.message}" for one in found if one.pod is not None]

    def environment(self, name: str) -> dict[str, str]:
        _one, units, cards = self.containers[name]
        return self.enforcer.environment(dict.fromkeys(cards, units))

    def limit(self, name: str, uuid: str = FIRST) -> list[int] | None:
        found = NvidiaLimits().get(uuid, str(self.containers[name][0].folder))
        return None if found is None else [found.soft >> 20, found.hard >> 20, found.used >> 20]

    def down(self) -> None:
        with contextlib.suppress(OSError):
            (ROOT / "cgroup.procs").write_text(str(os.getpid()))
        for one in self.made:
            one.end()
        for path in sorted(PODS.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        if PODS.exists():
            PODS.rmdir()


def enforced(node: Node) -> dict[str, t.Any]:
    """Everything is new enough."""
    enforcer = node.start()
    report: dict[str, t.Any] = {"state": enforcer.state, "own": NvidiaLimits().get(FIRST, str(NodeCgroups().own()))}
    # The toolkit limits the container before its process runs.
    good = node.create("good", 3)
    report["hook"] = good.hook(node.environment("good"))
    report["good"] = node.limit("good")
    report["events"] = node.once()
    report["corrected"] = enforcer.corrected
    report["allocations"] = [good.hold(2000), good.hold(2000), good.hold(1000)]
    # A toolkit without limits sets nothing.
    silent = node.create("silent", 2)
    report["silent before"] = node.limit("silent")
    node.once()
    report["silent"] = node.limit("silent")
    report["silent beyond"] = silent.hold(2049)
    # As with NVIDIA_VISIBLE_DEVICES=all: every process here sees both cards.
    report["silent elsewhere"] = silent.hold(2, card=1)
    # A pod that sets NVIDIA_GPU_MEMORY_LIMIT itself, and NVIDIA_VISIBLE_DEVICES=all.
    greedy = node.create("greedy", 1)
    report["greedy hook"] = greedy.hook({"NVIDIA_GPU_MEMORY_LIMIT": "8000"}, FIRST, SECOND)
    report["greedy before"] = [node.limit("greedy"), node.limit("greedy", SECOND)]
    report["greedy events"] = node.once()
    report["greedy"] = [node.limit("greedy"), node.limit("greedy", SECOND)]
    report["greedy elsewhere"] = greedy.hold(2, card=1)
    # Two cards, the same share of each.
    wide = node.create("wide", 4, FIRST, SECOND)
    report["wide hook"] = wide.hook(node.environment("wide"), FIRST, SECOND)
    node.once()
    report["wide"] = [node.limit("wide"), node.limit("wide", SECOND)]
    report["usage"] = {uuid: [one.containers, one.limited_mib, one.used_mib] for uuid, one in enforcer.usage.items()}
    # A new process of the plugin finds it all.
    report["after a restart"] = [node.start().state, node.once(), node.enforcer.corrected]
    # A container that ends takes its limit with it.
    folder = greedy.folder
    greedy.end()
    del node.containers["greedy"]
    folder.mkdir()
    report["gone with its cgroup"] = NvidiaLimits().get(FIRST, str(folder)) is None
    report["state in the end"] = [node.once(), node.enforcer.state]
    return report


def outlives(node: Node) -> dict[str, t.Any]:
    """A pod is deleted by force; its process ignores SIGTERM and keeps the memory."""
    node.start()
    # Whenever it is read, the processes have had their time to end.
    times = itertools.count(0.0, ENDING_SECONDS)
    left = Leftovers(NodeCgroups(str(ROOT)), lambda: next(times))
    one = node.create("one", 3)
    one.process.kill()
    one.process.wait()
    stubborn = one.run("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    report: dict[str, t.Any] = {"holds": one.hold(2000)}
    listed = node.listed()
    node.once()
    report["while it runs"] = len(left.observe(*listed))
    for each in one.programs[1:]:
        each.send_signal(signal.SIGTERM)
    # The program that holds the memory ends by SIGTERM; another of the container's takes its place.
    one.programs[2].wait()
    report["held again"] = one.hold(1500)
    del node.containers["one"]
    report["at first"] = len(left.observe([], []))
    found = left.observe([], [])
    report["left"] = [(holder.pod, len(holder.ids)) for holder in found]
    report["taken"] = len(left.taken(found[0].ids)) if found else 0
    for each in one.programs[1:]:
        each.kill()
        each.wait()
    for _turn in range(100):
        if not left.observe([], []):
            break
        time.sleep(0.02)
    report["after its end"] = [len(left.observe([], [])), len(left.taken(found[0].ids)) if found else 0]
    return report


def lifted(node: Node) -> dict[str, t.Any]:
    """A container with every privilege removes its limit, as these processes have them."""
    node.start()
    one = node.create("one", 2)
    report: dict[str, t.Any] = {"events": node.once(), "limit": node.limit("one")}
    words = ("--soft-limit", "0", "--hard-limit", "max", "-i", "0")
    one.run(str(DRIVER / "nvidia-smi"), "memory-limits", "--set", "-n", str(one.folder), *words).wait()
    report["lifted"] = node.limit("one")
    report["holds"] = one.hold(5000)
    report["events after"] = node.once()
    report["state"], report["more"] = node.enforcer.state, one.hold(100)
    return report


def impossible(node: Node) -> dict[str, t.Any]:
    """Something is missing: the plugin requests nothing, so NVIDIA's hook can't fail."""
    enforcer = node.start()
    one = node.create("one", 3)
    report: dict[str, t.Any] = {"state": enforcer.state, "refusal": enforcer.refusal(FIRST)}
    report["environment"] = enforcer.environment({FIRST: 3})
    report["hook, without a request"] = one.hook(enforcer.environment({FIRST: 3}))
    report["hook, requested by a pod"] = one.hook({"NVIDIA_GPU_MEMORY_LIMIT": "3072"})
    return report


SCENARIOS = {
    "enforced": enforced,
    "outlives": outlives,
    "lifted": lifted,
    "impossible": impossible,
}


def main() -> None:
    reports = {}
    for scenario in sys.argv[1:]:
        node = Node(os.environ.get("LIMIT_MODE", "auto"))
        try:
            reports[scenario] = SCENARIOS[scenario](node)
        finally:
            node.down()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
