# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a node's containerd: its files, their effective configuration, and whether the daemon has loaded it."""

from __future__ import annotations

import posixpath
import re

from .._core.secrets import mask_words
from .._host.system import System
from .._host.systemd import Unit, reason_of, stale, unit
from .._rancher.settings import K3S, RKE2
from . import containerd
from .types import ContainerdState

UNIT = "containerd.service"

# Kubernetes distributions with a containerd of their own, by paths that only they create. Data alone may be left of an
# earlier installation.
EMBEDDED: dict[str, tuple[str, ...]] = {
    **{kind.name: tuple(one for one in kind.marks if one != kind.data) for kind in (K3S, RKE2)},
    "microk8s": ("/var/snap/microk8s",),
    "k0s": ("/etc/k0s",),
}


def distribution(system: System) -> str:
    """Return the distribution of this machine that has its own containerd; empty for none."""
    return next((name for name, paths in EMBEDDED.items() if any(map(system.exists, paths))), "")


def config_path(daemon: Unit) -> str:
    """Return the path of the daemon's main configuration file."""
    return (daemon.values("--config", "-c") or [containerd.DEFAULT_CONFIG])[-1]


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

    :returns: the dump with its credentials, or an empty text and containerd's error without any.
    """
    # Without a file containerd runs with its defaults, but refuses to dump them.
    arguments = ["--config", config_path, "config", "dump"] if system.exists(config_path) else ["config", "default"]
    done = system.run([binary, *arguments])
    if done.rc != 0 or not done.out.strip():
        return "", mask_words(reason_of(done.err, f"config dump ended with {done.rc}"))
    return done.out, ""


def observe(system: System) -> ContainerdState | None:
    """Collect containerd's facts; None where it isn't installed."""
    embedded = distribution(system)
    daemon = unit(system, UNIT)
    binary = daemon.binary or "containerd"
    version = containerd.version_of(system.run([binary, "--version"]).out)
    if not version and not embedded:
        return None
    config = config_path(daemon)
    texts = read_files(system, config)
    text, error = dump(system, binary, config) if version else ("", "")
    drop_in = system.read(containerd.drop_in(config))
    return {
        "version": version,
        "config_path": config,
        "files": {path: containerd.mask(one) for path, one in texts.items()},
        "drop_in": None if drop_in is None else containerd.mask(drop_in),
        "dump": containerd.mask(text),
        "error": error,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "pending": system.exists(containerd.PENDING_PATH),
        "embedded": embedded,
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
        "low_level": low_level(system),
    }


def low_level(system: System) -> str:
    """Return the program by which NVIDIA's runtime runs containers: the first of its list that is there, or nothing."""
    listed = re.search(r"(?m)^\s*runtimes\s*=\s*\[([^\]]*)\]", system.read(containerd.TOOLKIT_CONFIG) or "")
    names = re.findall(r"[\"']([^\"']+)[\"']", listed.group(1)) if listed else containerd.LOW_LEVEL
    there = (
        name
        for name in names
        if name.startswith("/") or any(system.exists(posixpath.join(folder, name)) for folder in containerd.PATH)
    )
    return next(there, "")
