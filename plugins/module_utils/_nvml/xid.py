# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse Xid errors in the kernel's log, their only record. No I/O.

Source: https://docs.nvidia.com/deploy/xid-errors, and the kernel's Documentation/ABI/testing/dev-kmsg.
"""

from __future__ import annotations

import re
import typing as t

# A record of /dev/kmsg: priority and facility, number, time, flags; then the text. Facility 0 is the kernel:
# records that programs write have another.
RECORD = re.compile(r"(\d{1,6}),\d+,\d+,[^;]*;(.*)", re.DOTALL)
XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\): (\d{1,5})\b"
)
FACILITY = 8


def by_address(records: t.Iterable[str]) -> dict[str, list[int]]:
    """Return the codes by PCI address (``00000000:3B:00``), each once, in the order of their first appearance."""
    found: dict[str, list[int]] = {}
    for record in records:
        parts = RECORD.match(record)
        xid = XID.match(parts.group(2)) if parts and int(parts.group(1)) < FACILITY else None
        if xid:
            domain, bus, device = (xid.group(number).upper() for number in (1, 2, 3))
            codes = found.setdefault(f"{domain:0>8}:{bus}:{device}", [])
            code = int(xid.group(4))
            if code not in codes:
                codes.append(code)
    return found
