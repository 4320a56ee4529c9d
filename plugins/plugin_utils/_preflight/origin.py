# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a variable is set: file and line, as ansible-core tags the values that it reads."""

from __future__ import annotations

import os
import typing as t

try:
    # There is no public way to a tag. Without it the place isn't named.
    from ansible._internal._datatag._tags import Origin, VaultedValue
except ImportError:
    Origin = VaultedValue = None


def where(*tagged: t.Any) -> str:
    """Return where the first of these values that has a tag was set, in parentheses; empty where none is known."""
    for value in tagged if Origin else ():
        origin = Origin.get_tag(value)
        if origin is not None and origin.path:
            near = os.path.relpath(origin.path)
            path = origin.path if near.startswith(os.pardir) else near
            return f" ({path}:{origin.line_num})" if origin.line_num else f" ({path})"
        if origin is not None and origin.description:
            return f" ({origin.description.strip('<>')})"
    return ""


def is_vaulted(value: t.Any) -> bool:
    """Return whether the value was encrypted by ansible-vault, and mustn't be printed."""
    return VaultedValue is not None and VaultedValue.get_tag(value) is not None
