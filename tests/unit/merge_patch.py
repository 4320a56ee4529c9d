# SPDX-License-Identifier: GPL-3.0-or-later
"""The JSON merge patch (RFC 7386), as the API servers of the tests apply it."""

from __future__ import annotations

import typing as t


def merge_patch(live: dict[str, t.Any], patch: dict[str, t.Any]) -> None:
    """Apply a patch in place."""
    for key, value in patch.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(live.get(key), dict):
                live[key] = {}
            merge_patch(live[key], value)
        else:
            live[key] = value
