# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Query a node's containerd: its files, their effective configuration, and whether the daemon has loaded it."""

from __future__ import annotations

import dataclasses
import posixpath

from .._host.system import System
from .._host.systemd import stale, unit
from . import containerd
from .types import ContainerdState

UNIT = "containerd.service"

# Kubernetes distributions with a containerd of their own, by a directory that only they create.
EMBEDDED = {
    "k3s": "/etc/rancher/k3s",
    "rke2": "/etc/rancher/rke2",
    "microk8s": "/var/snap/microk8s",
    "k0s": "/etc/k0s",
}


@dataclasses.dataclass(frozen=True)
class Service:
    """containerd's systemd unit; ``pid`` is 0 while it doesn't run, ``binary`` is empty without a unit."""

    binary: str
    config_path: str
    active: bool
    pid: int


def service(system: System) -> Service:
    """Query the unit: its program, configuration file and state."""
    found = unit(system, UNIT)
    config = found.values("--config", "-c")
    return Service(found.binary, config[-1] if config else containerd.DEFAULT_CONFIG, found.active, found.pid)


def read_files(system: System, main: str) -> dict[str, str]:
    """Read the main file and all its imports, in containerd's order; empty without a main file."""
    texts: dict[str, str] = {}
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in texts:
            continue
        text = system.read(path)
        if text is None:
            continue
        texts[path] = text
        pending.extend(containerd.resolve(path, containerd.imports_of(text), system.names))
    return texts


def dump(system: System, binary: str, config_path: str) -> tuple[str, str]:
    """Have containerd print the effective configuration of the files.

    :returns: the dump, or an empty text and containerd's error.
    """
    # Without a file containerd runs with its defaults, but refuses to dump them.
    arguments = ["--config", config_path, "config", "dump"] if system.exists(config_path) else ["config", "default"]
    done = system.run([binary, *arguments])
    if done.rc != 0 or not done.out.strip():
        lines = [line for line in done.err.splitlines() if line.strip()]
        return "", lines[-1] if lines else f"config dump ended with {done.rc}"
    return done.out, ""


def observe(system: System) -> ContainerdState | None:
    """Collect containerd's facts; None where it isn't installed."""
    embedded = next((name for name, path in EMBEDDED.items() if system.exists(path)), "")
    daemon = service(system)
    binary = daemon.binary or "containerd"
    version = containerd.version_of(system.run([binary, "--version"]).out)
    if not version and not embedded:
        return None
    texts = read_files(system, daemon.config_path)
    text, error = dump(system, binary, daemon.config_path) if version else ("", "")
    return {
        "version": version,
        "config_path": daemon.config_path,
        "files": {path: containerd.mask(one) for path, one in texts.items()},
        "drop_in": system.read(
            posixpath.join(posixpath.dirname(daemon.config_path), "conf.d", containerd.DROP_IN_NAME)
        ),
        "dump": containerd.mask(text),
        "error": error,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "pending": system.exists(containerd.PENDING_PATH),
        "embedded": embedded,
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }
