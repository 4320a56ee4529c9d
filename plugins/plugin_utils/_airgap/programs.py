# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to programs of the controller: gpg, skopeo, pip, ansible-galaxy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import typing as t

from ...module_utils._core.untrusted import line
from ...module_utils._host.system import Done

# Characters of what a program writes that are kept.
LONGEST = 1 << 20
NOT_INSTALLED, TIMED_OUT = 127, 124
# Seconds after which a program that runs is looked at again.
LOOK = 0.5

# Takes the bytes that a program has written so far, to files and connections; None where the system doesn't say. An
# error that it raises ends the program.
Watch = t.Callable[[int | None], t.Any]


class Run(t.Protocol):
    """Runs a program of this machine in the C locale; ``Done.rc`` is 127 where it isn't installed, 124 after a time.

    :param timeout: seconds.
    :param watch: is called every ``LOOK`` seconds.
    """

    def __call__(
        self,
        argv: t.Sequence[str],
        timeout: float = 60,
        folder: str | None = None,
        also: t.Mapping[str, str] | None = None,
        watch: Watch | None = None,
    ) -> Done: ...


def run(
    argv: t.Sequence[str],
    timeout: float = 60,
    folder: str | None = None,
    also: t.Mapping[str, str] | None = None,
    watch: Watch | None = None,
) -> Done:
    """Run a program; where this process is interrupted, it and what it has started end too.

    :param folder: its working directory.
    :param also: more variables of its environment.
    :param watch: as ``Run`` has it.
    """
    environment = {**os.environ, "LC_ALL": "C", "LANGUAGE": "C", **(also or {})}
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Done(NOT_INSTALLED, "", f"{argv[0]}: {error.strerror}")
    try:
        out, err = _watched(process, timeout, watch) if watch else process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        return Done(TIMED_OUT, "", f"{argv[0]} didn't finish within {timeout:g} s")
    except BaseException:
        _end(process)
        raise
    return Done(process.returncode, _text(out), _text(err))


def _watched(process: subprocess.Popen[bytes], timeout: float, watch: Watch) -> tuple[bytes, bytes]:
    """Return what a program has written to its outputs, and tell meanwhile how far it is.

    :raises subprocess.TimeoutExpired: it didn't finish in time.
    """
    until = time.monotonic() + timeout
    while True:
        left = until - time.monotonic()
        try:
            return process.communicate(timeout=max(0.0, min(left, LOOK)))
        except subprocess.TimeoutExpired:
            if left <= LOOK:
                raise
            watch(_written(process.pid))


def _written(pid: int) -> int | None:
    """Return the bytes that a process has written with all its threads; None where the system doesn't say."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            rows = dict(row.split(":", 1) for row in file.read().splitlines())
        return int(rows["wchar"])
    except (OSError, ValueError, KeyError):
        return None


def _text(content: bytes) -> str:
    return content[-LONGEST:].decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def last_words(done: Done, count: int = 2) -> str:
    """Return the last lines of what a program wrote, in one."""
    rows = [row.strip() for row in (done.err.strip() or done.out).splitlines() if row.strip()]
    return line(" | ".join(rows[-count:]), 600) or f"it ended with {done.rc}"
