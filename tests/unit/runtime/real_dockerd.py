# SPDX-License-Identifier: GPL-3.0-or-later
"""Real dockerd programs that can check a daemon.json without a running daemon (from release 23 on)."""

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
    """Major release of a dockerd; 0 where it doesn't run here."""
    found = re.search(r"version v?([0-9]+)\.", real_parts.version_words(binary))
    return int(found[1]) if found else 0


@cache
def binaries() -> tuple[str, ...]:
    """One dockerd per release, oldest first; none where they can't be had."""
    sources: list[Callable[[], Path]] = [
        lambda: real_parts.debian("trixie") / "dockerd",
        lambda: real_parts.debian("sid") / "dockerd",
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
    """What a dockerd runs with: it takes no configuration where its PATH has no docker-proxy."""
    return {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ['PATH']}"}


def validate(binary: str, path: str | Path) -> tuple[bool, str]:
    """Whether dockerd takes this daemon.json, and its own words; it doesn't look whether the default runtime exists."""
    command = [binary, "--validate", "--config-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment(binary))
    return done.returncode == 0, (done.stdout + done.stderr).strip()
