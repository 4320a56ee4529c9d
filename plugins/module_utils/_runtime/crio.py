# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""CRI-O's configuration as its own commands print it. Pure.

``crio config`` prints the effective configuration of the files, since 1.24 with built-in values as comments; ``crio
status config`` prints the running daemon's. Both are parsed line by line, because nodes have no TOML library.
https://github.com/cri-o/cri-o/blob/v1.34.0/docs/crio.conf.5.md
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .containerd import RUNTIME_NAME, Options, _first_key, _path

UNIT = "crio.service"
MAIN = "/etc/crio/crio.conf"
FOLDER = "/etc/crio/crio.conf.d"
# Sorts after 99-nvidia.toml of nvidia-ctk, 99-nvidia.conf of the GPU Operator, and OpenShift's 99-*.
DROP_IN_NAME = "99-zz-kubegpu-nvidia.conf"
PENDING_PATH = "/var/lib/kubegpu-share/crio.json"
SOCKET = "/var/run/crio/crio.sock"
TOOLKIT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# The search path of system services, in which the toolkit searches for runc and crun.
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
RUNTIMES = ("crio", "runtime", "runtimes")

Flat = dict[tuple[str, ...], str]


@dataclasses.dataclass(frozen=True)
class CrioConfig:
    """A printed configuration: each value as it is written, by its full path."""

    flat: Flat

    @property
    def default_runtime(self) -> str:
        return self.flat.get(("crio", "runtime", "default_runtime"), "").strip("\"'")

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
    table: tuple[str, ...] = ()
    lines = [line.strip() for line in text.splitlines()]
    while lines:
        line = lines.pop(0)
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            table = _path(line.strip("[]"))
            flat.setdefault((*table, ""), "")
            continue
        key, value = _first_key(line)
        while value.startswith("[") and not value.endswith("]") and lines:
            value += " " + lines.pop(0)
        flat[(*table, key)] = re.sub(r"\[ *(.*?),? *\]$", r"[\1]", value)
    return CrioConfig(flat)


def unmet_requirements(found: CrioConfig, wanted: Options) -> list[str]:
    """List how a printed configuration differs from the requested state."""
    if not wanted.present:
        return []
    wrong = []
    if wanted.default and found.default_runtime != RUNTIME_NAME:
        wrong.append(f"default_runtime is {found.default_runtime!r}")
    ours = found.runtime(RUNTIME_NAME)
    if ours.get("runtime_path", "").replace("'", '"') != f'"{wanted.binary}"':
        wrong.append(f"runtimes.{RUNTIME_NAME}.runtime_path is {ours.get('runtime_path', 'missing')}")
    return wrong


def losses(before: CrioConfig, after: CrioConfig) -> list[str]:
    """List the user's settings that a change removed or altered, as paths."""

    def theirs(flat: Flat) -> Flat:
        return {
            path: value
            for path, value in flat.items()
            if path[:4] != (*RUNTIMES, RUNTIME_NAME)
            and path not in (("crio", "runtime", "default_runtime"), (*RUNTIMES, ""))
            and path[-1]
        }

    old, new = theirs(before.flat), theirs(after.flat)
    return sorted(".".join(path) for path in set(old) | set(new) if old.get(path) != new.get(path))


def in_order(names_of: t.Callable[[str], list[str]], is_folder: t.Callable[[str], bool], folder: str) -> list[str]:
    """List all files of the drop-in directory, whatever their names, in the order in which CRI-O reads them."""
    paths: list[str] = []
    for name in sorted(names_of(folder)):
        path = posixpath.join(folder, name)
        paths.extend(in_order(names_of, is_folder, path) if is_folder(path) else [path])
    return paths
