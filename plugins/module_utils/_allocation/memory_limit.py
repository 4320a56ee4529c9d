# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether NVIDIA's driver enforces the pods' shares, as the node's device plugin announces it. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import gpushare as contract
from .._core.types import JsonObject
from .._core.untrusted import line


def mode(value: t.Any) -> str:
    """Return the variable's value; YAML parses a bare ``off`` as false."""
    text = str(value)
    return "off" if text.lower() in ("off", "false", "no") else text


def announced_limit(node: JsonObject) -> str:
    """Return what a node's device plugin announces about limits; empty if nothing, as upstream's."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_LIMIT)
    return line(text or "")


def limit_of_cards(limits: t.Iterable[str]) -> str:
    """Return what a node's cards in slices say about limits, as a device plugin announces it; the worst card counts.

    :param limits: of each card: enforced, off, or the code of the reason why there is none; empty if unknown.
    """
    known = [one for one in limits if one]
    codes = sorted({one for one in known if one not in (contract.LIMIT_ENFORCED, contract.LIMIT_OFF)})
    if codes:
        return contract.LIMIT_UNENFORCED + ", ".join(codes)
    return contract.LIMIT_OFF if contract.LIMIT_OFF in known else known[0] if known else ""
