# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""k3s and RKE2: their paths and settings. Pure.

Both regenerate their containerd's configuration at each start, detect NVIDIA's runtime by themselves and have one
setting for the default one. https://github.com/k3s-io/k3s/blob/v1.34.1%2Bk3s1/pkg/cli/cmds/agent.go
"""

from __future__ import annotations

import dataclasses
import math
import posixpath
import re

from .containerd import CRI_PLUGIN, path_of

KEY = "default-runtime"
SOCKET = "/run/k3s/containerd/containerd.sock"
# The first patch releases of minor ones with the setting KEY; every release since 1.29 has it.
HAVE_KEY = {(1, 26): 12, (1, 27): 9, (1, 28): 5, (1, 29): 0}
# The same for containerd 2, which has a template of its own.
HAVE_CONTAINERD_2 = {(1, 31): 6, (1, 32): 2, (1, 33): 0}
# The files of a user's template, and the version of the base template that each includes.
TEMPLATES = {"config-v3.toml.tmpl": 3, "config.toml.tmpl": 2}
_COMMENT = re.compile(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", re.DOTALL)
_BASE = re.compile(r"template\s+([\"`])base\1")
_DEFAULT = re.compile(r"(?m)^[^#\n]*\bdefault_runtime_name\s*=\s*([\"'])([^\"'{}\n]+)\1")
# A table's header, in which blanks may stand around each name.
_HEADER = re.compile(r"(?m)^[ \t]*\[([^\[\]\n]+)\]")
_VERSION = re.compile(r"(?m)^\s*version\s*=\s*[2-9]")


def version_of(text: str) -> str:
    """Parse ``k3s version v1.30.4+k3s1 (98262b5d)``."""
    found = re.search(r"version v([0-9]+\.[0-9]+\.[0-9]+\S*)", text)
    return found.group(1) if found else ""


def since(version: str, first: dict[tuple[int, int], int]) -> bool:
    """Return whether a release is one of those that have something.

    :param first: by minor release its first patch release that has it; the last one stands for all that follow.
    """
    found = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", version)
    major, minor, patch = map(int, found.groups()) if found else (0, 0, 0)
    return (major, minor) > max(first) or patch >= first.get((major, minor), math.inf)


def templates(data: str, version: str) -> list[str]:
    """Return the paths of a user's own template for containerd's configuration; the first one that exists counts."""
    folder = f"{data}/agent/etc/containerd"
    newest = 3 if since(version, HAVE_CONTAINERD_2) else 2
    return [f"{folder}/{name}" for name, number in TEMPLATES.items() if number <= newest]


def rendered(data: str) -> str:
    """Return the path of the generated containerd configuration."""
    return f"{data}/agent/etc/containerd/config.toml"


@dataclasses.dataclass(frozen=True)
class Template:
    """A user's template, without its comments for Go.

    :param path: the file.
    :param version: of k3s or RKE2.
    """

    path: str
    text: str
    version: str

    @classmethod
    def parse(cls, path: str, text: str, version: str) -> Template:
        return cls(path, _COMMENT.sub("", text), version)

    @property
    def has_base(self) -> bool:
        return bool(_BASE.search(self.text))

    @property
    def renders_default(self) -> bool:
        """Return whether it renders the setting: it includes the base template, or names the setting."""
        return self.has_base or "DefaultRuntime" in self.text

    @property
    def default(self) -> str:
        """Return the default runtime that it sets by itself, or nothing."""
        if since(self.version, HAVE_CONTAINERD_2) and not self.has_base and not _VERSION.search(self.text):
            # Without a version containerd 2.0 to 2.2 ignores it.
            return ""
        return own_default(self.text)

    def repeats(self, runtime: str) -> bool:
        """Return whether it has a runtime's table that the base template has too, once the runtime is installed."""
        plugin = CRI_PLUGIN[TEMPLATES[posixpath.basename(self.path)]]
        table = ("plugins", plugin, "containerd", "runtimes", runtime)
        return self.has_base and any(path_of(found) == table for found in _HEADER.findall(self.text))


def own_default(text: str) -> str:
    """Return the default runtime that a file of containerd's or a template sets by itself; a comment doesn't count."""
    found = _DEFAULT.findall(text)
    return found[-1][1] if found else ""
