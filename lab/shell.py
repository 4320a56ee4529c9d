# SPDX-License-Identifier: GPL-3.0-or-later
"""Run commands, print progress, and define the error that users see."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_START = time.monotonic()
_LOCK = threading.Lock()

# A command behind these ends with this process, with all that it started and mounted, even after SIGKILL.
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_ROOM_OF_ITS_OWN = ("unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child", "--")


class LabError(Exception):
    """The lab can't go on; the message is one sentence for the user."""


def say(text: str) -> None:
    """Print one line of progress with the seconds since the start."""
    with _LOCK:
        print(f"lab {time.monotonic() - _START:5.0f}s  {text}", flush=True)


@contextmanager
def in_background(loop: Callable[[], object], stop: threading.Event, seconds: float | None = None) -> Iterator[None]:
    """Run a function in a thread while the body runs; ``stop`` is set at its end.

    :param seconds: how long the function may still take then; None: as long as it takes.
    """
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(seconds)


@contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call a function periodically while the body runs."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(seconds):
            act()

    with in_background(loop, stop):
        yield


@contextmanager
def step(text: str, pause: float = 30.0) -> Iterator[None]:
    """Print a step's name, its progress every ``pause`` seconds, and its duration."""
    began = time.monotonic()
    say(text)
    with every(pause, lambda: say(f"{text}: still running after {time.monotonic() - began:.0f} s")):
        yield
    if time.monotonic() - began >= 5:
        say(f"{text}: done in {time.monotonic() - began:.0f} s")


def run(
    command: Sequence[str],
    *,
    check: bool = True,
    tied: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    source: IO[bytes] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command without output.

    :raises LabError: it failed; the message has its last lines.
    """
    full = [*_DIE_WITH_US, *_ROOM_OF_ITS_OWN, *command] if tied else list(command)
    try:
        done = subprocess.run(
            full,
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=env,
            cwd=cwd,
            stdin=source or subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise LabError(f"the command {full[0]!r} is missing on this machine.") from None
    if check and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-12:]
        raise LabError(f"{' '.join(command[:6])} failed with {done.returncode}: " + "\n    ".join(said))
    return done


def output(command: Sequence[str]) -> str:
    """Return the stripped output of a command."""
    return run(command).stdout.strip()


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Run the work for all items in parallel; raise the first failure after all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        futures = [pool.submit(work, item) for item in items]
    return [future.result() for future in futures]


def wait_for(what: str, ready: Callable[[], bool], seconds: float, pause: float = 1.0) -> None:
    """Poll until a condition holds.

    :raises LabError: it didn't within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {seconds:.0f} s.")
        time.sleep(pause)
