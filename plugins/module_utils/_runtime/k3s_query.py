# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a node's k3s or RKE2: its settings, and the configuration that it has written for its containerd."""

from __future__ import annotations

import posixpath

from .._host.system import System
from .._host.systemd import Unit, environment, naming, next_arguments, stale, unit
from .._rancher import settings
from .._rancher.settings import DROP_IN_NAME, K3S, Kind, Settings
from . import containerd, k3s
from .containerd_query import low_level, read_files
from .types import K3sState, K3sTemplate


def daemon_of(system: System, kind: Kind) -> Unit:
    """Return the node's unit, of a server or an agent; the running one where it has both."""
    found = [unit(system, name) for name in kind.units]
    return max(found, key=lambda one: (one.active, bool(one.binary)))


def settings_of(system: System, kind: Kind, daemon: Unit) -> Settings:
    """Read the settings with which it starts next."""
    variables = environment(system, daemon)
    return settings.read(kind.name, next_arguments(daemon, variables), variables, system.read, system.names)


def data_folder(kind: Kind, found: Settings) -> str:
    """Return the directory of its state; the default one where the settings can't be read.

    :param found: its settings.
    """
    return posixpath.normpath(settings.value(found, "data-dir") or kind.data)


def drop_in(kind: Kind, found: Settings, name: str = DROP_IN_NAME) -> str:
    """Return the path of a drop-in of ours, beside the settings' file that it reads."""
    path = found["path"] if found["path"].startswith("/") else kind.config
    return posixpath.join(settings.folder_of(path), name)


def uses_docker(kind: Kind, found: Settings) -> bool:
    """Return whether its kubelet uses Docker, of which RKE2 knows nothing."""
    return kind is K3S and settings.on(found, "docker")


def own_containerd(kind: Kind, found: Settings) -> bool:
    """Return whether it runs a containerd of its own, whose configuration it writes at each start."""
    return not uses_docker(kind, found) and not settings.value(found, "container-runtime-endpoint")


def effective(system: System, data: str) -> containerd.EffectiveConfig:
    """Return the configuration that containerd was started with, of imported files only the default runtime."""
    found = containerd.effective(system.read(k3s.rendered(data)) or "")
    old = ("plugins", containerd.CRI_PLUGIN[1])
    if not found.plugin and any(path[:2] == old for path in found.flat):
        # A template of version 1, which is valid with containerd 1.
        found = containerd.EffectiveConfig(found.flat, old[1])
    defaults = _own_defaults(_imported(system, data)).values()
    default = {(*found.base, "containerd", "default_runtime_name"): name for name in defaults}
    return containerd.EffectiveConfig({**found.flat, **default}, found.plugin) if found.plugin else found


def _own_defaults(texts: dict[str, str]) -> dict[str, str]:
    """Return the default runtime of each file of containerd's that sets one; the last one wins."""
    return {path: name for path, text in texts.items() if (name := k3s.own_default(text))}


def _imported(system: System, data: str) -> dict[str, str]:
    main = k3s.rendered(data)
    return {path: text for path, text in read_files(system, main).items() if path != main}


def observe(system: System, kind: Kind) -> K3sState | None:
    """Collect its facts; None where it isn't installed."""
    if not any(map(system.exists, kind.marks)):
        return None
    daemon = daemon_of(system, kind)
    version = k3s.version_of(system.run([daemon.binary or kind.name, "--version"], timeout=20).out)
    if not version:
        return None
    configured = settings_of(system, kind, daemon)
    data, ours = data_folder(kind, configured), drop_in(kind, configured)
    found = effective(system, data)
    programs = {name: str(found.runtime(name).get(("options", "BinaryName"), "")) for name in found.runtimes()}
    gone = [name for name, path in programs.items() if path.startswith("/") and not system.exists(path)]
    template = _template(system, data, version)
    own = {template.path: template.default} if template and template.default else {}
    imported = _imported(system, data)
    read = [*(one["path"] for one in configured["files"]), *([template.path] if template else []), *imported]
    return {
        "version": version,
        "unit": daemon.name,
        "drop_in_path": ours,
        "drop_in": system.read(ours),
        "unread": system.read(kind.drop_in) if kind.drop_in != ours else None,
        "settings": settings.only(configured, (k3s.KEY,)),
        "flag_file": naming(system, daemon, f"-{k3s.KEY}"),
        "containerd_defaults": {**own, **_own_defaults(imported)},
        "template": _facts(template) if template else None,
        "default_runtime": found.default_runtime,
        "runtimes": programs,
        "gone": sorted(gone) if own_containerd(kind, configured) else [],
        "types": {name: str(found.runtime(name).get(("runtime_type",), "")) for name in found.runtimes()},
        "low_level": low_level(system),
        "cgroup_driver": found.cgroup_driver,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, read),
        "ours": system.exists(ours) or system.exists(kind.drop_in),
        "pending": system.exists(kind.record),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _template(system: System, data: str, version: str) -> k3s.Template | None:
    """Read the user's own template, where there is one."""
    path = next((path for path in k3s.templates(data, version) if system.exists(path)), "")
    return k3s.Template.parse(path, system.read(path) or "", version) if path else None


def _facts(template: k3s.Template) -> K3sTemplate:
    return {
        "path": template.path,
        "renders_default": template.renders_default,
        "names_nvidia": containerd.RUNTIME_NAME in template.text,
        "repeats_nvidia": template.repeats(containerd.RUNTIME_NAME),
    }
