# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated NVML as branch R615: memory limits per card and cgroup, and who holds what."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    made = Driver(r615_folder, tmp_path / "cards")
    made.describe()
    return made


def ask(driver: Driver, script: str) -> t.Any:
    return driver.python(_CALLS + "first, second = start()\n" + script)


def holder(driver: Driver, mib: int, group: Path, card: int = 0) -> subprocess.Popen[str]:
    """A program that holds memory until it is killed, or has been refused it."""
    command = [str(driver.folder / "nvidia-smi"), "simulated-allocation", str(mib), "-i", str(card)]
    environment = {**driver.environment(), "KUBEGPU_SIM_CGROUP": str(group)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def end(*programs: subprocess.Popen[str]) -> None:
    for one in programs:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def test_a_limit_is_kept_read_back_and_cleared(r615: Driver) -> None:
    told = ask(
        r615,
        """
one, other = folder("one"), folder("other")
answers = [read(first, one), limit(first, one, 3 << 30), read(first, one), read(first, other), read(second, one)]
answers += [limit(first, one, NONE), read(first, one)]
tell(answers)
""",
    )
    # A card that was never given any answers "not supported", as if it could not; after that "not found".
    assert told == [3, 0, [0, 3 * GIB, 0], 6, 3, 0, 6]


def test_limits_outlive_the_program_that_set_them(r615: Driver) -> None:
    ask(r615, 'tell(limit(second, folder("one"), 1 << 30, 5 << 20))')
    assert ask(r615, 'tell(read(second, folder("one")))') == [5 << 20, GIB, 0]


def test_a_folder_of_the_same_name_is_another_cgroup(r615: Driver) -> None:
    told = ask(
        r615,
        """
one = folder("one")
limit(first, one, 3 << 30)
os.rmdir(one)
time.sleep(0.02)
tell(read(first, folder("one")))
""",
    )
    assert told == 6


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
def test_what_is_refused_and_how(r615: Driver, call: str, answer: int) -> None:
    assert ask(r615, f"tell({call})") == answer


def test_limits_can_be_turned_off_and_mig_has_none(r615: Driver) -> None:
    r615.cards.write_text(CARDS.replace("_8GiB", "_8GiB mig=enabled"))
    assert ask(r615, 'tell([limit(h, folder("x"), 1 << 30) for h in (first, second)])') == [0, 3]
    r615.describe("limits off")
    assert ask(r615, 'tell([limit(first, folder("x"), 1 << 30), read(first, folder("x"))])') == [3, 3]


def test_with_dmem_a_cgroup_without_a_limit_has_the_highest(r615: Driver) -> None:
    r615.describe("limits dmem")
    told = ask(r615, 'tell([read(first, folder("x")), limit(first, folder("x"), 1 << 30), read(first, folder("x"))])')
    assert told == [[0, (1 << 64) - 1, 0], 0, [0, GIB, 0]]


def test_with_dmem_the_folder_must_be_writable(r615: Driver, tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("only root can mount a folder read-only")
    group = tmp_path / "one"
    group.mkdir()
    smi = f"{r615.folder}/nvidia-smi memory-limits --set -n {group} -i 0 --soft-limit 0 --hard-limit 5"
    script = f"mount --bind {group} {group} && mount -o remount,bind,ro {group} && {smi}"
    for how, code in (("dmem", 17), ("misc", 0)):
        r615.describe(f"limits {how}")
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], check=False, env=r615.environment())
        assert done.returncode == code


def test_only_who_may_sets_a_limit_and_everybody_reads_it(r615: Driver) -> None:
    if os.geteuid():
        pytest.skip("only root can give a right up")
    group = r615.cards.parent / "one"
    group.mkdir()
    smi = str(r615.folder / "nvidia-smi")
    arguments = ["memory-limits", "-n", str(group), "-i", "0"]
    less = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", smi, *arguments]
    first = subprocess.run(
        [*less, "--set", "--soft-limit", "0", "--hard-limit", "5"],
        check=False,
        capture_output=True,
        env=r615.environment(),
    )
    assert (first.returncode, first.stdout.decode()) == (4, "Insufficient Permissions\n")
    assert r615.smi(*arguments, "--set", "--soft-limit", "0", "--hard-limit", "5").returncode == 0
    again = subprocess.run([*less, "--get"], check=False, capture_output=True, text=True, env=r615.environment())
    assert again.stdout == f"namespace: {group}\nsoft limit: 0 MiB\nhard limit: 5 MiB\ncurrent used: 0 MiB\n"


def test_nvidia_smi_sets_the_highest_as_none(r615: Driver) -> None:
    arguments = ["memory-limits", "-n", str(r615.cards.parent), "-i", SECOND]
    assert r615.smi(*arguments, "--get").stdout == "Not Supported\n"
    assert r615.smi(*arguments, "--set", "--soft-limit", "0", "--hard-limit", "100").returncode == 0
    assert r615.smi(*arguments, "--set", "--soft-limit", "0", "--hard-limit", "max").returncode == 0
    done = r615.smi(*arguments, "--get")
    assert (done.returncode, done.stdout) == (6, "Not Found\n")
    assert r615.smi("memory-limits", "--get").returncode == 2


def test_memory_beyond_the_limit_is_refused_and_a_dead_program_holds_none(r615: Driver, tmp_path: Path) -> None:
    group = tmp_path / "one"
    inner = group / "inner"
    inner.mkdir(parents=True)
    ask(r615, 'tell(limit(first, folder("one"), 1000 << 20))')
    one = holder(r615, 600, group)
    assert said(one) == "holding 600 MiB"
    # A shell in the container, and a cgroup below: one limit for all of them.
    two, three = holder(r615, 500, group), holder(r615, 500, inner)
    assert (said(two), two.wait()) == ("Insufficient Memory", 20)
    assert (said(three), three.wait()) == ("Insufficient Memory", 20)
    four = holder(r615, 400, inner)
    assert said(four) == "holding 400 MiB"
    # Another card, and another cgroup, have nothing to do with it.
    five, six = holder(r615, 5000, group, card=1), holder(r615, 9000, tmp_path)
    assert (said(five), said(six)) == ("holding 5000 MiB", "holding 9000 MiB")
    told = ask(r615, 'tell([read(first, folder("one")), read(second, folder("one"))])')
    assert told == [[0, 1000 << 20, 1000 << 20], 3]
    memory = ask(
        r615, "tell([[n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used >> 20 for h in (first, second)]])"
    )
    assert memory == [[10000, 5000]]
    end(one)
    assert ask(r615, 'tell(read(first, folder("one"))[2] >> 20)') == 400
    seven = holder(r615, 600, group)
    assert said(seven) == "holding 600 MiB"
    end(two, three, four, five, six, seven)
    assert ask(r615, 'tell(read(first, folder("one"))[2])') == 0


def test_a_limit_isnt_lowered_below_what_is_held(r615: Driver, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = holder(r615, 600, tmp_path / "one")
    assert said(one) == "holding 600 MiB"
    answers = ask(r615, 'tell([limit(first, folder("one"), 500 << 20), limit(first, folder("one"), 700 << 20)])')
    assert answers == [19, 0]
    end(one)


def test_a_card_has_no_more_than_it_has(r615: Driver, tmp_path: Path) -> None:
    r615.describe("process 1 4711 3000")
    programs = [holder(r615, 2000, tmp_path, card=1) for _run in range(4)]
    words = sorted(said(one) for one in programs)
    # 8192 less the reserve of 256 and what others hold.
    assert words == ["Insufficient Memory"] * 2 + ["holding 2000 MiB"] * 2
    end(*programs)


def test_programs_at_the_same_moment_get_no_more_than_the_limit_together(r615: Driver, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    ask(r615, 'tell(limit(first, folder("one"), 1000 << 20))')
    programs = [holder(r615, 90, tmp_path / "one") for _run in range(16)]
    words = [said(one) for one in programs]
    assert words.count("holding 90 MiB") == 11
    assert ask(r615, 'tell(read(first, folder("one"))[2] >> 20)') == 990
    end(*programs)


def test_inside_a_limited_cgroup_the_limit_is_the_card(r615: Driver, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    ask(r615, 'tell(limit(first, folder("one"), 1000 << 20))')
    one = holder(r615, 300, tmp_path / "one")
    said(one)
    told = ask(
        r615,
        """
os.environ["KUBEGPU_SIM_CGROUP"] = folder("one")
answers = []
for h in (first, second):
    whole, own = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    answers.append([value >> 20 for value in (whole.total, own.total, own.used, own.free)])
tell(answers)
""",
    )
    assert told == [[16384, 1000, 300, 700], [8192, 8192, 0, 7936]]
    end(one)


def test_the_file_of_limits_stays_the_same_file(r615: Driver) -> None:
    """A container's mount stays with the file that it was given."""
    ask(r615, 'tell(limit(first, folder("one"), 1 << 30))')
    path = Path(f"{r615.cards}.limits")
    before = path.stat().st_ino
    ask(r615, "tell([limit(first, folder(str(k)), (k + 1) << 30) for k in range(9)])")
    ask(r615, 'tell(limit(first, folder("one"), NONE))')
    assert path.stat().st_ino == before
    assert len(path.read_text().splitlines()) == 10
    assert FIRST in path.read_text()


def test_a_driver_before_r615_has_no_limits(driver: Driver) -> None:
    """nvidia-ml-py says "function not found", as with the real one."""
    told = driver.python(
        """
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        tell([code(n.nvmlDeviceSetMemoryLimits_v1, h, n.c_nvmlSetMemoryLimits_v1_t(b"/", 0, 1)),
              code(n.nvmlDeviceGetMemoryLimits_v1, h, n.c_nvmlGetMemoryLimits_v1_t(nameSpace=b"/"))])
        """
    )
    assert told == [13, 13]
    assert driver.smi("memory-limits", "--get", "-n", "/tmp", "-i", "0").returncode == 13
    # A description of such limits is still one of its cards.
    driver.describe("limits dmem")
    assert driver.python("n.nvmlInit(); tell(n.nvmlDeviceGetCount())") == 2


@pytest.mark.parametrize("line", ["limits", "limits some", "limits misc dmem"])
def test_a_mistake_about_limits_is_said_with_its_line(r615: Driver, line: str) -> None:
    r615.describe(line)
    done = r615.smi("-L")
    assert done.returncode == 255 and f"{r615.cards}:{len(CARDS.splitlines()) + 1}: " in done.stderr


def test_many_programs_set_limits_at_once_and_none_is_lost(r615: Driver, tmp_path: Path) -> None:
    groups = [tmp_path / f"g{k}" for k in range(20)]
    for one in groups:
        one.mkdir()
    programs = [
        subprocess.Popen(
            [str(r615.folder / "nvidia-smi"), "memory-limits", "--set", "-n", str(group), "--soft-limit", "0",
             "--hard-limit", str(100 + k), "-i", "0"],
            env=r615.environment(),
        )
        for k, group in enumerate(groups)
    ]  # fmt: skip
    end_by = time.monotonic() + 30
    assert [one.wait(max(0.1, end_by - time.monotonic())) for one in programs] == [0] * 20
    told = ask(r615, "tell([read(first, folder(f'g{k}'))[1] >> 20 for k in range(20)])")
    assert told == [100 + k for k in range(20)]
