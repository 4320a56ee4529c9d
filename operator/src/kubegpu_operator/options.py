# SPDX-License-Identifier: GPL-3.0-or-later
"""The allow list: which variables a resource may set, from the file of which the schema is made."""

from __future__ import annotations

from pathlib import Path

import yaml


def known(path: Path) -> frozenset[str] | None:
    """Return the variables' names; None where there is no such file.

    :raises ValueError: it has none; with an empty list every resource would be refused.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    allowed = content.get("allowed") if isinstance(content, dict) else None
    roles = list(allowed.values()) if isinstance(allowed, dict) else []
    names = [name for role in roles if isinstance(role, dict) for name in role]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} has no names of variables below allowed")
    return frozenset(names)
