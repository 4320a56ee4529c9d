# SPDX-License-Identifier: GPL-3.0-or-later
"""A server of k3s or RKE2 in memory: its settings, its service, and the kube-scheduler that it runs."""

from __future__ import annotations

import hashlib
import posixpath
import typing as t
from collections.abc import Sequence

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import embedded
from memory_system import MemorySystem

API_SECONDS = 6.0


class FakeServer(MemorySystem):
    """As both behave: settings are read when the service starts, and a later file wins unless its key ends with +.

    :param flags: of the service's command line.
    """

    def __init__(self, name: str, settings: str = "", version: str = "1.32.4", flags: str = "") -> None:
        super().__init__("server1")
        self.places = embedded.PLACES[name]
        self.version = f"{version}+{name}r1"
        self.flags = flags
        self.environment_files: tuple[str, ...] = ()
        self.pid, self.scheduler, self.restarts = 10, 0, 0
        self.refuses: t.Callable[[FakeServer, str], bool] = lambda server, config: False
        self.healthy = False
        self._due: float | None = None
        # The configuration that kube-scheduler has loaded.
        self.loaded = ""
        self.arguments: list[str] = []
        self.put(self.places.kind.config, "token: secret\n" + settings, 0o600)
        self.restart()
        for _second in range(12):
            self.sleep(1)
        self.log.clear()

    # ----------------------------------------------------------------- System

    def done(self, argv: Sequence[str]) -> Done:
        if argv[0] == "systemctl":
            return self._systemctl(argv)
        if argv[0] == "journalctl":
            line = f'time="x" level=info msg="Running kube-scheduler {" ".join(self.arguments)}"'
            return Done(0, f'{line}\ntime="x" level=fatal msg="scheduler exited: no such file"\n', "")
        if argv[-1] == "--version":
            return Done(0, f"{self.places.kind.name} version v{self.version} (abc)\n", "")
        return super().done(argv)

    def _systemctl(self, argv: Sequence[str]) -> Done:
        if argv[1] == "restart":
            assert argv[2] == self.places.unit
            self.restart()
        if argv[1] != "show":
            return Done(0, "", "")
        if argv[2] != self.places.unit:
            return Done(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
        if "NRestarts" in argv:
            return Done(0, f"{self.restarts}\n", "")
        if "--value" in argv:
            return Done(0, "abc\n", "")
        binary = f"/usr/local/bin/{self.places.kind.name}"
        start = f"{{ path={binary} ; argv[]={binary} server {self.flags} ; }}"
        files = "".join(f"EnvironmentFiles={path} (ignore_errors=yes)\n" for path in self.environment_files)
        return Done(0, f"LoadState=loaded\nActiveState=active\nMainPID={self.pid}\nExecStart={start}\n{files}", "")

    # ----------------------------------------------------------------- time

    def ask(self, url: str) -> int:
        return 200 if self.healthy and ":10259/" in url else 0

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self._due is not None and self.time >= self._due:
            self._due = None
            self._start()

    def state(self) -> tuple[object, ...]:
        """Return everything that the next run can observe."""
        return tuple(sorted(self.files.items())), round(self.time, 1)

    def settings(self) -> dict[str, list[str]]:
        folder = f"{self.places.kind.config}.d"
        values: dict[str, list[str]] = {}
        for path in (self.places.kind.config, *(posixpath.join(folder, name) for name in self.names(folder))):
            for key, value in (yaml.safe_load(self.files.get(path, "")) or {}).items():
                words = [str(one) for one in (value if isinstance(value, list) else [value])]
                name = key.rstrip("+")
                values[name] = [*values.get(name, []), *words] if key.endswith("+") else words
        for word in self.flags.split():
            key, _equals, value = word.lstrip("-").partition("=")
            values.setdefault(key, []).append(value)
        return values

    def restart(self) -> None:
        self.forget_process(self.pid)
        self.pid += 1
        self.put_process(self.pid, f"/usr/local/bin/{self.places.kind.name}", "server")
        if self.places.kind.name == "k3s":
            self.healthy = False
        self._due = self.time + API_SECONDS

    def _start(self) -> None:
        """kube-scheduler, when the API server is there. RKE2 leaves its pod alone where nothing has changed."""
        settings = self.settings()
        cred = f"{self.places.kind.data}/server/cred/scheduler.kubeconfig"
        base = {"kubeconfig": cred, "profiling": "false", "secure-port": "10259"}
        for word in settings.get("kube-scheduler-arg", []):
            name, _equals, value = word.lstrip("-").partition("=")
            base[name] = value
        arguments = [f"--{name}={value}" for name, value in sorted(base.items())]
        config = base.get("config", "")
        path = self._on_machine(config)
        fine = (not config or path in self.files) and not self.refuses(self, self.files.get(path, ""))
        if self.places.kind.name == "k3s":
            self.arguments, self.healthy, self.loaded = arguments, fine, self.files.get(config, "")
            if not fine:
                # The whole process ends, and systemd starts it again.
                self.restart()
                self.restarts += 1
            return
        pod = [arguments, settings.get("kube-scheduler-extra-env"), settings.get("kube-scheduler-extra-mount")]
        name = hashlib.md5(repr(pod).encode()).hexdigest()
        if name == getattr(self, "pod", ""):
            return
        self.pod, self.arguments = name, arguments
        self.environ = "\0".join(settings.get("kube-scheduler-extra-env", []))
        self.forget_process(self.scheduler)
        self.healthy = fine
        if fine:
            self._start_container()

    def seen(self, path: str) -> str:
        inside = super().seen(path)
        return inside if inside == path else self._on_machine(inside)

    def _on_machine(self, path: str) -> str:
        """The file of a path in RKE2's pod."""
        mounts = [word.split(":")[:2] for word in self.settings().get("kube-scheduler-extra-mount", [])]
        for host, folder in sorted(mounts, key=lambda one: len(one[1]), reverse=True):
            if path == folder or path.startswith(folder.rstrip("/") + "/"):
                return posixpath.normpath(host + "/" + path[len(folder) :]) if path != folder else host
        return path

    def _start_container(self) -> None:
        self.scheduler = self.scheduler + 1 if self.scheduler else 5000
        self.put_process(self.scheduler, "kube-scheduler", *self.arguments, environ=self.environ)
        named = [word.partition("=")[2] for word in self.arguments if word.startswith("--config=")]
        self.loaded = self.files[self._on_machine(named[0])] if named else ""

    def container_restarts(self) -> None:
        """kube-scheduler ends: RKE2's kubelet starts its container again, and k3s ends as a whole."""
        if self.places.kind.name == "k3s":
            self.restart()
        else:
            self.forget_process(self.scheduler)
            self._start_container()
