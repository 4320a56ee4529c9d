# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to programs of the controller: gpg, skopeo, pip, ansible-galaxy."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import typing as t

from ...module_utils._core.untrusted import line
from ...module_utils._host.system import Done

# Characters of what a program writes that are kept.
LONGEST = 1 << 20
NOT_INSTALLED, TIMED_OUT = 127, 124


class Run(t.Protocol):
    """Runs a program of this machine in the C locale; ``Done.rc`` is 127 where it isn't installed, 124 after a time.

    :param timeout: seconds.
    """

    def __call__(
        self,
        argv: t.Sequence[str],
        timeout: float = 60,
        folder: str | None = None,
        also: t.Mapping[str, str] | None = None,
    ) -> Done: ...


def run(
    argv: t.Sequence[str], timeout: float = 60, folder: str | None = None, also: t.Mapping[str, str] | None = None
) -> Done:
    """Run a program; where this process is interrupted, it and what it has started end too.

    :param folder: its working directory.
    :param also: more variables of its environment.
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
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        return Done(TIMED_OUT, "", f"{argv[0]} didn't finish within {timeout:g} s")
    except BaseException:
        _end(process)
        raise
    return Done(process.returncode, _text(out), _text(err))


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
