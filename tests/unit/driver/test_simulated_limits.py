# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML as branch R615: memory limits per card and cgroup, and used memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
import time
import typing as t
from pathlib import Path

import pytest
from simulated_driver import CARDS, FIRST, SECOND, Driver, compiled

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
    for one in programs:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def test_a_limit_is_kept_read_back_and_cleared(r615: Driver) -> None:
    script = """
        one, other = folder("one"), folder("other")
        answers = [read(first, one), limit(first, one, 3 << 30), read(first, one), read(first, other)]
        report([*answers, read(second, one), limit(first, one, NONE), read(first, one)])
        """
    answer = query(r615, script)
    # A card without any limit reports "not supported"; with a limit of another cgroup it reports "not found".
    assert answer == [3, 0, [0, 3 * GIB, 0], 6, 3, 0, 6]


def test_limits_persist_and_a_cgroup_of_the_same_name_is_another_cgroup(r615: Driver) -> None:
    query(r615, 'report(limit(second, folder("one"), 1 << 30, 5 << 20))')
    assert query(r615, 'report(read(second, folder("one")))') == [5 << 20, GIB, 0]
    script = 'limit(first, folder("one"), 3 << 30); os.rmdir(folder("one")); time.sleep(0.02)\n'
    assert query(r615, script + 'report(read(first, folder("one")))') == 6


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("limit(first, folder('x'), 17 << 30)", 2),
        ("limit(second, folder('x'), 9 << 30)", 2),
        ("limit(first, folder('x'), 1 << 30, 2 << 30)", 2),
        ("limit(first, '/none/such', 1 << 30)", 17),
        ("read(first, '/none/such')", 17),
        ("library.nvmlDeviceSetMemoryLimits_v1(first, None)", 2),
        ("library.nvmlDeviceGetMemoryLimits_v1(first, None)", 2),
        ("limit(first, folder('x'), 16 << 30)", 0),
    ],
)
def test_invalid_calls_are_refused(r615: Driver, call: str, answer: int) -> None:
    assert query(r615, f"report({call})") == answer


def test_limits_can_be_turned_off_and_mig_has_none(r615: Driver) -> None:
    r615.cards.write_text(CARDS.replace("_8GiB", "_8GiB mig=enabled"))
    assert query(r615, 'report([limit(h, folder("x"), 1 << 30) for h in (first, second)])') == [0, 3]
    r615.describe("limits off")
    assert query(r615, 'report([limit(first, folder("x"), 1 << 30), read(first, folder("x"))])') == [3, 3]


def test_with_dmem_a_cgroup_without_a_limit_has_the_highest(r615: Driver) -> None:
    r615.describe("limits dmem")
    script = 'x = folder("x"); report([read(first, x), limit(first, x, 1 << 30), read(first, x)])'
    assert query(r615, script) == [[0, (1 << 64) - 1, 0], 0, [0, GIB, 0]]


def test_with_dmem_the_cgroup_must_be_writable(r615: Driver, tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can mount a folder read-only")
    group = tmp_path / "one"
    group.mkdir()
    smi = f"{r615.folder}/nvidia-smi memory-limits --set -n {group} -i 0 --soft-limit 0 --hard-limit 5"
    script = f"mount --bind {group} {group} && mount -o remount,bind,ro {group} && {smi}"
    for how, code in (("dmem", 17), ("misc", 0)):
        r615.describe(f"limits {how}")
        assert r615.run(["unshare", "-m", "sh", "-c", script]).returncode == code


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


def test_nvidia_smi_treats_the_highest_limit_as_none(r615: Driver) -> None:
    arguments = ["memory-limits", "-n", str(r615.cards.parent), "-i", SECOND]
    assert r615.smi(*arguments, "--get").stdout == "Not Supported\n"
    for hard in ("100", "max"):
        assert r615.smi(*arguments, "--set", "--soft-limit", "0", "--hard-limit", hard).returncode == 0
    done = r615.smi(*arguments, "--get")
    assert (done.returncode, done.stdout) == (6, "Not Found\n")
    assert r615.smi("memory-limits", "--get").returncode == 2


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


def test_a_card_allocates_no_more_than_its_memory(r615: Driver, allocate: Allocate, tmp_path: Path) -> None:
    r615.describe("process 1 4711 3000")
    programs = [allocate(2000, tmp_path, card=1) for _run in range(4)]
    lines = sorted(first_line(one) for one in programs)
    # 8192 less the reserve of 256 and what others hold.
    assert lines == ["Insufficient Memory"] * 2 + ["holding 2000 MiB"] * 2


def test_concurrent_programs_get_no_more_than_the_limit_together(
    r615: Driver, allocate: Allocate, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    query(r615, 'report(limit(first, folder("one"), 1000 << 20))')
    programs = [allocate(90, tmp_path / "one") for _run in range(16)]
    lines = [first_line(one) for one in programs]
    assert lines.count("holding 90 MiB") == 11
    assert query(r615, 'report(read(first, folder("one"))[2] >> 20)') == 990


def test_inside_a_limited_cgroup_the_limit_is_the_total_memory(
    r615: Driver, allocate: Allocate, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    query(r615, 'report(limit(first, folder("one"), 1000 << 20))')
    one = allocate(300, tmp_path / "one")
    first_line(one)
    script = """
        os.environ["KUBEGPU_SIM_CGROUP"] = folder("one")
        answers = []
        for h in (first, second):
            whole, own = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
            answers.append([value >> 20 for value in (whole.total, own.total, own.used, own.free)])
        report(answers)
        """
    answer = query(r615, script)
    assert answer == [[16384, 1000, 300, 700], [8192, 8192, 0, 7936]]


def test_the_file_of_limits_keeps_its_inode(r615: Driver) -> None:
    """A container's mount keeps the inode that it was created with."""
    query(r615, 'report(limit(first, folder("one"), 1 << 30))')
    path = Path(f"{r615.cards}.limits")
    before = path.stat().st_ino
    query(r615, "report([limit(first, folder(str(k)), (k + 1) << 30) for k in range(9)])")
    query(r615, 'report(limit(first, folder("one"), NONE))')
    assert path.stat().st_ino == before
    assert len(path.read_text().splitlines()) == 10
    assert FIRST in path.read_text()


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


@pytest.mark.parametrize("line", ["limits", "limits some", "limits misc dmem"])
def test_an_invalid_limit_is_reported_with_its_line(r615: Driver, line: str) -> None:
    r615.describe(line)
    done = r615.smi("-L")
    assert done.returncode == 255 and f"{r615.cards}:{len(CARDS.splitlines()) + 1}: " in done.stderr


def test_concurrent_limits_are_all_stored(r615: Driver, tmp_path: Path) -> None:
    groups = [tmp_path / f"g{k}" for k in range(20)]
    for one in groups:
        one.mkdir()
    command = [str(r615.folder / "nvidia-smi"), "memory-limits", "--set", "-i", "0", "--soft-limit", "0"]
    programs = [
        subprocess.Popen([*command, "-n", str(group), "--hard-limit", str(100 + k)], env=r615.environment())
        for k, group in enumerate(groups)
    ]
    end_by = time.monotonic() + 30
    assert [one.wait(max(0.1, end_by - time.monotonic())) for one in programs] == [0] * 20
    answer = query(r615, "report([read(first, folder(f'g{k}'))[1] >> 20 for k in range(20)])")
    assert answer == [100 + k for k in range(20)]
