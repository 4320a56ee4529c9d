# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""k3s and RKE2 on a node: settings, and the configuration that they wrote for their containerd.

Both regenerate their containerd's configuration at each start, detect NVIDIA's runtime by themselves and have one
setting for the default one. https://github.com/k3s-io/k3s/blob/v1.34.1%2Bk3s1/pkg/cli/cmds/agent.go
"""

from __future__ import annotations

import dataclasses
import math
import posixpath
import re

from .._host.system import System
from .._host.systemd import Unit, environment, naming, next_arguments, stale, unit
from .._rancher import settings
from .._rancher.settings import DROP_IN_NAME, K3S, Kind, Settings
from . import containerd
from .containerd import CRI_PLUGIN, low_level, path_of, read_files
from .types import K3sState, K3sTemplate

KEY = "default-runtime"
SOCKET = "/run/k3s/containerd/containerd.sock"
# The first patch releases of minor ones with the setting KEY; every release since 1.29 has it.
HAVE_KEY = {(1, 26): 12, (1, 27): 9, (1, 28): 5, (1, 29): 0}
# The same for containerd 2, which has a template of its own.
HAVE_CONTAINERD_2 = {(1, 31): 6, (1, 32): 2, (1, 33): 0}
# The files of a user's template, and the version of the base template that each includes.
TEMPLATES = {"config-v3.toml.tmpl": 3, "config.toml.tmpl": 2}
_COMMENT = re.compile(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", re.DOTALL)
_BASE = re.compile(r"template\s+([\"`])base\1")
_DEFAULT = re.compile(r"(?m)^[^#\n]*\bdefault_runtime_name\s*=\s*([\"'])([^\"'{}\n]+)\1")
# A table's header, in which blanks may stand around each name.
_HEADER = re.compile(r"(?m)^[ \t]*\[([^\[\]\n]+)\]")
_VERSION = re.compile(r"(?m)^\s*version\s*=\s*[2-9]")


def version_of(text: str) -> str:
    """Parse ``k3s version v1.30.4+k3s1 (98262b5d)``."""
    match = re.search(r"version v([0-9]+\.[0-9]+\.[0-9]+\S*)", text)
    return match.group(1) if match else ""


def since(version: str, first: dict[tuple[int, int], int]) -> bool:
    """Return whether a release is one of those that have something.

    :param first: by minor release its first patch release that has it; the last one stands for all that follow.
    """
    match = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", version)
    major, minor, patch = map(int, match.groups()) if match else (0, 0, 0)
    return (major, minor) > max(first) or patch >= first.get((major, minor), math.inf)


def templates(data: str, version: str) -> list[str]:
    """Return the paths of a user's own template for containerd's configuration; the first one that exists counts."""
    folder = f"{data}/agent/etc/containerd"
    newest = 3 if since(version, HAVE_CONTAINERD_2) else 2
    return [f"{folder}/{name}" for name, number in TEMPLATES.items() if number <= newest]


def rendered(data: str) -> str:
    """Return the path of the generated containerd configuration."""
    return f"{data}/agent/etc/containerd/config.toml"


@dataclasses.dataclass(frozen=True)
class Template:
    """A user's template, without its comments for Go.

    :param path: the file.
    :param version: of k3s or RKE2.
    """

    path: str
    text: str
    version: str

    @classmethod
    def parse(cls, path: str, text: str, version: str) -> Template:
        return cls(path, _COMMENT.sub("", text), version)

    @property
    def has_base(self) -> bool:
        return bool(_BASE.search(self.text))

    @property
    def renders_default(self) -> bool:
        """Return whether it renders the setting: it includes the base template, or names the setting."""
        return self.has_base or "DefaultRuntime" in self.text

    @property
    def default(self) -> str:
        """Return the default runtime that it sets by itself, or nothing."""
        if since(self.version, HAVE_CONTAINERD_2) and not self.has_base and not _VERSION.search(self.text):
            # Without a version containerd 2.0 to 2.2 ignores it.
            return ""
        return own_default(self.text)

    def repeats(self, runtime: str) -> bool:
        """Return whether it has a runtime's table that the base template has too, once the runtime is installed."""
        plugin = CRI_PLUGIN[TEMPLATES[posixpath.basename(self.path)]]
        table = ("plugins", plugin, "containerd", "runtimes", runtime)
        return self.has_base and any(path_of(header) == table for header in _HEADER.findall(self.text))


def own_default(text: str) -> str:
    """Return the default runtime that a file of containerd's or a template sets by itself; a comment doesn't count."""
    names = _DEFAULT.findall(text)
    return names[-1][1] if names else ""


def daemon_of(system: System, kind: Kind) -> Unit:
    """Return the node's unit, of a server or an agent; the running one where it has both."""
    units = [unit(system, name) for name in kind.units]
    return max(units, key=lambda daemon: (daemon.active, bool(daemon.binary)))


def settings_of(system: System, kind: Kind, daemon: Unit) -> Settings:
    """Read the settings with which it starts next."""
    variables = environment(system, daemon)
    return settings.read(kind.name, next_arguments(daemon, variables), variables, system.read, system.names)


def data_folder(kind: Kind, given: Settings) -> str:
    """Return the directory of its state; the default one where the settings can't be read.

    :param given: its settings.
    """
    return posixpath.normpath(settings.value(given, "data-dir") or kind.data)


def drop_in(kind: Kind, given: Settings, name: str = DROP_IN_NAME) -> str:
    """Return the path of a drop-in of ours, beside the settings' file that it reads."""
    path = given["path"] if given["path"].startswith("/") else kind.config
    return posixpath.join(settings.folder_of(path), name)


def uses_docker(kind: Kind, given: Settings) -> bool:
    """Return whether its kubelet uses Docker, of which RKE2 knows nothing."""
    return kind is K3S and settings.on(given, "docker")


def own_containerd(kind: Kind, given: Settings) -> bool:
    """Return whether it runs a containerd of its own, whose configuration it writes at each start."""
    return not uses_docker(kind, given) and not settings.value(given, "container-runtime-endpoint")


def effective(system: System, data: str) -> containerd.EffectiveConfig:
    """Return the configuration that containerd was started with, of imported files only the default runtime."""
    config = containerd.effective(system.read(rendered(data)) or "")
    old = ("plugins", containerd.CRI_PLUGIN[1])
    if not config.plugin and any(path[:2] == old for path in config.flat):
        # A template of version 1, which is valid with containerd 1.
        config = containerd.config_of(config.flat, old[1])
    defaults = list(_own_defaults(_imported(system, data)).values())
    if not config.plugin or not defaults:
        return config
    key = ("plugins", config.plugin, "containerd", "default_runtime_name")
    return containerd.config_of({**config.flat, key: defaults[-1]}, config.plugin)


def _own_defaults(texts: dict[str, str]) -> dict[str, str]:
    """Return the default runtime of each file of containerd's that sets one; the last one wins."""
    return {path: name for path, text in texts.items() if (name := own_default(text))}


def _imported(system: System, data: str) -> dict[str, str]:
    main = rendered(data)
    return {path: text for path, text in read_files(system, main).items() if path != main}


def observe(system: System, kind: Kind) -> K3sState | None:
    """Collect its facts; None where it isn't installed."""
    if not any(map(system.exists, kind.marks)):
        return None
    daemon = daemon_of(system, kind)
    version = version_of(system.run([daemon.binary or kind.name, "--version"], timeout=20).out)
    if not version:
        return None
    configured = settings_of(system, kind, daemon)
    data, ours = data_folder(kind, configured), drop_in(kind, configured)
    config = effective(system, data)
    programs = {name: str(config.runtimes[name].get(("options", "BinaryName"), "")) for name in config.names}
    gone = [name for name, path in programs.items() if path.startswith("/") and not system.exists(path)]
    template = _template(system, data, version)
    own = {template.path: template.default} if template and template.default else {}
    imported = _imported(system, data)
    read = [*(file["path"] for file in configured["files"]), *([template.path] if template else []), *imported]
    return {
        "version": version,
        "unit": daemon.name,
        "drop_in_path": ours,
        "drop_in": system.read(ours),
        "unread": system.read(kind.drop_in) if kind.drop_in != ours else None,
        "settings": settings.only(configured, (KEY,)),
        "flag_file": naming(system, daemon, f"-{KEY}"),
        "containerd_defaults": {**own, **_own_defaults(imported)},
        "template": _facts(template) if template else None,
        "default_runtime": config.default_runtime,
        "runtimes": programs,
        "gone": sorted(gone) if own_containerd(kind, configured) else [],
        "types": {name: str(config.runtimes[name].get(("runtime_type",), "")) for name in config.names},
        "low_level": low_level(system),
        "cgroup_driver": config.cgroup_driver,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, read),
        "ours": system.exists(ours) or system.exists(kind.drop_in),
        "pending": system.exists(kind.record),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }


def _template(system: System, data: str, version: str) -> Template | None:
    """Read the user's own template, where there is one."""
    path = next((path for path in templates(data, version) if system.exists(path)), "")
    return Template.parse(path, system.read(path) or "", version) if path else None


def _facts(template: Template) -> K3sTemplate:
    return {
        "path": template.path,
        "renders_default": template.renders_default,
        "names_nvidia": containerd.RUNTIME_NAME in template.text,
        "repeats_nvidia": template.repeats(containerd.RUNTIME_NAME),
    }
