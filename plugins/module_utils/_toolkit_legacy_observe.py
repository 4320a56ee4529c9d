# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See what a node still has of the container tools of earlier years."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy_sources as sources
from ansible_collections.kubegpu.share.plugins.module_utils._system import System
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit_legacy import DROP_INS, RECORD

Json = t.Dict[str, t.Any]


def observe(system: System) -> list[Json]:
    """The section ``sources_stale``: lists of others that name NVIDIA's container repositories."""
    paths = [sources.MAIN] + [f"{folder}/{name}" for folder in sources.FOLDERS for name in system.names(folder)]
    texts = {path: system.read(path) or "" for path in paths if sources.is_source(path)}
    return [
        {"file": path, "text": text, "line_count": len(text.splitlines())}
        for path, text in texts.items()
        if sources.clean(path, text).active
    ]


def kept(system: System) -> Json:
    """The section ``toolkit_legacy``: what was kept aside, and which drop-ins of nvidia-ctk there are."""
    return {"record": system.read(RECORD) or "", "drop_ins": [path for path in DROP_INS if system.exists(path)]}
