# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Read the content of an initramfs image."""

from __future__ import annotations

from .._host.system import System
from . import initramfs


def image_content(system: System, tool: str, path: str, file: str) -> initramfs.Content | None:
    """Return an image's content; None where the tool's lister can't read it."""
    done = system.run([initramfs.LISTERS[tool], path], timeout=120)
    return initramfs.content(done.out, file) if done.rc == 0 else None
