# SPDX-License-Identifier: GPL-3.0-or-later
"""This checkout's Python files as bytecode: the guest's processor is emulated, and compiles them ten times slower.

Each is kept in the cache by its path and content. A folder of links has them where Python looks for them; it is laid
over this machine's root in the guest, and nothing is written into the checkout.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import time
from pathlib import Path

from lab.guest.kernel import KEPT
from lab.paths import CHECKOUT, cache_root

FOLDERS = ("plugins/module_utils", "plugins/modules", "plugins/plugin_utils", "lab", "tests/kernel")


def lay(target: Path) -> None:
    """Fill a folder that represents the root with the bytecode of all files that tests import."""
    kept = cache_root() / "guest" / "bytecode"
    kept.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        for source in (CHECKOUT / folder).rglob("*.py"):
            content = source.read_bytes()
            tag = importlib.util.MAGIC_NUMBER.hex()
            made = kept / hashlib.sha256(f"{tag} {source}\n".encode() + content).hexdigest()
            if made.exists():
                os.utime(made)
            else:
                mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(source), cfile=str(made), doraise=True, invalidation_mode=mode)
            link = target / importlib.util.cache_from_source(str(source)).lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(made, link)
    for made in kept.iterdir():
        if made.stat().st_mtime < time.time() - KEPT:
            made.unlink()
