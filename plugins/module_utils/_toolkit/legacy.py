# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe the tools that the container toolkit replaced, and package sources that name them.

A stale source beside ours names the same repository with another key, and then apt refuses to read any source.
"""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._host.system import System
from .facts import LegacyRecord, StaleSource

STORE = "/var/lib/kubegpu-share/legacy"
RECORD = f"{STORE}/record.json"

# Drop-ins of releases of nvidia-ctk; the role runtime handles their effect.
DROP_INS = (
    "/etc/containerd/config.d/99-nvidia.toml",
    "/etc/containerd/conf.d/99-nvidia.toml",
    "/etc/crio/conf.d/99-nvidia.toml",
    "/etc/crio/crio.conf.d/99-nvidia.toml",
)


OURS = "kubegpu-"
# nvidia.github.io has all of them; mirrors of the two retired ones keep the directory's name.
STALE = re.compile(r"^[a-z+]+:/+(?:[^/\s]+\.)?nvidia\.github\.io/|/(?:nvidia-docker|nvidia-container-runtime)/")
MAIN = "/etc/apt/sources.list"
FOLDERS = {
    "/etc/apt/sources.list.d": (".list", ".sources"),
    "/etc/yum.repos.d": (".repo",),
    "/etc/zypp/repos.d": (".repo",),
}
KEYRINGS = ("/usr/share/keyrings/", "/etc/apt/keyrings/", "/etc/apt/trusted.gpg.d/")

LINE = re.compile(r"^\s*deb(?:-src)?\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<url>\S+)")
NO = ("no", "false", "0", "off")


class Cleaned(t.NamedTuple):
    """A package source without stale repositories.

    :param active: one of them was enabled; otherwise the file isn't changed.
    :param text: the remaining text; None where only comments remain.
    :param keyrings: of the stale repositories.
    """

    active: bool
    text: str | None
    keyrings: tuple[str, ...]


def is_source(path: str) -> bool:
    """Return whether a package manager reads its repositories from this file, and it isn't ours."""
    folder, name = posixpath.split(path)
    return path == MAIN or (folder in FOLDERS and name.endswith(FOLDERS[folder]) and OURS not in name)


def clean(path: str, text: str) -> Cleaned:
    """Remove the stale repositories of a package source; other entries and all comments stay."""
    if path.endswith(".sources"):
        active, lines, keyrings = _deb822(text)
    elif path.endswith(".repo"):
        active, lines, keyrings = _ini(text)
    else:
        active, lines, keyrings = _one_line(text)
    rest = "".join(lines)
    entries = any(line.strip() and not line.lstrip().startswith(("#", ";")) for line in lines)
    # Every Debian has sources.list, possibly empty.
    return Cleaned(active, rest if entries or path == MAIN else None, tuple(sorted(keyrings)))


def _one_line(text: str) -> tuple[bool, list[str], set[str]]:
    rest, keyrings = [], set()
    for line in text.splitlines(keepends=True):
        match = LINE.match(line)
        if match is None or not STALE.search(match.group("url")):
            rest.append(line)
            continue
        for word in (match.group("options") or "").split():
            if word.startswith("signed-by="):
                keyrings |= set(word[len("signed-by=") :].split(","))
    return len(rest) < len(text.splitlines()), rest, _paths(keyrings)


def _deb822(text: str) -> tuple[bool, list[str], set[str]]:
    active, rest, keyrings = False, [], set()
    for stanza in _stanzas(text):
        fields = _fields(stanza)
        urls = " ".join(fields.get("uris", [])).split()
        stale = [url for url in urls if STALE.search(url)]
        if not stale:
            rest += stanza
            continue
        active = active or " ".join(fields.get("enabled", ["yes"])).strip().lower() not in NO
        if len(stale) < len(urls):
            rest += _without(stanza, stale)
            continue
        rest += [line for line in stanza if line.startswith("#")]
        keyrings |= set(" ".join(fields.get("signed-by", [])).split())
    return active, rest, _paths(keyrings)


def _stanzas(text: str) -> list[list[str]]:
    """Split a text into stanzas, each with its final empty lines."""
    stanzas: list[list[str]] = [[]]
    ended = False
    for line in text.splitlines(keepends=True):
        if ended and line.strip():
            stanzas.append([])
        ended = not line.strip()
        stanzas[-1].append(line)
    return stanzas


def _fields(stanza: t.Iterable[str]) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    last: list[str] = []
    for line in stanza:
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t"):
            last.append(line.strip())
        elif ":" in line:
            name, value = line.split(":", 1)
            last = fields.setdefault(name.strip().lower(), [])
            last.append(value.strip())
    return fields


def _without(stanza: t.Iterable[str], urls: t.Sequence[str]) -> list[str]:
    """Remove these addresses from a stanza's field URIs."""
    rest, inside = [], False
    for line in stanza:
        if not line.startswith("#"):
            inside = line.lower().startswith("uris:") or (inside and line[:1] in (" ", "\t"))
        folded = line[:1] in (" ", "\t")
        words = (line if folded else line.replace(":", ": ", 1)).split() if inside else []
        left = [word for word in words if word not in urls]
        if len(left) == len(words):
            rest.append(line)
        elif left:
            rest.append((" " if folded else "") + " ".join(left) + line[len(line.rstrip("\r\n")) :])
    return rest


def _ini(text: str) -> tuple[bool, list[str], set[str]]:
    active, rest = False, []
    for section in _sections(text):
        values = _values(section)
        places = " ".join(values.get(name, "") for name in ("baseurl", "mirrorlist", "metalink")).split()
        if not any(STALE.search(url) for url in places):
            rest += section
            continue
        active = active or values.get("enabled", "1").strip().lower() not in NO
        rest += [line for line in section if line.startswith(("#", ";"))]
    # rpm's keys are in its own database, where other repositories may need them.
    return active, rest, set()


def _sections(text: str) -> list[list[str]]:
    sections: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            sections.append([])
        sections[-1].append(line)
    return sections


def _values(section: t.Iterable[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    last = ""
    for line in section:
        if line.startswith(("#", ";", "[")):
            continue
        if line[:1] in (" ", "\t") and last:
            values[last] += " " + line.strip()
        elif "=" in line:
            last, value = (word.strip() for word in line.split("=", 1))
            values[last] = value
    return values


def _paths(words: t.Iterable[str]) -> set[str]:
    """Filter the paths of keyrings; others are fingerprints or inline keys."""
    return {word for word in words if word.startswith(KEYRINGS)}


def named_nowhere(keyrings: t.Iterable[str], texts: t.Iterable[str]) -> list[str]:
    """Filter the keyrings that none of these package sources names."""
    everything = "\n".join(texts)
    return sorted({path for path in keyrings if not re.search(re.escape(path) + r"(?![\w.-])", everything)})


def observe_sources(system: System) -> list[StaleSource]:
    """Collect section ``sources_stale``: foreign package sources with NVIDIA's container repositories."""
    paths = [MAIN] + [f"{folder}/{name}" for folder in FOLDERS for name in system.names(folder)]
    texts = {path: system.read(path) or "" for path in paths if is_source(path)}
    return [
        {"file": path, "text": text, "line_count": len(text.splitlines())}
        for path, text in texts.items()
        if clean(path, text).active
    ]


def observe_record(system: System) -> LegacyRecord:
    """Collect section ``toolkit_legacy``: the record of removals, and nvidia-ctk's drop-ins."""
    return {"record": system.read(RECORD) or "", "drop_ins": [path for path in DROP_INS if system.exists(path)]}
