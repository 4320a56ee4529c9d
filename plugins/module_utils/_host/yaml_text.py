# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove the comments of YAML, for searching it on machines without a YAML library. Pure."""

from __future__ import annotations

import re

# A quoted value, which may contain '#', or a comment. Quotes inside plain values have no meaning.
_QUOTED_OR_COMMENT = re.compile(
    r"""((?:^\s*|[-?]\s+|[:,\[{]\s*)(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'))|(?:^|\s)\#.*$""", re.VERBOSE
)


def uncommented(text: str) -> str:
    """Return the text with the same lines, without comments."""
    return "\n".join(_QUOTED_OR_COMMENT.sub(lambda found: found.group(1) or "", line) for line in text.splitlines())
