# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a node's Docker: its file, the daemon's flags, and ``docker info``."""

from __future__ import annotations

import re

from .._core.digest import digest
from .._host.system import System
from .._host.systemd import Unit, naming, reason_of, unit
from . import docker
from .containerd_query import low_level
from .types import DockerState

# Docker refuses to start with a setting that is both a flag and in daemon.json.
FLAGS = ("default-runtime", "add-runtime", "feature", "exec-opt")


def config_path(daemon: Unit) -> str:
    """Return the path of the daemon's file."""
    return (daemon.values("--config-file") or [docker.DEFAULT_CONFIG])[-1]


def socket(system: System, daemon: Unit) -> str:
    """Return the daemon's first local socket, of its flags or its file."""
    hosts = daemon.values("-H", "--host") or docker.hosts(system.read(config_path(daemon)))
    local = [one for one in hosts if one.startswith("unix://")]
    return local[0] if local else docker.DEFAULT_SOCKET


def info(system: System, daemon: Unit) -> docker.Info | None:
    """Query the running daemon; None for a stopped one, which its socket would start."""
    if not daemon.active:
        return None
    done = system.run(["docker", "--host", socket(system, daemon), "info", "--format", "{{json .}}"], timeout=20)
    return docker.read_info(done.out)


def validate(system: System, daemon: Unit, path: str, version: str) -> str:
    """Have dockerd validate a file; return its error, or nothing.

    :param version: of Docker; releases before 23 can't do that.
    """
    if docker.major(version) < docker.VALIDATE_SINCE or not system.exists(path):
        return ""
    done = system.run([daemon.binary or "dockerd", "--validate", "--config-file", path], timeout=20)
    return "" if done.rc == 0 else reason_of(done.err + done.out, f"dockerd --validate ended with {done.rc}")


def observe(system: System) -> DockerState | None:
    """Collect Docker's facts; None where it isn't installed."""
    daemon = unit(system, docker.UNIT)
    done = system.run([daemon.binary or "dockerd", "--version"], timeout=10)
    found = re.search(r"version v?([0-9][^\s,]*)", done.out) if done.rc == 0 else None
    rootless = "" if daemon.active else _rootless_socket(system)
    if found is None and not rootless:
        return None
    version = found.group(1) if found else ""
    path = config_path(daemon)
    text = system.read(path)
    running = info(system, daemon)
    backup = docker.parse_backup(system.read(docker.BACKUP_PATH))
    ours = backup is not None and backup.path == path
    return {
        "version": version,
        "config_path": path,
        "text": None if text is None else docker.mask(text),
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
            "text": None if backup.text is None else docker.mask(backup.text),
            "untouched": text is not None and digest(text) in backup.written,
        },
        "ours": ours,
        "pending": system.exists(docker.PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _rootless_socket(system: System) -> str:
    """Find the socket of a rootless Docker."""
    for user in system.names("/run/user"):
        path = f"/run/user/{user}/docker.sock"
        if system.exists(path):
            return path
    return ""
