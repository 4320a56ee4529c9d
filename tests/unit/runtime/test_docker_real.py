# SPDX-License-Identifier: GPL-3.0-or-later
"""A real Docker engine in a directory of its own is reloaded with our settings, keeps running, and is restored."""

from __future__ import annotations

from collections.abc import Iterator

import private_dockerd
import pytest
import real_dockerd
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_transaction import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import docker as runtime_docker
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.common import RuntimePlan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.docker_apply import DockerEngine
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.docker_plan import make_plan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.engine import ConfigUpdate
from runtime_kit import ABSENT

# An existing program that prints a version.
BINARY = "/usr/bin/runc"
PRESENT = Options(True, binary=BINARY)
TEXT = '{\n  "labels": ["a=b"],\n  "shutdown-timeout": 15,  \n  "features": {"buildkit": true}\n}'


@pytest.fixture(
    params=["installed", pytest.param("newer", marks=pytest.mark.long), pytest.param("newest", marks=pytest.mark.long)]
)
def machine(request: pytest.FixtureRequest) -> Iterator[private_dockerd.Machine]:
    binary = private_dockerd.binary()
    if request.param != "installed":
        newer = [one for one in real_dockerd.binaries(newest=True) if one != binary]
        if len(newer) < (2 if request.param == "newest" else 1):
            pytest.skip("no newer dockerd than the others")
        binary = newer[0 if request.param == "newer" else -1]
    engine = private_dockerd.Dockerd(binary)
    engine.config.write_text(TEXT)
    try:
        if why := engine.start():
            pytest.skip(f"this dockerd doesn't run here: {why}")
        yield private_dockerd.Machine(engine)
    finally:
        engine.remove()


def observe(machine: private_dockerd.Machine) -> dict[str, object]:
    seen = runtime_docker.observe(machine)
    assert seen is not None
    return seen


def apply(machine: private_dockerd.Machine, wanted: Options, planned: RuntimePlan) -> dict[str, object]:
    docker = DockerEngine(machine, wanted, planned.restart)
    return ConfigUpdate(machine, docker, 60).run(replacements(planned.files))


def test_addition_and_removal(machine: private_dockerd.Machine) -> None:
    engine = machine.engine
    newer = runtime_docker.major(str(observe(machine)["version"])) >= runtime_docker.CDI_SINCE
    pid = engine.pid
    planned = make_plan(PRESENT, observe(machine))
    assert [change.header for change in planned.plan.changes] == [str(engine.config), runtime_docker.UNIT]
    assert planned.restart is newer, "CDI is switched on only in a restart, and no container runs"
    done = apply(machine, PRESENT, planned)
    assert done["restarted"] is newer and (newer or engine.pid == pid)
    assert engine.info()["DefaultRuntime"] == "nvidia" and engine.info()["Runtimes"]["nvidia"]["path"] == BINARY
    assert '"shutdown-timeout": 15,  \n' in engine.config.read_text(), "the user's layout stays"
    assert make_plan(PRESENT, observe(machine)).plan.empty, "a second run changes nothing"

    pid = engine.pid
    back = make_plan(ABSENT, observe(machine))
    assert apply(machine, ABSENT, back)["restarted"] is False
    assert engine.pid == pid, "ours go away by a reload"
    assert engine.config.read_text() == TEXT, "to the byte"
    assert engine.info()["DefaultRuntime"] == "runc" and "nvidia" not in engine.info()["Runtimes"]
    assert make_plan(ABSENT, observe(machine)).plan.empty
    assert not (engine.folder / "root/var/lib/kubegpu-share").exists(), "no trace of us"
    assert not any("daemon-reload" in one for one in machine.log)


def test_a_file_that_docker_rejects_is_rolled_back(machine: private_dockerd.Machine) -> None:
    engine = machine.engine
    planned = make_plan(PRESENT, observe(machine))
    row = dict(planned.files[0])
    row["after"] = str(row["after"]).replace('"shutdown-timeout"', '"no-such-directive"')
    with pytest.raises(NotInEffect, match="no-such-directive"):
        ConfigUpdate(machine, DockerEngine(machine, PRESENT, planned.restart), 60).run(replacements([row]))
    assert engine.config.read_text() == TEXT
    assert engine.info()["DefaultRuntime"] == "runc", "and it runs as before"
    assert make_plan(ABSENT, observe(machine)).plan.empty
