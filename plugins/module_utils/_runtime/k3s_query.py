# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Query a node's k3s or RKE2: its settings, and the configuration that it has written for its containerd."""

from __future__ import annotations

import posixpath

from .._host.system import System
from .._host.systemd import Unit, naming, stale, unit
from . import containerd, k3s
from .containerd_query import low_level
from .types import K3sState, K3sTemplate


def daemon_of(system: System, kind: k3s.Kind) -> Unit:
    """Return the node's unit, of a server or an agent; the running one where it has both."""
    found = [unit(system, name) for name in kind.units]
    return max(found, key=lambda one: (one.active, bool(one.binary)))


def data_folder(system: System, kind: k3s.Kind, daemon: Unit) -> str:
    """Return the directory of its state."""
    flag = daemon.values("--data-dir", "-d")
    return (flag[-1] if flag else "") or k3s.setting(system.read(kind.config) or "", "data-dir") or kind.data


def effective(system: System, data: str) -> containerd.EffectiveConfig:
    """Return the configuration that containerd was started with."""
    return containerd.effective(system.read(k3s.rendered(data)) or "")


def observe(system: System, kind: k3s.Kind) -> K3sState | None:
    """Collect its facts; None where it isn't installed."""
    if not system.exists(posixpath.dirname(kind.config)) and not system.exists(kind.data):
        return None
    daemon = daemon_of(system, kind)
    version = k3s.version_of(system.run([daemon.binary or kind.name, "--version"], timeout=20).out)
    if not version:
        return None
    data = data_folder(system, kind, daemon)
    found = effective(system, data)
    texts = {path: system.read(path) or "" for path in [kind.config, *_drop_ins(system, kind)] if system.exists(path)}
    return {
        "version": version,
        "unit": daemon.name,
        "drop_in": system.read(kind.drop_in),
        "defaults": {path: value for path, text in texts.items() if (value := k3s.setting(text, k3s.KEY))},
        "flag": {"values": daemon.values(f"--{k3s.KEY}"), "file": naming(system, daemon, f"--{k3s.KEY}")},
        "template": _template(system, data),
        "default_runtime": found.default_runtime,
        "runtimes": {name: found.runtime(name).get(("options", "BinaryName"), "") for name in found.runtimes()},
        "types": {name: str(found.runtime(name).get(("runtime_type",), "")) for name in found.runtimes()},
        "low_level": low_level(system),
        "cgroup_driver": _cgroup_driver(found),
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "ours": system.exists(kind.drop_in),
        "pending": system.exists(kind.record),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _template(system: System, data: str) -> K3sTemplate | None:
    """Read the user's own template, where there is one."""
    path = next((path for path in k3s.templates(data) if system.exists(path)), "")
    if not path:
        return None
    text = system.read(path) or ""
    return {"path": path, "renders_default": k3s.renders_default(text), "sets_default": k3s.sets_default(text)}


def _drop_ins(system: System, kind: k3s.Kind) -> list[str]:
    names = [name for name in system.names(kind.folder) if name.endswith((".yaml", ".yml"))]
    return [posixpath.join(kind.folder, name) for name in names]


def _cgroup_driver(found: containerd.EffectiveConfig) -> str:
    if not found.plugin:
        return ""
    return "systemd" if found.runtime(found.model()).get(("options", "SystemdCgroup")) else "cgroupfs"
