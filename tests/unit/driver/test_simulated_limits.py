# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML as branch R615: memory limits per card and cgroup, and used memory."""

from __future__ import annotations

import os
import subprocess
import textwrap
import typing as t
from pathlib import Path

import pytest
from simulated_driver import Driver, compiled

R615 = "615.71.09"
GIB = 1 << 30

_CALLS = """\
def folder(name):
    path = os.path.join(os.path.dirname(CARDS), name)
    os.makedirs(path, exist_ok=True)
    return path

def limit(handle, path, hard, soft=0):
    return code(n.nvmlDeviceSetMemoryLimits_v1, handle, n.c_nvmlSetMemoryLimits_v1_t(path.encode(), soft, hard))

def read(handle, path):
    answer = n.c_nvmlGetMemoryLimits_v1_t(nameSpace=path.encode())
    value = code(n.nvmlDeviceGetMemoryLimits_v1, handle, answer)
    return value or [answer.softLimit, answer.hardLimit, answer.currentUsed]

library = ctypes.CDLL("libnvidia-ml.so.1")

def allocate(handle, mib):
    return library.kubegpuSimAllocate(handle, ctypes.c_uint64(mib))

NONE = 0xFFFFFFFFFFFFFFFF
"""


@pytest.fixture(scope="session")
def r615_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("r615"), R615)


@pytest.fixture
def r615(r615_folder: Path, tmp_path: Path) -> Driver:
    return Driver(r615_folder, tmp_path / "cards").describe()


def query(driver: Driver, script: str) -> t.Any:
    return driver.query(_CALLS + textwrap.dedent(script))


Allocate = t.Callable[..., subprocess.Popen[str]]


@pytest.fixture
def allocate(r615: Driver) -> t.Iterator[Allocate]:
    """Start programs that hold memory of a card until the test ends, unless their allocation is refused."""
    programs = []

    def start(mib: int, group: Path, card: int = 0) -> subprocess.Popen[str]:
        command = [str(r615.folder / "nvidia-smi"), "simulated-allocation", str(mib), "-i", str(card)]
        environment = {**r615.environment(), "KUBEGPU_SIM_CGROUP": str(group)}
        programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return programs[-1]

    yield start
    end(*programs)


def first_line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def end(*programs: subprocess.Popen[str]) -> None:
    for program in programs:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()


def test_a_limit_is_kept_read_back_and_cleared(r615: Driver) -> None:
    script = """
        one, other = folder("one"), folder("other")
        answers = [read(first, one), limit(first, one, 3 << 30), read(first, one), read(first, other)]
        report([*answers, read(second, one), limit(first, one, NONE), read(first, one)])
        """
    answer = query(r615, script)
    # A card without any limit reports "not supported"; with a limit of another cgroup it reports "not found".
    assert answer == [3, 0, [0, 3 * GIB, 0], 6, 3, 0, 6]


def test_only_root_sets_a_limit_and_everyone_reads_it(r615: Driver) -> None:
    if os.geteuid():
        pytest.skip("only root can drop a capability")
    group = r615.cards.parent / "one"
    group.mkdir()
    smi = str(r615.folder / "nvidia-smi")
    arguments = ["memory-limits", "-n", str(group), "-i", "0"]
    less = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", smi, *arguments]
    five = ["--set", "--soft-limit", "0", "--hard-limit", "5"]
    first = r615.run([*less, *five])
    assert (first.returncode, first.stdout) == (4, "Insufficient Permissions\n")
    assert r615.smi(*arguments, *five).returncode == 0
    again = r615.run([*less, "--get"])
    assert again.stdout == f"namespace: {group}\nsoft limit: 0 MiB\nhard limit: 5 MiB\ncurrent used: 0 MiB\n"


def test_memory_beyond_the_limit_is_refused_and_an_ended_program_uses_none(
    r615: Driver, allocate: Allocate, tmp_path: Path
) -> None:
    group = tmp_path / "one"
    inner = group / "inner"
    inner.mkdir(parents=True)
    query(r615, 'report(limit(first, folder("one"), 1000 << 20))')
    one = allocate(600, group)
    assert first_line(one) == "holding 600 MiB"
    # A shell in the container, and a cgroup below: one limit for all of them.
    two, three = allocate(500, group), allocate(500, inner)
    assert (first_line(two), two.wait()) == ("Insufficient Memory", 102)
    assert (first_line(three), three.wait()) == ("Insufficient Memory", 102)
    four = allocate(400, inner)
    assert first_line(four) == "holding 400 MiB"
    # The limit covers neither another card nor another cgroup.
    five, six = allocate(5000, group, card=1), allocate(9000, tmp_path)
    assert (first_line(five), first_line(six)) == ("holding 5000 MiB", "holding 9000 MiB")
    answer = query(r615, 'report([read(first, folder("one")), read(second, folder("one"))])')
    assert answer == [[0, 1000 << 20, 1000 << 20], 3]
    script = "report([n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used >> 20 for h in (first, second)])"
    assert query(r615, script) == [10000, 5000]
    # A limit isn't lowered below the used memory.
    assert query(r615, 'report([limit(first, folder("one"), mib << 20) for mib in (900, 1000)])') == [19, 0]
    end(one)
    assert query(r615, 'report(read(first, folder("one"))[2] >> 20)') == 400
    seven = allocate(600, group)
    assert first_line(seven) == "holding 600 MiB"
    end(four, five, six, seven)
    assert query(r615, 'report(read(first, folder("one"))[2])') == 0


def test_concurrent_programs_get_no_more_than_the_limit_together(
    r615: Driver, allocate: Allocate, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    query(r615, 'report(limit(first, folder("one"), 1000 << 20))')
    programs = [allocate(90, tmp_path / "one") for _run in range(16)]
    lines = [first_line(program) for program in programs]
    assert lines.count("holding 90 MiB") == 11
    assert query(r615, 'report(read(first, folder("one"))[2] >> 20)') == 990


def test_a_driver_before_r615_has_no_limits(driver: Driver) -> None:
    """nvidia-ml-py raises "function not found", as with the real one."""
    answer = driver.python(
        """
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        report([code(n.nvmlDeviceSetMemoryLimits_v1, h, n.c_nvmlSetMemoryLimits_v1_t(b"/", 0, 1)),
              code(n.nvmlDeviceGetMemoryLimits_v1, h, n.c_nvmlGetMemoryLimits_v1_t(nameSpace=b"/"))])
        """
    )
    assert answer == [13, 13]
    assert driver.smi("memory-limits", "--get", "-n", "/tmp", "-i", "0").returncode == 13
    # A description with limits is still valid.
    driver.describe("limits dmem")
    assert driver.python("n.nvmlInit(); report(n.nvmlDeviceGetCount())") == 2
