# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The line of a program's output that says why it failed."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._host.systemd import reason_of


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "ended with 1"),
        ("\n \n", "ended with 1"),
        ("containerd: expected newline (3, 1)\n", "containerd: expected newline (3, 1)"),
        ("a: bad key\n\ngoroutine 1 [running]:\nmain.main()\n", "a: bad key"),
        (
            "log\npanic: interface conversion: not a map\n\ngoroutine 1 [running]:\nx\n\t/y.go:3 +0x1\n",
            "panic: interface conversion: not a map",
        ),
        ("fatal error: stack overflow\n\nruntime stack:\nmore\n", "fatal error: stack overflow"),
        (
            'time="2026" level=info msg="starting"\ntime="2026" level=fatal msg="bad table"\nbye\n',
            'time="2026" level=fatal msg="bad table"',
        ),
        (
            "INFO[0000] starting\nWARN[0000] old\nFATA[0000] validating runtimes\nUsage:\n  crio\n",
            "FATA[0000] validating runtimes",
        ),
        ("INFO[0000] only this\n", "INFO[0000] only this"),
    ],
)
def test_the_line_with_the_reason(output: str, reason: str) -> None:
    assert reason_of(output, "ended with 1") == reason
