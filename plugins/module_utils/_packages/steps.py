# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Steps of plans that change files and packages, of package sets and of the container toolkit."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PutFile:
    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class RemoveFile:
    path: str


@dataclasses.dataclass(frozen=True)
class RemovePackage:
    """``versions``: those of several that are removed; all when empty."""

    name: str
    held: bool
    versions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FinishInterrupted:
    """Complete what an interrupted run left."""
