# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes of the sections of ``gpu_node`` about NVIDIA's container toolkit."""

from __future__ import annotations

import typing as t

from .._host.types import Word


class ToolkitConfig(t.TypedDict):
    path: str
    mode: str
    text: str


class Toolkit(t.TypedDict):
    """``operator``: the GPU Operator runs a toolkit of its own on this node."""

    version: str | None
    binaries: list[Word]
    packages: dict[str, str]
    config: ToolkitConfig | None
    operator: bool


class SpecSummary(t.TypedDict):
    version: str
    kinds: list[str]
    devices: int


class CdiSpec(SpecSummary):
    path: str


class CdiSpecs(t.TypedDict):
    """``stale``: a spec names files of another driver than the loaded one."""

    specs: list[CdiSpec]
    driver_version: str
    stale: bool


class Cdi(CdiSpecs):
    """The section ``cdi``; ``refresh_env`` is the environment file of nvidia-cdi-refresh.service."""

    refresh_env: str | None


class StaleSource(t.TypedDict):
    """A package source that still names the repositories of NVIDIA's earlier container tools."""

    file: str
    text: str
    line_count: int


class LegacyRecord(t.TypedDict):
    """The section ``toolkit_legacy``; ``record`` is empty where nothing was kept."""

    record: str
    drop_ins: list[str]
