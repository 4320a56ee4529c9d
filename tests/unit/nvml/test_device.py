# SPDX-License-Identifier: GPL-3.0-or-later
"""A card's facts, implausible values, and functions that a driver lacks."""

from __future__ import annotations

import typing as t
from types import SimpleNamespace

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.card_exclusion import parse
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import device as cards
from hypothesis import given
from hypothesis import strategies as st
from nvml_kit import GIB, NA, FakeError, FakeHost, asked, gpu, gpu_uuid, memory, only, process

LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")
MIG_1, MIG_2 = "MIG-aaaaaaaa-0000-5000-8000-000000000001", "MIG-aaaaaaaa-0000-5000-8000-000000000002"


def test_a_healthy_node() -> None:
    found = asked(gpu(0), gpu(1), host=FakeHost(xids={"00000000:3B:00": [79, 31]}))
    assert (found["available"], found["problem"], found["pods_limited"]) == (True, "", 0)
    assert (found["driver"], found["nvml"], found["cuda"]) == ("615.71.09", "13.615.71.09", "13.4")
    first = found["cards"][0]
    assert first == {
        "index": 0,
        "minor": 0,
        "uuid": gpu_uuid(0),
        "pci": "00000000:3B:00.0",
        "name": "NVIDIA Something",
        "problem": "",
        "memory": {"total_mib": 16384, "used_mib": 1024, "free_mib": 15104, "reserved_mib": 256},
        "mig": {"mode": "unsupported", "pending": "unsupported", "devices": []},
        "compute_mode": "default",
        "health": {
            "ecc_uncorrected_volatile": 10,
            "ecc_uncorrected_aggregate": 11,
            "row_remap": {"correctable": 1, "uncorrectable": 2, "pending": False, "failed": True},
            "retired_pages_pending": False,
            "recovery_action": "none",
            "fabric": None,
            "xids": [79, 31],
        },
        "processes": [],
        "limits": [],
    }
    assert found["cards"][1]["health"]["xids"] == [] and set(found["cards"][1]) == set(first)
    assert set(cards.unknown_card(0)) == set(first) and set(cards.unknown_card(0)["health"]) == set(first["health"])


def test_without_version_2_used_includes_the_reserve() -> None:
    def first_version(version: int | None = None) -> t.Any:
        if version:
            raise FakeError(13)
        return memory()()

    card = only(gpu(nvmlDeviceGetMemoryInfo=first_version))
    assert card["memory"] == {"total_mib": 16384, "used_mib": 1280, "free_mib": 15104, "reserved_mib": None}


def test_a_reserve_that_is_not_whole_is_rounded_up() -> None:
    """An H200's, recorded in tests/unit/driver/recordings; nvidia-smi and the device plugin say 616, too."""
    recorded = memory(total=150754820096, used=0, reserved=644939776)
    card = only(gpu(nvmlDeviceGetMemoryInfo=recorded))
    assert card["memory"] == {"total_mib": 143771, "used_mib": 0, "free_mib": 143155, "reserved_mib": 616}


def test_a_missing_function_is_no_problem() -> None:
    for function in set(gpu()) - set(LISTS):
        for code in (13, 3):
            assert only(gpu(**{function: FakeError(code)}))["problem"] == "", function


def test_without_the_kernels_log_xids_are_unknown() -> None:
    assert only(gpu())["health"]["xids"] is None
    assert only(gpu(nvmlDeviceGetPciInfo_v3=FakeError(3)), host=FakeHost(xids={}))["health"]["xids"] is None


def test_a_card_lost_while_it_is_read_keeps_its_facts() -> None:
    card = only(gpu(nvmlDeviceGetRemappedRows=FakeError(15)))
    assert card["memory"]["total_mib"] == 16384 and card["uuid"] == gpu_uuid(0)
    assert card["processes"] is None and card["limits"] is None and "GPU is lost (15" in card["problem"]


@pytest.mark.parametrize(
    ("state", "status", "fabric"),
    [
        (0, 0, None),
        (1, 0, {"state": "not_started", "status": 0}),
        (2, 0, {"state": "in_progress", "status": 0}),
        (3, 0, {"state": "completed", "status": 0}),
        (3, 999, {"state": "completed", "status": 999}),
        (7, 0, {"state": "state_7", "status": 0}),
    ],
)
def test_the_registration_with_nvswitches(state: int, status: int, fabric: JsonObject | None) -> None:
    def answer(info: t.Any) -> None:
        # It is NVML's structure, by reference.
        info._obj.state, info._obj.status = state, status

    card = only(gpu(nvmlDeviceGetGpuFabricInfo=answer))
    assert card["health"]["fabric"] == fabric and not card["problem"]


def test_cards_that_are_left_alone_are_named_and_nothing_is_read_of_them() -> None:
    dead = FakeError(15)
    kept = gpu(1, nvmlDeviceGetMemoryInfo=dead, nvmlDeviceGetMigMode=dead, nvmlDeviceGetComputeMode=dead)
    for entry in ("3c:00.0", gpu_uuid(1).upper(), "something"):
        cards_of = [gpu(0, nvmlDeviceGetName="NVIDIA L4"), kept]
        found = asked(*cards_of, exclude=parse([entry]))
        assert [(card["index"], card["problem"]) for card in found["cards"]] == [(0, "")] and not found["problem"]
        named = {"uuid": gpu_uuid(1), "pci": "00000000:3C:00.0", "name": "NVIDIA Something"}
        assert found["excluded"] == [{**named, "entry": parse([entry]).entries[0]}]
    assert asked(gpu(0), kept)["excluded"] == []


@pytest.mark.parametrize(
    ("number", "name"), [*enumerate(cards.RECOVERY_ACTIONS), (8, "action_8"), (NA, None), (1 << 63, None)]
)
def test_recovery_actions(number: int, name: str | None) -> None:
    value = SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=number))
    card = only(gpu(nvmlDeviceGetFieldValues=lambda _ids: [value]))
    assert card["health"]["recovery_action"] == name
    assert bool(card["problem"]) == (number == 1 << 63)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([], "NVML returned nothing usable when reading its recovery action: the field has no value"),
        ([SimpleNamespace(nvmlReturn=2, valueType=1, value=None)], ""),
        ([SimpleNamespace(nvmlReturn=0, valueType=0, value=SimpleNamespace(dVal=1.0))], ""),
        ([SimpleNamespace(nvmlReturn=999, valueType=1, value=None)], "Unknown Error (999"),
    ],
)
def test_a_refused_field(answers: list[t.Any], problem: str) -> None:
    card = only(gpu(nvmlDeviceGetFieldValues=lambda _ids: answers))
    assert card["health"]["recovery_action"] is None
    assert problem in card["problem"] and bool(problem) == bool(card["problem"])


@pytest.mark.parametrize(("number", "name"), [*enumerate(cards.COMPUTE_MODES), (4, "unknown")])
def test_compute_modes(number: int, name: str) -> None:
    card = only(gpu(nvmlDeviceGetComputeMode=number))
    assert (card["compute_mode"], bool(card["problem"])) == (name, number == 4)


IMPLAUSIBLE: list[tuple[str, t.Any, str, t.Any, str]] = [
    ("MemoryInfo", memory(used=32 * GIB), "memory", None, "can't be 32768 MiB used"),
    ("MemoryInfo", memory(total=0, used=0, reserved=0), "memory", None, "of 0 MiB"),
    ("MemoryInfo", SimpleNamespace(total=-1, used=None, free="x"), "memory", None, "total memory can't be -1"),
    ("MemoryInfo", SimpleNamespace(total=GIB, used=0, free=2 * GIB), "memory", None, "2048 MiB free of 1024"),
    ("MemoryInfo", None, "memory", None, ""),
    ("UUID", "", "uuid", "", ""),
    ("UUID", "GPU-\x1b[31m", "uuid", "", "characters"),
    ("UUID", "0", "uuid", "", "its UUID can't be '0'"),
    ("UUID", 7, "uuid", "", "its UUID isn't a string"),
    ("Name", UnicodeDecodeError("utf-8", b"N\xff\xfeX", 1, 2, "bad"), "name", "N??X", "its name has"),
    ("Name", "x" * 5000, "name", "x" * 256 + "…", "its name has"),
    ("Name", "a\nb", "name", "a?b", "its name has"),
    ("MinorNumber", -3, "minor", None, "its minor number can't be -3"),
    ("MinorNumber", 1 << 80, "minor", None, "its minor number can't be"),
    ("MinorNumber", True, "minor", None, "its minor number can't be True"),
    ("Index", 5, "index", 0, "at index 0 and reports index 5"),
    ("PciInfo_v3", SimpleNamespace(busId=b"\xff"), "pci", "", "its PCI address is malformed"),
    ("PciInfo_v3", SimpleNamespace(), "pci", "", "its PCI address is malformed"),
    ("PciInfo_v3", SimpleNamespace(busId=b"0000000a:c1:00.0"), "pci", "0000000A:C1:00.0", ""),
    ("MigMode", 3, "mig", {"mode": "unknown", "pending": "unknown", "devices": []}, "its MIG mode"),
    ("MigMode", [7, 0], "mig", {"mode": "unknown", "pending": "disabled", "devices": []}, "can't be 7"),
    ("MigMode", [0, 1], "mig", {"mode": "disabled", "pending": "enabled", "devices": []}, ""),
    ("ComputeRunningProcesses_v3", MemoryError(), "processes", None, "failed with MemoryError"),
    ("ComputeRunningProcesses_v3", 7, "processes", None, "plausible list"),
    ("ComputeRunningProcesses_v3", [None] * 70000, "processes", None, "plausible list"),
    ("ComputeRunningProcesses_v3", [process(0, 1)], "processes", [], "PID 0"),
    ("ComputeRunningProcesses_v3", [process(2**32 - 1, 1)], "processes", [], "PID 4294967295"),
    ("ComputeRunningProcesses_v3", [None], "processes", [], "PID None"),
]


@pytest.mark.parametrize(("function", "answer", "key", "value", "problem"), IMPLAUSIBLE)
def test_implausible_values_are_unknown(function: str, answer: t.Any, key: str, value: t.Any, problem: str) -> None:
    card = only(gpu(**{f"nvmlDeviceGet{function}": answer}))
    assert card[key] == value
    assert problem in card["problem"] and bool(problem) == bool(card["problem"])


@pytest.mark.parametrize("answer", [None, (1, 2), (1, 2, 3, "x"), 7, (1, 2, 3, 1 << 70)])
def test_malformed_remapped_rows(answer: t.Any) -> None:
    assert only(gpu(nvmlDeviceGetRemappedRows=answer))["health"]["row_remap"] is None


def test_duplicate_identities_are_reported_on_both_cards() -> None:
    twin = gpu(1, nvmlDeviceGetUUID=gpu_uuid(0), nvmlDeviceGetMinorNumber=0)
    found = asked(gpu(0), twin, gpu(2), gpu(3, nvmlDeviceGetMinorNumber=None), gpu(4, nvmlDeviceGetMinorNumber=None))
    problem = "it has the same UUID as card {0}; it has the same minor number as card {0}"
    assert [card["problem"] for card in found["cards"]] == [problem.format(1), problem.format(0), "", "", ""]


def test_implausibly_many_cards() -> None:
    found = asked(gpu(0), nvmlDeviceGetCount=257, nvmlDeviceGetHandleByIndex=FakeError(2))
    assert found["available"] and "257" in found["problem"] and len(found["cards"]) == 256


def test_a_malformed_count() -> None:
    assert [asked(gpu(0), nvmlDeviceGetCount=count)["cards"] for count in (None, "2", -1, NA)] == [[]] * 4


def test_missing_versions() -> None:
    found = asked(
        nvmlSystemGetDriverVersion=FakeError(999),
        nvmlSystemGetNVMLVersion=FakeError(13),
        nvmlSystemGetCudaDriverVersion_v2=FakeError(13),
    )
    assert (found["driver"], found["nvml"], found["cuda"], found["available"]) == ("", "", "", True)
    assert "Unknown Error (999" in found["problem"] and "the driver's version" in found["problem"]


def divided(*devices: JsonObject, most: t.Any = 7) -> JsonObject:
    def device(index: int) -> JsonObject:
        if index < len(devices) and devices[index]:
            return devices[index]
        raise FakeError(6)

    return gpu(
        nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=most, nvmlDeviceGetMigDeviceHandleByIndex=device
    )


def instance(uuid: str, gi: int, **changes: t.Any) -> JsonObject:
    return gpu(
        nvmlDeviceGetUUID=uuid,
        nvmlDeviceGetGpuInstanceId=gi,
        nvmlDeviceGetComputeInstanceId=0,
        nvmlDeviceGetMemoryInfo=memory(total=4 * GIB),
        **changes,
    )


def test_mig_devices_are_listed_with_gaps() -> None:
    card = only(divided(instance(MIG_1, 7), {}, instance(MIG_2, 9)))
    assert card["problem"] == ""
    row = {"uuid": MIG_1, "index": 0, "gi": 7, "ci": 0, "total_mib": 4096, "used_mib": 1024}
    assert card["mig"] == {
        "mode": "enabled",
        "pending": "enabled",
        "devices": [row, {**row, "uuid": MIG_2, "index": 2, "gi": 9}],
    }


def test_implausible_mig_devices() -> None:
    full = {**instance("MIG?", 7), "nvmlDeviceGetMemoryInfo": memory(total=GIB, used=2 * GIB)}
    card = only(divided(full, most=4294967295))
    assert [(device["uuid"], device["used_mib"]) for device in card["mig"]["devices"]] == [("", None)]
    assert "4294967295 MIG devices" in card["problem"] and "2048 MiB used of 1024 MiB" in card["problem"]


def test_a_refused_mig_device_is_reported() -> None:
    card = only({**divided(most=2), "nvmlDeviceGetMigDeviceHandleByIndex": FakeError(4)})
    assert "Insufficient Permissions (4" in card["problem"] and "MIG device 0 and MIG device 1" in card["problem"]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=5),
    st.sampled_from([FakeError(999), FakeError(15), FakeError(4), ValueError("x"), RecursionError(), OverflowError()]),
)


@given(st.dictionaries(st.sampled_from(sorted({*gpu(), "nvmlDeviceGetMaxMigDeviceCount"})), JUNK, max_size=8))
def test_no_value_of_a_card_raises(answers: JsonObject) -> None:
    found = asked(gpu(0, **answers), gpu(1))
    assert found["available"] and len(found["cards"]) == 2 and found["cards"][1]["uuid"] == gpu_uuid(1)
    assert set(found["cards"][0]) == set(cards.unknown_card(0))


@given(st.dictionaries(st.sampled_from(["nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"]), JUNK, max_size=2))
def test_no_value_of_the_system_raises(answers: JsonObject) -> None:
    assert isinstance(asked(gpu(0), **answers)["cards"], list)
