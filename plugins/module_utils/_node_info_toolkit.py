# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""NVIDIA's container toolkit, its CDI specs, and whether a pod's memory can be limited. Sections as plain JSON."""

from __future__ import annotations

import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._node_info_files import names, text, whole
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

CTK = "/usr/bin/nvidia-ctk"
BINARIES = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-cdi-hook")
PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
CONFIG = "/etc/nvidia-container-runtime/config.toml"
# What the GPU operator's toolkit container leaves while it runs, and where it puts its programs.
OPERATOR = ("/run/nvidia/toolkit/toolkit.pid", "/usr/local/nvidia/toolkit/nvidia-container-runtime")
# /var/run is /run on every distribution with systemd.
CDI = ("/etc/cdi", "/run/cdi")
# Since these a limit per cgroup exists and is applied when a container starts.
LIMIT_DRIVER = 615
LIMIT_TOOLKIT = (1, 20, 1)


def toolkit(system: System, packages: Json) -> Json:
    """The toolkit as it answers, and beside it as its packages say."""
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


def mode_in(config: str) -> str:
    """The runtime's mode; ``auto`` where the file doesn't say."""
    table = ""
    for line in config.splitlines():
        header = re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", line)
        if header:
            table = header.group(1)
        value = re.match(r"\s*mode\s*=\s*[\"']([^\"']*)", line)
        if value and table == "nvidia-container-runtime":
            return value.group(1)
    return "auto"


def cdi(system: System, module: str | None) -> Json:
    """NVIDIA's CDI specs.

    :param module: version of the loaded driver; specs that name another driver's files are stale.
    """
    specs = []
    versions = set()
    for folder in CDI:
        for name in names(system, folder):
            content = text(system, f"{folder}/{name}") if name.endswith((".yaml", ".yml", ".json")) else ""
            spec = parse_json(content) if name.endswith(".json") else parse_yaml(content)
            if spec and any(kind.startswith("nvidia.com/") for kind in spec["kinds"]):
                specs.append({"path": f"{folder}/{name}", **spec})
                versions |= set(re.findall(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.[\d.]*\d)\b", content))
    # One version is told; where there are several, one that isn't the driver's.
    told = sorted(version for version in versions if version != module) or sorted(versions)
    return {
        "specs": specs,
        "driver_version": told[0] if told else "",
        "stale": bool(module) and any(version != module for version in versions),
    }


def parse_json(content: str) -> Json | None:
    """A spec in JSON; None where it isn't one."""
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


def parse_yaml(content: str) -> Json | None:
    """A spec in YAML as nvidia-ctk writes it, without a library that nodes lack; None where it isn't one."""
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
    """How many items the list under a key at the left margin has: the lines with its first dash's indent."""
    found = re.search(rf"^{key}:\s*\n((?:(?:[ -]|#).*\n?|\n)*)", content + "\n", re.MULTILINE)
    dashes = re.findall(r"^( *)- ", found.group(1), re.MULTILINE) if found else []
    return dashes.count(dashes[0]) if dashes else 0


def memory_limit(driver: Json, tools: Json, cgroup: Json) -> Json:
    """Whether the driver can hold a container to its share of a card's memory, and what stands against it."""
    why = []
    loaded = driver["module_version"] or driver["version"] or ""
    if not loaded:
        why.append("No driver is loaded.")
    elif numbers(loaded) < (LIMIT_DRIVER,):
        why.append(f"The driver is {loaded}; limits need {LIMIT_DRIVER} or newer.")
    limit = ".".join(str(number) for number in LIMIT_TOOLKIT)
    if not tools["version"]:
        why.append(f"NVIDIA's container toolkit isn't installed; limits need {limit} or newer.")
    elif numbers(tools["version"]) < LIMIT_TOOLKIT:
        why.append(f"NVIDIA's container toolkit is {tools['version']}; limits need {limit} or newer.")
    if cgroup["version"] != 2:
        why.append("The node doesn't run with cgroup version 2.")
    divided = [str(card["index"]) for card in driver["cards"] if card["mig"]]
    if divided:
        why.append(f"MIG is on for card {', '.join(divided)}; MIG devices can't be limited.")
    return {"possible": not why, "why": why}


def numbers(version: str) -> tuple[int, ...]:
    """A version's leading numbers; a release candidate counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
