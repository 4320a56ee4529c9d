# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits in a container of NVIDIA's real runtime and runc, with the plugin's environment variables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from gpushare.node import limits
from limit_fakes import FIRST, R580, R615
from test_limits_real import CARD_LINES, HERE, hook, namespaces

# The plugin's process on the same node, which has one pod with 3 GiB of the first card.
ENFORCER = """
import os, sys
from gpushare.shared._contracts import gpushare as contract
from gpushare.node.cgroups import NodeCgroups
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.nvml.limits import NvidiaLimits
from limit_fakes import CARDS, FIRST, entry, ids, pod
own = "/sys/fs/cgroup/kubepods-test" + str(os.getppid()) + "/plugin"
os.makedirs(own)
open(own + "/cgroup.procs", "w").write(str(os.getpid()))
enforcer = LimitEnforcer("auto", "GiB", NvidiaLimits(), NodeCgroups())
enforcer.probe(CARDS)
found = enforcer.once(
    CARDS, [pod("a", {"x": 3}, {"x": os.environ["LIMIT_CONTAINER"]})], [entry("a", x=ids(FIRST, 0, 3))]
)
print(enforcer.state, *[one.reason for one in found], sep="; ", flush=True)
"""
SHOW = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits; "


def container(
    folder: Path,
    drivers: t.Mapping[str, Path],
    version: str,
    command: str,
    environment: t.Mapping[str, str],
    cgroups: int = 2,
    beside: str = "",
) -> tuple[int, list[str], str]:
    """Exit status, the container's output, and the runtime's log."""
    namespaces()
    if not shutil.which("runc") or os.path.exists("/dev/nvidiactl"):
        pytest.skip("no runc on this machine, or a real driver")
    (folder / "cards").write_text(CARD_LINES)
    inside = folder / "node"
    inside.mkdir()
    source = HERE.parents[3] / "images" / "gpushare" / "src"
    outer = {
        **os.environ,
        "PYTHONPATH": f"{source}:{HERE}",
        "LIMIT_DRIVER": str(drivers[version]),
        "LIMIT_FOLDER": str(folder),
        "LIMIT_TOOLKIT": str(Path(hook()).parent),
        "LIMIT_PYTHON": sys.executable,
        "LIMIT_BESIDE": beside,
    }
    given = {"NVIDIA_VISIBLE_DEVICES": FIRST, "NVIDIA_DRIVER_CAPABILITIES": "all", **environment}
    script = str(HERE / "limit_container.sh")
    words = [f"{name}={value}" for name, value in given.items()]
    done = subprocess.run(
        ["unshare", "-m", "bash", script, str(inside), version, str(cgroups), command, *words],
        capture_output=True, text=True, check=False, timeout=120, env=outer,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_fault_20_the_container_sees_its_share_as_the_card(drivers: dict[str, Path], tmp_path: Path) -> None:
    command = (
        f"{SHOW} nvidia-smi simulated-allocation 3073; nvidia-smi simulated-allocation 3000 --seconds 1 & sleep 0.3; "
        "sh -c 'nvidia-smi simulated-allocation 100'; "
        # No process in the container can lift it.
        "nvidia-smi memory-limits --set -n /sys/fs/cgroup --soft-limit 0 --hard-limit max -i 0"
    )
    code, output, _log = container(tmp_path, drivers, R615, command, limits.environment({FIRST: 3072}))
    assert code == 0
    assert output == [
        "3072",
        "Insufficient Memory",
        "holding 3000 MiB",
        "Insufficient Memory",
        "Insufficient Permissions",
    ]


def test_fault_20_a_raised_limit_is_restored_by_the_plugin(drivers: dict[str, Path], tmp_path: Path) -> None:
    asked = {limits.LIMIT: "9000", limits.REQUEST: "0"}
    code, output, _log = container(tmp_path, drivers, R615, SHOW, asked, beside=ENFORCER)
    assert code == 0
    assert output == ["enforced; GpuMemoryLimitCorrected", "3072"]


@pytest.mark.parametrize(("version", "cgroups", "asked"), [(R580, 2, False), (R580, 2, True), (R615, 1, False)])
def test_fault_20_a_container_starts_without_limits_unless_its_pod_requires_them(
    drivers: dict[str, Path], tmp_path: Path, version: str, cgroups: int, asked: bool
) -> None:
    if cgroups == 1 and os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        pytest.skip("this machine has no cgroups of version 1")
    environment = {limits.LIMIT: "3072", limits.REQUEST: "0"} if asked else {}
    code, output, words = container(tmp_path, drivers, version, SHOW, environment, cgroups)
    if asked:
        assert code == 3 and "error running hook" in words
    else:
        assert code == 0 and output == ["16384"]
