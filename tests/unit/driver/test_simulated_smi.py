# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated nvidia-smi: the fields, forms and exit codes that roles and scripts rely on; and libcuda."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nvidia_smi as node_info
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from simulated_driver import FIRST, SECOND, VERSION, Driver

QUERY = (
    "index,uuid,name,memory.total,memory.used,memory.free,driver_version,"
    "pci.bus_id,persistence_mode,compute_mode,gpu_uuid"
)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines(), skipinitialspace=True))


def test_a_query_answers_every_field_with_its_unit(driver: Driver) -> None:
    driver.describe("process 1 4711 1000")
    done = driver.smi(f"--query-gpu={QUERY}", "--format=csv")
    assert done.returncode == 0
    heading, first, second = rows(done.stdout)
    assert heading == [name + " [MiB]" if name.startswith("memory.") else name for name in QUERY.split(",")]
    memory = ["16384 MiB", "0 MiB", "16128 MiB"]
    rest = [VERSION, "00000000:3B:00.0", "Disabled", "Default", FIRST]
    assert first == ["0", FIRST, "Simulated NVIDIA GPU 16GiB", *memory, *rest]
    assert second[:6] == ["1", SECOND, "Simulated NVIDIA GPU 8GiB", "8192 MiB", "1000 MiB", "6936 MiB"]


def observed(driver: Driver) -> dict[str, object]:
    """Parse the simulated nvidia-smi's answer to gpu_node_info's own query."""
    fields = [*node_info.FIELDS, *node_info.NEWER_FIELDS]
    done = driver.smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    return node_info.parse_result(Done(done.returncode, done.stdout, done.stderr), fields)


def test_gpu_node_info_parses_the_cards(driver: Driver) -> None:
    result = observed(driver)
    assert (result["version"], result["code"], result["error"]) == (VERSION, 0, None)
    cards = [tuple(card[name] for name in ("index", "uuid", "memory_mib", "address")) for card in result["cards"]]
    assert cards == [(0, FIRST, 16384, "0000:3b:00.0"), (1, SECOND, 8192, "0000:c1:00.0")]
    # The simulated cards have persistence mode off, and no MIG mode at all.
    assert {(card["persistence"], card["mig"]) for card in result["cards"]} == {(False, None)}


def test_an_unknown_field_is_refused_with_the_message_that_gpu_node_info_parses(driver: Driver) -> None:
    done = driver.smi("--query-gpu=index,persistence_mode.extended", "--format=csv,noheader")
    refused = node_info.REFUSED.search(done.stdout)
    assert refused is not None and refused.group(1) == "persistence_mode.extended"


@pytest.mark.parametrize("chosen", ["1", SECOND, "00000000:C1:00.0", "0000:c1:00.0"])
def test_one_card_can_be_chosen(driver: Driver, chosen: str) -> None:
    done = driver.smi("-i", chosen, "--query-gpu=uuid", "--format=csv,noheader")
    assert (done.returncode, done.stdout) == (0, f"{SECOND}\n")


def test_the_list_and_the_table(driver: Driver) -> None:
    driver.describe("process 0 4711 1000")
    assert driver.smi("-L").stdout.splitlines() == [
        f"GPU 0: Simulated NVIDIA GPU 16GiB (UUID: {FIRST})",
        f"GPU 1: Simulated NVIDIA GPU 8GiB (UUID: {SECOND})",
    ]
    table = driver.smi().stdout
    assert "SIMULATED" in table.splitlines()[1]
    assert f"Driver Version: {VERSION}" in table and "CUDA Version: 13.0" in table
    assert "1000MiB /   16384MiB" in table and "4711" in table
    assert {len(line) for line in table.splitlines()} == {91}
    heading = driver.smi("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv").stdout.splitlines()[0]
    assert heading == "pid, used_gpu_memory [MiB], gpu_uuid"
    details = driver.smi("-q").stdout
    assert "SIMULATED" in details
    assert [line.split(":")[1].strip() for line in details.splitlines() if "Minor Number" in line] == ["1", "3"]


NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"


@pytest.mark.parametrize(
    ("fault", "code", "status", "message"),
    [
        ("init:4", 4, 4, "Failed to initialize NVML: Insufficient Permissions"),
        ("init:9", 9, 9, NO_DRIVER),
        ("init:18", 18, 18, MISMATCH),
        ("init:999", 999, 255, "Failed to initialize NVML: Unknown Error"),
        ("count0", 6, 6, "No devices were found"),
        ("card:1:15", 15, 15, "Unable to determine the device handle for GPU1: GPU is lost."),
    ],
)
def test_failing_driver_prints_the_real_message_whose_code_gpu_node_info_reads(
    driver: Driver, fault: str, code: int, status: int, message: str
) -> None:
    driver.describe(f"fault {fault}")
    for arguments in ([], ["-L"], ["--query-gpu=uuid", "--format=csv"]):
        done = driver.smi(*arguments)
        assert done.returncode == status
        assert message in done.stdout
    result = observed(driver)
    assert result["code"] == code and result["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--query-gpu=uuid,colour", "--format=csv"],
        ["--query-gpu=uuid"],
        ["--query-gpu=uuid", "--format=xml"],
        ["--format=csv"],
        ["--reset-everything"],
    ],
)
def test_a_wrong_command_line_ends_with_2(driver: Driver, arguments: list[str]) -> None:
    done = driver.smi(*arguments)
    assert done.returncode == 2 and done.stdout


def test_a_missing_card_ends_with_6_and_a_missing_library_with_12(driver: Driver) -> None:
    assert driver.smi("-L", "-i", "7").returncode == 6
    alone = Path(shutil.copy(driver.folder / "nvidia-smi", driver.cards.parent))
    environment = {"LD_LIBRARY_PATH": str(alone.parent)}
    done = subprocess.run([alone], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 12
    assert "couldn't find libnvidia-ml.so" in done.stdout


def test_cuda_reports_its_version_and_finds_the_cards(driver: Driver) -> None:
    answer = driver.python(
        """
        cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        answer = cuda.cuDriverGetVersion(ctypes.byref(version))
        report([answer, version.value, cuda.cuDriverGetVersion(None), cuda.cuInit(0), cuda.cuInit(1)])
        """
    )
    assert answer == [0, 13000, 1, 0, 1]
