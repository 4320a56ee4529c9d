# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""RPM files on a node: which of them serve a set, and what they need of one another."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._rpm import Package
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_drivers import Commands, failure
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import Version, by_version

QUERY = (
    "F\\t%{NAME}\\t%|EPOCH?{%{EPOCH}}:{0}|:%{VERSION}-%{RELEASE}\\t%{ARCH}\\n"
    "[P\\t%{PROVIDENAME}\\t%{PROVIDEVERSION}\\n][L\\t%{FILENAMES}\\t\\n]"
)
ROUNDS = 50


class File(t.NamedTuple):
    """One file: what is in it, and what that provides, by name."""

    path: str
    name: str
    version: str
    provides: dict[str, str]


def look(commands: Commands, folder: str) -> list[File]:
    """The packages in a folder that fit this machine.

    :raises ShareError: one can't be read.
    """
    paths = [f"{folder}/{name}" for name in commands.system.names(folder) if name.endswith(".rpm")]
    if not paths:
        raise ShareError(f"node_dir: {folder} holds no .rpm file")
    argv = ["rpm", "-qp", "--nosignature", "--qf", QUERY, *paths]
    done = commands.run(argv)
    if done.rc != 0:
        raise failure(["rpm", "-qp", f"{folder}/*.rpm"], done)
    machine = commands.system.run(["uname", "-m"]).out.strip()
    return [file for arch, file in parse(done.out, paths) if arch in ("noarch", machine)]


def parse(text: str, paths: t.Sequence[str]) -> t.Iterator[tuple[str, File]]:
    """The answer about files, in the order in which they were asked for."""
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
    """The newest file that is the package in a version that is asked for."""
    found = [one for one in files if one.name == package.name and package.satisfied_by(one.version)]
    return max(found, key=lambda one: by_version(one.version)) if found else None


def with_needs(commands: Commands, chosen: t.Sequence[File], files: t.Sequence[File]) -> tuple[list[File], bool]:
    """The chosen files and those that they need beside what is installed, as rpm itself says.

    :returns: the files; and whether that is all that is needed.
    """
    taken = {one.name: one for one in chosen}
    names = {one.name for one in files}
    for _round in range(ROUNDS):
        argv = ["rpm", "-U", "--test", "--oldpackage", "--replacepkgs", "--nosignature"]
        done = commands.run([*argv, *(one.path for one in taken.values())])
        known = len(taken)
        # What is needed by its own name comes first: it may be what others need by another.
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
    """What rpm misses. ``name`` and ``version`` of a capability; or an installed package that has to come along."""

    name: str
    version: str
    along: str = ""

    def served_by(self, file: File) -> bool:
        if self.along:
            return file.name == self.along
        # Of a condition such as (a or b) every word may be a name.
        words = re.findall(r"[^\s()]+", self.name) if self.name.startswith("(") else [self.name]
        provided = [file.provides[word] for word in words if word in file.provides]
        return any(not self.version or _same(one, self.version) for one in provided)


def missing(text: str) -> list[Need]:
    """What rpm says is needed."""
    found = []
    for line in text.splitlines():
        parts = re.match(r"\s+(.+) is needed by (\(installed\) )?(\S+)", line)
        if parts:
            # An installed package that needs what is replaced.
            along = re.sub(r"-[^-]+-[^-]+$", "", parts.group(3)) if parts.group(2) else ""
            name, _blank, version = parts.group(1).partition(" = ")
            found.append(Need(name if name.startswith("(") else name.split(" ")[0], version, along))
    return found


def _same(provided: str, wanted: str) -> bool:
    have, want = Version.of(provided), Version.of(wanted)
    return (have.epoch, have.version) == (want.epoch, want.version) and want.release in ("", have.release)
