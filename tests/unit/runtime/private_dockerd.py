# SPDX-License-Identifier: GPL-3.0-or-later
"""A Docker engine of the tests: private socket, data and containerd, no network; stopped by its process id."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import typing as t
from pathlib import Path

import pytest
import real_dockerd
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from limited import without_limit

# What an engine makes outside of the folders that it is given.
TRACES = ("/etc/docker/key.json", "/etc/docker", "/opt/containerd", "/run/docker")

OWN_PATHS = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
ISOLATION = "--bridge=none --iptables=false --ip-forward=false --storage-driver=vfs --cgroup-parent=kubegpu-test"


class Dockerd:
    """One engine in a folder of its own; ``pid`` is 0 where it doesn't run."""

    def __init__(self, binary: str, flags: t.Sequence[str] = ()) -> None:
        self.binary = binary
        self._flags = list(flags)
        # A socket's path may be only so long.
        self.folder = Path(tempfile.mkdtemp(prefix="kgd-"))
        self.config = self.folder / "daemon.json"
        self.socket = f"unix://{self.folder}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._absent = [path for path in TRACES if not os.path.exists(path)]

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def arguments(self) -> list[str]:
        own = [f"--{name}={self.folder}/{file}" for name, file in OWN_PATHS.items()]
        return [f"--host={self.socket}", f"--config-file={self.config}", *own, *ISOLATION.split(), *self._flags]

    def start(self) -> str:
        """Start it; return why it ended at once, or nothing."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.binary, *self.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=real_dockerd.environment(self.binary),
                start_new_session=True,
            )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self._process.poll() is not None:
                return self.log()[-400:]
            if self.info():
                return ""
            time.sleep(0.1)
        return "it doesn't answer"

    def info(self) -> dict[str, t.Any]:
        command = ["docker", "--host", self.socket, "info", "--format", "{{json .}}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found: dict[str, t.Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return found if found.get("ServerVersion") else {}

    def hangup(self) -> None:
        os.kill(self.pid, signal.SIGHUP)
        time.sleep(1)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                # Its containerd is in the same session.
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
        self._process = None

    def remove(self) -> None:
        self.stop()
        # Mounted over itself; one that was killed leaves it so.
        subprocess.run(["umount", "--lazy", self.folder / "data"], capture_output=True, check=False)
        for path in (*map(Path, self._absent), self.folder):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def binary() -> str:
    """Return this machine's dockerd; skip the test where it can't run."""
    found = shutil.which("dockerd", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None or shutil.which("docker") is None or os.geteuid() != 0:
        pytest.skip("no dockerd that this user can start")
    return found


class Machine(RealSystem):
    """This machine with a private engine in the place of its own: simulated systemd, our records in its folder."""

    def __init__(self, engine: Dockerd) -> None:
        super().__init__(run_command=self._run_it)
        self.engine = engine
        self.log: list[str] = []

    def _real(self, path: str) -> str:
        if path.startswith(("/var/lib/kubegpu-share", "/run/", "/proc/")):
            return str(self.engine.folder / "root") + path
        return super()._real(path)

    def _run_it(self, argv, data=None, environ_update=None):  # type: ignore[no-untyped-def]
        words = without_limit(argv)
        self.log.append(" ".join(words))
        if words[0] == "systemctl":
            return self._systemctl(words)
        if words[0] == "journalctl":
            return 0, "\n".join(self.engine.log().splitlines()[-30:]), ""
        if words[0] in ("mkdir", "rmdir", "stat") and words[-1].startswith("/var/"):
            words[-1] = self._real(words[-1])
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def _systemctl(self, words: list[str]) -> tuple[int, str, str]:
        if words[1] == "restart":
            self.engine.stop()
            return (1 if self.engine.start() else 0), "", ""
        if words[1] != "show" or "--value" in words:
            return 0, "", ""
        binary, flags = self.engine.binary, " ".join(self.engine.arguments())
        start = f"{{ path={binary} ; argv[]={binary} {flags} ; ignore_errors=no }}"
        state = "active" if self.engine.pid else "inactive"
        return 0, f"LoadState=loaded\nActiveState={state}\nMainPID={self.engine.pid}\nExecStart={start}\n", ""
