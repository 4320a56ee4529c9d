# SPDX-License-Identifier: GPL-3.0-or-later
"""Texts that whoever took a node, or a tenant, puts where a text is allowed; and texts of honest people.

Each test of a sink sends all of these through the real writer.
"""

from __future__ import annotations

import re

# What no terminal, log, page or file of a report may get, whatever the text around it.
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
TEXTS = (
    "\x1b[2J\x1b[1;1Hcleared",
    "\x1b]0;title\x07after",
    "\x1b]52;c;cm0gLXJm\x1b\\clipboard",
    "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]0;never ends",
    "\x9b31mC1\x9d0;x\x9c",
    "over\rwritten\x08\x08\x7f",
    "two\nok: [forged]",
    "two\r\nlines\x0b\x0c",
    "nul\x00byte",
    "bidi\u202egpj.exe\u202c\u2066\u2069\u200e\u200f",
    "separated\u2028line\u2029paragraph\x85next",
    "\ufffe\uffffnoncharacters\ufeff",
    "lone\ud800surrogate\udfff",
    "]]></failure><x a='&\"",
    "<script>alert(1)</script>",
    "{{ lookup('pipe', 'touch MARKER') }}",
    "{% for one in [1] %}x{% endfor %}",
    '"} 1\nforged_metric{a="b',
    "back\\slash\\",
    "x" * 100_000,
)
# Nothing of these may change.
HONEST = (
    "Grüße aus Köln",
    "显卡内存不足",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "👩\u200d💻 ok",
    "naïve — \u201cquoted\u201d 1 °C",
    "/dev/nvidia0: a=b, 'c'",
)

# No address of a machine.
ADDRESSES = (
    "{{ lookup('pipe', 'touch MARKER') }}",
    "192.0.2.7\n      ansible_connection: local",
    "192.0.2.7 ",
    "-oProxyCommand=touch MARKER",
    "fe80::1%{{ 1 }}",
    "192.0.2.7/24",
    "user@192.0.2.7",
    "192.0.2.7:22",
    "a" * 254,
    "gpu_1",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "x\x1b[31m",
)
# Addresses that lead to the machine that connects, to many machines, or to none.
NOT_OTHERS = (
    *("127.0.0.1", "127.8.9.1", "::1", "0.0.0.0", "0.1.2.3", "::", "::ffff:127.0.0.1", "localhost", "x.localhost"),
    *("224.0.0.1", "ff02::1", "169.254.169.254", "fe80::1", "255.255.255.255", "240.0.0.1", "LOCALHOST"),
)
# No names of nodes.
NAMES = (
    *(
        "",
        "-oProxyCommand=x",
        "a[1:3]",
        "a,b",
        "a b",
        "../../etc/passwd",
        "a/b",
        "..",
        ".",
        "A",
        "a_b",
        "a.",
        "x" * 254,
    ),
    *("a\n  b:", "{{ x }}", "a\x1b[31m", "gpu_nodes", "a:22", "über"),
)
# Names of nodes that mean something else to Ansible.
RESERVED = ("localhost", "127.0.0.1", "all", "ungrouped", "localhost.localdomain")
