# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What apt and dpkg know, as plain JSON."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._apt import (
    CONFIGURATION,
    KEYRINGS,
    MARK,
    PREFERENCES,
    SOURCES,
)
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._repository_key import sha256_of
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

QUERY = ("dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\t${Maintainer}\\n")
STATUS = "/var/lib/dpkg/status"
JOURNAL = "/var/lib/dpkg/updates"


def observe(system: System, native: str) -> Json:
    """Both sections that a plan reads.

    :param native: dpkg's name of the machine's own architecture; packages of others are left out.
    :returns: ``apt`` (None on a node without dpkg) and ``packages``, all that are installed.
    """
    if not system.exists(STATUS):
        return {"apt": None, "packages": {}}
    done = system.run(QUERY, timeout=30)
    if done.rc != 0:
        raise ShareError(f"dpkg's list of packages can't be read: {done.err.strip() or done.rc}")
    packages, unfinished, triggers = parse_query(done.out, native)
    return {
        "apt": {
            "files": {
                path: system.read(path) or ""
                for folder in (SOURCES, PREFERENCES, CONFIGURATION)
                for path in _files(system, folder)
                if MARK in path
            },
            "keys": {path: sha256_of(system.read(path) or "") for path in _files(system, KEYRINGS) if MARK in path},
            "sources": _foreign_sources(system),
            # The journal holds what a killed dpkg didn't get to put into its database.
            "interrupted": triggers or bool(system.names(JOURNAL)),
            "unfinished": unfinished,
        },
        "packages": packages,
    }


def parse_query(text: str, native: str) -> tuple[dict[str, Json], list[str], bool]:
    """What dpkg-query says.

    :returns: the installed packages; the names of those unpacked or configured by half; whether triggers are pending.
    """
    packages: dict[str, Json] = {}
    unfinished = []
    triggers = False
    for line in text.splitlines():
        status, name, version, architecture, maintainer = ([*line.split("\t", 4), "", "", ""])[:5]
        if not status or architecture not in (native, "all"):
            continue
        # First letter: what is wanted (h is hold). Second: what is (W and t wait for triggers and do work).
        if status[1] in "iWt":
            packages[name] = {"version": version, "held": status[0] == "h", "origin": maintainer}
            triggers = triggers or status[1] != "i"
        elif status[1] in "HUF":
            unfinished.append(name)
    return packages, sorted(unfinished), triggers


def _files(system: System, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in system.names(folder)]


def _foreign_sources(system: System) -> list[Json]:
    """Every repository of a list that isn't ours."""
    found = []
    for path in ["/etc/apt/sources.list", *_files(system, SOURCES)]:
        text = system.read(path) if MARK not in path else None
        if text and path.endswith(".list"):
            found += [{"file": path, **one} for one in parse_list(text)]
        elif text and path.endswith(".sources"):
            found += [{"file": path, **one} for one in parse_deb822(text)]
    return found


def parse_list(text: str) -> t.Iterator[Json]:
    """The repositories of one-line entries."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", line)
        if found:
            options = dict(word.split("=", 1) for word in (found.group(1) or "").split() if "=" in word)
            signed_by = options.get("signed-by", "")
            yield {"url": found.group(2), "suite": found.group(3), "signed_by": signed_by}


def parse_deb822(text: str) -> t.Iterator[Json]:
    """The repositories of deb822 stanzas."""
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
                yield {"url": url, "suite": suite, "signed_by": fields.get("signed-by", "").strip()}
