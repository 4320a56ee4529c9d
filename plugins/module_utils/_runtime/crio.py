# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CRI-O's configuration as its own commands print it. Pure.

``crio config`` prints the effective configuration of the files, since 1.24 with values that equal a built-in one as
comments; ``crio status config`` prints the running daemon's without comments. Both are parsed line by line, because
nodes have no TOML library. https://github.com/cri-o/cri-o/blob/v1.34.0/docs/crio.conf.5.md
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .containerd import RUNTIME_NAME, Options, _first_key, path_of
from .types import Loss

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
