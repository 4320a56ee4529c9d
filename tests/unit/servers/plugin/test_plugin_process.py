# SPDX-License-Identifier: GPL-3.0-or-later
"""The real command as a process of its own, with the real nvidia-ml-py over the lab's simulated library.

It uses kubelet over gRPC and the API over HTTP; tests kill it and let cards fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing as t
from pathlib import Path

import gpushare
import pytest
from api_double import served
from gpushare.http.service import STOP_SECONDS
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import R580
from plugin_fakes import NODE, Node, make_pod, seen, until
from service_account import service_account
from unix_http import ask_socket

# What the simulated driver keeps of a card.
RESERVED_MIB = 256


class Process:
    """The plugin's process, and all that is around it.

    :param library: the folder of the simulated driver's library, of this version.
    """

    def __init__(self, root: Path, library: Path, driver: str = R580) -> None:
        self.node = Node(root)
        self._library, self._driver = library, driver
        self._cards = root / "cards"
        self._log = root / "log"
        self._process: subprocess.Popen[bytes] | None = None
        # A command that starts it.
        self.started_by: tuple[str, ...] = ()
        self.hardware()
        self._api = contextlib.ExitStack()
        self._account = service_account(root / "account", self._api.enter_context(served(self.node.kube)))

    def hardware(self, *faults: str, xids: tuple[str, ...] = (), mig: tuple[int, ...] = ()) -> None:
        rows = [
            f"card {one.index} uuid={one.uuid} minor={one.minor} memory={one.memory_mib + RESERVED_MIB} "
            f"bus=0000:0{one.index + 1}:00.0 name=Simulated_GPU mig={'enabled' if one.index in mig else 'disabled'}"
            for one in self.node.nvml.found
        ]
        rows += [f"fault {fault}" for fault in faults] + [f"xid {xid}" for xid in xids]
        text = "\n".join([f"driver {self._driver}", "cuda 13000", *rows, ""])
        # In place and by one write, as the simulated library requires.
        with self._cards.open("r+b" if self._cards.exists() else "wb") as file:
            file.truncate(file.write(text.encode()))

    def start(self, *arguments: str) -> None:
        self._launch(
            "--status-socket", str(self.node.status_socket), "--resync", "1", "--query-interval", "0.3", *arguments
        )
        until(lambda: '"message":"started"' in self.log, 60)

    def clean(self) -> int:
        """``--cleanup``, to its end."""
        return self._launch("--cleanup").wait(60)

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as stream:
            process = subprocess.Popen(
                [
                    *self.started_by,
                    *(sys.executable, "-m", "gpushare.plugin.command", "--node-name", NODE, "--log-format", "json"),
                    *("--kubelet-dir", str(self.node.kubelet.root), *self._account),
                    *("--cdi-folders", str(self.node.specifications), *arguments),
                ],
                env={**self.driver_environment, "PYTHONPATH": str(Path(gpushare.__file__).parents[1])},
                stderr=stream,
            )
        if "--cleanup" not in arguments:
            self._process = process
        return process

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(10)
        self._process = None
        self._log.write_text("")
        return code

    @property
    def driver_environment(self) -> dict[str, str]:
        """The environment of a program that uses the simulated driver."""
        paths = {"LD_LIBRARY_PATH": str(self._library), "KUBEGPU_SIM_CARDS": str(self._cards)}
        return {"PATH": os.environ["PATH"], **paths}

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def status(self) -> str:
        """The kernel's view of it."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/status").read_text()

    def ready(self) -> str:
        return ask_socket(self.node.status_socket, "/readyz")[1]

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        self._api.close()
        self.node.kubelet.stop()


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory, drivers: dict[str, Path]) -> t.Iterator[Process]:
    one = Process(tmp_path_factory.mktemp("p"), drivers[R580] / "usr" / "lib64")
    yield one
    one.close()


def test_fault_09_a_late_driver_and_failing_cards(process: Process) -> None:
    node = process.node
    node.kubelet.start()
    process.hardware("init:9")
    process.start()
    until(lambda: process.ready() == "NVIDIA's driver doesn't answer: Driver Not Loaded", 60)
    assert node.kubelet.registrations == 0
    process.hardware()
    until(lambda: len(node.kubelet.healthy) == 32 and process.ready() == "ok", 60)
    # NVML's "GPU is lost", for the second card.
    process.hardware("card:1:15")
    until(lambda: len(node.kubelet.unhealthy) == 16, 60)
    until(lambda: [card.healthy for card in contract.node_cards(node.kube.node())] == [True, False])
    process.hardware(mig=(0,))
    until(lambda: [card.healthy for card in contract.node_cards(node.kube.node())] == [False, True], 60)
    assert contract.node_cards(node.kube.node())[0].code == contract.Reason.MIG_ENABLED
    process.hardware()
    until(lambda: len(node.kubelet.healthy) == 32, 60)
    assert "Traceback" not in process.log


def test_killed_and_started_again_and_again(process: Process) -> None:
    """In the end it leaves the node for good (fault 16)."""
    node = process.node
    node.kubelet.start()
    process.start()
    pods = []
    for turn in range(3):
        until(lambda: len(node.kubelet.healthy) == 32, 60)
        pods.append(node.run(make_pod(f"pod{turn}", 2, 1, booked=1)))
        process.kill()
        # Bound without a running plugin: kubelet can't admit it before the plugin is back.
        until(lambda: not node.kubelet.registered)
        process.start()
    for pod in pods:
        until(lambda pod=pod: node.agrees(pod), 60)
        assert node.visible(pod) == {seen(1).uuid}
    until(lambda: process.ready() == "ok", 60)
    assert process.clean() == 1 and "the device plugin still runs on this node" in process.log
    assert "Traceback" not in process.log
    assert process.kill(signal.SIGTERM) == 0
    assert not (node.kubelet.folder / "kubegpu-gpushare.sock").exists()
    assert process.clean() == 0 and "Traceback" not in process.log
    left = node.kube.node()
    assert left["metadata"]["annotations"] == {} and left["status"]["capacity"] == {"cpu": "4"}


def test_it_ends_in_time_while_the_api_hangs(process: Process) -> None:
    node, hanging, end = process.node, threading.Event(), threading.Event()
    node.kubelet.start()
    process.start()
    until(lambda: process.ready() == "ok", 60)

    reached: list[str] = []

    def hang(method: str, path: str) -> None:
        if hanging.is_set():
            reached.append(method)
            end.wait(60)

    node.kube.hooks.append(hang)
    hanging.set()
    # The watches open again, and the reconciler has an annotation to write.
    node.kube.cut()
    threading.Thread(target=node.kube.put, args=(make_pod("pod", 2),), daemon=True).start()
    until(lambda: reached.count("GET") >= 2)
    began = time.monotonic()
    assert process.kill(signal.SIGTERM) == 0
    # The parts that wait for the API end side by side: one after the other takes longer.
    assert time.monotonic() - began < STOP_SECONDS - 1
    end.set()
    assert not (node.kubelet.folder / "kubegpu-gpushare.sock").exists()


def test_fault_07_xids_by_the_real_library(process: Process) -> None:
    """The event set that NVML fills, and the wait for it, are those of nvidia-ml-py."""
    node = process.node
    node.kubelet.start()
    process.start("--xid-quiet", "3", "--ignore-xids", "74,61")
    until(lambda: len(node.kubelet.healthy) == 32, 60)
    pod = node.run(make_pod("pod", 2, booked=1))
    until(lambda: node.agrees(pod), 60)
    process.hardware(xids=("1 31", "1 74"))
    until(lambda: '"XID 74 of card' in process.log, 60)
    assert len(node.kubelet.healthy) == 32
    process.hardware(xids=("1 31", "1 74", "1 48"))
    until(lambda: len(node.kubelet.unhealthy) == 16, 60)
    until(lambda: contract.node_cards(node.kube.node())[1].reason == "XID 48 (a double-bit memory error)", 60)
    until(lambda: node.kube.reasons("default/pod") == ["GpuCardUnhealthy"], 60)
    until(lambda: node.kube.reasons(f"x/{NODE}") == ["GpuCardUnhealthy"], 60)
    until(lambda: len(node.kubelet.healthy) == 32, 60)
    # Again, now that the line was there before.
    process.hardware(xids=("1 31", "1 74", "1 48", "1 48"))
    until(lambda: len(node.kubelet.unhealthy) == 16, 60)
    assert "Traceback" not in process.log


def test_excluded_cards_by_the_real_library(process: Process) -> None:
    """The entries are those of several nodes; a pod that has a card before it is excluded keeps it until it ends."""
    node, excluded = process.node, contract.Reason.EXCLUDED
    node.kubelet.start()
    process.start()
    until(lambda: len(node.kubelet.healthy) == 32, 60)
    held = node.run(make_pod("held", 4, booked=0))
    until(lambda: [card.healthy for card in contract.node_cards(node.kube.node())] == [True, True], 60)
    process.kill(signal.SIGTERM)
    others = json.dumps({"nodes": ["another"], "cards": ["*simulated*"]})
    ours = json.dumps({"nodes": ["another", NODE], "cards": [contract.node_cards(node.kube.node())[0].uuid]})
    process.start("--exclude-cards", others, "--exclude-cards", ours)
    until(lambda: len(node.kubelet.healthy) == 16 and all(one.startswith("00000001-") for one in node.kubelet.healthy))
    until(lambda: [card.code for card in contract.node_cards(node.kube.node())] == [excluded, ""], 60)
    until(lambda: "GpuCardUnhealthy" in node.kube.reasons("default/held"), 60)
    node.kube.remove(held)
    node.kubelet.remove(held)
    until(lambda: [card.index for card in contract.node_cards(node.kube.node())] == [1], 60)
    until(lambda: node.kube.node()["status"]["capacity"][contract.RESOURCE_COUNT] == "1", 60)


# As the DaemonSet's container is: nothing can be written but kubelet's folder, and root has no right of root's.
CONFINED = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro /
shift
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def test_fault_19_root_without_rights_on_a_file_system_that_it_cannot_write(process: Process) -> None:
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("only root can take rights from itself")
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine has no mount namespaces for us")
    folder = str(process.node.kubelet.root)
    process.started_by = ("unshare", "-m", "sh", "-c", CONFINED, "sh", folder)
    process.node.kubelet.start()
    process.start()
    rights = dict(line.split(":\t") for line in process.status.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    assert rights.pop("NoNewPrivs") == "1"
    assert set(rights) >= {"CapEff", "CapPrm", "CapBnd"} and {int(right, 16) for right in rights.values()} == {0}
    until(lambda: process.node.kubelet.registered and process.ready() == "ok")
    pod = process.node.run(make_pod("pod", 3, booked=1))
    until(lambda: process.node.agrees(pod))
    # kubelet restarts: the socket is created again.
    process.node.kubelet.stop()
    process.node.kubelet.start()
    until(lambda: process.node.kubelet.registered and process.ready() == "ok")
    assert process.kill(signal.SIGTERM) == 0
    assert not (process.node.kubelet.folder / "kubegpu-gpushare.sock").exists()
