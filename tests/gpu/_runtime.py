# SPDX-License-Identifier: GPL-3.0-or-later
"""Real containerd, runc and NVIDIA's container runtime over the machine's own driver, with files of their own.

They are taken from the PATH. Nothing of the machine's own containerd or of its container toolkit is used or changed but
the programs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

from _card import CGROUPFS, absent, place, remove_groups

PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "nvidia-container-runtime", "nvidia-ctk")
# What the containers run; the driver's own files come from the toolkit.
TOOLS = ("sh", "cat", "sleep", "ls")
CONTAINERD = """\
version = 3
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
"""
TOOLKIT = """\
accept-nvidia-visible-devices-envvar-when-unprivileged = {accept}
[nvidia-container-runtime]
mode = "jit-cdi"
runtimes = ["runc"]
debug = "{folder}/runtime.log"
[nvidia-ctk]
path = "{ctk}"
"""
# ctr reads specifications here; in a namespace of its own they are only the test's.
CDI = "/var/run/cdi"
WITH_CDI = f'mount --make-rprivate / && mkdir -p {CDI} && mount --bind "$1" {CDI} && shift && exec "$@"'


class Ran(t.NamedTuple):
    """How a container ended, and what it and the runtime said."""

    code: int
    out: str
    err: str


class Runtime:
    """:param program: the program that holds memory of a card, in every container as /hold."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self._image = folder / "image"
        self._numbers = itertools.count(1)
        self._log = (folder / "containerd.log").open("ab")
        self._socket = folder / "c.sock"
        self._make_image(program)
        hook, ctk = shutil.which("nvidia-cdi-hook"), shutil.which("nvidia-ctk")
        self.toolkits = {}
        for name, accept in (("accepting", "true"), ("refusing", "false")):
            home = folder / name / "nvidia-container-runtime"
            home.mkdir(parents=True)
            (home / "config.toml").write_text(TOOLKIT.format(accept=accept, ctk=ctk, folder=folder / name))
            # The runtime reads its configuration below this variable.
            self.toolkits[name] = folder / f"runtime-{name}"
            self.toolkits[name].write_text(
                f'#!/bin/sh\nexport XDG_CONFIG_HOME={folder / name}\nexec nvidia-container-runtime "$@"\n'
            )
            self.toolkits[name].chmod(0o755)
        self.specifications = folder / "cdi"
        self.specifications.mkdir()
        output = self.specifications / "nvidia.yaml"
        subprocess.run(
            ["nvidia-ctk", "--quiet", "cdi", "generate", f"--output={output}", f"--nvidia-cdi-hook-path={hook}"],
            check=True, timeout=60,
        )  # fmt: skip
        (folder / "containerd.toml").write_text(CONTAINERD)
        self._containerd = subprocess.Popen(
            [
                *("containerd", "--config", folder / "containerd.toml", "--root", folder / "root"),
                *("--state", folder / "state", "--address", self._socket),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        for _turn in range(600):
            if self._ctr("version").returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError((folder / "containerd.log").read_text()[-2000:])

    def _ctr(self, *words: t.Any) -> subprocess.CompletedProcess[str]:
        command = ["ctr", "--address", str(self._socket), "--namespace", "test", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def _make_image(self, program: Path) -> None:
        for name in ("proc", "sys", "dev", "tmp", "run", "usr/bin", "usr/lib64", "etc/ld.so.conf.d", "bin"):
            (self._image / name).mkdir(parents=True, exist_ok=True)
        (self._image / "var").mkdir()
        (self._image / "var" / "run").symlink_to("/run")
        (self._image / "etc" / "ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
        shutil.copy(program, self._image / "hold")
        tools = [str(shutil.which(one)) for one in TOOLS]
        for tool in tools:
            shutil.copy(tool, self._image / "bin")
        said = subprocess.run(["ldd", *tools, str(program)], capture_output=True, text=True, check=True).stdout
        libraries = set(re.findall(r"(/\S+) \(0x", said))
        # What libcuda and NVML load, which the C library has.
        libc = next(Path(one) for one in libraries if "/libc.so" in one)
        libraries |= {
            str(path) for name in ("libm", "libdl", "libpthread", "librt") for path in libc.parent.glob(f"{name}.so.*")
        }
        for library in libraries:
            (self._image / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, self._image / library.lstrip("/"))

    def command(
        self,
        *command: str,
        environment: t.Mapping[str, str] | None = None,
        devices: t.Sequence[str] = (),
        toolkit: str = "accepting",
        options: t.Sequence[str] = (),
        identifier: str = "",
        root: Path | None = None,
    ) -> list[str]:
        """The command line that runs a container to its end.

        :param command: of the container.
        :param environment: its variables, whoever sets them.
        :param devices: CDI names.
        :param toolkit: with which of the toolkit's configurations.
        :param options: further ones of ctr.
        :param root: its file system; by default a copy of one with a shell.
        """
        number = next(self._numbers)
        if root is None:
            root = self.folder / f"rootfs{number}"
            shutil.copytree(self._image, root, symlinks=True)
        words = ["ctr", "--address", str(self._socket), "--namespace", "test", "run", "--rm", "--rootfs"]
        # Nothing here is about the processor; controlling it needs a controller.
        words += ["--cpu-shares", "0"]
        words += ["--runc-binary", str(self.toolkits[toolkit]), *options]
        for name, value in (environment or {}).items():
            words += ["--env", f"{name}={value}"]
        for device in devices:
            words += ["--device", device]
        words += ["--env", "PATH=/bin:/usr/bin:/usr/local/bin:/usr/local/nvidia/bin"]
        words += [str(root), identifier or f"c{number}", *command]
        return ["unshare", "--mount", "sh", "-c", WITH_CDI, "sh", str(self.specifications), *words]

    def kill(self, identifier: str) -> None:
        self._ctr("tasks", "kill", "--signal", "9", identifier)

    def run(self, *command: str, **how: t.Any) -> Ran:
        done = subprocess.run(
            self.command(*command, **how),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def holding(self, script: str, uid: str, identifier: str, **how: t.Any) -> t.Iterator[list[str]]:
        """Run a container in a pod's control group until the caller has looked at it.

        :param script: ends with the program that holds memory, which is waited for.
        :param uid: of the pod.
        :returns: the lines that it has printed.
        """
        group = place(CGROUPFS, uid, identifier)
        added = absent(group)
        how["options"] = (*how.get("options", ()), "--cgroup", f"/{group}")
        process = subprocess.Popen(
            self.command("/bin/sh", "-c", script, identifier=identifier, **how),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said: list[str] = []
        try:
            assert process.stdout is not None
            while not (said and said[-1].startswith("holding")):
                line = process.stdout.readline()
                assert line, said
                said.append(line.strip())
            yield said
            assert process.poll() is None, "the container ended by itself"
        finally:
            self.kill(identifier)
            process.wait(30)
            remove_groups(added)

    def logs(self) -> str:
        return (self.folder / "containerd.log").read_text()

    def stop(self) -> None:
        for one in self._ctr("tasks", "list", "--quiet").stdout.split():
            self.kill(one)
        self._containerd.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._containerd.wait(10)
        self._containerd.kill()
        self._log.close()


def missing() -> str:
    """Return why containers can't be started here; empty if they can."""
    lacks = [one for one in (*PROGRAMS, "nvidia-cdi-hook") if not shutil.which(one)]
    if lacks:
        return f"not on the PATH: {', '.join(lacks)}"
    return (
        ""
        if os.path.exists("/sys/fs/cgroup/cgroup.controllers")
        else "control groups of version 2 aren't at /sys/fs/cgroup"
    )
