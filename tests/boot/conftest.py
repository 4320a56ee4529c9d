# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests of what has to survive a boot: each boots a small Debian from a disk of its own, in QEMU, several times."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernel")]
