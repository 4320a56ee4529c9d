# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of containers: by the driver's limits, by its list of processes, and none where neither tells."""

from __future__ import annotations

import types
import typing as t

import pytest
from gpushare.node import usage
from gpushare.node.usage import Sample, Share, Usage, samples
from gpushare.nvml.processes import Held, NvidiaProcesses
from gpushare.shared._nvml.binding import FUNCTION_NOT_FOUND, NOT_FOUND, NvmlRefused
from limit_fakes import FIRST, SECOND
from prometheus_client import CollectorRegistry, generate_latest

MIB = 1 << 20
ONE = Share("team/train-0", "uid-1", "main", frozenset({"c1"}), ("c1",), {FIRST: 1024})
TWO = Share("team/train-1", "uid-2", "main", frozenset({"c2"}), ("c2",), {FIRST: 2048, SECOND: 2048})


def sample(share: Share, uuid: str, used: int | None, duty: int | None) -> Sample:
    return Sample(share.pod, share.container, uuid, share.mib[uuid] * MIB, used, duty)


def test_without_a_source_only_the_share_is_known() -> None:
    found = samples([TWO, ONE], {}, {})
    assert found == [sample(ONE, FIRST, None, None), sample(TWO, FIRST, None, None), sample(TWO, SECOND, None, None)]


def test_the_drivers_count_for_a_limit_comes_first_and_a_list_without_a_container_is_zero() -> None:
    listed = {FIRST: [Held("uid-1", "c1", 300, 40), Held("uid-9", "c9", 9, 9)], SECOND: None}
    found = samples([ONE, TWO], {("c1", FIRST): 12345}, listed)
    assert found == [sample(ONE, FIRST, 12345, 40), sample(TWO, FIRST, 0, 0), sample(TWO, SECOND, None, None)]


def test_a_pod_of_several_containers_is_one_sample() -> None:
    pod = Share("team/pair", "uid-1", "", frozenset(), ("/sys/a", "/sys/b"), {FIRST: 1024})
    listed = {FIRST: [Held("uid-1", "c1", 100, 70), Held("uid-1", "c2", 28, 60), Held("uid-2", "c3", 1, 1)]}
    assert samples([pod], {}, listed) == [sample(pod, FIRST, 128 * MIB, 100)]
    assert samples([pod], {("/sys/a", FIRST): 5, ("/sys/b", FIRST): 6}, {}) == [sample(pod, FIRST, 11, None)]
    assert samples([pod], {("/sys/a", FIRST): 5}, {}) == [sample(pod, FIRST, None, None)], "a part isn't all"


def test_the_number_of_samples_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_SAMPLES", 2)
    assert len(samples([ONE, TWO], {}, {})) == 2


class Reader:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def read(self, uuids: t.Sequence[str]) -> dict[str, list[Held] | None]:
        self.asked += uuids
        return {uuid: [Held("uid-1", "c1", 300, 40)] for uuid in uuids}


def test_the_page_has_present_containers_only() -> None:
    registry, reader = CollectorRegistry(), Reader()
    page = Usage("gpu1", reader)
    registry.register(page)
    page.refresh([ONE], {})
    text = generate_latest(registry).decode()
    labels = f'{{container="main",namespace="team",node="gpu1",pod="train-0",uuid="{FIRST}"}}'
    samples_shown = sorted(line for line in text.splitlines() if line.startswith("container_"))
    assert [line.replace(labels, "") for line in samples_shown] == [
        "container_accelerator_duty_cycle 40.0",
        f"container_accelerator_memory_total_bytes {float(1024 * MIB)}".replace("1073741824.0", "1.073741824e+09"),
        f"container_accelerator_memory_used_bytes {float(300 * MIB)}".replace("314572800.0", "3.145728e+08"),
    ]
    assert reader.asked == [FIRST], "a card that no container has isn't asked"
    page.refresh([], {})
    assert "uuid=" not in generate_latest(registry).decode()


# --------------------------------------------------------------------------- the driver's list


class Nvml:
    """NVML's answers by function; an exception is raised."""

    def __init__(self, **answers: t.Any) -> None:
        self.answers = {
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetComputeRunningProcesses_v3": [row(1, 100), row(2, 20), row(3, 3), row(4, 4)],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
            "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
            "nvmlDeviceGetProcessUtilization": [used(1, 1000, 30), used(2, 1001, 20), used(2, 1002, 40)],
            **answers,
        }
        self.since: list[int] = []
        self.ended = 0

    def call(self, function: str, *arguments: t.Any) -> t.Any:
        self.ended += function == "nvmlShutdown"
        if function == "nvmlDeviceGetProcessUtilization":
            self.since.append(arguments[1])
        answer = self.answers[function]
        if isinstance(answer, Exception):
            raise answer
        return answer


def row(pid: int, mib: int | None) -> t.Any:
    used_bytes = None if mib is None else mib * MIB
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used_bytes, gpuInstanceId=None, computeInstanceId=None)


def used(pid: int, at: int, percent: int) -> t.Any:
    return types.SimpleNamespace(pid=pid, timeStamp=at, smUtil=percent)


class Owners:
    """Processes 1 and 2 are of one container, 3 of another, 4 of the machine."""

    def now(self) -> int:
        return 1

    def process(self, pid: int, listed: int) -> t.Any:
        place = {1: ("uid-1", "c1"), 2: ("uid-1", "c1"), 3: ("uid-2", "c2")}.get(pid)
        return {
            "where": "pod" if place else "host",
            **dict(zip(("pod_uid", "container_id"), place or ("", ""), strict=True)),
        }


def read(nvml: Nvml) -> list[Held] | None:
    return NvidiaProcesses(lambda: t.cast(t.Any, nvml), t.cast(t.Any, Owners())).read([FIRST])[FIRST]


def test_processes_are_added_up_by_container() -> None:
    assert read(Nvml()) == [Held("uid-1", "c1", 120, 60), Held("uid-2", "c2", 3, 0)]


@pytest.mark.parametrize(
    ("answer", "duties"),
    [
        (NvmlRefused(NOT_FOUND), [0, 0]),
        (NvmlRefused(FUNCTION_NOT_FOUND), [None, None]),
        # nvtop#110: of processes that have ended.
        ([used(1, 5, 4_000_000_000), used(3, 6, 7)], [0, 7]),
        ([used(1, 5, 90), used(2, 5, 90)], [100, 0]),
        ("garbage", [None, None]),
    ],
    ids=["idle", "too-old", "above-100", "more-than-all", "garbage"],
)
def test_utilization_as_drivers_answer_it(answer: t.Any, duties: list[int | None]) -> None:
    found = read(Nvml(nvmlDeviceGetProcessUtilization=answer))
    assert found is not None and [held.duty for held in found] == duties


def test_a_process_without_a_number_makes_its_container_unknown() -> None:
    found = read(Nvml(nvmlDeviceGetComputeRunningProcesses_v3=[row(1, 100), row(2, None), row(3, 3)]))
    assert found is not None and [held.used_mib for held in found] == [None, 3]


def test_samples_are_asked_since_the_latest_one() -> None:
    nvml = Nvml()
    reader = NvidiaProcesses(lambda: t.cast(t.Any, nvml), t.cast(t.Any, Owners()))
    assert [reader.read([FIRST])[FIRST] is not None for _time in range(2)] == [True, True]
    assert nvml.since == [0, 1002]


def test_the_library_is_left_after_each_read_whatever_it_answers() -> None:
    """Its count of users would keep it alive while the driver is reloaded."""
    for nvml in (Nvml(), Nvml(nvmlDeviceGetHandleByUUID=NvmlRefused(15)), Nvml(nvmlShutdown=NvmlRefused(1))):
        reader = NvidiaProcesses(lambda: t.cast(t.Any, nvml), t.cast(t.Any, Owners()))  # noqa: B023
        assert set(reader.read([FIRST, SECOND])) == {FIRST, SECOND} and nvml.ended == 1


def test_a_driver_that_does_not_answer_is_unknown() -> None:
    def start() -> t.Any:
        raise NvmlRefused(9)

    assert NvidiaProcesses(start, t.cast(t.Any, Owners())).read([FIRST]) == {FIRST: None}
    assert read(Nvml(nvmlDeviceGetHandleByUUID=NvmlRefused(15))) is None
