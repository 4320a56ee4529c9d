# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits with real cgroups, the real nvidia-ml-py and NVIDIA's real hook: enforced ones and unavailable ones.

The silicon and its driver are simulated (lab/driver). A machine whose /sys/fs/cgroup isn't version 2 has an empty
hierarchy of that version mounted there for the test, in a private mount namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import typing as t
from functools import cache
from pathlib import Path

import pytest
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import FIRST, R615, SECOND

from lab import build
from lab.shell import LabError

HERE = Path(__file__).resolve().parent
CARD_LINES = f"""\
card 0 uuid={FIRST} minor=1 memory=16384 bus=0000:3b:00.0 name=Simulated_NVIDIA_GPU_16GiB
card 1 uuid={SECOND} minor=3 memory=8192 bus=0000:C1:00.0 name=Simulated_NVIDIA_GPU_8GiB
"""
VERSION_2 = "mount -t cgroup2 none /sys/fs/cgroup"


@cache
def hook() -> str:
    try:
        return str(build.binaries("toolkit") / "nvidia-cdi-hook")
    except (LabError, OSError) as error:
        pytest.skip(f"no container toolkit: {error}")


@cache
def namespaces() -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can mount a hierarchy of cgroups")
    done = subprocess.run(["unshare", "-m", "sh", "-c", VERSION_2], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no cgroup version 2 on this machine: {done.stderr.strip()}")


def play(
    driver: Path, tmp_path: Path, *scenarios: str, mode: str = "auto", without: str = ""
) -> dict[str, dict[str, t.Any]]:
    """Run scenarios of limit_node.py and return their reports."""
    namespaces()
    (tmp_path / "cards").write_text(CARD_LINES)
    source = Path(__file__).resolve().parents[4] / "images" / "gpushare" / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "LD_LIBRARY_PATH": str(driver / "usr" / "lib64"),
        "KUBEGPU_SIM_CARDS": str(tmp_path / "cards"),
        "LIMIT_FOLDER": str(tmp_path),
        "LIMIT_HOOK": hook(),
        "LIMIT_DRIVER": str(driver),
        "LIMIT_CARDS": f"{FIRST},{SECOND}",
        "LIMIT_MODE": mode,
    }
    less = ["setpriv", "--bounding-set", f"-{without}", "--inh-caps", f"-{without}"] if without else []
    program = [*less, sys.executable, str(HERE / "limit_node.py"), *scenarios]
    script = f'mount --make-rprivate / && {VERSION_2} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *program],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return t.cast(dict[str, dict[str, t.Any]], json.loads(done.stdout))


@pytest.fixture(scope="module")
def reports(drivers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, t.Any]]:
    return play(drivers[R615], tmp_path_factory.mktemp("enforced"), "enforced", "outlives", "lifted")


@pytest.fixture(scope="module")
def report(reports: dict[str, dict[str, t.Any]]) -> dict[str, t.Any]:
    return reports["enforced"]


def test_fault_20_a_share_is_limited_from_the_start_and_stays_limited(report: dict[str, t.Any]) -> None:
    assert report["state"] == "enforced" and report["own"] is None
    # The toolkit's own hook has set what the plugin requested, and the plugin changes nothing.
    assert report["hook"][0] == 0 and report["good"] == [0, 3072, 0]
    assert report["events"] == [] and report["corrected"] == 0
    # Memory beyond it is refused, also to a process that is started later in the container.
    assert report["allocations"] == ["holding 2000 MiB", "Insufficient Memory", "holding 1000 MiB"]


def test_fault_20_a_toolkit_without_limits_and_a_pod_with_a_higher_one(report: dict[str, t.Any]) -> None:
    assert report["silent before"] is None and report["silent"] == [0, 2048, 0]
    assert report["silent beyond"] == "Insufficient Memory" and report["silent elsewhere"] == "Insufficient Memory"
    # NVIDIA's hook uses the pod's own variables: its limit, on its cards.
    assert report["greedy hook"][0] == 0
    assert report["greedy before"] == [[8000, 8000, 0], [8000, 8000, 0]]
    reasons = sorted(one.partition(":")[0] for one in report["greedy events"])
    assert reasons == ["GpuCardNotGiven", "GpuMemoryLimitCorrected"]
    assert report["greedy"] == [[0, 1024, 0], [0, 1, 0]] and report["greedy elsewhere"] == "Insufficient Memory"


def test_several_cards_restarts_and_ends(report: dict[str, t.Any]) -> None:
    assert report["wide hook"][0] == 0 and report["wide"] == [[0, 4096, 0], [0, 4096, 0]]
    assert report["usage"] == {FIRST: [4, 10240, 3000], SECOND: [1, 4096, 0]}
    assert report["after a restart"] == ["enforced", [], 0]
    assert report["gone with its cgroup"] is True
    assert report["state in the end"] == [[], "enforced"]


def test_a_process_that_ignores_sigterm_keeps_its_memory_from_others(reports: dict[str, dict[str, t.Any]]) -> None:
    report = reports["outlives"]
    assert report["holds"] == "holding 2000 MiB" and report["while it runs"] == 0
    assert report["held again"] == "holding 1500 MiB"
    assert (report["at first"], report["left"], report["taken"]) == (0, [["default/one", 3]], 3)
    assert report["after its end"] == [0, 0]


def test_what_a_container_holds_after_it_lifted_its_limit_is_reported(reports: dict[str, dict[str, t.Any]]) -> None:
    report = reports["lifted"]
    assert report["events"] == [] and report["limit"] == [0, 2048, 0]
    assert report["lifted"] is None and report["holds"] == "holding 5000 MiB"
    (event,) = report["events after"]
    assert event.startswith("GpuMemoryExceeded: MemoryLimitExceeded: container x of pod default/one holds 5000 MiB")
    assert report["state"].startswith("unenforced: MemoryLimitExceeded") and report["more"] == "Insufficient Memory"


def test_a_plugin_without_permission_refuses_its_cards_where_limits_are_required(
    drivers: dict[str, Path], tmp_path: Path
) -> None:
    report = play(drivers[R615], tmp_path, "impossible", mode="required", without="sys_admin")["impossible"]
    problem = (
        "card 0 can't be limited; the driver's error: the plugin lacks the right to (it needs the capability SYS_ADMIN)"
    )
    assert report["state"] == f"unenforced: {problem} (and 1 more)" and report["environment"] == {}
    assert report["refusal"] == [
        contract.Reason.MEMORY_LIMIT_UNAVAILABLE,
        f"gpushare_memory_limit: limits are required, but {problem}",
    ]
    # Therefore nothing is requested there: the runtime doesn't start a container whose hook fails.
    assert report["hook, without a request"][0] == 0 and report["hook, requested by a pod"][0] != 0
