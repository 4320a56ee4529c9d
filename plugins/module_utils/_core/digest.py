# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Digests of texts."""

from __future__ import annotations

import hashlib


def digest(text: str | None) -> str:
    """Return the SHA-256 of a text in hexadecimal; empty where there is no text."""
    return "" if text is None else hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
