# SPDX-License-Identifier: GPL-3.0-or-later
"""The upgrade of a cluster by kubeadm: tests with a lab of their own, apart from the whole test run."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "lab"))
sys.path.insert(0, str(TESTS.parent))
