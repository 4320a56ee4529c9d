# SPDX-License-Identifier: GPL-3.0-or-later
"""Read and write .lab/state.json, the state of the lab. Its paths are relative to the checkout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lab.paths import LAB

State = dict[str, Any]
FILE = LAB / "state.json"


def read() -> State | None:
    """Read the state; None when no lab is up or partly up."""
    try:
        found = json.loads(FILE.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(state: State) -> None:
    """Write the state atomically."""
    LAB.mkdir(mode=0o755, exist_ok=True)
    fresh = FILE.with_suffix(".new")
    fresh.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    fresh.replace(FILE)


def private_file(path: Path, text: str) -> None:
    """Write a file that only root can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    # Atomically, since others may be reading it.
    fresh.replace(path)
