# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""YAML without its comments, for who looks at it on a machine without a YAML library. Pure."""

from __future__ import annotations

import re

# A quoted value, which may hold what looks like a comment; or a comment. A quote within a plain value is none.
_QUOTED_OR_COMMENT = re.compile(
    r"""((?:^\s*|[-?]\s+|[:,\[{]\s*)(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'))|(?:^|\s)\#.*$""", re.VERBOSE
)


def uncommented(text: str) -> str:
    """The text with the same lines, and without what stands behind ``#``."""
    return "\n".join(_QUOTED_OR_COMMENT.sub(lambda found: found.group(1) or "", line) for line in text.splitlines())
