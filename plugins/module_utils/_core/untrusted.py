# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The boundary for values that a node, the Kubernetes API or a tenant chose: each gets a type that says what it is.

A name or an address is refused where it isn't one (``Refused``). Free text is never refused: ``line`` and ``lines``
return it as a terminal, a log, XML and HTML can show it. Pure; the servers' image takes this file as it is.
"""

from __future__ import annotations

import ipaddress
import re
import typing as t

# An IP address in its canonical form, or a DNS name.
Address = t.NewType("Address", str)
# The name of a Node object, which is a DNS subdomain.
NodeName = t.NewType("NodeName", str)
# The value of a label, which may be empty.
LabelValue = t.NewType("LabelValue", str)
# The version of a component, such as v1.36.3 or v1.30.1+k3s1.
Version = t.NewType("Version", str)
# One component of a URL's path, with everything quoted that isn't a letter, a digit or one of ``-._~``.
Component = t.NewType("Component", str)
# Printable text without a line break.
Line = t.NewType("Line", str)
# The same with line breaks and tabs.
Lines = t.NewType("Lines", str)

# Characters. A longer text is a log or an attack; its start is enough.
LONGEST = 2000
# Characters of a text with several lines, such as a table of a large cluster.
LONGEST_LINES = 64 * 1024 * 1024
INSTEAD = "\N{REPLACEMENT CHARACTER}"
ENDING = "…"

_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# Kubernetes limits the whole name only.
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
LONGEST_NAME = 253
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_VERSION = re.compile(r"v?[0-9][-+.~\w]{0,127}", re.ASCII)
# What the C library resolves as an IPv4 address in one of its old forms: 127.1, 0x7f.1, 2130706433.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# Names of the machine itself in usual files of hosts.
_OWN_NAMES = re.compile(r"localhost[46]?|ip6-(?:localhost|loopback)|localhost[46]?\.localdomain[46]?|.*\.localhost")
# What Ansible takes as its own machine, or as a group.
_RESERVED = frozenset(("localhost", "127.0.0.1", "all", "ungrouped"))

# Bytes of a path's component that a URL has another meaning for, or can't have.
_TO_QUOTE = re.compile(rb"[^\w.~-]")
# Colors and their end, which programs write into logs; they change nothing but colors.
_COLORS = re.compile("\x1b\\[[0-9;:]*m")
# Control characters (C0, DEL, C1), those that reorder or hide text, and those that XML forbids.
_HIDDEN = (
    "\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_OF_A_LINE = re.compile(f"[\x00-\x1f{_HIDDEN}]")
_OF_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_HIDDEN}]")


class Refused(ValueError):
    """A value isn't what it should be.

    :ivar code: why, as in ``REFUSALS``.
    """

    def __init__(self, code: str) -> None:
        super().__init__(REFUSALS[code])
        self.code = code


REFUSALS: t.Mapping[str, str] = {
    "not-an-address": "is neither an IP address nor a DNS name",
    "own-machine": "names the machine that connects to it",
    "no-machine": "is no address of a single machine that others reach (multicast, link-local or reserved)",
    "not-a-node-name": "isn't the name of a node (a DNS subdomain)",
    "reserved-name": "is a name that has a meaning of its own in an inventory",
    "not-a-label-value": "isn't the value of a label",
    "not-a-version": "isn't a version",
    "no-name": "is empty, or is a step in a path",
}


def address(value: t.Any) -> Address:
    """Return the address of a machine in its canonical form.

    :raises Refused: it is no IP address and no DNS name (RFC 1123).
    """
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        raise Refused("not-an-address")
    ip = _ip(value)
    if ip is not None:
        return Address(str(getattr(ip, "ipv4_mapped", None) or ip))
    name = value.lower()
    if not _DNS_NAME.fullmatch(name) or _NUMBER.fullmatch(name.rpartition(".")[2]):
        raise Refused("not-an-address")
    return Address(name)


def other_machine(value: t.Any) -> Address:
    """Return the address of a machine by which another machine reaches it; as ``address``.

    :raises Refused: it isn't one, or it would lead to the machine that connects, to many, or to none.
    """
    name = address(value)
    ip = _ip(name)
    if ip is None:
        if _OWN_NAMES.fullmatch(name):
            raise Refused("own-machine")
    elif ip.is_loopback or ip in _THIS_NETWORK:
        raise Refused("own-machine")
    elif ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_reserved:
        raise Refused("no-machine")
    return name


# The C library connects to 0.0.0.0 on the machine itself, and so do systems to the rest of it.
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an IP address; None for any other text, and for one with a zone, which may be any text."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def node_name(value: t.Any) -> NodeName:
    """Return the name of a node.

    :raises Refused: no Node object can have it.
    """
    if not isinstance(value, str) or len(value) > LONGEST_NAME or not _SUBDOMAIN.fullmatch(value):
        raise Refused("not-a-node-name")
    return NodeName(value)


def host_name(value: t.Any) -> NodeName:
    """Return the name of a node that may also be a host of an inventory.

    :raises Refused: no Node object can have it, or it means another thing to Ansible.
    """
    name = node_name(value)
    if name in _RESERVED or _OWN_NAMES.fullmatch(name):
        raise Refused("reserved-name")
    return name


def label_value(value: t.Any) -> LabelValue:
    """Return the value of a label.

    :raises Refused: no label can have it.
    """
    if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
        raise Refused("not-a-label-value")
    return LabelValue(value)


def version(value: t.Any) -> Version:
    """Return the version of a component.

    :raises Refused: it isn't one.
    """
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise Refused("not-a-version")
    return Version(value)


def component(value: t.Any) -> Component:
    """Return one component of a URL's path, quoted.

    :raises Refused: it is empty, or ``.`` or ``..``, so that the path would name another thing.
    """
    text = str(value or "")
    if text in ("", ".", ".."):
        raise Refused("no-name")
    return Component(_TO_QUOTE.sub(lambda match: b"%%%02X" % match[0][0], text.encode("utf-8", "replace")).decode())


def path(*values: t.Any) -> str:
    """Return the absolute path of a URL from its components, each quoted.

    :raises Refused: one of them names no single thing.
    """
    return "".join(f"/{component(value)}" for value in values)


def line(value: t.Any, longest: int = LONGEST) -> Line:
    """Return any value as one printable line; empty for None.

    :param longest: characters.
    """
    text = _text(value)
    if len(text) <= longest and text.isascii() and text.isprintable() and "  " not in text:
        return Line(text if text[:1] != " " != text[-1:] else text.strip())
    # Truncated first, so that megabytes of junk cost nothing.
    cut = _OF_A_LINE.sub(INSTEAD, " ".join(_COLORS.sub("", text[: longest * 4]).split()))
    whole = len(cut) <= longest and len(text) <= longest * 4
    return Line(cut if whole else cut[: longest - 1] + ENDING)


def exact(value: t.Any, longest: int = LONGEST) -> Line:
    """Return any value as printable text without a line break, of which every other character stays.

    :param longest: characters.
    """
    return Line(_OF_A_LINE.sub(INSTEAD, _text(value)[:longest]))


def lines(value: t.Any, longest: int = LONGEST_LINES) -> Lines:
    """Return any value as printable text that keeps its line breaks and tabs; empty for None.

    :param longest: characters.
    """
    text = _text(value)
    cut = text if len(text) <= longest else text[: longest - 1] + ENDING
    if cut.isascii() and (cut.isprintable() or cut.replace("\n", "").isprintable()):
        return Lines(cut)
    return Lines(_OF_LINES.sub(INSTEAD, _COLORS.sub("", cut.replace("\r\n", "\n"))))


def _text(value: t.Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else str(value)
