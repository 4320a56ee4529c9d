# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Whether NVIDIA's driver enforces the pods' shares, as the node's device plugin announces it. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .._core.types import JsonObject


def mode(value: t.Any) -> str:
    """Return the variable's value; YAML parses a bare ``off`` as false."""
    text = str(value)
    return "off" if text.lower() in ("off", "false", "no") else text


def announced_limit(node: JsonObject) -> str:
    """Return what a node's device plugin announces about limits; empty if nothing, as upstream's."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_LIMIT)
    return str(text) if text else ""
