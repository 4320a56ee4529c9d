# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of the lab that is up: .lab/state.json. Paths in it are relative to the checkout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lab.paths import LAB

State = dict[str, Any]
FILE = LAB / "state.json"


def read() -> State | None:
    """The state, or None where no lab is up or half up."""
    try:
        found = json.loads(FILE.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(state: State) -> None:
    """Put the state in place in one step."""
    LAB.mkdir(mode=0o755, exist_ok=True)
    fresh = FILE.with_suffix(".new")
    fresh.write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    fresh.replace(FILE)


def private_file(path: Path, text: str) -> None:
    """A file that only root can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    # In one step: others may be reading it.
    fresh.replace(path)
