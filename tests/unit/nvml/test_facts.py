# SPDX-License-Identifier: GPL-3.0-or-later
"""A worker that hangs, crashes or exceeds the time limit: what was read is kept, and every card keeps its index."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import facts as nvml
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.device import unknown_card
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import Request
from nvml_kit import gpu_uuid


class Scripted:
    """Worker with prepared runs: messages, ending and duration in seconds."""

    def __init__(self, *runs: tuple[Sequence[JsonObject], str, float]) -> None:
        self._runs = list(runs)
        self.now = 0.0
        self.requests: list[tuple[Request, float, float]] = []

    def run(self, request: Request, stall: float, seconds: float) -> nvml.WorkerResult:
        self.requests.append((request, stall, seconds))
        messages, ending, took = self._runs.pop(0)
        self.now += took
        return nvml.WorkerResult(messages, ending, "it was killed by SIGSEGV" if ending == nvml.CRASHED else "")

    def clock(self) -> float:
        return self.now

    def facts(self, timeout: int = 30) -> JsonObject:
        return nvml.facts(self, self.clock, timeout)


def system(count: int) -> JsonObject:
    return {"system": {"driver": "1", "nvml": "2", "cuda": "3", "count": count, "problem": ""}}


def card(index: int, *pids: int) -> JsonObject:
    rows: list[JsonObject] = [{"pid": pid, "start_time": str(pid * 2), "libvgpu": None} for pid in pids]
    return {**unknown_card(index), "uuid": gpu_uuid(index), "processes": rows}


def done(index: int, *pids: int) -> list[JsonObject]:
    return [{"begin": index}, {"card": card(index, *pids)}]


def summary(answer: JsonObject) -> list[tuple[int, str, str]]:
    return [(card["index"], card["uuid"][:12], card["problem"][:34]) for card in answer["cards"]]


def test_all_in_one_run() -> None:
    worker = Scripted(
        ([system(2), *done(0, 7), *done(1), {"begin": "7"}, {"libvgpu": [7, True]}, {"end": True}], nvml.END, 1.26)
    )
    found = worker.facts()
    assert (found["available"], found["problem"], found["driver"], found["seconds"]) == (True, "", "1", 1.3)
    assert [card["problem"] for card in found["cards"]] == ["", ""]
    assert found["cards"][0]["processes"][0]["libvgpu"] is True
    assert worker.requests == [(Request(), 10.0, 30.0)]


def test_a_hanging_card_is_skipped_and_the_others_are_read() -> None:
    worker = Scripted(
        (
            [
                system(3),
                *done(0, 7),
                {"begin": 1},
                {"begin": 1, "so_far": {**unknown_card(1), "uuid": gpu_uuid(1)}},
            ],
            nvml.STALLED,
            11,
        ),
        ([system(3), *done(2), {"begin": "7"}, {"libvgpu": [7, False]}, {"end": True}], nvml.END, 1),
    )
    found = worker.facts()
    assert found["available"] and found["problem"] == ""
    # The identity that was read before is kept.
    assert summary(found) == [
        (0, "GPU-00000000", ""),
        (1, "GPU-00000001", "NVML didn't respond for this card "),
        (2, "GPU-00000002", ""),
    ]
    assert "within 10 s" in found["cards"][1]["problem"] and found["cards"][1]["processes"] is None
    assert found["cards"][0]["processes"][0]["libvgpu"] is False
    assert worker.requests[1] == (Request(frozenset({0, 1}), ((7, "14"),), frozenset()), 10.0, 19.0)


def test_a_crashing_card_is_skipped() -> None:
    worker = Scripted(([system(2), {"begin": 0}], nvml.CRASHED, 1), ([system(2), *done(1), {"end": True}], nvml.END, 1))
    found = worker.facts()
    assert found["available"] and "killed by SIGSEGV" in found["cards"][0]["problem"] and found["cards"][1]["uuid"]


def test_cards_that_were_read_before_the_time_limit_are_kept() -> None:
    worker = Scripted(([system(3), *done(0), {"begin": 1}], nvml.TIMED_OUT, 30))
    found = worker.facts()
    assert not found["available"]
    assert found["problem"].startswith("NVML didn't respond within 30 s (at card 1)")
    assert [card["problem"] for card in found["cards"]] == [
        "",
        "NVML didn't respond for this card in time",
        "this card wasn't read in time",
    ]
    assert found["driver"] == "1" and found["cards"][0]["uuid"]


@pytest.mark.parametrize(
    ("messages", "ending", "problem"),
    [
        ([], nvml.TIMED_OUT, "NVML didn't respond within 30 s: a card or the driver hangs"),
        ([], nvml.CRASHED, "the process that calls NVML ended too early; it was killed by SIGSEGV"),
        ([{"failed": "NVML: no"}], nvml.END, "NVML: no"),
    ],
)
def test_a_worker_that_ends_before_any_card(messages: list[JsonObject], ending: str, problem: str) -> None:
    found = Scripted((messages, ending, 0)).facts()
    assert (found["available"], found["cards"], found["driver"], found["pods_limited"]) == (False, [], "", None)
    assert found["problem"] == problem
    found = Scripted(([system(1), *messages], ending, 0)).facts()
    assert not found["available"] and found["cards"][0]["problem"] == "this card wasn't read in time"


def test_a_library_that_fails_in_the_second_attempt_keeps_the_cards() -> None:
    worker = Scripted(([system(2), *done(0), {"begin": 1}], nvml.STALLED, 10), ([{"failed": "NVML: no"}], nvml.END, 0))
    found = worker.facts()
    assert (found["available"], found["problem"]) == (False, "NVML: no")
    assert found["cards"][0]["uuid"] and "didn't respond" in found["cards"][1]["problem"]


def test_a_hanging_process_is_skipped() -> None:
    worker = Scripted(
        ([system(1), *done(0, 7, 8), {"begin": "7"}], nvml.STALLED, 10),
        ([system(1), {"begin": "8"}, {"libvgpu": [8, True]}, {"end": True}], nvml.END, 1),
    )
    found = worker.facts()
    assert found["available"] and found["problem"] == ""
    assert [process["libvgpu"] for process in found["cards"][0]["processes"]] == [None, True]
    assert worker.requests[1][0].skip_processes == frozenset({7})


def test_all_cards_before_the_time_limit_are_complete() -> None:
    found = Scripted(([system(1), *done(0, 7), {"begin": "7"}], nvml.TIMED_OUT, 30)).facts()
    assert found["available"] and "HAMi" in found["problem"]


def test_every_card_hangs() -> None:
    worker = Scripted(
        *(([system(2), {"begin": index}], nvml.STALLED, 10) for index in (0, 1)),
        ([system(2), {"end": True}], nvml.END, 1),
    )
    assert [card["problem"][:19] for card in worker.facts()["cards"]] == ["NVML didn't respond"] * 2


def test_time_limits() -> None:
    assert [nvml.valid_timeout(seconds) for seconds in (1, 600)] == [1, 600]
    for seconds in (0, -1, 601):
        with pytest.raises(BadInput, match=r"^timeout: .* between 1 and 600 seconds$"):
            nvml.valid_timeout(seconds)
