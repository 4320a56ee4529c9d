# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the sections ``apt`` and ``packages`` from dpkg and apt's files."""

from __future__ import annotations

import re
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .._host.system import System
from .paths import APT_CONFIGURATION, APT_KEYRINGS, APT_PREFERENCES, APT_SOURCES, MARK
from .types import AptSource, AptState, InstalledPackage

QUERY = ("dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\t${Maintainer}\\n")
STATUS = "/var/lib/dpkg/status"
JOURNAL = "/var/lib/dpkg/updates"


Packages = dict[str, InstalledPackage]


def observe(system: System, native: str) -> tuple[AptState | None, Packages]:
    """Return the section ``apt`` (None on a node without dpkg) and all installed packages.

    :param native: dpkg's name of the machine's own architecture; packages of others are left out.
    :raises ShareError: dpkg can't list its packages.
    """
    if not system.exists(STATUS):
        return None, {}
    done = system.run(QUERY, timeout=30)
    if done.rc != 0:
        raise ShareError(f"dpkg-query can't list the packages: {done.err.strip() or done.rc}")
    packages, unfinished, triggers = parse_query(done.out, native)
    return {
        "files": {
            path: system.read(path) or ""
            for folder in (APT_SOURCES, APT_PREFERENCES, APT_CONFIGURATION)
            for path in _files(system, folder)
            if MARK in path
        },
        "keys": {path: digest(system.read(path) or "") for path in _files(system, APT_KEYRINGS) if MARK in path},
        "sources": _foreign_sources(system),
        # The journal contains what a killed dpkg hasn't written into its database.
        "interrupted": triggers or bool(system.names(JOURNAL)),
        "unfinished": unfinished,
    }, packages


def parse_query(text: str, native: str) -> tuple[Packages, list[str], bool]:
    """Parse dpkg-query's rows.

    :returns: the installed packages; the names of those unpacked or configured in part; whether triggers are pending.
    """
    packages: Packages = {}
    unfinished = []
    triggers = False
    for line in text.splitlines():
        status, name, version, architecture, maintainer = ([*line.split("\t", 4), "", "", ""])[:5]
        if not status or architecture not in (native, "all"):
            continue
        # First letter: the desired state (h is hold). Second: the state (W and t wait for triggers, and work).
        if status[1] in "iWt":
            packages[name] = {"version": version, "held": status[0] == "h", "origin": maintainer}
            triggers = triggers or status[1] != "i"
        elif status[1] in "HUF":
            unfinished.append(name)
    return packages, sorted(unfinished), triggers


def _files(system: System, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in system.names(folder)]


def _foreign_sources(system: System) -> list[AptSource]:
    """Return every repository of a list that this collection didn't write."""
    found: list[AptSource] = []
    for path in ["/etc/apt/sources.list", *_files(system, APT_SOURCES)]:
        text = system.read(path) if MARK not in path else None
        if text and path.endswith(".list"):
            found += parse_list(path, text)
        elif text and path.endswith(".sources"):
            found += parse_deb822(path, text)
    return found


def parse_list(path: str, text: str) -> t.Iterator[AptSource]:
    """Yield the repositories of one-line entries (sources.list(5))."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", line)
        if found:
            options = dict(word.split("=", 1) for word in (found.group(1) or "").split() if "=" in word)
            signed_by = options.get("signed-by", "")
            yield {"file": path, "url": found.group(2), "suite": found.group(3), "signed_by": signed_by}


def parse_deb822(path: str, text: str) -> t.Iterator[AptSource]:
    """Yield the repositories of deb822 stanzas (sources.list(5))."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line[:1] in " \t" and last:
                fields[last] += "\n" + line.strip()
            elif ":" in line:
                last, value = line.split(":", 1)
                last = last.strip().lower()
                fields[last] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        for url in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                signed_by = fields.get("signed-by", "").strip()
                yield {"file": path, "url": url, "suite": suite, "signed_by": signed_by}
