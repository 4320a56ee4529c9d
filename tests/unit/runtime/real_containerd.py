# SPDX-License-Identifier: GPL-3.0-or-later
"""Real containerd programs, one per relevant release, which validate every written file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import real_parts
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import containerd
from limited import without_limit

_SOURCES: dict[str, Callable[[], Path]] = {
    "1.6": lambda: real_parts.debian("bookworm") / "containerd",
    "1.7": lambda: real_parts.debian("trixie") / "containerd",
    "2.0": lambda: real_parts.built("containerd-2.0") / "containerd",
    "2.1": lambda: real_parts.debian("sid") / "containerd",
    "2.2": lambda: real_parts.built("containerd-2.2") / "containerd",
    "2.4": lambda: real_parts.built("containerd") / "containerd",
}
RELEASES = tuple(_SOURCES)
# The releases of the usual tests: one before 2.0, whose program is a download of seconds, and the lab's. What a release
# ignores is tried on 2.2, the last one that ignores settings of another format: that is one program to build.
USUAL = ("1.7", "2.4")
FURTHER = tuple(release for release in RELEASES if release not in USUAL)
# For ``parametrize``: every further release is downloaded or built first, which takes minutes.
PARAMETERS = tuple(pytest.param(release, marks=() if release in USUAL else pytest.mark.long) for release in RELEASES)


@cache
def find(release: str) -> str:
    """Return the containerd of a release: the machine's own if it has this release, else one of the cache.

    :raises real_parts.Missing: it can't be downloaded or built.
    """
    ready = [Path(os.environ["LAB_BIN"]) / "containerd"] if os.environ.get("LAB_BIN") else []
    for path in [*ready, Path("/usr/bin/containerd")]:
        if _release_of(path) == release:
            return str(path)
    path = _SOURCES[release]()
    if _release_of(path) != release:
        # Suites move on to newer releases.
        raise real_parts.Missing(
            f"no containerd {release}: {path} is {real_parts.version_words(path).strip() or 'dead'}"
        )
    return str(path)


def _release_of(path: Path) -> str:
    return ".".join(map(str, containerd.release(version(str(path)))))


@cache
def version(binary: str) -> str:
    return containerd.version_of(real_parts.version_words(binary))


def of(release: str) -> str:
    """Return the containerd of a release; skip the test where it is missing."""
    try:
        return find(release)
    except real_parts.Missing as missing:
        pytest.skip(str(missing))


# What a node's own toolkit would find by their names.
LOW_LEVEL = ("docker-runc", "runc", "crun")


class Machine(RealSystem):
    """This machine's files, with a simulated unit for a containerd and its configuration; its CRI plugin is loaded."""

    def __init__(self, binary: str, config: str) -> None:
        super().__init__(run_command=self._run_it)
        self._binary = binary
        self._unit = (
            f"ExecStart={{ path={binary} ; argv[]={binary} --config {config} ; ignore_errors=no }}\n"
            "ActiveState=active\nMainPID=0\n"
        )

    def exists(self, path: str) -> bool:
        # Ignore everything else on the machine that runs the tests.
        foreign = path.startswith(("/etc/rancher", "/var", "/run", "/etc/k0s", "/usr/bin/crictl"))
        return False if foreign or os.path.basename(path) in LOW_LEVEL else super().exists(path)

    def _run_it(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        if "systemctl" in argv:
            return 0, self._unit, ""
        if list(argv[-1:]) == ["--version"]:
            return 0, f"containerd c {version(self._binary)} x\n", ""
        program, *arguments = without_limit(argv)
        command = [os.path.basename(program), *arguments]
        if command[0] in ("ctr", "journalctl"):
            return 0, "io.containerd.grpc.v1 cri linux/amd64 ok\n", ""
        if command[0] == "stat":
            return 0, "644 0:0\n", ""
        # Asked for at each change, and a process of its own takes longer than the change.
        if command[0] == "date":
            return 0, f"{time.time()}\n", ""
        if command[0] == "mkdir":
            os.makedirs(command[-1], exist_ok=True)
            return 0, "", ""
        if command[0] == "rmdir":
            with contextlib.suppress(OSError):
                os.rmdir(command[-1])
            return 0, "", ""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


def observe(binary: str, config: Path) -> dict[str, object]:
    seen = containerd.observe(Machine(binary, str(config)))
    assert seen is not None
    return seen


def apply(files: tuple[dict[str, str | None], ...]) -> None:
    """Write the files of a plan."""
    for row in files:
        path = Path(str(row["path"]))
        if row["after"] is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["after"].encode())
