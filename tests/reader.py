# SPDX-License-Identifier: GPL-3.0-or-later
"""A reader of README.md: an empty home, the tarball, PyPI, and the commands as they are written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of the caller's environment; everything else, Ansible's settings above all, would help the reader.
KEPT = ("PATH", "LANG", "TERM", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


class Reader:
    """Types commands into one shell after another, in a folder that is his home too.

    :param folder: an empty one.
    :param environment: more of it.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        # Where PyPI is reached through a mirror, pip's settings say so.
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = {**kept, **pip, "HOME": str(folder), "ANSIBLE_NOCOLOR": "1", **environment}
        self.environment["PATH"] = ":".join(one for one in self.environment["PATH"].split(":") if ".venv" not in one)

    def types(self, commands: Sequence[str]) -> str:
        """Run commands in one shell, which a command that fails ends.

        :returns: their output.
        """
        # The environment that an earlier block has activated stays so.
        active = self.folder / "kubegpu/bin/activate"
        lines = ["set -e", *([f". {active}"] if active.exists() else []), *commands]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=self.folder,
            env={**self.environment, "PWD": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr
