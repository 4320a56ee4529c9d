# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the checkout importable as the collection ``kubegpu.share`` and the servers as the package ``gpushare``."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder

ROOT = Path(__file__).resolve().parents[2]

finder = _AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])
finder._install()
sys.path.insert(0, str(ROOT / "images" / "gpushare" / "src"))
sys.path.insert(0, str(ROOT))
