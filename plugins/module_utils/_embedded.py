# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""k3s and RKE2 as those who run kube-scheduler: where its settings stand, and what they say.

k3s runs it within its own process, RKE2 as a static pod whose manifest it writes anew at each start. Both take its
arguments from their own configuration: a file, a folder of drop-ins beside it, and the command line.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _k3s
from ansible_collections.kubegpu.share.plugins.module_utils._observe_k3s import data_folder
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._system import System
from ansible_collections.kubegpu.share.plugins.module_utils._yaml_comments import uncommented

DROP_IN_NAME = "99-kubegpu-scheduler.yaml"
ARG = "kube-scheduler-arg"
MOUNT = "kube-scheduler-extra-mount"
ENV = "kube-scheduler-extra-env"
DISABLED = "disable-scheduler"
KEYS = (ARG, MOUNT, DISABLED)
# Carries the configuration's SHA-256 into RKE2's pod, so that a changed one starts it again.
STAMP = "KUBEGPU_SCHEDULER_CONFIG_SHA256"


@dataclasses.dataclass(frozen=True)
class Places:
    """What is ours on a server of one kind.

    :param health: where its kube-scheduler answers; before 1.22 without TLS.
    """

    kind: _k3s.Kind
    health: tuple[str, ...] = ("https://127.0.0.1:10259/healthz", "http://127.0.0.1:10251/healthz")

    @property
    def unit(self) -> str:
        return self.kind.units[0]

    @property
    def folder(self) -> str:
        return f"/etc/rancher/{self.kind.name}/kubegpu-share"

    @property
    def config(self) -> str:
        return f"{self.folder}/scheduler.yaml"

    @property
    def record(self) -> str:
        return f"/var/lib/kubegpu-share/{self.kind.name}-scheduler.json"

    @property
    def merged(self) -> str:
        """The note of what was put into a configuration of the user's own."""
        return f"/var/lib/kubegpu-share/{self.kind.name}-scheduler-merged.json"


PLACES = {kind.name: Places(kind) for kind in (_k3s.K3S, _k3s.RKE2)}


def settings_file(kind: _k3s.Kind, daemon: Unit) -> str:
    """The file with its settings; its drop-ins lie in the folder of that name with ``.d``."""
    named = daemon.values("--config", "-c")
    return (named[-1].strip("\"'") if named else "") or kind.config


def observe(system: System, name: str) -> dict[str, t.Any] | None:
    """A server of that kind, or None where this machine has none."""
    places = PLACES.get(name)
    if places is None:
        return None
    daemon = unit(system, places.unit)
    if not daemon.binary:
        return None
    kind = places.kind
    version = _k3s.version_of(system.run([daemon.binary, "--version"], timeout=20).out)
    config = settings_file(kind, daemon)
    drop_in = posixpath.join(f"{config}.d", DROP_IN_NAME)
    files = [{"path": path, "text": relevant(system.read(path) or "")} for path in _files(system, config)]
    flags = {key: [one.strip("\"'") for one in daemon.values(f"--{key}")] for key in KEYS}
    named = [value for one in files for value in _configs(one["text"])] + _configs("\n".join(flags[ARG]))
    newer = [path for path in (drop_in, *named) if system.exists(path)]
    return {
        "version": version,
        "unit": daemon.name,
        "active": daemon.active,
        "data": data_folder(system, kind, daemon),
        "settings": config,
        "drop_in_path": drop_in,
        "drop_in": system.read(drop_in),
        # In the order in which they are read.
        "files": files,
        "flags": flags,
        "named": named[-1] if named else "",
        "stale": daemon.active and stale(system, daemon.pid, newer),
    }


def _files(system: System, config: str) -> list[str]:
    names = [name for name in system.names(f"{config}.d") if name.lower().endswith((".yaml", ".yml"))]
    paths = [config, *(posixpath.join(f"{config}.d", name) for name in names)]
    return [path for path in paths if system.exists(path)]


def _configs(text: str) -> list[str]:
    """Values of kube-scheduler's --config, read without a YAML library."""
    return re.findall(r"(?m)(?:^|[\s\"'\[,-])config=([^\s\"',\]]+)", uncommented(text))


def relevant(text: str) -> str:
    """The settings that concern kube-scheduler; the others may be secrets, and stay on the machine."""
    if text.lstrip().startswith("{"):
        # JSON: all of it is one value.
        return "{}" if "kube-scheduler" not in text and DISABLED not in text else "{"
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if re.match(r"[^\s#\-\]}]", line):
            inside = bool(re.match(rf"([\"']?)(?:{'|'.join(KEYS)})\+?\1\s*:", line))
        if inside and line.strip() and not line.lstrip().startswith("#"):
            kept.append(line)
    return "\n".join([*kept, ""]) if kept else ""


def stamp(system: System, pid: int) -> str:
    """The configuration's SHA-256 that a process of RKE2's was started with."""
    for one in (system.read(f"/proc/{pid}/environ") or "").split("\0"):
        name, _equals, value = one.partition("=")
        if name == STAMP:
            return value
    return ""


def stamp_of(drop_in: str) -> str:
    """The one that our drop-in gives to RKE2's next pod."""
    found = re.search(rf"{STAMP}=([0-9a-f]{{64}})", drop_in)
    return found.group(1) if found else ""
