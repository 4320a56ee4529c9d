# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cards that Kubernetes must not get: the variable ``gpu_exclude``. Pure.

An entry is a PCI address, a UUID, or a pattern of the name that the driver has for the card. This file alone decides
which card an entry names; the servers' image takes it as it is.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
import typing as t

from .._core.errors import BadInput

ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.([0-7]))?")
UUID = re.compile(r"gpu-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MODEL = re.compile(r"[a-z0-9 *?\[\]()./_+-]+")
# A node's entries, and the nodes of one option of the servers: the kernel limits an argument to 128 KiB.
MOST_ENTRIES, MOST_NODES = 256, 400

FORMS = "a PCI address (0000:3b:00.0), a UUID (GPU-…) or a pattern of a model (NVIDIA T400*)"


def address_of(text: str) -> str:
    """Return a PCI address as the kernel writes it; empty for any other text."""
    match = ADDRESS.fullmatch(text.strip().lower())
    if match is None:
        return ""
    domain, rest, function = match.groups()
    # The kernel writes four digits, and more of a domain that has them.
    return f"{int(domain or '0', 16):04x}:{rest}.{function or '0'}"


def problem(entry: t.Any) -> str:
    """Return what is wrong with an entry, as the end of a sentence about it; empty for a usable one."""
    if not isinstance(entry, str) or not entry.strip():
        return f"is neither {FORMS}"
    text = entry.strip().lower()
    if text.isdigit():
        return "is an index, which changes with the cards that the driver finds: use the card's PCI address or its UUID"
    if address_of(text) or UUID.fullmatch(text):
        return ""
    if text.startswith("mig-"):
        return "is a MIG device: only whole cards can be left alone"
    if text.startswith("gpu-") or ":" in text or not MODEL.fullmatch(text):
        return f"is neither {FORMS}"
    if not re.search(r"[a-z0-9]", text):
        return "matches every card: take the machine out of gpu_nodes instead"
    return ""


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """The entries of one node, in lower case and with complete addresses."""

    entries: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The PCI addresses among them."""
        return tuple(entry for entry in self.entries if ADDRESS.fullmatch(entry))

    def of(self, address: str, uuid: str = "", name: str = "") -> str:
        """Return the entry that names a card; empty where none does.

        :param address: its PCI address; as all others empty where it is unknown.
        :param uuid: the driver's UUID of it.
        :param name: the driver's name of it.
        """
        known = {address_of(address), uuid.lower()} - {""}
        for entry in self.entries:
            if entry in known:
                return entry
        # The driver's name has its maker's in front, or hasn't.
        names = {name.lower(), name.lower().removeprefix("nvidia ")} - {""}
        # A bracket is one: names have them, and Python 3.9 fails on [z-a].
        for entry in self.entries:
            pattern = entry.replace("[", "[[]")
            if not _is_identity(entry) and any(fnmatch.fnmatchcase(text, pattern) for text in names):
                return entry
        return ""


def _is_identity(entry: str) -> bool:
    return bool(ADDRESS.fullmatch(entry) or UUID.fullmatch(entry))


NOTHING = Exclusion()


def parse(entries: t.Iterable[t.Any]) -> Exclusion:
    """Return a node's entries.

    :raises BadInput: an entry is unusable, with its sentence.
    """
    entered = []
    for entry in entries:
        why = problem(entry)
        if why:
            raise BadInput(f"gpu_exclude: {entry!r} {why}")
        entered.append(address_of(entry) or entry.strip().lower())
    if len(entered) > MOST_ENTRIES:
        raise BadInput(f"gpu_exclude: {len(entered)} entries are more than a node has cards")
    return Exclusion(tuple(dict.fromkeys(entered)))


def options(by_node: t.Mapping[str, Exclusion]) -> list[str]:
    """Return the values of the servers' option ``--exclude-cards``: one for all nodes with the same entries."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node in sorted(by_node):
        if by_node[node].entries:
            groups.setdefault(by_node[node].entries, []).append(node)
    return [
        json.dumps({"cards": list(entries), "nodes": nodes[at : at + MOST_NODES]}, separators=(",", ":"))
        for entries, nodes in sorted(groups.items())
        for at in range(0, len(nodes), MOST_NODES)
    ]


def of_node(node: str, values: t.Iterable[str]) -> Exclusion:
    """Return a node's entries from the values of ``--exclude-cards``.

    :raises BadInput: a value isn't what ``options`` makes.
    """
    entries: list[str] = []
    for value in values:
        try:
            given = json.loads(value)
            nodes, cards = given["nodes"], given["cards"]
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(f"{value!r} isn't a JSON object with nodes and cards") from error
        if not isinstance(nodes, list) or not isinstance(cards, list):
            raise BadInput(f"{value!r} has no lists of nodes and cards")
        if node in nodes:
            entries += cards
    return parse(entries)
