# SPDX-License-Identifier: GPL-3.0-or-later
"""The real nvidia-ml-py over the lab's driver, in a child process: cards, processes, limits, and cards that hang."""

from __future__ import annotations

import subprocess
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import CODES
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.processes import ContainerCgroup
from nvml_kit import Driver, FakeHost, compiled, really
from simulated_driver import CARDS, FIRST, SECOND

R580, R615 = "580.95.05", "615.71.09"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {version: compiled(tmp_path_factory.mktemp("nvml"), version) for version in (R580, R615)}


@pytest.fixture
def driver(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(folders[R615], tmp_path / "cards")
    monkeypatch.setenv("KUBEGPU_SIM_CARDS", str(made.cards))
    made.describe()
    return made


@pytest.fixture
def hold(driver: Driver, tmp_path: Path) -> Iterator[t.Callable[..., int]]:
    """Programs that hold memory of a card until the test ends."""
    programs: list[subprocess.Popen[str]] = []

    def start(mib: int, card: int = 0, group: Path = tmp_path) -> int:
        command = [str(driver.folder / "nvidia-smi"), "simulated-allocation", str(mib), "-i", str(card)]
        environment = {**driver.environment(), "KUBEGPU_SIM_CGROUP": str(group)}
        programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        stdout = programs[-1].stdout
        assert stdout is not None and stdout.readline() == f"holding {mib} MiB\n"
        return programs[-1].pid

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def test_two_cards_and_their_processes(driver: Driver, hold: t.Callable[..., int]) -> None:
    one, two, three = hold(700), hold(50), hold(4000, 1)
    driver.describe(f"process 0 {one} 800 graphics", "process 0 4711 3000 mps", "process 1 4194304 1")
    found = really(driver)
    assert (found["available"], found["problem"], found["driver"], found["cuda"]) == (True, "", R615, "13.0")
    first, second = found["cards"]
    assert (first["uuid"], first["minor"], first["pci"]) == (FIRST, 1, "00000000:3B:00.0")
    assert (second["uuid"], second["index"], second["minor"]) == (SECOND, 1, 3)
    rows = [(row["pid"], row["types"], row["used_mib"]) for row in first["processes"]]
    client = (4711, ["compute", "mps"], 3000)
    assert sorted(rows) == sorted([(one, ["compute", "graphics"], 800), (two, ["compute"], 50), client])
    assert [(row["pid"], row["used_mib"]) for row in second["processes"]] == [(three, 4000), (4194304, 1)]
    assert first["memory"] == {"total_mib": 16384, "used_mib": 4550, "free_mib": 11578, "reserved_mib": 256}
    row = next(row for row in first["processes"] if row["pid"] == one)
    assert (row["name"], row["libvgpu"], row["gi"]) == ("nvidia-smi", False, None) and row["start_time"].isdecimal()
    assert second["processes"][1]["where"] == "gone" and first["problem"] == second["problem"] == ""


def test_health_and_modes(driver: Driver) -> None:
    driver.cards.write_text(
        CARDS.replace("_16GiB", "_16GiB mode=3 ecc=4:5 remapped=1:2:1:0").replace("_8GiB", "_8GiB mig=enabled mode=2")
    )
    first, second = really(driver)["cards"]
    assert first["compute_mode"] == "exclusive_process" and second["compute_mode"] == "prohibited"
    assert first["health"]["ecc_uncorrected_volatile"] == 4 and first["health"]["ecc_uncorrected_aggregate"] == 5
    assert first["health"]["row_remap"] == {"correctable": 1, "uncorrectable": 2, "pending": True, "failed": False}
    assert second["health"]["row_remap"] is None and second["health"]["ecc_uncorrected_volatile"] is None
    assert second["mig"] == {"mode": "enabled", "pending": "enabled", "devices": []}
    assert first["mig"]["mode"] == "unsupported" and first["problem"] == second["problem"] == ""


def test_limits_of_cgroups_and_their_memory(driver: Driver, hold: t.Callable[..., int], tmp_path: Path) -> None:
    groups = [ContainerCgroup(str(tmp_path / name), f"/{name}", name, name * 64) for name in "abc"]
    for name in "ab":
        (tmp_path / name).mkdir()
    for name, mib in (("a", "1000"), ("b", "2000")):
        arguments = ["memory-limits", "--set", "-n", str(tmp_path / name), "--soft-limit", "0", "--hard-limit", mib]
        done = driver.smi(*arguments, "-i", "0")
        if done.returncode == 4:
            pytest.skip("only root may set a limit")
        assert done.returncode == 0
    hold(300, group=tmp_path / "a")
    found = really(driver, host=FakeHost(groups))
    rows = [(row["cgroup"], row["hard_mib"], row["soft_mib"], row["used_mib"]) for row in found["cards"][0]["limits"]]
    assert rows == [("/a", 1000, 0, 300), ("/b", 2000, 0, 0)]
    assert (found["cards"][1]["limits"], found["pods_limited"]) == ([], 2)


def test_a_driver_before_the_limits(folders: dict[str, Path], driver: Driver) -> None:
    found = really(Driver(folders[R580], driver.cards), host=FakeHost([ContainerCgroup("/", "/", "", "")]))
    assert found["driver"] == R580
    assert found["cards"][0]["limits"] is None and found["pods_limited"] is None and found["cards"][0]["problem"] == ""


def test_an_error_at_the_start_is_reported(driver: Driver) -> None:
    driver.describe("fault init:18")
    found = really(driver)
    assert (found["available"], found["cards"]) == (False, [])
    assert f"(18, NVML_ERROR_{CODES[18].name})" in found["problem"]


def test_a_failing_card_doesnt_affect_the_other(driver: Driver) -> None:
    driver.describe("fault card:0:15")
    found = really(driver)
    assert found["available"] and [card["index"] for card in found["cards"]] == [0, 1]
    assert CODES[15].text in found["cards"][0]["problem"] and found["cards"][0]["processes"] is None
    assert (found["cards"][1]["uuid"], found["cards"][1]["problem"]) == (SECOND, "")


def test_a_hanging_card_doesnt_affect_the_other(driver: Driver, hold: t.Callable[..., int]) -> None:
    pid = hold(100, 1)
    driver.describe("fault hang:0")
    found = really(driver, timeout=15)
    first, second = found["cards"]
    assert found["available"] and "within 5 s" in first["problem"] and first["processes"] is None
    assert (second["uuid"], [row["pid"] for row in second["processes"]]) == (SECOND, [pid])
