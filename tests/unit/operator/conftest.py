# SPDX-License-Identifier: GPL-3.0-or-later
"""The operator's package, beside those of the other tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator" / "src"))
