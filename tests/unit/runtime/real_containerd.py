# SPDX-License-Identifier: GPL-3.0-or-later
"""Real containerd binaries of this machine, to judge every file that is written."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _containerd, _observe_containerd
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


@cache
def binaries() -> tuple[str, ...]:
    """The lab's containerd 2.x (LAB_BIN or its cache) and the distribution's own, one per version."""
    cache_home = os.environ.get("KUBEGPU_CACHE") or (
        os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kubegpu-share")
    )
    folders = [Path(os.environ["LAB_BIN"])] if os.environ.get("LAB_BIN") else []
    found = [folder / "containerd" for folder in folders] + sorted(Path(cache_home).glob("bin/containerd-*/containerd"))
    versions = {}
    for path in [*found, Path("/usr/bin/containerd")]:
        if os.access(path, os.X_OK):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if version := _containerd.version_of(done.stdout):
                versions.setdefault(_containerd.release(version), str(path))
    return tuple(versions.values())


def of_release(major: int) -> str:
    for path in binaries():
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if re.search(rf"\bv?{major}\.", done.stdout.partition("containerd")[2]):
            return path
    pytest.skip(f"no containerd {major}.x on this machine: neither in LAB_BIN, nor in the lab's cache, nor in /usr/bin")


class Machine(RealSystem):
    """This machine's files, with systemd's word for which containerd runs with which file."""

    def __init__(self, binary: str, config: str) -> None:
        super().__init__(run_command=self._run_it)
        self._unit = (
            f"ExecStart={{ path={binary} ; argv[]={binary} --config {config} ; ignore_errors=no }}\n"
            "ActiveState=active\nMainPID=0\n"
        )

    def exists(self, path: str) -> bool:
        # Nothing of the machine that the tests run on may count.
        return False if path.startswith(("/etc/rancher", "/var", "/run", "/etc/k0s")) else super().exists(path)

    def _run_it(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        if "systemctl" in argv:
            return 0, self._unit, ""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


def observe(binary: str, config: Path) -> dict[str, object]:
    seen = _observe_containerd.observe(Machine(binary, str(config)))
    assert seen is not None
    return seen


def apply(files: tuple[dict[str, str | None], ...]) -> None:
    """Write what a plan hands over."""
    for row in files:
        path = Path(str(row["path"]))
        if row["after"] is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(row["after"])
