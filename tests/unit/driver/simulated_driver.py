# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's simulated driver, compiled once per test run, and programs that query it in child processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import packages

VERSION = "580.95.05"
FIRST = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
SECOND = "GPU-bbbbbbbb-0000-4000-8000-000000000002"
# Two cards with a gap in their minors and different sizes, the second described first.
CARDS = f"""\
# the cards
driver {VERSION}
cuda 13000
card 1 uuid={SECOND} minor=3 memory=8192 bus=0000:C1:00.0 name=Simulated_NVIDIA_GPU_8GiB
card 0 uuid={FIRST} minor=1 memory=16384 bus=0000:3b:00.0 name=Simulated_NVIDIA_GPU_16GiB   # a comment
"""

_PRELUDE = """\
import ctypes, json, os, sys, time
import pynvml as n

CARDS = os.environ["KUBEGPU_SIM_CARDS"]

def rewrite(text):
    with open(CARDS, "w") as file:
        file.write(text)

def append(line):
    with open(CARDS, "a") as file:
        file.write(line + "\\n")

def report(answer):
    print(json.dumps(answer))

def code(function, *arguments):
    try:
        function(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0

def start():
    n.nvmlInit()
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]

def watch(*handles):
    events = n.nvmlEventSetCreate()
    for handle in handles:
        n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
    return events

def wait(events, ms):
    try:
        data = n.nvmlEventSetWait_v2(events, ms)
    except n.NVMLError as error:
        return error.value
    return [n.nvmlDeviceGetUUID(data.device), data.eventType, data.eventData]
"""


def compiled(folder: Path, version: str) -> Path:
    """The simulated driver of a version, compiled by gcc, under the names that its users load."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc on this machine to compile the simulated driver with")
    packages.compile_driver(folder, version)
    for name in ("libnvidia-ml.so", "libcuda.so"):
        (folder / f"{name}.1").symlink_to(f"{name}.{version}")
    return folder


@dataclass(frozen=True)
class Driver:
    """A compiled driver and the file that it reads."""

    folder: Path
    cards: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "KUBEGPU_SIM_CARDS": str(self.cards), "LC_ALL": "C"}

    def describe(self, *lines: str) -> Driver:
        """Describe two cards, and add these lines."""
        self.cards.write_text(CARDS + "".join(f"{line}\n" for line in lines))
        return self

    def python(self, script: str) -> Any:
        """Run a program of nvidia-ml-py; return the value that it reports."""
        done = self.run([sys.executable, "-c", _PRELUDE + textwrap.dedent(script)])
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def query(self, script: str) -> Any:
        """Run a program that begins with NVML initialized and with handles of the ``first`` and ``second`` card."""
        return self.python("first, second = start()\n" + textwrap.dedent(script))

    def smi(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run([str(self.folder / "nvidia-smi"), *arguments])

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=self.environment())
