# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of names and versions that contain numbers. Pure."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural(text: str) -> list[str | int]:
    """Return a sort key that puts gpu2 before gpu10, and kernel 6.8.0-99 before 6.8.0-100."""
    # Longer than any name of Kubernetes; Python can't parse much longer numbers.
    parts: list[str | int] = list(_DIGITS.split(text[:300]))
    parts[1::2] = map(int, parts[1::2])
    return parts
