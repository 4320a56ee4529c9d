# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Docker on a node: daemon.json, flags, ``docker info``, and credentials.

https://github.com/moby/moby/blob/v28.5.0/daemon/config/config.go
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core.digest import digest
from .._core.secrets import masked, unmasked
from .._host.system import System
from .._host.systemd import Unit, naming, reason_of, unit
from .containerd import RUNTIME_NAME, Options, low_level, release
from .types import DockerState

UNIT = "docker.service"
DEFAULT_CONFIG = "/etc/docker/daemon.json"
DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PENDING_PATH = "/var/lib/kubegpu-share/docker.json"
# JSON has no comments to mark our keys with, so the original daemon.json is backed up here.
BACKUP_PATH = "/var/lib/kubegpu-share/docker-was.json"
STOCK_RUNTIME = "runc"
# The first releases that support CDI, --validate, and an empty file.
CDI_SINCE = 25
VALIDATE_SINCE = 23
EMPTY_FILE_SINCE = 23

# One pass over the text, so that masking and unmasking number alike; a slash may be written as \/.
_URL = r'(?:[^"\\]|\\.)*?:(?:\\?/){2}'
_SECRET = re.compile(
    # In a proxy, with a scheme or without.
    rf'("(?:https?|ftp)-proxy"\s*:\s*"(?:{_URL})?)((?:[^"\s\\]|\\.)+)(?=@)'
    # In a URL: everything between the scheme and the last at sign.
    rf'|("{_URL})((?:[^"\s\\]|\\.)+)(?=@)'
    # In options of log drivers and the like.
    r'|("[^"\n]*(?:token|password|secret|access-key|credential)[^"\n]*"\s*:\s*")((?:[^"\\\n]|\\.)+)(?=")',
    re.IGNORECASE,
)


def _credentials(text: str) -> t.Iterator[tuple[int, int]]:
    for match in _SECRET.finditer(text):
        # The two groups that matched are the text before a credential and the credential.
        yield match.span(match.lastindex or 0)


def mask(text: str) -> str:
    """Replace the file's credentials by placeholders."""
    return masked(text, _credentials(text))


def unmask(text: str, real: str) -> str:
    """Restore the credentials of a masked text, which may have been edited, from the file that was masked."""
    return unmasked(text, real, _credentials(real))


def major(version: str) -> int:
    """Return Docker's major release: 20 for 20.10."""
    return release(version)[0]


@dataclasses.dataclass(frozen=True)
class Info:
    """The parts of ``docker info`` that this collection uses.

    :param runtimes: each runtime's program; empty for a containerd shim.
    :param containers: number of running containers.
    """

    version: str
    default_runtime: str
    runtimes: t.Mapping[str, str]
    cgroup_driver: str
    live_restore: bool
    containers: int
    rootless: bool

    @property
    def state(self) -> tuple[str, dict[str, str]]:
        """Return the part that this collection's changes can alter."""
        # A reload adds and removes aliases of containerd's shims.
        return self.default_runtime, {name: path for name, path in self.runtimes.items() if "." not in name}


def read_info(text: str) -> Info | None:
    """Parse ``docker info --format '{{json .}}'``; None where no daemon answered."""
    try:
        data = json.loads(text)
        if not data.get("ServerVersion"):
            return None
        return Info(
            version=str(data["ServerVersion"]),
            default_runtime=str(data.get("DefaultRuntime") or ""),
            runtimes={name: str(runtime.get("path") or "") for name, runtime in (data.get("Runtimes") or {}).items()},
            cgroup_driver=str(data.get("CgroupDriver") or ""),
            live_restore=bool(data.get("LiveRestoreEnabled")),
            containers=int(data.get("ContainersRunning") or 0),
            rootless=any("rootless" in str(option) for option in data.get("SecurityOptions") or []),
        )
    except (ValueError, AttributeError, TypeError):
        return None


def unmet_requirements(running: Info, wanted: Options) -> list[str]:
    """List how a running Docker differs from the requested state."""
    if not wanted.present:
        return []
    wrong = []
    if wanted.default and running.default_runtime != RUNTIME_NAME:
        wrong.append(f"its default runtime is {running.default_runtime!r}")
    if RUNTIME_NAME not in running.runtimes:
        wrong.append(f"it has no runtime {RUNTIME_NAME!r}")
    elif running.runtimes[RUNTIME_NAME] != wanted.binary:
        wrong.append(f"its runtime {RUNTIME_NAME!r} runs {running.runtimes[RUNTIME_NAME]!r}")
    return wrong


@dataclasses.dataclass(frozen=True)
class Flags:
    """The daemon's command line: its --default-runtime, and the program of an --add-runtime of our name."""

    default: str = ""
    ours: str | None = None


def flags(default_runtime: t.Sequence[str], add_runtime: t.Sequence[str]) -> Flags:
    """Convert the values of the two flags."""
    pairs = (runtime.partition("=") for runtime in add_runtime)
    added = {name: program for name, _equals, program in pairs}
    return Flags(default_runtime[-1] if default_runtime else "", added.get(RUNTIME_NAME))


@dataclasses.dataclass(frozen=True)
class FileRuntimes:
    """The runtimes that a daemon.json sets; ``default`` is None where it sets none."""

    default: str | None
    runtimes: t.Mapping[str, str]

    def match(self, daemon: Info, flags: Flags) -> bool:
        """Return whether the daemon runs with this file."""
        default = self.default or flags.default or STOCK_RUNTIME
        ours = self.runtimes.get(RUNTIME_NAME)
        running = daemon.runtimes.get(RUNTIME_NAME)
        return daemon.default_runtime == default and (running == ours if ours is not None else running == flags.ours)


def _tree(text: str | None) -> t.Any:
    """Parse a daemon.json; a missing or empty one is an empty object."""
    return json.loads((text or "").lstrip("\ufeff").strip() or "{}")


def setting(runtime: dict[str, t.Any], key: str) -> t.Any:
    """Return one setting of a runtime; Go ignores the case of its key, and the last spelling wins."""
    return next((value for name, value in reversed(runtime.items()) if name.lower() == key.lower()), None)


def runtimes_in(text: str | None) -> FileRuntimes:
    """Read the runtimes of a daemon.json; an unreadable one sets none."""
    try:
        tree = _tree(text)
        runtimes = tree.get("runtimes")
        if not isinstance(runtimes, dict):
            runtimes = {}
        return FileRuntimes(
            tree.get("default-runtime") or None,
            {name: str(setting(runtime or {}, "path") or "") for name, runtime in runtimes.items()},
        )
    except (ValueError, AttributeError, TypeError):
        return FileRuntimes(None, {})


def hosts_in(text: str | None) -> list[str]:
    """Return the daemon's addresses in a daemon.json; empty where it can't be read."""
    try:
        return [str(host) for host in _tree(text).get("hosts") or []]
    except (ValueError, AttributeError, TypeError):
        return []


def reload_keeps_runtime(text: str | None, flags: Flags) -> bool:
    """Return whether a reload of this file would keep an old runtime, because the file lacks the key."""
    configured = runtimes_in(text)
    return (configured.default is None and not flags.default) or not configured.runtimes


def with_stock_runtime(text: str | None, flags: Flags) -> str:
    """Return a file for one reload only, which sets what the real one leaves out: the stock runtime and no others.

    A default runtime that is a flag must not be in the file too.
    """
    tree = _tree(text)
    if not flags.default:
        tree.setdefault("default-runtime", STOCK_RUNTIME)
    tree["runtimes"] = tree.get("runtimes") or {}
    return json.dumps(tree)


@dataclasses.dataclass(frozen=True)
class DaemonJsonBackup:
    """The original daemon.json.

    :param text: None where there was no file.
    :param written: SHA-256 of each text that consists of the original and our settings alone.
    """

    path: str
    text: str | None
    written: tuple[str, ...]

    def dump(self) -> str:
        return json.dumps({"path": self.path, "text": self.text, "written": list(self.written)}) + "\n"


def parse_backup(text: str | None) -> DaemonJsonBackup | None:
    """Parse a backup; None for a missing or incomplete one."""
    try:
        data = json.loads(text or "")
        return DaemonJsonBackup(str(data["path"]), data["text"], tuple(data["written"]))
    except (ValueError, KeyError, TypeError):
        return None


# Docker refuses to start with a setting that is both a flag and in daemon.json.
FLAGS = ("default-runtime", "add-runtime", "feature", "exec-opt")


def config_path(daemon: Unit) -> str:
    """Return the path of the daemon's file."""
    return (daemon.values("--config-file") or [DEFAULT_CONFIG])[-1]


def socket(system: System, daemon: Unit) -> str:
    """Return the daemon's first local socket, of its flags or its file."""
    hosts = daemon.values("-H", "--host") or hosts_in(system.read(config_path(daemon)))
    local = [host for host in hosts if host.startswith("unix://")]
    return local[0] if local else DEFAULT_SOCKET


def info(system: System, daemon: Unit) -> Info | None:
    """Query the running daemon; None for a stopped one, which its socket would start."""
    if not daemon.active:
        return None
    done = system.run(["docker", "--host", socket(system, daemon), "info", "--format", "{{json .}}"], timeout=20)
    return read_info(done.out)


def validate(system: System, daemon: Unit, path: str, version: str) -> str:
    """Have dockerd validate a file; return its error, or nothing.

    :param version: of Docker; releases before 23 can't do that.
    """
    if major(version) < VALIDATE_SINCE or not system.exists(path):
        return ""
    done = system.run([daemon.binary or "dockerd", "--validate", "--config-file", path], timeout=20)
    return "" if done.rc == 0 else reason_of(done.err + done.out, f"dockerd --validate ended with {done.rc}")


def observe(system: System) -> DockerState | None:
    """Collect Docker's facts; None where it isn't installed."""
    daemon = unit(system, UNIT)
    done = system.run([daemon.binary or "dockerd", "--version"], timeout=10)
    match = re.search(r"version v?([0-9][^\s,]*)", done.out) if done.rc == 0 else None
    rootless = "" if daemon.active else _rootless_socket(system)
    if match is None and not rootless:
        return None
    version = match.group(1) if match else ""
    path = config_path(daemon)
    text = system.read(path)
    running = info(system, daemon)
    backup = parse_backup(system.read(BACKUP_PATH))
    ours = backup is not None and backup.path == path
    return {
        "version": version,
        "config_path": path,
        "text": None if text is None else mask(text),
        "flags": {
            name: {"values": daemon.values(f"--{name}"), "file": naming(system, daemon, f"--{name}")}
            for name in FLAGS
            if daemon.values(f"--{name}")
        },
        "default_runtime": running.default_runtime if running else "",
        "runtimes": dict(running.runtimes) if running else {},
        "cgroup_driver": running.cgroup_driver if running else "",
        "live_restore": running.live_restore if running else False,
        "containers": running.containers if running else 0,
        "rootless": rootless or ("docker info" if running and running.rootless else ""),
        "service_active": daemon.active,
        "answers": running is not None,
        "error": validate(system, daemon, path, version),
        "low_level": low_level(system),
        "was": None
        if backup is None or not ours
        else {
            "text": None if backup.text is None else mask(backup.text),
            "untouched": text is not None and digest(text) in backup.written,
        },
        "ours": ours,
        "pending": system.exists(PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _rootless_socket(system: System) -> str:
    """Find the socket of a rootless Docker."""
    for user in system.names("/run/user"):
        path = f"/run/user/{user}/docker.sock"
        if system.exists(path):
            return path
    return ""
