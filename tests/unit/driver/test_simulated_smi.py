# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated nvidia-smi: the fields, forms and exit codes that roles and scripts rely on; and libcuda."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nvidia_smi as node_info
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from simulated_driver import FIRST, SECOND, VERSION, Driver


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
