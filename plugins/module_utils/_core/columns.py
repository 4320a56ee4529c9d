# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rows of cells as text. Pure."""

from __future__ import annotations

import typing as t

from .untrusted import line


def columns(rows: t.Sequence[t.Sequence[str]], right: t.Container[int] = ()) -> str:
    """Align the cells of rows, each of which is made one printable line.

    :param right: columns whose cells are aligned to the right.
    """
    rows = [[line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    justify = [str.rjust if at in right else str.ljust for at in range(len(widths))]
    joined = ("  ".join([side(cell, width) for side, cell, width in zip(justify, row, widths)]) for row in rows)
    return "".join([f"{text.rstrip()}\n" for text in joined])
