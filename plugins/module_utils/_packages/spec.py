# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The desired state of one package set, for every package manager."""

from __future__ import annotations

import dataclasses

from .names import matches_any


@dataclasses.dataclass(frozen=True)
class Repository:
    """One repository and its key; exactly one of ``key_url`` and ``key_text`` is set.

    :param suites: apt only, as are ``components`` and ``architectures``.
    :param signed: rpm only: ``packages``, ``metadata`` or both.
    :param key_fingerprint: of the only key in the file, in capitals; read where ``key_sha256`` is empty.
    """

    name: str
    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    architectures: tuple[str, ...]
    signed: tuple[str, ...]
    key_url: str
    key_text: str
    key_sha256: str
    key_fingerprint: str = ""

    @property
    def key_origin(self) -> str:
        return self.key_url or "given as text"


@dataclasses.dataclass(frozen=True)
class Pin:
    """One entry of apt's preferences."""

    package: str
    pin: str
    priority: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A module stream of dnf 4; ``switch``: replace another stream although packages of the set are installed."""

    module: str
    stream: str
    switch: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.stream}"


@dataclasses.dataclass(frozen=True)
class Package:
    """A package and the pattern of its version; an empty pattern matches every version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}={self.version}" if self.version else self.name


@dataclasses.dataclass(frozen=True)
class PackageSet:
    """The options of the module ``pinned_packages``, validated.

    :param present: whether the set is wanted; where ``verified``, neither it nor its absence is.
    :param verified: only the keys of its repositories are checked.
    """

    name: str
    present: bool
    repositories: tuple[Repository, ...]
    pins: tuple[Pin, ...]
    streams: tuple[Stream, ...]
    packages: tuple[Package, ...]
    hold: bool
    hold_also: tuple[str, ...]
    never_upgrade: tuple[str, ...]
    conflicts: tuple[str, ...]
    replaces: tuple[str, ...]
    node_dir: str
    keep: tuple[str, ...]
    erase_dependencies: bool
    verified: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(package.name for package in self.packages)

    def manages(self, name: str) -> bool:
        """Return whether a lock of this package belongs to this set."""
        return name in self.names or matches_any(name, self.hold_also)

    def replaceable(self, name: str) -> bool:
        """Return whether an installed package may be removed to make place for the set."""
        return name not in self.names and matches_any(name, self.replaces)

    def kept(self, name: str) -> bool:
        """Return whether a package stays installed when the set is removed."""
        return matches_any(name, self.keep)
