# SPDX-License-Identifier: GPL-3.0-or-later
"""What is made of a process that hangs, dies or is late: what was read stays, and every card has its place."""

from __future__ import annotations

import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _nvml as nvml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_card import blank
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request
from nvml_kit import gpu_uuid

Json = dict[str, t.Any]


class Scripted:
    """Ends as it is told, one run after the other; a run takes so many seconds."""

    def __init__(self, *runs: tuple[Sequence[Json], str, float]) -> None:
        self._runs = list(runs)
        self.now = 0.0
        self.requests: list[tuple[Request, float, float]] = []

    def run(self, request: Request, stall: float, seconds: float) -> nvml.Ended:
        self.requests.append((request, stall, seconds))
        messages, how, took = self._runs.pop(0)
        self.now += took
        return nvml.Ended(messages, how, "it was ended by SIGSEGV" if how == nvml.DIED else "")

    def clock(self) -> float:
        return self.now

    def facts(self, timeout: int = 30) -> Json:
        return nvml.facts(self, self.clock, timeout)


def system(count: int) -> Json:
    return {"system": {"driver": "1", "nvml": "2", "cuda": "3", "count": count, "problem": ""}}


def card(index: int, *pids: int) -> Json:
    rows: list[Json] = [{"pid": pid, "start_time": str(pid * 2), "libvgpu": None} for pid in pids]
    return {**blank(index, ""), "uuid": gpu_uuid(index), "processes": rows}


def done(index: int, *pids: int) -> list[Json]:
    return [{"begin": index}, {"card": card(index, *pids)}]


def seen(found: Json) -> list[tuple[int, str, str]]:
    return [(one["index"], one["uuid"][:12], one["problem"][:34]) for one in found["cards"]]


def test_all_in_one_run() -> None:
    asker = Scripted(
        ([system(2), *done(0, 7), *done(1), {"begin": "7"}, {"libvgpu": [7, True]}, {"end": True}], nvml.END, 1.26)
    )
    found = asker.facts()
    assert (found["available"], found["problem"], found["driver"], found["seconds"]) == (True, "", "1", 1.3)
    assert [one["problem"] for one in found["cards"]] == ["", ""]
    assert found["cards"][0]["processes"][0]["libvgpu"] is True
    assert asker.requests == [(Request(), 10.0, 30.0)]


def test_a_card_that_hangs_is_left_out_and_the_others_are_still_asked() -> None:
    asker = Scripted(
        (
            [system(3), *done(0, 7), {"begin": 1}, {"begin": 1, "so_far": {**blank(1, ""), "uuid": gpu_uuid(1)}}],
            nvml.STALLED,
            11,
        ),
        ([system(3), *done(2), {"begin": "7"}, {"libvgpu": [7, False]}, {"end": True}], nvml.END, 1),
    )
    found = asker.facts()
    assert found["available"] and found["problem"] == ""
    # It is known which one it is, for all that was read of it.
    assert seen(found) == [
        (0, "GPU-00000000", ""),
        (1, "GPU-00000001", "NVML gave no answer about this car"),
        (2, "GPU-00000002", ""),
    ]
    assert "within 10 s" in found["cards"][1]["problem"] and found["cards"][1]["processes"] is None
    assert found["cards"][0]["processes"][0]["libvgpu"] is False
    assert asker.requests[1] == (Request(frozenset({0, 1}), ((7, "14"),), frozenset()), 10.0, 19.0)


def test_a_card_that_crashes_the_library_is_left_out_too() -> None:
    asker = Scripted(([system(2), {"begin": 0}], nvml.DIED, 1), ([system(2), *done(1), {"end": True}], nvml.END, 1))
    found = asker.facts()
    assert found["available"] and "ended by SIGSEGV" in found["cards"][0]["problem"] and found["cards"][1]["uuid"]


def test_when_the_time_is_over_what_was_read_stays() -> None:
    asker = Scripted(([system(3), *done(0), {"begin": 1}], nvml.LATE, 30))
    found = asker.facts()
    assert not found["available"]
    assert found["problem"].startswith("NVML gave no answer within 30 s (it was at card 1)")
    assert [one["problem"] for one in found["cards"]] == [
        "",
        "NVML gave no answer about this card in time",
        "this card wasn't reached in time",
    ]
    assert found["driver"] == "1" and found["cards"][0]["uuid"]


def test_a_library_that_hangs_at_once() -> None:
    found = Scripted(([], nvml.LATE, 5)).facts(5)
    assert (found["available"], found["cards"], found["driver"]) == (False, [], "")
    assert found["problem"].startswith("NVML gave no answer within 5 s: a card or the driver hangs")


def test_a_process_that_dies_before_any_card() -> None:
    found = Scripted(([], nvml.DIED, 0)).facts()
    assert not found["available"] and found["problem"].endswith("it was ended by SIGSEGV")
    found = Scripted(([system(1)], nvml.DIED, 0)).facts()
    assert not found["available"] and found["cards"][0]["problem"] == "this card wasn't reached in time"


def test_a_refusal_of_the_whole_library() -> None:
    found = Scripted(([{"failed": "NVML: no"}], nvml.END, 0)).facts()
    assert (found["available"], found["problem"], found["pods_limited"]) == (False, "NVML: no", None)


def test_a_library_that_fails_in_the_second_attempt_keeps_the_cards() -> None:
    asker = Scripted(([system(2), *done(0), {"begin": 1}], nvml.STALLED, 10), ([{"failed": "NVML: no"}], nvml.END, 0))
    found = asker.facts()
    assert (found["available"], found["problem"]) == (False, "NVML: no")
    assert found["cards"][0]["uuid"] and "no answer" in found["cards"][1]["problem"]


def test_a_process_whose_memory_cant_be_looked_at_costs_no_card() -> None:
    asker = Scripted(
        ([system(1), *done(0, 7, 8), {"begin": "7"}], nvml.STALLED, 10),
        ([system(1), {"begin": "8"}, {"libvgpu": [8, True]}, {"end": True}], nvml.END, 1),
    )
    found = asker.facts()
    assert found["available"] and found["problem"] == ""
    assert [one["libvgpu"] for one in found["cards"][0]["processes"]] == [None, True]
    assert asker.requests[1][0].skip_processes == frozenset({7})


def test_late_with_all_cards_known_is_an_answer() -> None:
    found = Scripted(([system(1), *done(0, 7), {"begin": "7"}], nvml.LATE, 30)).facts()
    assert found["available"] and "HAMi" in found["problem"]


def test_every_card_hangs() -> None:
    asker = Scripted(
        *(([system(2), {"begin": index}], nvml.STALLED, 10) for index in (0, 1)),
        ([system(2), {"end": True}], nvml.END, 1),
    )
    assert [one["problem"][:22] for one in asker.facts()["cards"]] == ["NVML gave no answer ab"] * 2


@pytest.mark.parametrize("seconds", [0, -1, 601])
def test_a_time_limit_that_is_none(seconds: int) -> None:
    with pytest.raises(BadInput, match=r"^timeout: .* between 1 and 600 seconds$"):
        nvml.seconds_of({"timeout": seconds})


@pytest.mark.parametrize("seconds", [1, 600])
def test_time_limits(seconds: int) -> None:
    assert nvml.seconds_of({"timeout": seconds}) == seconds
