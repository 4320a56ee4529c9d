# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of CUDA in control groups as pods have them: who holds what, by NVML, nvml_info, plugin and verify."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest
from _card import ALONE, CGROUPFS, CGROUPS, CRIO, MIB, SYSTEMD, Holders, facts, first, place, record, until
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_kit import checked, failing, found
from check_worlds import NODE, our_entries, our_node, our_pod, pod_uid, world
from gpushare.kubelet.pod_resources import Entry
from gpushare.node.cgroups import NodeCgroups
from gpushare.node.limit_enforcer import SLACK_MIB, UNACCOUNTED_SECONDS
from gpushare.nvml.limits import NvidiaLimits
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.shared._contracts import gpushare as contract

# What a context of CUDA takes beside what its program asks for, at most.
CONTEXT_MIB = 1024
# A user without any right.
NOBODY = 65534
SIZES = (1024, 3072, 8192)
IDS = tuple(f"{number}" * 64 for number in (1, 2, 3))
FORMS = (SYSTEMD, CGROUPFS, CRIO)
UNITS = (2, 4, 9)

needs_v2 = pytest.mark.skipif(
    not (CGROUPS / "cgroup.controllers").exists(), reason="control groups of version 2 aren't at /sys/fs/cgroup"
)


def listed(group: str, *before: str) -> JsonObject:
    """NVML's lists of processes, as a new program gets them."""
    script = str(Path(__file__).parent / "nvml_calls.py")
    done = subprocess.run(
        [*before, sys.executable, script, "libnvidia-ml.so.1", group],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers: JsonObject = {}
    for line in done.stdout.splitlines():
        answers.update(json.loads(line))
    return answers


def three(holders: Holders) -> list[int]:
    """Three pods, the second one with a PID namespace of its own; returns the PIDs."""
    made = []
    for at, (mib, form) in enumerate(zip(SIZES, FORMS, strict=True)):
        group = place(form, pod_uid(at + 1), IDS[at])
        made.append(holders.start(mib, group, ALONE if at == 1 else ()).pid)
    return made


@needs_v2
def test_every_mib_belongs_to_its_pod_and_container(holders: Holders) -> None:
    before = first()["memory"]
    pids = three(holders)
    card = first()
    rows = {row["pid"]: row for row in card["processes"]}
    record("three-pods", {"card": card, "before": before, "raw": listed("processes")})
    for at, pid in enumerate(pids):
        row = rows[pid]
        assert (row["where"], row["pod_uid"], row["container_id"]) == ("pod", pod_uid(at + 1), IDS[at])
        assert (row["name"], row["types"], row["libvgpu"]) == ("hold", ["compute"], False)
        assert SIZES[at] <= row["used_mib"] <= SIZES[at] + CONTEXT_MIB
    assert rows[pids[0]]["runtime"] == "containerd" and rows[pids[2]]["runtime"] == "cri-o"
    # The processes' memory is what is in use beside the reserve; each number is rounded, and queried at another moment.
    held = sum(rows[pid]["used_mib"] for pid in pids)
    assert abs(card["memory"]["used_mib"] - before["used_mib"] - held) <= 64
    folders = NodeCgroups().folders(IDS)
    assert [folders[one] for one in IDS] == [
        str(CGROUPS / place(FORMS[at], pod_uid(at + 1), IDS[at])) for at in range(3)
    ]
    assert all(NodeCgroups().populated(folder) for folder in folders.values())


@needs_v2
def test_verify_finds_who_holds_memory_without_a_share(holders: Holders) -> None:
    pids = three(holders)
    seen = facts()
    one = seen["cards"][0]
    shared = contract.units_of(one["memory"]["total_mib"] - one["memory"]["reserved_mib"], "GiB")
    card = contract.Card(
        *(0, one["uuid"], one["minor"], one["memory"]["total_mib"], shared, True, one["name"]),
        reserved_mib=one["memory"]["reserved_mib"],
    )
    pods = [our_pod(at + 1, [card], UNITS[at]) for at in range(3)]
    entries = [row for at in range(3) for row in our_entries(at + 1, [card], [card], UNITS[at])]
    registered = {
        contract.RESOURCE_MEMORY: [
            contract.device_id(contract.short_uuids([card.uuid])[card.uuid], at) for at in range(shared)
        ]
    }

    def verified(given: list[JsonObject], evidence: JsonObject) -> JsonObject:
        built = world(our_node([card]), given, [], entries, registered, extender=None)
        built["evidence"][NODE]["nvml"] = evidence
        return checked(built)

    good = verified(pods, seen)
    record("verify", good)
    assert failing(good) == set(), found(good, "FAIL")
    # A pod of the API without a share, and a program of the node itself.
    without = our_pod(3, [card], UNITS[2])
    without["spec"]["containers"][0]["resources"] = {}
    host = holders.start(256)
    wrong = verified([*pods[:2], without], facts())
    texts = [text for text in found(wrong, "FAIL") if text.startswith("C2 ")]
    assert len(texts) == 2 and any(str(pids[2]) in text for text in texts), texts
    assert any(str(host.pid) in text for text in texts), texts


@needs_v2
def test_another_user_lacks_the_kernels_log_and_the_maps_only(holders: Holders) -> None:
    holders.start(512, place(SYSTEMD, pod_uid(1), IDS[0]))
    root, other = facts()["cards"][0], facts(NOBODY)["cards"][0]
    assert root["health"].pop("xids") is not None and other["health"].pop("xids") is None
    assert [row.pop("libvgpu") for row in root["processes"]] == [False]
    assert [row.pop("libvgpu") for row in other["processes"]] == [None]
    assert other == root


def test_a_pid_namespace_has_its_own_processes_only(holders: Holders) -> None:
    outside = holders.start(512)
    inside = holders.start(512, before=ALONE)
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    everybody = listed("processes")[name]["rows"]
    assert {outside.pid, inside.pid} <= {row["pid"] for row in everybody}
    there = listed("processes", "nsenter", "--target", str(inside.pid), "--pid", "--mount")[name]
    nobody = listed("processes", *ALONE)[name]
    record("namespaces", {"node": everybody, "inside": there, "beside": nobody})
    # The number is that of the namespace: its first process.
    assert [(row["pid"], row["used"] // MIB >= 512) for row in there["rows"]] == [(1, True)]
    assert nobody["rows"] == []


def test_killed_programs_return_their_memory(holders: Holders) -> None:
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)

        def used() -> int:
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) // MIB

        def running() -> set[int]:
            return {row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}

        # Programs of other tests may just be ending.
        until(lambda: not running(), 10, "no program runs")
        times, before = {}, used()
        for mib in SIZES:
            one = holders.start(mib)
            assert used() >= before + mib and running() == {one.pid}
            began = time.monotonic()
            os.kill(one.pid, signal.SIGKILL)
            one.process.wait()
            reaped = time.monotonic() - began
            until(lambda pid=one.pid: pid not in running(), 10, "NVML doesn't list it any more")
            unlisted = time.monotonic() - began
            until(lambda: used() <= before, 10, "the memory is returned")
            times[mib] = {"reaped": reaped, "unlisted": unlisted, "returned": time.monotonic() - began}
        record("killed", times)
    finally:
        pynvml.nvmlShutdown()


@needs_v2
def test_a_driver_before_the_limits_says_so_and_foreign_memory_is_found(holders: Holders) -> None:
    limits = NvidiaLimits()
    if int(limits.driver().partition(".")[0]) >= 615:
        pytest.skip(f"this driver, {limits.driver()}, has limits")
    one = first()
    shared = contract.units_of(one["memory"]["total_mib"] - one["memory"]["reserved_mib"], "GiB")
    card = contract.Card(
        0, one["uuid"], one["minor"], one["memory"]["total_mib"], shared, reserved_mib=one["memory"]["reserved_mib"]
    )
    now = [0.0]
    enforcer = LimitEnforcer("auto", "GiB", limits, NodeCgroups(), lambda: now[0])
    assert enforcer.probe([card])
    assert enforcer.state == f"unenforced: NVIDIA's driver is {limits.driver()}, and limits need 615 or newer"
    assert enforcer.environment({card.uuid: 3}) == {} and enforcer.refusal(card.uuid) is None
    assert not limits.divided(card.uuid)
    assert enforcer.once([card], [], []) == [] and enforcer.violations == ()
    holders.start(2048, place(SYSTEMD, pod_uid(1), IDS[0]))

    def violated(*units: int) -> list[contract.Reason]:
        """What is found if pods have shares of so many units."""
        short = contract.short_uuids([card.uuid])[card.uuid]
        slots = iter(range(sum(units)))
        listing = [
            Entry(f"default/{at}", {"x": tuple(contract.device_id(short, next(slots)) for _unit in range(unit))})
            for at, unit in enumerate(units)
        ]
        for _pass in range(2):
            now[0] += UNACCOUNTED_SECONDS + 1
            events = enforcer.once([card], [], listing)
        record(f"unaccounted-{sum(units)}", [event.message for event in events])
        return [violation.code for violation in enforcer.violations]

    assert violated() == [contract.Reason.UNACCOUNTED_MEMORY_HELD]
    assert violated(3) == []
    # A program that allocates the whole share: its context may be more than what isn't reported.
    context = first()["processes"][0]["used_mib"] - 2048
    assert bool(violated(2)) == (context > SLACK_MIB)
