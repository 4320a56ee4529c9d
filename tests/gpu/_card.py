# SPDX-License-Identifier: GPL-3.0-or-later
"""The first card of this machine, and programs that hold memory of it in control groups named as a pod's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pynvml
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts as node
from unix_http import ask_socket

HERE = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
# Control groups by kubelet's and the runtimes' drivers, below CGROUPS; {unit} is the UID in a unit's name.
SYSTEMD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{unit}.slice/cri-containerd-{id}.scope"
CGROUPFS = "kubepods/besteffort/pod{uid}/{id}"
CRIO = "kubepods.slice/kubepods-pod{unit}.slice/crio-{id}.scope/container"
# Where kubelet has its own, they are elsewhere: it ends the processes of pods that it doesn't know.
TOP = "kubegpu-gpu-test/" if any((CGROUPS / one).exists() for one in ("kubepods", "kubepods.slice")) else ""
# As module nvml_info does it.
FACTS = """
import json, os, sys, time
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import binding, facts, host, protocol, worker
module, user = binding.load(sys.argv[1]), int(sys.argv[2])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
def work(request, send):
    protocol.read(lambda: binding.Library(module), host.NodeHost(), request, send)
print(json.dumps(facts.facts(worker.ForkedWorker(work), time.monotonic, 30)))
"""
# In a PID namespace of its own, with its own /proc.
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def record(name: str, content: t.Any) -> None:
    """Keep what was seen, where a person wants it: a file in $KUBEGPU_GPU_RECORD."""
    if folder := os.environ.get("KUBEGPU_GPU_RECORD"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def facts(user: int = 0) -> JsonObject:
    """What module nvml_info returns to a user of this number.

    In a new process, as on a node: this one may have initialised the library, whose files the module's worker closes.
    """
    done = subprocess.run(
        [sys.executable, "-c", FACTS, str(pynvml.__file__), str(user)],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".collections")},
    )  # fmt: skip
    return t.cast(JsonObject, json.loads(done.stdout))


def first() -> JsonObject:
    """The facts of the first card, of which nothing is missing."""
    found = facts()
    assert (found["available"], found["problem"]) == (True, ""), found
    card: JsonObject = found["cards"][0]
    assert card["problem"] == "", card
    return card


def observed() -> JsonObject:
    """What module gpu_node_info returns."""

    def run(
        argv: t.Sequence[str], data: str | None = None, environ_update: t.Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        environment = {**os.environ, **(environ_update or {})}
        done = subprocess.run(
            argv, input=data, capture_output=True, text=True, errors="replace", check=False, env=environment
        )
        return done.returncode, done.stdout, done.stderr

    return t.cast(JsonObject, node.observe(RealSystem("/", run)))


def gauge(socket: Path, name: str) -> float:
    """The first value of a gauge of the device plugin or the DRA driver, by its status socket."""
    page = ask_socket(socket, "/metrics")[1]
    return float(re.findall(rf"^gpushare_plugin_{name}{{.*}} (\S+)$", page, re.MULTILINE)[0])


def until(condition: t.Callable[[], t.Any], seconds: float, what: str) -> float:
    """Wait, and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - began


class Holder:
    """A program with so many MiB of the first card.

    :param pid: of the program itself, as the node counts.
    """

    def __init__(self, process: subprocess.Popen[str], mib: int) -> None:
        self.process, self.mib = process, mib
        assert process.stdout is not None
        self.said = []
        while not self.said or not self.said[-1].startswith("holding"):
            line = process.stdout.readline()
            assert line, f"it ended: {self.said}"
            self.said.append(line.strip())
        self.pid = self._last(process.pid)

    @staticmethod
    def _last(pid: int) -> int:
        """The process at the end of those that start one another."""
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return Holder._last(int(children[0])) if children else pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Holders:
    def __init__(self, program: Path) -> None:
        self._program = program
        self._made: list[Holder] = []
        self._folders: list[Path] = []

    def start(self, mib: int, group: str = "", before: t.Sequence[str] = ()) -> Holder:
        """Start a program that holds memory.

        :param group: below CGROUPS; made if it isn't there.
        :param before: the command that starts it.
        """
        script = ""
        if group:
            folder = CGROUPS / group
            self._folders += absent(group)
            folder.mkdir(parents=True, exist_ok=True)
            script = f"echo $$ > {folder}/cgroup.procs && "
        command = ["sh", "-c", f'{script}exec "$@"', "sh", *before, str(self._program), str(mib)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self._made.append(Holder(process, mib))
        except BaseException:
            process.kill()
            raise
        return self._made[-1]

    def end(self) -> None:
        for one in self._made:
            one.kill()
        remove_groups(self._folders)


def place(form: str, uid: str, identifier: str) -> str:
    """The control group of a pod's container, below CGROUPS."""
    return TOP + form.format(uid=uid, unit=uid.replace("-", "_"), id=identifier)


def absent(group: str) -> list[Path]:
    """Return which of a control group and those around it aren't there yet."""
    folder = CGROUPS / group
    around = [parent for parent in folder.parents if parent.is_relative_to(CGROUPS) and parent != CGROUPS]
    return [one for one in (folder, *around) if not one.exists()]


def remove_groups(folders: t.Sequence[Path]) -> None:
    """Remove control groups whose processes have been killed."""
    for folder in sorted(set(folders), key=lambda one: -len(one.parts)):
        for _turn in range(100):
            with contextlib.suppress(OSError):
                if folder.exists():
                    folder.rmdir()
                break
            time.sleep(0.02)
