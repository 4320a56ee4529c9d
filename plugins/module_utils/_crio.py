# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""CRI-O's configuration as the node sees it: which files make it up and what the daemon says of itself. Pure.

``crio config`` prints what the files amount to, and from 1.24 on what is as built in only as a comment; ``crio status
config`` prints what the running daemon has. Both are read here line by line, for nodes have no TOML library.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted, _first_key, _path

UNIT = "crio.service"
MAIN = "/etc/crio/crio.conf"
FOLDER = "/etc/crio/crio.conf.d"
# Behind NVIDIA's own: 99-nvidia.toml of nvidia-ctk, 99-nvidia.conf of the GPU Operator; and behind OpenShift's 99-*.
DROP_IN_NAME = "99-zz-kubegpu-nvidia.conf"
PENDING_PATH = "/var/lib/kubegpu-share/crio.json"
SOCKET = "/var/run/crio/crio.sock"
TOOLKIT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# The search path of system services, in which the toolkit looks for runc and crun.
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
RUNTIMES = ("crio", "runtime", "runtimes")

Flat = t.Dict[t.Tuple[str, ...], str]


@dataclasses.dataclass(frozen=True)
class Shown:
    """What CRI-O has printed of its configuration: each value as it is written, by its full path."""

    flat: Flat

    @property
    def default_runtime(self) -> str:
        return self.flat.get(("crio", "runtime", "default_runtime"), "").strip("\"'")

    def runtime(self, name: str) -> dict[str, str]:
        """One runtime's settings that say something."""
        base = (*RUNTIMES, name)
        return {
            path[-1]: value
            for path, value in self.flat.items()
            if path[: len(base)] == base and len(path) == len(base) + 1 and value not in ('""', "[]", "")
        }

    def names(self) -> list[str]:
        return sorted({path[3] for path in self.flat if path[:3] == RUNTIMES and len(path) > 3 and path[3]})


def read_shown(text: str) -> Shown:
    """The answer of ``crio config`` or ``crio status config``; comments are left out, lists are put together."""
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
    return Shown(flat)


def shortcomings(found: Shown, wanted: Wanted, settings: t.Mapping[str, str] | None = None) -> list[str]:
    """Why a configuration that CRI-O has printed isn't what is wanted.

    :param settings: what our runtime's table has to hold beside the program, as it is written.
    """
    if not wanted.present:
        return []
    wrong = []
    if wanted.default and found.default_runtime != RUNTIME_NAME:
        wrong.append(f"default_runtime is {found.default_runtime!r}")
    ours = found.runtime(RUNTIME_NAME)
    for key, value in {**(settings or {}), "runtime_path": f'"{wanted.binary}"'}.items():
        if ours.get(key, "").replace("'", '"') != value:
            wrong.append(f"runtimes.{RUNTIME_NAME}.{key} is {ours.get(key, 'not there')}")
    return wrong


def losses(before: Shown, after: Shown) -> list[str]:
    """What of the user's settings a change took away or altered, as paths."""

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
    """All files of the folder of drop-ins, whatever their names, as CRI-O reads them; the later one wins."""
    paths: list[str] = []
    for name in sorted(names_of(folder)):
        path = posixpath.join(folder, name)
        paths.extend(in_order(names_of, is_folder, path) if is_folder(path) else [path])
    return paths
