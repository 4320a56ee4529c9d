# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a node's k3s or RKE2: what it is set to, and which configuration it has written for its containerd."""

from __future__ import annotations

import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _containerd, _k3s
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, naming, stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._system import System


def daemon_of(system: System, kind: _k3s.Kind) -> Unit:
    """The unit that this node has: a server's or an agent's; the running one where it has both."""
    found = [unit(system, name) for name in kind.units]
    return max(found, key=lambda one: (one.active, bool(one.binary)))


def data_folder(system: System, kind: _k3s.Kind, daemon: Unit) -> str:
    """Where it keeps its state."""
    flag = daemon.values("--data-dir", "-d")
    return (flag[-1] if flag else "") or _k3s.setting(system.read(kind.config) or "", "data-dir") or kind.data


def effective(system: System, data: str) -> _containerd.Effective:
    """What containerd was started with."""
    return _containerd.effective(system.read(_k3s.rendered(data)) or "")


def observe(system: System, kind: _k3s.Kind) -> dict[str, t.Any] | None:
    """What the runtime role decides on, or None where it isn't on this machine."""
    if not system.exists(posixpath.dirname(kind.config)) and not system.exists(kind.data):
        return None
    daemon = daemon_of(system, kind)
    version = _k3s.version_of(system.run([daemon.binary or kind.name, "--version"], timeout=20).out)
    if not version:
        return None
    data = data_folder(system, kind, daemon)
    found = effective(system, data)
    texts = {path: system.read(path) or "" for path in [kind.config, *_drop_ins(system, kind)] if system.exists(path)}
    template = next((path for path in _k3s.templates(data) if system.exists(path)), "")
    return {
        "version": version,
        "unit": daemon.name,
        "drop_in": system.read(kind.drop_in),
        # Who says so, in the order in which it is read; the last one wins.
        "defaults": {path: value for path, text in texts.items() if (value := _k3s.setting(text, _k3s.KEY))},
        "flag": {"values": daemon.values(f"--{_k3s.KEY}"), "file": naming(system, daemon, f"--{_k3s.KEY}")},
        "template": {"path": template, "heeds": _k3s.heeds_default(system.read(template) or "")} if template else None,
        "default_runtime": found.default_runtime,
        "runtimes": {name: found.runtime(name).get(("options", "BinaryName"), "") for name in found.runtimes()},
        "cgroup_driver": _cgroup_driver(found),
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "ours": system.exists(kind.drop_in),
        "pending": system.exists(kind.record),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _drop_ins(system: System, kind: _k3s.Kind) -> list[str]:
    names = [name for name in system.names(kind.folder) if name.endswith((".yaml", ".yml"))]
    return [posixpath.join(kind.folder, name) for name in names]


def _cgroup_driver(found: _containerd.Effective) -> str:
    if not found.plugin:
        return ""
    return "systemd" if found.runtime(found.model()).get(("options", "SystemdCgroup")) else "cgroupfs"
