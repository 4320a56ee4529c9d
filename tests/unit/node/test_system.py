# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of this machine that disappear while they are read, and the time at which they were changed."""

from __future__ import annotations

import builtins
import errno
import os
import resource
import shlex
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host import system as host_system
from ansible_collections.kubegpu.share.plugins.module_utils._host import systemd
from ansible_collections.kubegpu.share.plugins.module_utils._host.file_transaction import FileTransaction, Replacement
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done, RealSystem, target

LIMITS = resource.getrlimit(resource.RLIMIT_AS)
# Bytes, so that a file without an end doesn't take the machine's.
MOST_MEMORY = 4 << 30


@pytest.mark.parametrize("name", ["cgroup", "cmdline", "stat"])
def test_process_that_ends_while_its_file_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers ESRCH then, not ENOENT."""
    process = subprocess.Popen(["sleep", "60"])
    opened, real = [], builtins.open

    def slow_open(path: Any, *arguments: Any, **options: Any) -> Any:
        file = real(path, *arguments, **options)
        if path == f"/proc/{process.pid}/{name}":
            opened.append(path)
            process.kill()
            process.wait()
        return file

    monkeypatch.setattr(builtins, "open", slow_open)
    assert RealSystem().read(f"/proc/{process.pid}/{name}") is None
    assert opened


def test_what_is_no_file_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    """A configuration may be a link to /dev/null."""
    os.mkfifo(tmp_path / "null")
    (tmp_path / "conf").symlink_to("null")
    system = RealSystem(str(tmp_path))
    for act in (lambda: system.write(target(system, "/conf"), "x"), lambda: system.remove("/null")):
        with pytest.raises(ShareError, match="/null is no file but a device, a socket or a pipe"):
            act()
    assert stat.S_ISFIFO((tmp_path / "null").lstat().st_mode) and sorted(os.listdir(tmp_path)) == ["conf", "null"]


@pytest.mark.parametrize("kind", ["pipe", "endless", "huge"])
def test_what_has_no_end_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a pod that is named kube-scheduler names its configuration, which is read through its root."""
    monkeypatch.setattr(host_system, "LONGEST", 1 << 20)
    path = tmp_path / "conf"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    read: list[str] = []

    def reading() -> None:
        try:
            RealSystem(str(tmp_path)).read("/conf")
        except ShareError as error:
            read.append(str(error))

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, LIMITS[1]))
    try:
        thread = threading.Thread(target=reading, daemon=True)
        thread.start()
        thread.join(20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, LIMITS)
    words = "is larger than" if kind == "huge" else "is no file but a device, a socket or a pipe"
    assert len(read) == 1 and read[0].startswith(f"/conf {words}")


def test_no_file_is_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    system = RealSystem(str(tmp_path))
    assert (system.read("/null"), system.read("/folder"), system.read("/none")) == ("", None, None)
    with pytest.raises(ShareError, match="zero byte"):
        system.read("/x\0y")


def test_a_folder_that_cant_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ShareError, match=r"^/run/containerd can't be listed: Permission denied$"):
        RealSystem(str(tmp_path)).names("/run/containerd")


def test_a_new_name_is_on_the_disk_before_the_next_file_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    RealSystem(str(tmp_path)).write("/etc/x", "text")
    assert synced[-1] == str(tmp_path / "etc") and len(synced) == 2


def test_a_file_that_is_not_utf_8_is_not_changed_in_a_transaction(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    system = RealSystem(str(tmp_path), run_command)
    changes = [Replacement("/latin", "", "x")]
    with pytest.raises(ShareError, match="/latin isn't UTF-8; it is left as it is"):
        FileTransaction(system, f"{tmp_path}/record").backup(changes)
    assert (tmp_path / "latin").read_bytes() == b"caf\xe9\n"


def run_command(argv: list[str], **_: Any) -> tuple[int, str, str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_new_file_with_an_old_time_of_modification_is_newer_than_the_process(tmp_path: Path) -> None:
    """As dpkg and ``cp -p`` write it."""
    system, before = RealSystem(run_command=run_command), tmp_path / "before"
    before.write_text("")
    with subprocess.Popen(["sleep", "60"]) as process:
        time.sleep(systemd.STALE_AFTER_SECONDS + 0.1)
        packaged = tmp_path / "packaged"
        packaged.write_text("")
        os.utime(packaged, (0, 0))
        found = [systemd.stale(system, process.pid, [str(path)]) for path in (before, packaged)]
        process.kill()
    assert found == [False, True]


class Clock:
    """A machine whose boot was at 1000, and whose process 1 started at 1100.

    :param changed: when its files were changed.
    """

    def __init__(self, now: float, *changed: float) -> None:
        self.now, self.changed = now, changed

    def read(self, path: str) -> str:
        return f"{self.now - 1000}" if path == "/proc/uptime" else f"1 (x) S {'0 ' * 18}10000 0"

    def run(self, argv: list[str], timeout: float = 60, stdin: str | None = None) -> Done:
        answers = [self.now] if argv[0] == "date" else self.changed
        return Done(0, "".join(f"{answer}\n" for answer in answers), "")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ((1050, 1400), True),
        ((1400, 1900), True),
        ((1050, 1900), None),
        ((1900,), None),
        ((), None),
        ((1050, 1100.5), False),
    ],
)
def test_a_time_in_the_future_hides_no_other_change(changed: tuple[float, ...], found: bool | None) -> None:
    paths = [str(number) for number in range(len(changed))]
    assert systemd.changed_since_start(Clock(1500, *changed), 1, paths, 1) is found  # type: ignore[arg-type]


def test_a_command_that_sets_the_modes_of_the_modules_terminal_runs_to_its_end() -> None:
    """Without pipelining a module has a terminal; who sets its modes from another process group is stopped."""

    def in_terminal(argv: list[str], **_: Any) -> tuple[int, str, str]:
        # The shell stays, as Ansible's does; what it becomes would lead the session.
        kept = f"{shlex.join(argv)}; exit $?"
        inside = ["script", "--quiet", "--return", "--command", kept, "/dev/null"]
        done = subprocess.run(inside, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=8)
        return done.returncode, done.stdout, done.stderr

    assert RealSystem(run_command=in_terminal).run(["sh", "-c", "tty && stty sane && echo set"]).rc == 0
    assert RealSystem(run_command=in_terminal).run(["no-such-command"]).rc == 127
    assert RealSystem(run_command=in_terminal).run(["sleep", "9"], timeout=0.1).rc == 124
