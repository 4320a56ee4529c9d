# SPDX-License-Identifier: GPL-3.0-or-later
"""Real dockerd programs that validate a daemon.json without a running daemon (since release 23)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import real_parts

# The first release that knows --validate.
OLDEST = 23


def release(binary: str) -> int:
    """Return the major release of a dockerd; 0 where it doesn't run here."""
    match = re.search(r"version v?([0-9]+)\.", real_parts.version_words(binary))
    return int(match[1]) if match else 0


@cache
def binaries(newest: bool = False) -> tuple[str, ...]:
    """Return one dockerd per available release, the oldest first.

    :param newest: also download that of Debian's unstable suite.
    """
    sources: list[Callable[[], Path]] = [
        lambda: real_parts.debian("trixie") / "dockerd",
        *([lambda: real_parts.debian("sid") / "dockerd"] if newest else []),
        lambda: Path("/usr/bin/dockerd"),
        lambda: Path("/usr/sbin/dockerd"),
    ]
    found: dict[int, str] = {}
    for source in sources:
        try:
            path = str(source())
        except real_parts.Missing:
            continue
        if (number := release(path)) >= OLDEST:
            found.setdefault(number, path)
    return tuple(found[number] for number in sorted(found))


def environment(binary: str) -> dict[str, str]:
    """Return a dockerd's environment: it rejects every configuration without docker-proxy in its PATH."""
    return {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ['PATH']}"}


def validate(binary: str, path: str | Path) -> tuple[bool, str]:
    """Validate a daemon.json; return the result and the output. It doesn't check that the default runtime exists."""
    command = [binary, "--validate", "--config-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment(binary))
    return done.returncode == 0, (done.stdout + done.stderr).strip()
