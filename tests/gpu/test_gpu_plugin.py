# SPDX-License-Identifier: GPL-3.0-or-later
"""The device plugin's process over NVIDIA's library, between a kubelet and an API server of the unit tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _card import Holders, facts, first, gauge, observed, record
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from gpushare.nvml.inventory import Inventory
from gpushare.nvml.library import NvidiaMl
from gpushare.shared._contracts import gpushare as contract
from plugin_fakes import make_pod, until
from test_plugin_process import CONFINED, Process
from unix_http import ask_socket

# The driver's report of an address that isn't mapped: an error of the application.
FAULT_XID = 31


# A process whose /dev has no device of NVIDIA's, and which can't make one, as the library would.
WITHOUT_DEVICES = """
set -e
mount --make-rprivate /
for name in null zero urandom random; do cp -a /dev/$name "$1/$name"; done
mount --bind "$1" /dev
shift
exec setpriv --bounding-set=-mknod --inh-caps=-mknod "$@"
"""


def return_devices(hidden: Path) -> None:
    """Make NVIDIA's devices in the folder that a process of WITHOUT_DEVICES has as its /dev."""
    for device in Path("/dev").glob("nvidia*"):
        if device.is_char_device():
            about = device.stat()
            os.mknod(hidden / device.name, about.st_mode, about.st_rdev)
            os.chmod(hidden / device.name, 0o666)


class OnCards(Process):
    """The plugin on this machine's own cards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Path())
        library = NvidiaMl()
        self.node.nvml.found = library.cards()
        library.close()

    @property
    def driver_environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def metrics(self) -> str:
        return ask_socket(self.node.status_socket, "/metrics")[1]

    def gauge(self, name: str) -> float:
        return gauge(self.node.status_socket, name)


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCards]:
    one = OnCards(tmp_path_factory.mktemp("p"))
    one.node.kubelet.start()
    yield one
    one.close()


def test_cards_as_the_plugin_reads_them() -> None:
    library, card = NvidiaMl(), first()
    try:
        one = next(found for found in library.cards() if found.uuid == card["uuid"])
        inventory = Inventory(library, "GiB", reserve_mib=512)
        inventory.refresh()
        began = time.monotonic()
        assert library.xids(0.5) == []
        waited = time.monotonic() - began
    finally:
        library.close()
    memory = card["memory"]
    assert (one.index, one.minor, one.model, one.problem) == (0, card["minor"], card["name"], None)
    assert (one.memory_mib, one.reserved_mib) == (memory["total_mib"], memory["reserved_mib"]) and one.reserved_mib > 0
    # Version 1 counts the reserve as used.
    assert one.used_mib >= one.reserved_mib
    announced = next(found for found in inventory.cards if found.uuid == card["uuid"])
    assert announced.healthy and announced.units == (one.memory_mib - one.reserved_mib - 512) // 1024
    assert 0.4 < waited < 2, "the wait for events takes the time that it is given"
    record("plugin-card", {"card": str(one), "announced": str(announced), "waited": waited})


def test_it_registers_lists_and_allocates(process: OnCards) -> None:
    node, card = process.node, first()
    process.start()
    units = contract.units_of(card["memory"]["total_mib"] - card["memory"]["reserved_mib"], "GiB")
    until(lambda: len(node.kubelet.healthy) >= units and process.ready() == "ok", 60)
    announced = next(one for one in contract.node_cards(node.kube.node()) if one.uuid == card["uuid"])
    assert (announced.units, announced.minor, announced.healthy) == (units, card["minor"], True)
    pod = node.run(make_pod("pod", 3, booked=announced.index))
    until(lambda: node.agrees(pod), 60)
    given = node.kubelet.envs[pod["metadata"]["uid"]]["c0"]
    limit = node.kube.node()["metadata"]["annotations"][contract.NODE_LIMIT]
    record("plugin", {"envs": given, "limit": limit, "metrics": process.metrics, "log": process.log})
    assert given["NVIDIA_VISIBLE_DEVICES"] == card["uuid"] and os.path.exists(f"/dev/nvidia{card['minor']}")
    driver = facts()["driver"]
    if int(driver.partition(".")[0]) < 615:
        assert limit == f"unenforced: NVIDIA's driver is {driver}, and limits need 615 or newer"
        assert "NVIDIA_GPU_MEMORY_LIMIT" not in given
    assert process.gauge("card_memory_bytes") == card["memory"]["total_mib"] << 20
    assert "Traceback" not in process.log


def test_metrics_follow_what_programs_hold(process: OnCards, holders: Holders) -> None:
    process.start()
    until(lambda: process.ready() == "ok", 60)
    before = process.gauge("card_memory_used_bytes")
    one = holders.start(4096)
    until(lambda: process.gauge("card_memory_used_bytes") >= before + (4096 << 20), 20)
    one.kill()
    until(lambda: process.gauge("card_memory_used_bytes") <= before, 20)


def test_no_right_of_roots_is_needed(process: OnCards) -> None:
    """Root without any capability, and no file system to write to: as the DaemonSet where no limits are kept."""
    folder = str(process.node.kubelet.root)
    process.started_by = ("unshare", "-m", "sh", "-c", CONFINED, "sh", folder)
    process.start()
    until(lambda: process.ready() == "ok", 60)
    assert "CapEff:\t0000000000000000" in process.status
    card = first()
    pod = process.node.run(make_pod("pod", 3, booked=0))
    until(lambda: process.node.agrees(pod), 60)
    assert process.gauge("card_memory_bytes") == card["memory"]["total_mib"] << 20
    assert "NVML reports no events" not in process.log and "Traceback" not in process.log


def test_the_driver_comes_after_the_plugin(process: OnCards) -> None:
    """The devices appear later, as when the driver's modules are loaded late; the library was refused before."""
    hidden = process.node.kubelet.root / "dev"
    hidden.mkdir()
    process.started_by = ("unshare", "-m", "sh", "-c", WITHOUT_DEVICES, "sh", str(hidden))
    process.start()
    until(lambda: process.ready() == "NVIDIA's driver doesn't answer: Driver Not Loaded", 60)
    assert process.node.kubelet.registrations == 0
    return_devices(hidden)
    until(lambda: process.ready() == "ok" and process.node.kubelet.healthy, 60)
    assert "Traceback" not in process.log


def test_an_error_of_an_application_is_read_and_keeps_the_card(process: OnCards, program: Path) -> None:
    """A program writes to an address that isn't there: the driver's own event, the kernel's log, all readers."""
    process.start()
    until(lambda: process.ready() == "ok", 60)
    units = len(process.node.kubelet.healthy)
    done = subprocess.run([program, "fault"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 4, done.stdout
    until(lambda: f"XID {FAULT_XID} of card" in process.log, 20)
    card: JsonObject = first()
    log = observed()["log"]
    record("fault", {"said": done.stdout, "log": process.log, "health": card["health"], "node": log})
    assert FAULT_XID in [xid["code"] for xid in log["xids"]]
    assert FAULT_XID in card["health"]["xids"] and card["health"]["recovery_action"] == "none"
    assert len(process.node.kubelet.healthy) == units and process.ready() == "ok"
    assert "Traceback" not in process.log
