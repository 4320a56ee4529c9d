# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes of the sections of ``gpu_node`` about packages: ``apt``, ``rpm`` and ``packages``."""

from __future__ import annotations

import typing as t

from .._host.types import Package


class InstalledPackage(Package, total=False):
    """``versions`` is there only where several versions of an rpm package are installed; the newest is first."""

    versions: list[str]


class AptSource(t.TypedDict):
    """One repository of a list that this collection didn't write."""

    file: str
    url: str
    suite: str
    signed_by: str


class AptState(t.TypedDict):
    """``files`` (texts) and ``keys`` (SHA-256) are this collection's; ``sources`` are all others.

    ``unfinished`` are packages that dpkg unpacked or configured only in part; ``interrupted``: dpkg has work left.
    """

    files: dict[str, str]
    keys: dict[str, str]
    sources: list[AptSource]
    interrupted: bool
    unfinished: list[str]


class RpmRepository(t.TypedDict):
    """One repository of any ``.repo`` file."""

    file: str
    id: str
    url: str
    enabled: bool


class LockState(t.TypedDict):
    """One version lock; ``ours``: this collection wrote it, ``exclude``: it excludes the versions."""

    name: str
    version: str
    ours: bool
    exclude: bool


class RpmState(t.TypedDict):
    """``lock_plugin`` is enabled, disabled or empty (not installed); ``streams`` are the enabled ones by module.

    ``imported`` are the keys in rpm's database, as ``<key id>-<creation time>``; ``duplicates`` are packages of which
    an interrupted transaction left two versions.
    """

    manager: str
    files: dict[str, str]
    keys: dict[str, str]
    imported: list[str]
    repositories: list[RpmRepository]
    lock_path: str
    lock_plugin: str
    locks: list[LockState]
    streams: dict[str, str]
    duplicates: list[str]


class PackageLists(t.TypedDict):
    """What the node's package lists have: of each name the versions, each with its repositories.

    A repository is a URL with apt and an id otherwise. ``age_hours`` is None where it is unknown. With an ``error``, or
    without any package, nothing is known.
    """

    age_hours: float | None
    error: str
    packages: dict[str, dict[str, list[str]]]


class PackageFacts(t.TypedDict):
    """All that a plan reads; at most one of ``apt`` and ``rpm`` is there."""

    apt: AptState | None
    rpm: RpmState | None
    packages: t.Mapping[str, InstalledPackage]
