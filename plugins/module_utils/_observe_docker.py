# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a node's Docker: its file, its daemon's flags, and what the running daemon says of itself."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _docker
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, naming, unit
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

# Flags that a key of daemon.json must not repeat.
FLAGS = ("default-runtime", "add-runtime", "feature", "exec-opt")


def config_path(daemon: Unit) -> str:
    """The file that the daemon reads."""
    return (daemon.values("--config-file") or [_docker.DEFAULT_CONFIG])[-1]


def socket(system: System, daemon: Unit) -> str:
    """Where the daemon is asked: its first local socket, by its flags or its file."""
    hosts = daemon.values("-H", "--host") or _docker.hosts(system.read(config_path(daemon)))
    local = [one for one in hosts if one.startswith("unix://")]
    return local[0] if local else _docker.DEFAULT_SOCKET


def info(system: System, daemon: Unit) -> _docker.Info | None:
    """What the running daemon says of itself. Never asked of one that is off: its socket would start it."""
    if not daemon.active:
        return None
    done = system.run(["docker", "--host", socket(system, daemon), "info", "--format", "{{json .}}"], timeout=20)
    return _docker.read_info(done.out)


def validate(system: System, daemon: Unit, path: str, version: str) -> str:
    """Why Docker wouldn't take its file, in its own words, or nothing; releases before 23 can't be asked."""
    if _docker.major(version) < _docker.VALIDATE_SINCE or not system.exists(path):
        return ""
    done = system.run([daemon.binary or "dockerd", "--validate", "--config-file", path], timeout=20)
    lines = [line for line in (done.err + done.out).splitlines() if line.strip()]
    return "" if done.rc == 0 else (lines[-1] if lines else f"dockerd --validate ended with {done.rc}")


def observe(system: System) -> dict[str, t.Any] | None:
    """What the runtime role decides on, or None where there is no Docker on this machine."""
    daemon = unit(system, _docker.UNIT)
    done = system.run([daemon.binary or "dockerd", "--version"], timeout=10)
    found = re.search(r"version v?([0-9][^\s,]*)", done.out) if done.rc == 0 else None
    rootless = "" if daemon.active else _rootless_socket(system)
    if found is None and not rootless:
        return None
    version = found.group(1) if found else ""
    path = config_path(daemon)
    text = system.read(path)
    running = info(system, daemon)
    was = _docker.read_was(system.read(_docker.WAS_PATH))
    mine = was is not None and was.path == path
    return {
        "version": version,
        "config_path": path,
        "text": None if text is None else _docker.mask(text),
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
        # What was there before us, and whether the file is still as we have left it.
        "was": None
        if was is None or not mine
        else {
            "text": None if was.text is None else _docker.mask(was.text),
            "untouched": text is not None and digest(text) in was.written,
        },
        "ours": was is not None and mine,
        "pending": system.exists(_docker.PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _rootless_socket(system: System) -> str:
    """The socket of a Docker that a user runs for himself."""
    for user in system.names("/run/user"):
        path = f"/run/user/{user}/docker.sock"
        if system.exists(path):
            return path
    return ""
