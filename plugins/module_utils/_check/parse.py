# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text of messages, and numbers in text. No I/O."""

from __future__ import annotations

import re
import typing as t

# Above any memory in MiB and any count.
MAX_NUMBER = 10**15
# Python refuses to convert thousands of digits.
MAX_DIGITS = 24

_NUMBER = re.compile(f"-?[0-9]{{1,{MAX_DIGITS}}}")


def shorten(text: str, most: int = 60) -> str:
    """Reduce text to one line of at most ``most`` characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def parse_int(text: str | None) -> int | None:
    """Parse an integer; None for other text, and for one of too many digits."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def plural(number: int, singular: str, more: str = "") -> str:
    """Format a count: ``1 GPU``, ``2 GPUs``."""
    return f"{number} {singular if number == 1 else more or singular + 's'}"


def join(names: t.Iterable[t.Any], most: int = 6) -> str:
    """Join names by commas, and count those beyond ``most``."""
    every = [str(name) for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
