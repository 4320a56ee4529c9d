# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions, tools and input of the lab's package repositories."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lab import packages

VERSION, TOOLKIT = "580.95.05", "1.20.2"


def output(*command: str | Path) -> str:
    """Run a command that must succeed; return its standard output."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def skip_without(*tools: str) -> None:
    missing = [name for name in tools if not shutil.which(name)]
    if missing:
        pytest.skip(f"this machine lacks {', '.join(missing)}")


def make_toolkit(folder: Path) -> Path:
    """Create the toolkit's programs as scripts."""
    folder.mkdir()
    for name in (*packages.BASE_BINARIES, packages.HOOK_BINARY):
        (folder / name).write_text(f"#!/bin/sh\necho {name}\n")
        (folder / name).chmod(0o755)
    return folder


def apt_root(folder: Path) -> list[str]:
    """Make a root of its own for apt, without sources, and return the options with which apt uses it."""
    for name in (
        *("etc/sources.list.d", "etc/preferences.d", "etc/trusted.gpg.d"),
        *("lib/lists/partial", "cache/archives/partial"),
    ):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "Dir::Etc": f"{folder}/etc",
        "Dir::Etc::sourceparts": "sources.list.d",
        "Dir::State": f"{folder}/lib",
        "Dir::State::status": f"{folder}/status",
        "Dir::Cache": f"{folder}/cache",
        "APT::Sandbox::User": "root",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
