# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Sources of packages that set a node up for the container tools of earlier years: what of them goes. Pure.

NVIDIA's repositories nvidia-docker, nvidia-container-runtime and libnvidia-container have had many lists. One that is
left beside ours names the same repository with another key, and then apt reads no list at all.
"""

from __future__ import annotations

import posixpath
import re
import typing as t

OURS = "kubegpu-"
# nvidia.github.io has all three; mirrors of the two retired ones keep their folder's name.
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
    """A list without what is stale in it.

    :param active: something of it was in use; otherwise the list is left as it is.
    :param text: what is left; None where that is nothing but comments.
    :param keyrings: the files that stale entries were signed by.
    """

    active: bool
    text: str | None
    keyrings: tuple[str, ...]


def is_source(path: str) -> bool:
    """A file that a package manager reads its repositories from and that isn't ours."""
    folder, name = posixpath.split(path)
    return path == MAIN or (folder in FOLDERS and name.endswith(FOLDERS[folder]) and OURS not in name)


def clean(path: str, text: str) -> Cleaned:
    """Take the stale repositories out of a list; other entries and all comments stay as they are."""
    if path.endswith(".sources"):
        active, lines, keyrings = _deb822(text)
    elif path.endswith(".repo"):
        active, lines, keyrings = _ini(text)
    else:
        active, lines, keyrings = _one_line(text)
    rest = "".join(lines)
    says = any(line.strip() and not line.lstrip().startswith(("#", ";")) for line in lines)
    # Every Debian has sources.list; it may be empty.
    return Cleaned(active, rest if says or path == MAIN else None, tuple(sorted(keyrings)))


def _one_line(text: str) -> tuple[bool, list[str], set[str]]:
    rest, keyrings = [], set()
    for line in text.splitlines(keepends=True):
        found = LINE.match(line)
        if found is None or not STALE.search(found.group("url")):
            rest.append(line)
            continue
        for word in (found.group("options") or "").split():
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
    """The lines of each stanza with the empty ones that end it."""
    found: list[list[str]] = [[]]
    ended = False
    for line in text.splitlines(keepends=True):
        if ended and line.strip():
            found.append([])
        ended = not line.strip()
        found[-1].append(line)
    return found


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
    """A stanza whose field URIs names these no more."""
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
    # rpm keeps keys in its own database, where others may rely on them.
    return active, rest, set()


def _sections(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            found.append([])
        found[-1].append(line)
    return found


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
    """Those that are keyrings of their own, and not a key's fingerprint or the key itself."""
    return {word for word in words if word.startswith(KEYRINGS)}


def named_nowhere(keyrings: t.Iterable[str], texts: t.Iterable[str]) -> list[str]:
    """Keyrings that none of these lists names."""
    everything = "\n".join(texts)
    return sorted({path for path in keyrings if not re.search(re.escape(path) + r"(?![\w.-])", everything)})
