# SPDX-License-Identifier: GPL-3.0-or-later
"""What the simulated driver answers about MIG devices, compute modes and MPS, as NVIDIA's device plugin asks it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from simulated_driver import CARDS, FIRST, SECOND, Driver

from lab.packages import SOURCES

RECORDINGS = Path(__file__).parent / "recordings" / "mps-control"
# An A100's sizes: a 40 GB card.
DIVIDED = CARDS.replace("memory=8192", "memory=40960").replace("_8GiB", "_8GiB mig=enabled")
MIGS = """\
mig 1 2 3g.20gb uuid=MIG-00000000-0000-4000-8000-000000000001
mig 1 7 1g.5gb uuid=MIG-2
mig 1 8 1g.5gb+me uuid=MIG-3
"""


@pytest.fixture
def divided(driver: Driver) -> Driver:
    driver.cards.write_text(DIVIDED + MIGS + "process 1 4711 100 compute 7\nprocess 1 4712 50 compute\n")
    return driver


def test_a_mig_device_has_a_handle_of_its_own(divided: Driver) -> None:
    answer = divided.query(
        """
        devices = [n.nvmlDeviceGetMigDeviceHandleByIndex(second, index) for index in range(3)]
        parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(devices[1])
        report([
            [n.nvmlDeviceGetUUID(one) for one in devices], n.nvmlDeviceGetName(devices[1]),
            [n.nvmlDeviceGetGpuInstanceId(one) for one in devices], n.nvmlDeviceGetComputeInstanceId(devices[1]),
            n.nvmlDeviceGetUUID(parent), n.nvmlDeviceIsMigDeviceHandle(devices[0]).value,
            n.nvmlDeviceIsMigDeviceHandle(second).value, code(n.nvmlDeviceGetMigDeviceHandleByIndex, second, 3),
            n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID("MIG-2")), n.nvmlDeviceGetMaxMigDeviceCount(second),
        ])
        """
    )
    assert answer[0] == ["MIG-00000000-0000-4000-8000-000000000001", "MIG-2", "MIG-3"]
    assert answer[1:] == ["Simulated NVIDIA GPU 8GiB MIG 1g.5gb", [2, 7, 8], 0, SECOND, 1, 0, 6, "MIG-2", 7]


def test_its_memory_and_processes_are_its_own(divided: Driver) -> None:
    answer = divided.query(
        """
        def of(device):
            rows = n.nvmlDeviceGetComputeRunningProcesses_v3(device)
            memory = n.nvmlDeviceGetMemoryInfo(device)
            return [memory.total >> 20, memory.used >> 20, [[one.pid, one.gpuInstanceId] for one in rows]]
        large, small = (n.nvmlDeviceGetMigDeviceHandleByIndex(second, index) for index in (0, 1))
        attributes = n.nvmlDeviceGetAttributes_v2(small)
        report([of(large), of(small), of(second), attributes.memorySizeMB, attributes.gpuInstanceSliceCount])
        """
    )
    none = 0xFFFFFFFF
    assert answer == [
        [20160, 0, []],
        [5040, 100, [[4711, 7]]],
        [40960, 256 + 150, [[4711, 7], [4712, none]]],
        5040,
        1,
    ]


def test_instances_lead_to_their_profiles_as_the_plugin_follows_them(divided: Driver) -> None:
    """From a device to its GPU instance, to the number of its profile, to the compute profile that is as large."""
    answer = divided.query(
        """
        found = []
        for index in range(3):
            device = n.nvmlDeviceGetMigDeviceHandleByIndex(second, index)
            instance = n.nvmlDeviceGetGpuInstanceById(second, n.nvmlDeviceGetGpuInstanceId(device))
            profile = n.nvmlGpuInstanceGetInfo(instance).profileId
            numbers = []
            for number in range(18):
                info = n.c_nvmlGpuInstanceProfileInfo_t()
                library = ctypes.CDLL("libnvidia-ml.so.1")
                if library.nvmlDeviceGetGpuInstanceProfileInfo(second, number, ctypes.byref(info)) == 0:
                    numbers.append([number, info.sliceCount] if info.id == profile else None)
            compute = n.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
            number = n.nvmlComputeInstanceGetInfo(compute).profileId
            info = (ctypes.c_uint * 9)()
            assert library.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0, info) == 0
            found.append([[one for one in numbers if one], info[1]])
        device = n.nvmlDeviceGetMigDeviceHandleByIndex(second, 0)
        report([found, code(n.nvmlDeviceGetGpuInstanceById, second, 1), code(n.nvmlDeviceGetMinorNumber, device)])
        """
    )
    # 2: three slices; 0: one slice; 7: one slice with the media engines.
    assert answer == [[[[[2, 3]], 3], [[[0, 1]], 1], [[[7, 1]], 1]], 6, 2]


def test_nvidia_smi_lists_devices_and_changes_compute_modes(divided: Driver) -> None:
    listed = divided.smi("-L").stdout
    assert re.search(r"^  MIG 1g\.5gb +Device  1: \(UUID: MIG-2\)$", listed, re.MULTILINE)
    query = ("--query-gpu=uuid,compute_mode", "--format=csv,noheader")
    before = divided.cards.read_text()
    done = divided.smi("-i", FIRST, "-c", "EXCLUSIVE_PROCESS")
    assert done.returncode == 0 and "Set compute mode to EXCLUSIVE_PROCESS" in done.stdout
    assert divided.smi(*query).stdout.splitlines() == [f"{FIRST}, Exclusive_Process", f"{SECOND}, Default"]
    assert divided.smi("-c", "DEFAULT").returncode == 0
    assert divided.smi(*query).stdout.splitlines() == [f"{FIRST}, Default", f"{SECOND}, Default"]
    # Nothing else of the description changed, its comment neither.
    assert divided.cards.read_text().replace(" mode=0", "") == before
    assert divided.smi("-c", "SHARED").returncode == 2


def test_the_mps_daemon_answers_as_nvidias_until_it_quits(driver: Driver, tmp_path: Path) -> None:
    """The recording is that of tests/gpu/test_gpu_mps.py, on an H100."""
    program = driver.folder / "nvidia-cuda-mps-control"
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipe.mkdir()
    log.mkdir()
    # As the plugin does it, without any other variable.
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}

    def control(text: str, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [program, *words], input=text, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert control("get_default_active_thread_percentage") == (1, "Cannot find MPS control daemon process\n")
    assert control("", "-d")[0] == 0
    try:
        assert control("", "-d")[0] == 1
        recorded = json.loads((RECORDINGS / "580.159.04.json").read_text())
        assert [[command, control(f"{command}\n")[1]] for command, _answer in recorded] == recorded
        assert control("get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 9") == (
            0,
            "33.3\n1G\n",
        )
        assert "set_default_device_pinned_mem_limit 0 5120M." in (log / "control.log").read_text()
    finally:
        control("quit")
    end = time.monotonic() + 20
    while (pipe / "control").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert control("get_default_active_thread_percentage")[0] == 1


def test_the_module_makes_the_capability_files_of_each_instance(tmp_path: Path) -> None:
    """By the real script, with its folders below another root, and mknod that makes plain files."""
    programs, state, dev = tmp_path / "bin", tmp_path / "state", tmp_path / "dev"
    for folder in (programs, dev):
        folder.mkdir()
    for name, text in {"mknod": 'echo "$3:$4" >"$1"', "mount": ":"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    cards = tmp_path / "cards"
    cards.write_text(DIVIDED + MIGS)
    script = (
        (SOURCES / "nvidia-sim").read_text().replace("@VERSION@", "580.95.05").replace("/dev/nvidia", f"{dev}/nvidia")
    )
    script = re.sub("^CARDS=.*", f"CARDS={cards}", script, flags=re.MULTILINE)
    script = re.sub("^STATE=.*", f"STATE={state}", script, flags=re.MULTILINE)
    subprocess.run(
        ["sh", "-c", script, "sh", "start"], env={"PATH": f"{programs}:{os.environ['PATH']}"}, check=True, timeout=60
    )
    # Of the card with minor 3: each card has 135 minors, each of its instances 9.
    assert (state / "proc/nvidia-caps/mig-minors").read_text().splitlines()[:4] == [
        "config 1",
        "monitor 2",
        "gpu3/gi2/access 426",
        "gpu3/gi2/ci0/access 427",
    ]
    access = (state / "proc/nvidia/capabilities/gpu3/mig/gi7/ci0/access").read_text()
    assert access.splitlines()[0] == f"DeviceFileMinor: {3 + 3 * 135 + 7 * 9 + 1}"
    assert (dev / "nvidia-caps/nvidia-cap426").read_text() == "511:426\n"
