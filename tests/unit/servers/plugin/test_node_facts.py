# SPDX-License-Identifier: GPL-3.0-or-later
"""The command gpushare-node-facts over the lab's driver: what the modules return of a machine, by the same code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpushare
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check.evidence import Reader, evidence_of
from ansible_collections.kubegpu.share.plugins.module_utils._check.node_pods import COMMAND, VERSION
from gpushare.node import facts
from gpushare.shared._core.types import JsonObject
from simulated_driver import FIRST, SECOND, Driver, compiled

NODE = "gpu1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"), "580.95.05")


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Driver:
    # This process is one that exists.
    return Driver(folder, tmp_path / "cards").describe(f"process 0 {os.getpid()} 800")


def told(driver: Driver, *options: str, kubelet: Path) -> JsonObject:
    command = [sys.executable, "-m", "gpushare.node.facts", f"--node-name={NODE}", f"--kubelet-dir={kubelet}", *options]
    path = str(Path(gpushare.__file__).parents[1])
    done = subprocess.run(
        command,
        capture_output=True,
        check=True,
        env={**driver.environment(), "PYTHONPATH": path},
        timeout=60,
    )
    assert done.stdout.count(b"\n") == 1
    answer: JsonObject = json.loads(done.stdout)
    return answer


def test_the_answer_is_evidence_of_a_machine(driver: Driver, tmp_path: Path) -> None:
    plugins = tmp_path / "device-plugins"
    plugins.mkdir()
    checkpoint: JsonObject = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {}}, "Checksum": 1}
    (plugins / "kubelet_internal_checkpoint").write_text(json.dumps(checkpoint))
    answer = told(driver, "--host-pid", kubelet=tmp_path)
    assert (answer["version"], answer["node"]) == (VERSION, NODE)
    reader = Reader()
    nvml, kubelet, *_others = evidence_of(answer, True, reader)
    assert (nvml.problem, kubelet.problem, reader.unreadable) == ("", "", [])
    assert [gpu.uuid for gpu in nvml.gpus] == [FIRST, SECOND]
    assert [process.pid for process in nvml.gpus[0].processes or ()] == [os.getpid()]
    assert answer["kubelet"]["root"] == str(tmp_path) and kubelet.pod_resources_problem


def test_without_the_nodes_process_ids_processes_and_devices_are_unknown(driver: Driver, tmp_path: Path) -> None:
    answer = told(driver, kubelet=tmp_path)
    assert [card["processes"] for card in answer["nvml"]["cards"]] == [None, None]
    assert answer["kubelet"]["device_nodes"] is None


def test_cards_that_are_left_alone_are_left_out(driver: Driver, tmp_path: Path) -> None:
    excluded = json.dumps({"cards": [SECOND.lower()], "nodes": [NODE]})
    answer = told(driver, f"--exclude-cards={excluded}", kubelet=tmp_path)
    assert [card["uuid"] for card in answer["nvml"]["cards"]] == [FIRST]
    assert [card["uuid"] for card in answer["nvml"]["excluded"]] == [SECOND]


@pytest.mark.parametrize(
    "options",
    [["--timeout=0"], ["--kubelet-dir=x"], ["--exclude-cards=x"], ["--node-name="]],
    ids=lambda given: given[0],
)
def test_wrong_options_end_it(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        facts.parse([f"--node-name={NODE}", *options])
    assert f"{COMMAND}: error: " in capsys.readouterr().err


def test_the_image_has_the_command() -> None:
    project = (Path(gpushare.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'{COMMAND} = "{facts.__name__}:main"' in project
