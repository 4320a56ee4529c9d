# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes merged over lists and MIG devices, and the driver's limits per cgroup."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import Request
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.processes import ContainerCgroup, misreports_processes
from nvml_kit import GIB, NA, FakeError, FakeHost, FakePynvml, LocalWorker, asked, gpu, only, process
from test_device import MIG_1, MIG_2, divided, instance

COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
POD = "c51e6a8f-4b2c-4b1e-9d57-0123456789ab"
ONE = ContainerCgroup("/sys/fs/cgroup/a", "/a", POD, "a" * 64)


def held(card: JsonObject) -> list[tuple[t.Any, ...]]:
    return [(one["pid"], one["types"], one["used_mib"], one["mig_uuid"], one["gi"]) for one in card["processes"]]


def test_lists_are_merged_by_pid_with_the_highest_number() -> None:
    compute, graphics = [process(20, 300), process(10, 100), process(10, 150)], [process(10, 120), process(30, 0)]
    assert held(only(gpu(**{COMPUTE: compute, GRAPHICS: graphics, MPS: [process(20, 310)]}))) == [
        (10, ["compute", "graphics"], 150, "", None),
        (20, ["compute", "mps"], 310, "", None),
        (30, ["graphics"], 0, "", None),
    ]


@pytest.mark.parametrize("unknown", [None, NA])
def test_unknown_memory_is_null(unknown: t.Any) -> None:
    card = only(gpu(**{COMPUTE: [process(10, unknown), process(20, unknown)], GRAPHICS: [process(20, 7)]}))
    assert held(card) == [(10, ["compute"], None, "", None), (20, ["compute", "graphics"], 7, "", None)]
    assert card["problem"] == ""


def test_a_process_with_more_than_the_cards_memory() -> None:
    card = only(gpu(**{COMPUTE: [process(10, 16385), process(20, 16384)]}))
    assert held(card) == [(10, ["compute"], None, "", None), (20, ["compute"], 16384, "", None)]
    assert card["problem"] == "process 10 can't hold 16385 MiB of 16384 MiB"


def test_each_process_has_its_owner() -> None:
    card = only(gpu(**{COMPUTE: [process(10, 1), process(11, 1)]}))
    first = card["processes"][0]
    owner = {key: first[key] for key in ("where", "start_time", "cgroup", "name")}
    assert owner == {"where": "pod", "start_time": "10", "cgroup": "/kubepods/pod10", "name": "python3"}
    assert [one["libvgpu"] for one in card["processes"]] == [True, False]


def test_older_functions_are_called_if_newer_ones_are_missing() -> None:
    card = gpu(
        **{name: FakeError(13) for name in (COMPUTE, GRAPHICS, MPS)},
        nvmlDeviceGetComputeRunningProcesses_v2=[process(10, 1)],
        nvmlDeviceGetGraphicsRunningProcesses_v2=[process(11, 2)],
    )
    found = only(card)
    assert [one["pid"] for one in found["processes"]] == [10, 11] and found["problem"] == ""
    none_at_all = only({**card, "nvmlDeviceGetComputeRunningProcesses_v2": FakeError(13)})
    assert none_at_all["processes"] is None and "Function Not Found (13" in none_at_all["problem"]


@pytest.mark.parametrize("function", [COMPUTE, GRAPHICS, MPS])
def test_an_incomplete_list_is_null(function: str) -> None:
    card = only(gpu(**{COMPUTE: [process(10, 1)], GRAPHICS: [], MPS: [], function: FakeError(999)}))
    assert card["processes"] is None and "Unknown Error (999" in card["problem"]


BROKEN = ("535.43.02", "535.54.03", "535.86.10", "535.86")
CORRECT = (
    "535.98",
    "535.104.05",
    "535.42",
    "530.41.03",
    "5350.54",
    "615.71.09",
    "",
    "535",
    "535.x",
    "535." + "9" * 9000,
)


@pytest.mark.parametrize("driver", [*BROKEN, *CORRECT], ids=lambda driver: driver[:9])
def test_processes_of_misreporting_drivers_are_unknown(driver: str) -> None:
    assert misreports_processes(driver) == (driver in BROKEN)
    card = asked(gpu(**{COMPUTE: [process(10, 1)]}), nvmlSystemGetDriverVersion=driver[:100])["cards"][0]
    assert (card["processes"] is None) == ("535.104.05" in card["problem"]) == (driver in BROKEN)


def test_processes_of_mig_devices_are_found_once() -> None:
    one = instance(MIG_1, 7, **{COMPUTE: [process(10, 100, 7, 0)]})
    two = instance(MIG_2, 9, **{COMPUTE: [process(20, 200, 9, 0), process(10, 3, 9, 0)]})
    whole = divided(one, two)
    # The card lists the same processes, with or without their instances, and one more.
    whole[COMPUTE] = [process(10, 90, 7, 0), process(20, 250), process(30, 5), process(40, 6, 9, 0)]
    assert held(only(whole)) == [
        (10, ["compute"], 100, MIG_1, 7),
        (10, ["compute"], 3, MIG_2, 9),
        (20, ["compute"], 250, MIG_2, 9),
        (30, ["compute"], 5, "", None),
        (40, ["compute"], 6, MIG_2, 9),
    ]


def test_a_refusing_mig_device_makes_the_list_incomplete() -> None:
    whole = divided(instance(MIG_1, 7, **{COMPUTE: FakeError(4)}), instance(MIG_2, 9, **{COMPUTE: [process(20, 1)]}))
    card = only(whole)
    assert card["processes"] is None and "become: true" in card["problem"] and len(card["mig"]["devices"]) == 2


def existing_cgroup(folder: Path) -> ContainerCgroup:
    return ContainerCgroup(str(folder), "/kubepods/x", POD, "c" * 64)


def limited(rows: dict[str, t.Any], **more: t.Any) -> JsonObject:
    """A card with limits, by the cgroup's folder."""

    def answer(request: t.Any) -> None:
        row = rows.get(request.nameSpace.decode(), FakeError(6))
        if isinstance(row, Exception):
            raise row
        request.softLimit, request.hardLimit, request.currentUsed = row

    return gpu(nvmlDeviceGetMemoryLimits_v1=answer, **more)


def test_limits_of_cgroups(tmp_path: Path) -> None:
    group = existing_cgroup(tmp_path)
    rows = {str(tmp_path): (0, 3 * GIB, GIB)}
    found = asked(limited(rows), limited({}), host=FakeHost([group, ONE]))
    row = {"cgroup": "/kubepods/x", "pod_uid": POD, "container_id": "c" * 64, "hard_mib": 3072, "soft_mib": 0}
    assert [card["limits"] for card in found["cards"]] == [[{**row, "used_mib": 1024}], []]
    assert found["pods_limited"] == 1


def test_no_limit_is_null_and_counts_no_pod(tmp_path: Path) -> None:
    group = existing_cgroup(tmp_path)
    found = asked(limited({str(tmp_path): (0, NA, 5 << 20)}), host=FakeHost([group]))
    only_one = found["cards"][0]["limits"][0]
    assert (only_one["hard_mib"], only_one["soft_mib"], only_one["used_mib"]) == (None, 0, 5)
    assert found["pods_limited"] == 0


def test_a_driver_without_limits() -> None:
    module = FakePynvml(gpu())
    del module.nvmlLib.nvmlDeviceGetMemoryLimits_v1
    ended = LocalWorker(module, FakeHost([ONE])).run(Request(), 1, 1)
    card = next(message["card"] for message in ended.messages if "card" in message)
    assert card["limits"] is None and card["problem"] == ""


def test_cards_that_were_read_are_skipped() -> None:
    module = FakePynvml(gpu(0), FakeError(999), gpu(2, **{COMPUTE: [process(10, 1), process(20, 1)]}))
    request = Request(frozenset({0, 1}), ((7, "x"), (9, "x")), frozenset({9, 10}))
    messages = LocalWorker(module, FakeHost()).run(request, 1, 1).messages
    assert [message["begin"] for message in messages if "begin" in message] == [2, 2, "7", "20"]
    assert [message["so_far"]["uuid"][-4:] for message in messages if "so_far" in message] == ["4444"]


def test_a_removed_cgroup_is_skipped_and_other_errors_are_reported(tmp_path: Path) -> None:
    here = existing_cgroup(tmp_path)
    rows = {str(tmp_path): (0, GIB, 0), ONE.folder: FakeError(17)}
    assert len(only(limited(rows), host=FakeHost([ONE, here]))["limits"]) == 1
    broken = only(limited({str(tmp_path): FakeError(17)}), host=FakeHost([here]))
    assert broken["limits"] is None and "(17, NVML_ERROR_OPERATING_SYSTEM) when reading limits" in broken["problem"]


def test_a_card_lost_at_its_limits_keeps_its_processes(tmp_path: Path) -> None:
    here = existing_cgroup(tmp_path)
    card = only(limited({str(tmp_path): FakeError(15)}, **{COMPUTE: [process(10, 1)]}), host=FakeHost([here]))
    assert card["limits"] is None and len(card["processes"]) == 1 and "GPU is lost" in card["problem"]
