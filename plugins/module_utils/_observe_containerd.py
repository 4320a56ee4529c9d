# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a node's containerd: its files, what they amount to, and whether the running daemon has read them."""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _containerd
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

UNIT = "containerd.service"

# Distributions of Kubernetes with a containerd of their own, configured in their own way, by the folder they own.
EMBEDDED = {
    "k3s": "/etc/rancher/k3s",
    "rke2": "/etc/rancher/rke2",
    "microk8s": "/var/snap/microk8s",
    "k0s": "/etc/k0s",
}


@dataclasses.dataclass(frozen=True)
class Service:
    """containerd's systemd unit; ``pid`` is 0 where it doesn't run and ``binary`` empty where there is no unit."""

    binary: str
    config_path: str
    active: bool
    pid: int


def service(system: System) -> Service:
    """The unit as systemd knows it: which binary with which configuration, and whether it runs."""
    found = unit(system, UNIT)
    config = found.values("--config", "-c")
    return Service(found.binary, config[-1] if config else _containerd.DEFAULT_CONFIG, found.active, found.pid)


def read_files(system: System, main: str) -> dict[str, str]:
    """The main file and all that it imports, in containerd's order; nothing where there is no main file."""
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
        pending.extend(_containerd.resolve(path, _containerd.imports_of(text), system.names))
    return texts


def dump(system: System, binary: str, config_path: str) -> tuple[str, str]:
    """What the files amount to, by containerd itself: the dump and, where it has none, its own words."""
    # Without a file containerd runs with its defaults, but refuses to dump them.
    what = ["--config", config_path, "config", "dump"] if system.exists(config_path) else ["config", "default"]
    done = system.run([binary, *what])
    if done.rc != 0 or not done.out.strip():
        lines = [line for line in done.err.splitlines() if line.strip()]
        return "", lines[-1] if lines else f"config dump ended with {done.rc}"
    return done.out, ""


def observe(system: System) -> dict[str, t.Any] | None:
    """What the runtime role decides on, or None where there is no containerd on this machine.

    ``embedded`` names a distribution that runs a containerd of its own instead. Credentials in files and dump are
    masked; ``stale`` is "a file is newer than the running daemon", ``pending`` "a run of ours was cut short".
    """
    embedded = next((name for name, path in EMBEDDED.items() if system.exists(path)), "")
    daemon = service(system)
    binary = daemon.binary or "containerd"
    version = _containerd.version_of(system.run([binary, "--version"]).out)
    if not version and not embedded:
        return None
    texts = read_files(system, daemon.config_path)
    text, error = dump(system, binary, daemon.config_path) if version else ("", "")
    return {
        "version": version,
        "config_path": daemon.config_path,
        "files": {path: _containerd.mask(one) for path, one in texts.items()},
        # The file that would be ours, even where nothing imports it.
        "drop_in": system.read(
            posixpath.join(posixpath.dirname(daemon.config_path), "conf.d", _containerd.DROP_IN_NAME)
        ),
        "dump": _containerd.mask(text),
        "error": error,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "pending": system.exists(_containerd.PENDING_PATH),
        "embedded": embedded,
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }
