# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler as k3s and RKE2 run it: their settings for it, and where the collection's files are.

k3s runs it within its own process, RKE2 as a static pod whose manifest it rewrites at each start. Both read its
arguments from their own settings: a file, a folder of drop-ins beside it, and the command line.
https://docs.k3s.io/installation/configuration
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
import typing as t

from .._host.system import System
from .._host.systemd import Unit, stale, unit
from .._host.yaml_text import uncommented
from .._runtime import k3s
from .._runtime.k3s_query import data_folder

DROP_IN_NAME = "99-kubegpu-scheduler.yaml"
ARG = "kube-scheduler-arg"
MOUNT = "kube-scheduler-extra-mount"
ENV = "kube-scheduler-extra-env"
DISABLED = "disable-scheduler"
KEYS = (ARG, MOUNT, DISABLED)
# Passes the configuration's stamp to RKE2's pod, so that a changed one restarts it.
STAMP = "KUBEGPU_SCHEDULER_CONFIG_SHA256"


@dataclasses.dataclass(frozen=True)
class Places:
    """The collection's files on a server of one kind.

    :param health: URLs of its kube-scheduler's health; before 1.22 without TLS.
    """

    kind: k3s.Kind
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
        """Return the path of the note about a user's configuration into which the extender was merged."""
        return f"/var/lib/kubegpu-share/{self.kind.name}-scheduler-merged.json"


PLACES = {kind.name: Places(kind) for kind in (k3s.K3S, k3s.RKE2)}


class SettingsFile(t.TypedDict):
    """One file of a server's settings, reduced to the keys for kube-scheduler."""

    path: str
    text: str


class Server(t.TypedDict):
    """A k3s or RKE2 server.

    ``files`` are in the order in which they are read, ``named`` is the --config in effect, and ``stale`` is true
    where the running process is older than the configuration.
    """

    version: str
    unit: str
    active: bool
    pid: int
    data: str
    settings: str
    drop_in_path: str
    drop_in: str | None
    files: list[SettingsFile]
    flags: dict[str, list[str]]
    named: str
    stale: bool


def settings_file(kind: k3s.Kind, daemon: Unit) -> str:
    """Return the path of its settings; the folder of drop-ins is that path with ``.d``."""
    named = daemon.values("--config", "-c")
    return (named[-1].strip("\"'") if named else "") or kind.config


def observe(system: System, name: str) -> Server | None:
    """Collect the state of a server of that kind; None where this machine has none."""
    places = PLACES.get(name)
    if places is None:
        return None
    daemon = unit(system, places.unit)
    if not daemon.binary:
        return None
    kind = places.kind
    version = k3s.version_of(system.run([daemon.binary, "--version"], timeout=20).out)
    config = settings_file(kind, daemon)
    drop_in = posixpath.join(f"{config}.d", DROP_IN_NAME)
    files: list[SettingsFile] = [
        {"path": path, "text": relevant(system.read(path) or "")} for path in _files(system, config)
    ]
    flags = {key: [one.strip("\"'") for one in daemon.values(f"--{key}")] for key in KEYS}
    named = [value for one in files for value in _configs(one["text"])] + _configs("\n".join(flags[ARG]))
    newer = [path for path in (drop_in, *named) if system.exists(path)]
    return {
        "version": version,
        "unit": daemon.name,
        "active": daemon.active,
        "pid": daemon.pid,
        "data": data_folder(system, kind, daemon),
        "settings": config,
        "drop_in_path": drop_in,
        "drop_in": system.read(drop_in),
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
    """Return the values of kube-scheduler's --config, without a YAML library."""
    return re.findall(r"(?m)(?:^|[\s\"'\[,])-{0,2}config=([^\s\"',\]]+)", uncommented(text))


def relevant(text: str) -> str:
    """Return the settings for kube-scheduler; others may be secrets and stay on the machine.

    Values of other lists of arguments are kept where an alias in kube-scheduler's settings names them.
    """
    if text.lstrip().startswith("{"):
        return _relevant_members(text)
    blocks = _blocks(text)
    named: set[str] = set()
    while True:
        kept = [block if _key(block[0]) in KEYS else _anchored(block, named) for block in blocks]
        lines = [line for block in kept for line in block]
        aliases = set(re.findall(r"(?:^|[\s\[,:{])\*([\w.-]+)", uncommented("\n".join(lines))))
        if aliases <= named:
            return "\n".join([*lines, ""]) if lines else ""
        named |= aliases


def _key(text: str) -> str:
    """Return the key at the beginning of a line or member, without the + of a key that adds."""
    found = re.match(r"\s*([\"']?)([\w.-]+)\+?\1\s*:", text)
    return found.group(2) if found else ""


def _blocks(text: str) -> list[list[str]]:
    """Split YAML in block style into its top-level keys with their lines, without blank lines and comments."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if re.match(r"[^\s#\-\]}]", line):
            blocks.append([line])
        elif blocks and line.strip() and not line.lstrip().startswith("#"):
            blocks[-1].append(line)
    return blocks


def _anchored(block: t.Sequence[str], names: t.Collection[str]) -> list[str]:
    """Return the lines of a list of arguments that have one of these anchors: the whole list, or single items."""
    if not _key(block[0]).endswith(("-arg", "-args")):
        return []
    value = re.match(r"[^:]*:\s+&([\w.-]+)(?:\s|$)", block[0])
    if value and value.group(1) in names:
        return list(block)
    items = [(re.match(r"\s*-\s+&([\w.-]+)\s+\S", line), line) for line in block[1:]]
    lines = [line for found, line in items if found and found.group(1) in names]
    return [block[0], *lines] if lines and block[0].rstrip().endswith(":") else []


def _relevant_members(text: str) -> str:
    """Return the settings for kube-scheduler of a file in JSON, as Rancher writes it, or in YAML's flow style."""
    try:
        return json.dumps({key: value for key, value in json.loads(text).items() if key.rstrip("+") in KEYS}) + "\n"
    except ValueError:
        members = _members(text)
    if members is None:
        # "{" alone makes the plan refuse it.
        return "{}" if "kube-scheduler" not in text and DISABLED not in text else "{"
    return "{" + ", ".join(one.strip() for one in members if _key(one) in KEYS) + "}\n"


# In flow style: quoted values, which begin a value or key only; comments; brackets; the rest.
_TOKEN = re.compile(
    r"""(?<=[\s{\[,:])(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*') | (?<=\s)\#[^\n]* | [{}\[\],:"'] | [^{}\[\],:"'\s]+ | \s+""",
    re.VERBOSE,
)


def _members(text: str) -> list[str] | None:
    """Split a mapping in YAML's flow style into its members; None where it isn't one from begin to end."""
    members: list[str] = []
    depth, ended = 0, False
    for token in _TOKEN.findall(text):
        if token.startswith("#") or (not token.strip() and not depth):
            continue
        if ended or (not depth and token != "{"):
            return None
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token, 0)
        ended = depth == 0
        if (depth, token) == (1, ",") or not members:
            members.append("")
        elif not ended:
            members[-1] += token
    return members if ended else None


def stamp(system: System, pid: int) -> str:
    """Return the configuration's stamp with which RKE2 started a process."""
    for one in (system.read(f"/proc/{pid}/environ") or "").split("\0"):
        name, _equals, value = one.partition("=")
        if name == STAMP:
            return value
    return ""


def stamp_of(drop_in: str) -> str:
    """Return the stamp that the drop-in passes to RKE2's next pod."""
    found = re.search(rf"{STAMP}=([0-9a-f]{{64}}(?:-[0-9]+)?)", drop_in)
    return found.group(1) if found else ""
