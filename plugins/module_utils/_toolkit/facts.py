# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe NVIDIA's container toolkit and its CDI specs, and the shapes of these sections of ``gpu_node``."""

from __future__ import annotations

import json
import re
import typing as t

from .._core.natural import natural
from .._host.cached_reader import names, text, whole
from .._host.system import System
from .._host.types import Package, Word


class ToolkitConfig(t.TypedDict):
    path: str
    mode: str
    text: str


class Toolkit(t.TypedDict):
    """``operator``: the GPU Operator runs a toolkit of its own on this node."""

    version: str | None
    binaries: list[Word]
    packages: dict[str, str]
    config: ToolkitConfig | None
    operator: bool


class SpecSummary(t.TypedDict):
    version: str
    kinds: list[str]
    devices: int


class CdiSpec(SpecSummary):
    path: str


class CdiSpecs(t.TypedDict):
    """``stale``: a spec names files of another driver than the loaded one."""

    specs: list[CdiSpec]
    driver_version: str
    stale: bool


class Cdi(CdiSpecs):
    """The section ``cdi``; ``refresh_env`` is the environment file of nvidia-cdi-refresh.service."""

    refresh_env: str | None


class StaleSource(t.TypedDict):
    """A package source that still names the repositories of NVIDIA's earlier container tools."""

    file: str
    text: str
    line_count: int


class LegacyRecord(t.TypedDict):
    """The section ``toolkit_legacy``; ``record`` is empty where nothing was kept."""

    record: str
    drop_ins: list[str]


CTK = "/usr/bin/nvidia-ctk"
BINARIES = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-cdi-hook")
PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
CONFIG = "/etc/nvidia-container-runtime/config.toml"
# The environment of nvidia-cdi-refresh.service.
ENVIRONMENT = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
# The pid file of the GPU Operator's running toolkit container, and the programs that it installs.
OPERATOR = ("/run/nvidia/toolkit/toolkit.pid", "/usr/local/nvidia/toolkit/nvidia-container-runtime")
# /var/run is /run on every distribution with systemd.
CDI = ("/etc/cdi", "/run/cdi")
# Since then mode auto is jit-cdi, before it is legacy on machines with NVML.
# https://github.com/NVIDIA/nvidia-container-toolkit/blob/v1.18.0/internal/info/auto.go
JIT_CDI_SINCE = (1, 18)


def toolkit(system: System, packages: t.Mapping[str, Package]) -> Toolkit:
    """Collect section ``toolkit``: the version that nvidia-ctk reports, and those of the packages."""
    found = None
    if system.exists(CTK):
        found = re.search(r"version\s+v?([0-9]\S*)", system.run([CTK, "--version"], timeout=10).out)
    config = whole(system, CONFIG)
    return {
        "version": found.group(1) if found else None,
        "binaries": [name for name in BINARIES if system.exists(f"/usr/bin/{name}")],
        "packages": {name: packages[name]["version"] for name in PACKAGES if name in packages},
        "config": None if config is None else {"path": CONFIG, "mode": mode_in(config), "text": config},
        "operator": any(system.exists(path) for path in OPERATOR),
    }


def refresh_env(system: System) -> str | None:
    """Read ``cdi.refresh_env``; None without the file."""
    return system.read(ENVIRONMENT)


def mode_in(config: str) -> str:
    """Return the runtime's mode, however TOML spells it; ``auto`` where the file sets none."""
    name, key = "nvidia-container-runtime", r"[\"']?{}[\"']?"
    value = r"\s*=\s*[\"']+([^\"']*)"
    runtime, mode = key.format(name), key.format("mode")
    table = ""
    for line in config.lstrip("\ufeff").splitlines():
        header = re.match(r"\s*\[\[?\s*([^\[\]#]+?)\s*\]", line)
        if header:
            table = re.sub(r"[\"'\s]", "", header.group(1))
        match = re.match(rf"\s*{mode}{value}", line) if table == name else None
        if not table:
            match = re.match(rf"\s*{runtime}\s*\.\s*{mode}{value}", line) or re.match(
                rf"\s*{runtime}\s*=\s*\{{(?:[^#]*[,\s])?{mode}{value}", line
            )
        if match:
            return match.group(1) or "auto"
    return "auto"


def takes_cards_on_reload(mode: str, version: str | None) -> bool:
    """Return whether the runtime's mode gives containers their cards behind systemd's back.

    :param mode: of the configuration.
    :param version: of the toolkit; None where it is unknown.
    """
    match = re.match(r"([0-9]+)\.([0-9]+)", version or "")
    auto = match is not None and (int(match.group(1)), int(match.group(2))) < JIT_CDI_SINCE
    return mode == "legacy" or (mode == "auto" and auto)


def cdi(system: System, module: str | None) -> CdiSpecs:
    """Collect NVIDIA's CDI specs.

    https://github.com/cncf-tags/container-device-interface/blob/v1.0.1/SPEC.md

    :param module: version of the loaded driver; specs that name another driver's files are stale.
    """
    specs: list[CdiSpec] = []
    versions = set()
    for folder in CDI:
        for name in names(system, folder):
            content = text(system, f"{folder}/{name}") if name.endswith((".yaml", ".yml", ".json")) else ""
            spec = parse_json(content) if name.endswith(".json") else parse_yaml(content)
            if spec and any(kind.startswith("nvidia.com/") for kind in spec["kinds"]):
                specs.append({"path": f"{folder}/{name}", **spec})
                versions |= set(re.findall(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.[\d.]*\d)\b", content))
    # Report one version; of several, one that isn't the driver's.
    reported = sorted(versions - {module}, key=natural) or sorted(versions)
    return {
        "specs": specs,
        "driver_version": reported[0] if reported else "",
        "stale": bool(module) and any(version != module for version in versions),
    }


def parse_json(content: str) -> SpecSummary | None:
    """Parse a spec in JSON; None for anything else."""
    try:
        spec = json.loads(content)
    except ValueError:
        return None
    if not isinstance(spec, dict) or not isinstance(spec.get("kind"), str):
        return None
    devices = spec.get("devices")
    return {
        "version": str(spec.get("cdiVersion", "")),
        "kinds": [spec["kind"]],
        "devices": len(devices) if isinstance(devices, list) else 0,
    }


def parse_yaml(content: str) -> SpecSummary | None:
    """Parse a spec in YAML as nvidia-ctk writes it, because nodes have no YAML library; None for anything else."""
    kind = re.search(r"^kind:\s*[\"']?([^\s\"']+)", content, re.MULTILINE)
    if not kind:
        return None
    version = re.search(r"^cdiVersion:\s*[\"']?([^\s\"']+)", content, re.MULTILINE)
    return {
        "version": version.group(1) if version else "",
        "kinds": [kind.group(1)],
        "devices": _items(content, "devices"),
    }


def _items(content: str, key: str) -> int:
    """Count the items of a top-level list: the lines with the indentation of its first dash."""
    match = re.search(rf"^{key}:\s*\n((?:(?:[ -]|#).*\n?|\n)*)", content + "\n", re.MULTILINE)
    dashes = re.findall(r"^( *)- ", match.group(1), re.MULTILINE) if match else []
    return dashes.count(dashes[0]) if dashes else 0
