# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a control-plane machine's kube-scheduler: its manifest, its configuration, the process, its health."""

from __future__ import annotations

import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._observe_containerd import EMBEDDED
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import process_age
from ansible_collections.kubegpu.share.plugins.module_utils._probe import Probe, probe
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

MANIFEST = "/etc/kubernetes/manifests/kube-scheduler.yaml"
FOLDER = "/etc/kubernetes/kubegpu-share"
CONFIG = f"{FOLDER}/scheduler.yaml"
PENDING = f"{FOLDER}/backup/pending.json"
STAGED = f"{FOLDER}/.staged-kube-scheduler.yaml"
LOGS = "/var/log/pods"
POD_PREFIX = "kube-system_kube-scheduler-"

ARGUMENTS: dict[str, t.Any] = {"config_path": {"type": "path"}}


def flag(text: str, name: str) -> str:
    """A flag's value in a manifest, read without a YAML library; empty where it isn't set.

    Both ``--config=FILE`` and the two list items ``--config`` and ``FILE`` are understood.
    """
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = re.search(rf"--{re.escape(name)}(?:=|[\"']?\s*(?:,|\n\s*-)\s*[\"']?)([^\s\"',\]]+)", code)
    return found.group(1) if found else ""


class Scheduler(t.NamedTuple):
    """A running kube-scheduler process; ``age`` in seconds."""

    pid: int
    age: float
    config: str


def running(system: System) -> list[Scheduler]:
    """All processes of that name on this machine, with their --config."""
    found = []
    for name in system.names("/proc"):
        if not name.isdigit():
            continue
        words = (system.read(f"/proc/{name}/cmdline") or "").split("\0")
        if posixpath.basename(words[0]) != "kube-scheduler":
            continue
        age = process_age(system, int(name))
        if age is not None:
            found.append(Scheduler(int(name), age, _config_of(words)))
    return found


def _config_of(words: t.Sequence[str]) -> str:
    for number, word in enumerate(words):
        if word.startswith("--config="):
            return word[len("--config=") :]
        if word == "--config" and number + 1 < len(words):
            return words[number + 1]
    return ""


def health_url(manifest: str) -> str:
    """Where kube-scheduler answers for its health on this machine; /healthz is served by every version."""
    address = flag(manifest, "bind-address") or "127.0.0.1"
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{flag(manifest, 'secure-port') or '10259'}/healthz"


def observe(system: System, config_path: str | None = None, ask: Probe = probe) -> dict[str, t.Any]:
    """What the scheduler role decides on.

    :param config_path: which file to read as kube-scheduler's configuration, where that isn't the path in its --config.
    """
    manifest = system.read(MANIFEST)
    named = flag(manifest or "", "config")
    path = config_path or named
    return {
        "manifest_path": MANIFEST,
        "manifest": manifest,
        "config_path": path,
        "config": system.read(path) if path.startswith("/") else None,
        "ours": system.read(CONFIG),
        "running": [{"pid": one.pid, "config": one.config} for one in running(system)],
        "health": ask(health_url(manifest)) if manifest else 0,
        "pending": system.exists(PENDING),
        # As it stands in the lease that kube-scheduler holds.
        "hostname": (system.read("/proc/sys/kernel/hostname") or "").strip(),
        "embedded": next((name for name, folder in EMBEDDED.items() if system.exists(folder)), ""),
    }
