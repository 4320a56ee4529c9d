# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""RPM files in a directory of the node: which of them a set needs, and what they need of one another."""

from __future__ import annotations

import re
import typing as t

from .._core.errors import ShareError
from .commands import Commands
from .rpm_version import Version, by_version, matches
from .spec import Package

QUERY = (
    "F\\t%{NAME}\\t%|EPOCH?{%{EPOCH}}:{0}|:%{VERSION}-%{RELEASE}\\t%{ARCH}\\n"
    "[P\\t%{PROVIDENAME}\\t%{PROVIDEVERSION}\\n][L\\t%{FILENAMES}\\t\\n]"
)
ROUNDS = 50


class File(t.NamedTuple):
    """One file: its package, and what that provides, version by name."""

    path: str
    name: str
    version: str
    provides: dict[str, str]


def read(commands: Commands, folder: str) -> list[File]:
    """Return the files of a directory that are for this machine's architecture.

    :raises ShareError: there are none, or one can't be read.
    """
    paths = [f"{folder}/{name}" for name in commands.system.names(folder) if name.endswith(".rpm")]
    if not paths:
        raise ShareError(f"node_dir: {folder} contains no .rpm file")
    argv = ["rpm", "-qp", "--nosignature", "--qf", QUERY, *paths]
    done = commands.run(argv)
    if done.rc != 0:
        raise commands.failure(["rpm", "-qp", f"{folder}/*.rpm"], done)
    machine = commands.system.run(["uname", "-m"]).out.strip()
    return [file for arch, file in parse(done.out, paths) if arch in ("noarch", machine)]


def parse(text: str, paths: t.Sequence[str]) -> t.Iterator[tuple[str, File]]:
    """Yield architecture and file of each row of rpm's answer, in the order of ``paths``."""
    number = -1
    current: tuple[str, File] | None = None
    for line in text.splitlines():
        kind, _tab, rest = line.partition("\t")
        fields = rest.split("\t")
        if kind == "F":
            if current:
                yield current
            number += 1
            current = (fields[2], File(paths[number], fields[0], str(Version.of(fields[1])), {}))
        elif current and kind in ("P", "L"):
            current[1].provides[fields[0]] = fields[1] if kind == "P" else ""
    if current:
        yield current


def best(files: t.Iterable[File], package: Package) -> File | None:
    """Return the newest file of a package that satisfies its version."""
    found = [one for one in files if one.name == package.name and matches(package.version, one.version)]
    return max(found, key=lambda one: by_version(one.version)) if found else None


def with_needs(commands: Commands, chosen: t.Sequence[File], files: t.Sequence[File]) -> tuple[list[File], bool]:
    """Return the chosen files and those that they need beside what is installed, by ``rpm --test``.

    :returns: the files; and whether they need nothing else.
    """
    taken = {one.name: one for one in chosen}
    names = {one.name for one in files}
    for _round in range(ROUNDS):
        argv = ["rpm", "-U", "--test", "--oldpackage", "--replacepkgs", "--nosignature"]
        done = commands.run([*argv, *(one.path for one in taken.values())])
        known = len(taken)
        # Needs that are package names come first: such a package may also satisfy others.
        for need in sorted(missing(done.err + done.out), key=lambda one: one.name not in names):
            if not any(need.served_by(file) for file in taken.values()):
                found = [file for file in files if need.served_by(file) and file.name not in taken]
                if found:
                    file = max(found, key=lambda one: by_version(one.version))
                    taken[file.name] = file
        if len(taken) == known:
            break
    return list(taken.values()), done.rc == 0


class Need(t.NamedTuple):
    """A missing capability (``name``, ``version``), or an installed package (``along``) that has to change as well."""

    name: str
    version: str
    along: str = ""

    def served_by(self, file: File) -> bool:
        if self.along:
            return file.name == self.along
        # In a condition such as (a or b) every word may be a name.
        words = re.findall(r"[^\s()]+", self.name) if self.name.startswith("(") else [self.name]
        provided = [file.provides[word] for word in words if word in file.provides]
        return any(not self.version or _same(one, self.version) for one in provided)


def missing(text: str) -> list[Need]:
    """Parse what ``rpm --test`` misses."""
    found = []
    for line in text.splitlines():
        parts = re.match(r"\s+(.+) is needed by (\(installed\) )?(\S+)", line)
        if parts:
            # An installed package that needs the replaced one.
            along = re.sub(r"-[^-]+-[^-]+$", "", parts.group(3)) if parts.group(2) else ""
            name, _blank, version = parts.group(1).partition(" = ")
            found.append(Need(name if name.startswith("(") else name.split(" ")[0], version, along))
    return found


def _same(provided: str, wanted: str) -> bool:
    have, want = Version.of(provided), Version.of(wanted)
    return (have.epoch, have.version) == (want.epoch, want.version) and want.release in ("", have.release)
