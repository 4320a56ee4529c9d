# SPDX-License-Identifier: GPL-3.0-or-later
"""Every return code of NVML is reported with its name and advice, and none raises."""

from __future__ import annotations

import pynvml
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import BROKEN, CODES, NvmlRefused, describe
from nvml_kit import FakeError, asked, gpu, only

# All codes of the pinned nvidia-ml-py; a code that a newer version adds fails here first.
KNOWN = sorted(
    (int(value), name.removeprefix("NVML_ERROR_"))
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
)
SILENT = (3, 13)
# The other codes are handled equally.
FEW = [pytest.param(*one, marks=() if one[0] in (3, 4, 13, 15, 999) else pytest.mark.long) for one in KNOWN]


def test_every_code_of_the_library_is_known() -> None:
    assert [(value, CODES[value].name) for value in sorted(CODES)] == KNOWN
    assert len({code.advice for code in CODES.values()}) == len(CODES)


@pytest.mark.parametrize(("value", "name"), KNOWN)
def test_a_refusing_library_is_reported(value: int, name: str) -> None:
    for function in ("nvmlInit", "nvmlDeviceGetCount"):
        found = asked(gpu(), **{function: FakeError(value)})
        assert not found["available"] and found["cards"] == []
        assert f"({value}, NVML_ERROR_{name})" in found["problem"]
        assert found["problem"].endswith(CODES[value].advice)


@pytest.mark.parametrize(("value", "name"), FEW)
def test_a_refused_function_doesnt_affect_the_others(value: int, name: str) -> None:
    card = only(gpu(nvmlDeviceGetComputeMode=FakeError(value)), gpu(1))
    assert (card["compute_mode"], card["name"]) == ("unknown", "NVIDIA Something")
    if value in SILENT:
        assert card["problem"] == ""
    elif value == 15:
        # No further function is called.
        assert card["problem"] == describe(NvmlRefused(15)) and card["processes"] is None
    else:
        assert card["problem"] == describe(NvmlRefused(value), ["its compute mode"])
        assert card["processes"] == []


@pytest.mark.parametrize(("value", "name"), FEW)
def test_a_refused_card_keeps_its_index_and_a_refused_list_is_null(value: int, name: str) -> None:
    found = asked(gpu(0), FakeError(value), gpu(2, nvmlDeviceGetComputeRunningProcesses_v3=FakeError(value)))
    assert [(card["index"], bool(card["uuid"])) for card in found["cards"]] == [(0, True), (1, False), (2, True)]
    assert all(f"NVML_ERROR_{name}" in card["problem"] for card in found["cards"][1:]) and found["available"]
    assert found["cards"][2]["processes"] is None


def test_an_undocumented_code_is_reported_by_its_number() -> None:
    for value in (31, -7, 1 << 31):
        assert str(value) in asked(nvmlInit=FakeError(value))["problem"]


def test_equal_refusals_are_one_sentence() -> None:
    card = only(gpu(nvmlDeviceGetComputeMode=FakeError(999), nvmlDeviceGetName=FakeError(999)))
    assert card["problem"] == describe(NvmlRefused(999), ["its name", "its compute mode"])
    assert "when reading its name and its compute mode" in card["problem"]


def test_a_failure_of_the_binding_is_reported_with_its_text() -> None:
    assert describe(NvmlRefused(BROKEN, "nothing is there")) == "nothing is there"
    assert describe(NvmlRefused(BROKEN, "MemoryError"), ["a", "b", "a"]).endswith("when reading a and b: MemoryError")
