# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Messages whose cause may stand at their end. Pure."""

from __future__ import annotations

import typing as t

from .untrusted import ENDING, Line, line


def both_ends(value: t.Any, longest: int) -> Line:
    """Return any value as one printable line, of a long one its start and its end.

    Container runtimes write the cause behind everything that it has stopped.

    :param longest: characters.
    """
    text = "" if value is None else str(value)
    if len(text) > longest * 8:
        text = f"{text[: longest * 4]} {text[-longest * 4 :]}"
    whole = line(text, len(text))
    last = longest // 2
    return whole if len(whole) <= longest else Line(whole[: longest - 1 - last] + ENDING + whole[-last:])
