# SPDX-License-Identifier: GPL-3.0-or-later
"""The DRA driver's process over NVIDIA's library, beside a real API server and a double of kubelet's DRA manager.

What it prepares is given to containers by containerd, runc and NVIDIA's container runtime.
"""

from __future__ import annotations

import os
import subprocess
import typing as t
from collections.abc import Iterator
from pathlib import Path

import _runtime
import pytest
from _card import facts, first, gauge, record
from _runtime import Runtime
from dra_cluster import Cluster, cluster
from dra_kit import uid, until
from gpushare.dra.slices import PCI_BUS, PCIE_ROOT, quantity, semantic_version
from gpushare.shared._contracts import gpushare as contract
from real_apiserver import api_server
from test_dra_process import Process
from test_gpu_plugin import FAULT_XID, WITHOUT_DEVICES, return_devices
from unix_http import ask_socket

__all__ = ["api_server", "cluster"]

IDENTIFIER = "5" * 64
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
MODES = ("variable", "cdi")

needs_containers = pytest.mark.skipif(bool(_runtime.missing()), reason=_runtime.missing() or "containers run here")


class OnCards(Process):
    """The driver on this machine's own cards."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        super().__init__(root, cluster, Path())

    def _plug_in(self) -> None:
        self.uuids = (str(first()["uuid"]),)

    @property
    def driver_environment(self) -> dict[str, str]:
        return dict(os.environ)

    def devices(self) -> list[t.Any]:
        return [device for each in self.cluster.slices() for device in each["spec"].get("devices", [])]

    def up(self) -> None:
        self.kubelet.start()
        self.start()
        until(lambda: self.ready() == "ok", 60, self.ready)


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[OnCards]:
    one = OnCards(tmp_path_factory.mktemp("d"), cluster)
    yield one
    one.close()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, program: Path) -> Iterator[Runtime]:
    made = Runtime(tmp_path_factory.mktemp("r"), program)
    yield made
    made.stop()


def test_the_slices_show_the_card(process: OnCards) -> None:
    process.up()
    (device,) = process.devices()
    record("dra-slices", process.cluster.slices())
    card, driver = first(), facts()["driver"]
    units = contract.units_of(card["memory"]["total_mib"] - card["memory"]["reserved_mib"], "GiB")
    found = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
    bus = str(card["pci"]).lower()[-12:]
    assert device["name"] == card["uuid"].lower() and device["capacity"]["memory"]["value"] == quantity(units << 10)
    assert (found["uuid"], found["model"], found["index"]) == (card["uuid"], card["name"], 0)
    assert found["driverVersion"] == semantic_version(driver) and found[PCI_BUS] == bus
    assert found[PCIE_ROOT] in str((Path("/sys/bus/pci/devices") / bus).resolve())
    if int(driver.partition(".")[0]) < 615:
        assert found["memoryLimit"] == contract.Reason.MEMORY_LIMIT_UNAVAILABLE
    assert "taints" not in device and "Traceback" not in process.log


@needs_containers
@pytest.mark.parametrize("mode", MODES)
def test_a_claim_gives_its_container_the_card(process: OnCards, runtime: Runtime, mode: str) -> None:
    """Whatever the pod's own variable says; the driver may be killed meanwhile, and the program goes on."""
    process.cdi = runtime.specifications
    if mode == "cdi":
        process.nvidias = runtime.specifications
    process.up()
    claim = process.claim(1, 0, "3Gi")
    names = process.kubelet.prepare(claim)
    assert len(names) == (2 if mode == "cdi" else 1)
    card = first()
    pod = uid(0x1001)
    how: t.Any = {"environment": {VISIBLE: "all"}, "devices": names}
    script = f"echo visible ${VISIBLE}; echo units $ALIYUN_COM_GPU_MEM_CONTAINER; nvidia-smi -L; exec /hold 2048"
    with runtime.holding(script, pod, IDENTIFIER, **how) as said:
        process.kill()
        process.start()
        until(lambda: process.ready() == "ok", 60, process.ready)
        assert process.specifications() == {claim.uid} and process.kubelet.prepare(claim) == names
        seen = first()["processes"]
    record(f"dra-container-{mode}", {"said": said, "processes": seen, "names": names, "log": process.log})
    # Where the variable names the card, NVIDIA's runtime has read it, and leaves the same behind.
    assert "visible void" in said and "units 3" in said, said
    assert f"card {card['uuid']}" in said and "computed" in said, said
    assert any(card["uuid"] in line and line.startswith("GPU 0: ") for line in said), said
    (row,) = [one for one in seen if one["name"] == "hold"]
    assert (row["where"], row["pod_uid"]) == ("pod", pod) and row["used_mib"] >= 2048
    process.kubelet.unprepare(claim)
    assert process.specifications() == set()
    after = runtime.run("/hold", "cards", **how)
    assert after.code and "unresolvable CDI devices" in after.err, after
    assert "Traceback" not in process.log


def test_an_error_of_an_application_keeps_the_card(process: OnCards, program: Path) -> None:
    process.up()
    with process.kubelet.watching() as health:
        until(lambda: health, 20)
        done = subprocess.run([program, "fault"], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 4, done.stdout
        until(lambda: f"XID {FAULT_XID} of card" in process.log, 20, lambda: process.log[-2000:])
        record("dra-fault", {"health": health, "log": process.log})
        assert len(health) == 1, "no change of its health"
    assert all("taints" not in device for device in process.devices()) and process.ready() == "ok"
    assert process.kubelet.prepare(process.claim(1, 0, "1Gi"))


def test_the_driver_of_nvidia_comes_later(process: OnCards) -> None:
    """The devices appear later, as when modules are loaded late; no slice before, and no claim is prepared."""
    hidden = process.root / "dev"
    hidden.mkdir()
    process.started_by = ("unshare", "-m", "sh", "-c", WITHOUT_DEVICES, "sh", str(hidden))
    process.kubelet.start()
    process.start()
    until(lambda: process.ready() == "NVIDIA's driver doesn't answer: Driver Not Loaded", 60, process.ready)
    assert process.devices() == []
    return_devices(hidden)
    until(lambda: process.ready() == "ok", 60, process.ready)
    (device,) = process.devices()
    assert device["name"] == process.uuids[0].lower() and "Traceback" not in process.log


def test_the_metrics_count_what_the_card_holds(process: OnCards, program: Path) -> None:
    def shown(name: str) -> float:
        return gauge(process.status_socket, name)

    process.up()
    card = first()
    before = shown("card_memory_used_bytes")
    assert shown("card_memory_bytes") == card["memory"]["total_mib"] << 20
    holder = subprocess.Popen([program, "4096"], stdout=subprocess.DEVNULL)
    try:
        until(lambda: shown("card_memory_used_bytes") >= before + (4096 << 20), 20)
    finally:
        holder.kill()
        holder.wait()
    until(lambda: shown("card_memory_used_bytes") <= before, 20)
    process.kubelet.prepare(process.claim(1, 0, "5Gi"))
    until(lambda: shown("card_held_units") == 5, 20)
    record("dra-metrics", ask_socket(process.status_socket, "/metrics")[1])
