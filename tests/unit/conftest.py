# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the checkout importable as the collection ``kubegpu.share`` and the servers as the package ``gpushare``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ansible.utils.collection_loader._collection_finder import _AnsibleCollectionFinder
from hypothesis import settings

# The same examples in every run, so that CI fails for a change and not by chance; KUBEGPU_EXPLORE=1 looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("KUBEGPU_EXPLORE") else "steady")

ROOT = Path(__file__).resolve().parents[2]

finder = _AnsibleCollectionFinder(paths=[str(ROOT / ".collections")])
finder._install()
sys.path.insert(0, str(ROOT / "images" / "gpushare" / "src"))
sys.path.insert(0, str(ROOT))
