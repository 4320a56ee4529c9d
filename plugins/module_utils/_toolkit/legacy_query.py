# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query the tools that the container toolkit replaced."""

from __future__ import annotations

from .._host.system import System
from . import legacy_sources as sources
from .legacy_paths import DROP_INS, RECORD
from .types import LegacyRecord, StaleSource


def observe_sources(system: System) -> list[StaleSource]:
    """Collect section ``sources_stale``: foreign package sources with NVIDIA's container repositories."""
    paths = [sources.MAIN] + [f"{folder}/{name}" for folder in sources.FOLDERS for name in system.names(folder)]
    texts = {path: system.read(path) or "" for path in paths if sources.is_source(path)}
    return [
        {"file": path, "text": text, "line_count": len(text.splitlines())}
        for path, text in texts.items()
        if sources.clean(path, text).active
    ]


def observe_record(system: System) -> LegacyRecord:
    """Collect section ``toolkit_legacy``: the record of removals, and nvidia-ctk's drop-ins."""
    return {"record": system.read(RECORD) or "", "drop_ins": [path for path in DROP_INS if system.exists(path)]}
