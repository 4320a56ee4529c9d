# SPDX-License-Identifier: GPL-3.0-or-later
"""Every return code of NVML has a sentence that names it and says what it means; none of them is a traceback."""

from __future__ import annotations

import pynvml
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import BROKEN, CODES, Refused, sentence
from nvml_kit import FakeError, asked, gpu, only

# All that the pinned nvidia-ml-py knows; one that a newer version adds fails here first.
KNOWN = sorted(
    (int(value), name.removeprefix("NVML_ERROR_"))
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
)
SILENT = (3, 13)


def test_every_code_of_the_library_is_known_by_its_own_name() -> None:
    assert [(value, CODES[value].name) for value in sorted(CODES)] == KNOWN
    assert len({code.advice for code in CODES.values()}) == len(CODES)


@pytest.mark.parametrize(("value", "name"), KNOWN)
def test_a_library_that_refuses_says_why(value: int, name: str) -> None:
    for function in ("nvmlInit", "nvmlDeviceGetCount"):
        found = asked(gpu(), **{function: FakeError(value)})
        assert not found["available"] and found["cards"] == []
        assert f"({value}, NVML_ERROR_{name})" in found["problem"]
        assert found["problem"].endswith(CODES[value].advice)


@pytest.mark.parametrize(("value", "name"), KNOWN)
def test_one_question_that_is_refused_leaves_the_others(value: int, name: str) -> None:
    card = only(gpu(nvmlDeviceGetComputeMode=FakeError(value)), gpu(1))
    assert (card["compute_mode"], card["name"]) == ("unknown", "NVIDIA Something")
    if value in SILENT:
        assert card["problem"] == ""
    elif value == 15:
        # Nothing else needs to be asked of it.
        assert card["problem"] == sentence(Refused(15)) and card["processes"] is None
    else:
        assert card["problem"] == sentence(Refused(value), ["its compute mode"])
        assert card["processes"] == []


@pytest.mark.parametrize(("value", "name"), KNOWN)
def test_a_card_that_is_refused_keeps_its_place(value: int, name: str) -> None:
    found = asked(gpu(0), FakeError(value), gpu(2))
    assert [one["index"] for one in found["cards"]] == [0, 1, 2]
    assert [bool(one["uuid"]) for one in found["cards"]] == [True, False, True]
    assert f"NVML_ERROR_{name}" in found["cards"][1]["problem"] and found["available"]


@pytest.mark.parametrize(("value", "name"), KNOWN)
def test_a_list_of_processes_that_is_refused_is_none(value: int, name: str) -> None:
    card = only(gpu(nvmlDeviceGetComputeRunningProcesses_v3=FakeError(value)))
    assert card["processes"] is None and f"NVML_ERROR_{name}" in card["problem"]


@pytest.mark.parametrize("value", [31, 4711, -7, 1 << 31])
def test_a_code_that_nobody_documents_is_said_by_its_number(value: int) -> None:
    assert str(value) in asked(nvmlInit=FakeError(value))["problem"]


def test_equal_refusals_are_one_sentence() -> None:
    card = only(gpu(nvmlDeviceGetComputeMode=FakeError(999), nvmlDeviceGetName=FakeError(999)))
    assert card["problem"] == sentence(Refused(999), ["its name", "its compute mode"])
    assert "when asked for its name and its compute mode" in card["problem"]


def test_what_isnt_nvmls_own_is_said_in_its_words() -> None:
    assert sentence(Refused(BROKEN, "nothing is there")) == "nothing is there"
    assert sentence(Refused(BROKEN, "MemoryError"), ["a", "b", "a"]).endswith("when asked for a and b: MemoryError")
