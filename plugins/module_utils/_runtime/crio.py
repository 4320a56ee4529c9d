# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CRI-O on a node: its files, flags and configuration, as its own commands print it.

``crio config`` prints the effective configuration of the files, since 1.24 with values that equal a built-in one as
comments; ``crio status config`` prints the running daemon's without comments. Both are parsed line by line, because
nodes have no TOML library. https://github.com/cri-o/cri-o/blob/v1.34.0/docs/crio.conf.5.md
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.secrets import PLACEHOLDER
from .._host.system import System
from .._host.systemd import Unit, naming, reason_of, stale, unit
from . import containerd
from .containerd import RUNTIME_NAME, Options, _first_key, path_of
from .types import CrioState, Loss

UNIT = "crio.service"
MAIN = "/etc/crio/crio.conf"
FOLDER = "/etc/crio/crio.conf.d"
# Sorts after 99-nvidia.toml of nvidia-ctk, 99-nvidia.conf of the GPU Operator, and OpenShift's 99-*.
DROP_IN_NAME = "99-zz-kubegpu-nvidia.conf"
# Read after ours: the table of runc, which releases before 1.25.1 delete where a file sets another default.
KEPT_NAME = "99-zz-kubegpu-runc.conf"
PENDING_PATH = "/var/lib/kubegpu-share/crio.json"
SOCKET = "/var/run/crio/crio.sock"
RUNTIME = ("crio", "runtime")
RUNTIMES = (*RUNTIME, "runtimes")
# crio config prints these keys of the table crio.runtime behind the tables below it, without a header of their own.
PRINTED_LAST = ("hostnetwork_disable_selinux", "disable_hostport_mapping", "timezone")

Flat = dict[tuple[str, ...], str]

# A header or a value that is printed as a comment; prose has neither form.
_COMMENTED = re.compile(r"^# (\[crio\b.*\]$|[A-Za-z0-9_-]+ = .*)")


@dataclasses.dataclass(frozen=True)
class CrioConfig:
    """A printed configuration: each value as it is written, by its full path.

    :param flat: the values that aren't comments.
    :param builtin: those that are comments, with the examples in CRI-O's prose.
    """

    flat: Flat
    builtin: Flat = dataclasses.field(default_factory=dict)

    @property
    def values(self) -> Flat:
        return {**self.builtin, **self.flat}

    @property
    def default_runtime(self) -> str:
        return self.values.get((*RUNTIME, "default_runtime"), "").strip("\"'")

    def runtime(self, name: str) -> dict[str, str]:
        """Return one runtime's settings without empty values."""
        base = (*RUNTIMES, name)
        return {
            path[-1]: value
            for path, value in self.flat.items()
            if path[: len(base)] == base and len(path) == len(base) + 1 and value not in ('""', "[]", "")
        }

    def runtimes(self) -> list[str]:
        return sorted({path[3] for path in self.flat if path[:3] == RUNTIMES and len(path) > 3 and path[3]})


def parse_config(text: str) -> CrioConfig:
    """Parse the output of ``crio config`` or ``crio status config``; a list of several lines becomes one."""
    flat: Flat = {}
    builtin: Flat = {}
    table: tuple[str, ...] = ()
    lines = [line.strip() for line in text.splitlines()]
    while lines:
        line = lines.pop(0)
        commented = _COMMENTED.match(line)
        if not commented and (not line or line.startswith("#")):
            continue
        values, line = (builtin, commented.group(1)) if commented else (flat, line)
        if line.startswith("["):
            table = path_of(line.strip("[]"))
            values.setdefault((*table, ""), "")
            continue
        key, value = _first_key(line)
        while value.startswith("[") and not value.endswith("]") and lines:
            # In a comment each line of the list is one.
            value += " " + lines.pop(0).lstrip("# \t")
        values[(*(RUNTIME if key in PRINTED_LAST else table), key)] = re.sub(r"\[ *(.*?),? *\]$", r"[\1]", value)
    return CrioConfig(flat, builtin)


def unmet_requirements(config: CrioConfig, wanted: Options) -> list[str]:
    """List how a printed configuration differs from the requested state."""
    if not wanted.present:
        return []
    wrong = []
    if wanted.default and config.default_runtime != RUNTIME_NAME:
        wrong.append(f"default_runtime is {config.default_runtime!r}")
    ours = config.runtime(RUNTIME_NAME)
    if ours.get("runtime_path", "").replace("'", '"') != f'"{wanted.binary}"':
        wrong.append(f"runtimes.{RUNTIME_NAME}.runtime_path is {ours.get('runtime_path', 'missing')}")
    return wrong


def losses(before: CrioConfig, after: CrioConfig) -> list[Loss]:
    """List the user's settings that a change removed or altered.

    A change of one value turns the others of its table from comments into values. What is a comment on one side and
    missing on the other isn't the user's: releases before 1.25.1 drop their own runc where another one is the default.
    """

    def theirs(path: tuple[str, ...]) -> bool:
        ours = path[:4] == (*RUNTIMES, RUNTIME_NAME) or path == (*RUNTIME, "default_runtime")
        return bool(path[-1]) and not ours and (path in before.flat or path in after.flat)

    old, new = before.values, after.values
    changed = sorted(path for path in {*old, *new} if theirs(path) and old.get(path) != new.get(path))
    return [Loss(path, old.get(path), new.get(path)) for path in changed]


def in_order(names_of: t.Callable[[str], list[str]], is_folder: t.Callable[[str], bool], folder: str) -> list[str]:
    """List all files of the drop-in directory, whatever their names, in the order in which CRI-O reads them."""
    paths: list[str] = []
    for name in sorted(names_of(folder)):
        path = posixpath.join(folder, name)
        paths.extend(in_order(names_of, is_folder, path) if is_folder(path) else [path])
    return paths


# These flags override all files.
FLAGS = ("default-runtime", "runtimes")

# In a URL, or in a proxy without a scheme: everything up to the last at sign.
_SECRET = re.compile(r"""(://|_proxy=(?![a-z0-9+.-]+://))((?:[^\s"'\\]|\\.)+)(?=@)""", re.IGNORECASE)


class Masks:
    """Numbered placeholders for the credentials of CRI-O's files, the same in every file.

    Our drop-in repeats values of other files and of the daemon, so a placeholder means the same credential everywhere.
    """

    def __init__(self, texts: t.Iterable[str]) -> None:
        self._words: dict[str, str] = {}
        for text in texts:
            for found in _SECRET.finditer(text):
                self._words.setdefault(found.group(2), f"{PLACEHOLDER}-{len(self._words) + 1}")

    def mask(self, text: str) -> str:
        """Replace the credentials by placeholders."""
        return _SECRET.sub(lambda found: found.group(1) + self._words.get(found.group(2), PLACEHOLDER), text)

    def unmask(self, text: str) -> str:
        """Replace the placeholders by the credentials."""
        secrets = {word: secret for secret, word in self._words.items()}
        return re.sub(rf"{PLACEHOLDER}-[0-9]+", lambda found: secrets.get(found.group(), found.group()), text)


def paths_of(daemon: Unit) -> tuple[str, str]:
    """Return the main file and the drop-in directory."""
    main = [MAIN, *daemon.values("--config", "-c")]
    folder = [FOLDER, *daemon.values("--config-dir", "-d")]
    return main[-1], folder[-1]


def read_files(system: System, main: str, folder: str) -> dict[str, str]:
    """Read all files of the configuration, in CRI-O's order."""
    texts = {}
    for path in [main, *in_order(system.names, lambda path: bool(system.names(path)), folder)]:
        text = system.read(path)
        if text is not None:
            texts[path] = text
    return texts


def config_of_files(system: System, daemon: Unit) -> tuple[str, str]:
    """Have CRI-O print the effective configuration of the files.

    :returns: the configuration, or an empty text and CRI-O's error.
    """
    main, folder = paths_of(daemon)
    flags = ["--config", main] if system.exists(main) else []
    done = system.run([daemon.binary or "crio", *flags, "--config-dir", folder, "config"], timeout=20)
    if done.rc == 0:
        return done.out, ""
    return "", reason_of(done.err, f"crio config ended with {done.rc}")


def config_of_daemon(system: System, daemon: Unit) -> str:
    """Query the running daemon's configuration; empty where it doesn't answer."""
    if not daemon.active:
        return ""
    for command in ([daemon.binary or "crio", "status", "config"], ["crio-status", "config"]):
        done = system.run(command, timeout=10)
        if done.rc == 0 and done.out.strip():
            return done.out
    return ""


def masks(system: System, daemon: Unit) -> Masks:
    """Build the placeholders from every text that the plan uses.

    Our own files come last: all their credentials are copies.
    """
    main, folder = paths_of(daemon)
    texts = read_files(system, main, folder)
    ours = [texts.pop(posixpath.join(folder, name), "") for name in (DROP_IN_NAME, KEPT_NAME)]
    return Masks(
        [*texts.values(), system.read(containerd.TOOLKIT_CONFIG) or "", config_of_daemon(system, daemon), *ours]
    )


def observe(system: System) -> CrioState | None:
    """Collect CRI-O's facts; None where it isn't installed."""
    daemon = unit(system, UNIT)
    done = system.run([daemon.binary or "crio", "--version"], timeout=10)
    match = re.search(r"(?:version|Version:)\s+v?([0-9]+\.[0-9]+\S*)", done.out) if done.rc == 0 else None
    if match is None:
        return None
    main, folder = paths_of(daemon)
    texts = read_files(system, main, folder)
    _text, error = config_of_files(system, daemon)
    running = parse_config(config_of_daemon(system, daemon))
    toolkit = system.read(containerd.TOOLKIT_CONFIG)
    hide = masks(system, daemon).mask
    drop_in = posixpath.join(folder, DROP_IN_NAME)
    return {
        "version": match.group(1),
        "config_path": main,
        "folder": folder,
        "files": {path: hide(text) for path, text in texts.items()},
        "flags": {
            name: {"values": daemon.values(f"--{name}"), "file": naming(system, daemon, f"--{name}")}
            for name in FLAGS
            if daemon.values(f"--{name}")
        },
        "default_runtime": running.default_runtime,
        "runtimes": {
            name: {key: hide(value) for key, value in running.runtime(name).items()} for name in running.runtimes()
        },
        "cgroup_driver": running.flat.get(("crio", "runtime", "cgroup_manager"), "").strip("\"'"),
        "answers": bool(running.flat),
        "error": hide(error),
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "toolkit_config": None if toolkit is None else hide(toolkit),
        "on_path": [
            name
            for name in sorted({*containerd.LOW_LEVEL, *running.runtimes()})
            if any(system.exists(f"{folder}/{name}") for folder in containerd.PATH)
        ],
        "ours": drop_in in texts,
        "pending": system.exists(PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }
