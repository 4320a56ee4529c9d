# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the line of a program's output that says why it failed. Pure."""

from __future__ import annotations

import re

# A log line that is no failure, with or without a time before it.
_HARMLESS = re.compile(r"level=\"?(?:trace|debug|info|warn(?:ing)?)\b|^(?:TRAC|DEBU|INFO|WARN)[A-Z]*\[", re.IGNORECASE)
# What Go's runtime and flag parsers print behind the reason.
_BEHIND = re.compile(r"^(?:goroutine [0-9]+ \[|\[signal |USAGE:|Usage:|NAME:|See '.* --help')")
_PANIC = re.compile(r"^(?:panic|fatal error): ")


def reason_of(output: str, otherwise: str) -> str:
    """Return the line with the reason: that of a panic, else the first one that isn't a harmless log line.

    :param output: of the failed program.
    :param otherwise: returned where it printed nothing.
    """
    lines = []
    for line in output.splitlines():
        if _BEHIND.match(line):
            break
        if line.strip():
            lines.append(line.strip())
    panic = next((line for line in lines if _PANIC.match(line)), "")
    failed = next((line for line in lines if not _HARMLESS.search(line)), "")
    return panic or failed or (lines[-1] if lines else otherwise)
