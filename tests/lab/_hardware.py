# SPDX-License-Identifier: GPL-3.0-or-later
"""Change the simulated cards of a node while its driver runs: add cards, inject faults."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from _lab import ROOT, Lab, until
from _pods import is_announced, restart_plugin

from lab import hardware

MODULE = "/usr/lib/nvidia-sim/nvidia-sim"


@dataclasses.dataclass(frozen=True)
class More:
    """A card to be put in beside those that the lab has.

    :param minor: of its device node.
    """

    index: int
    minor: int
    mib: int
    name: str

    def line(self, node: str) -> str:
        facts = {
            "uuid": hardware.card_uuid(node, self.index),
            "minor": self.minor,
            "memory": self.mib,
            "bus": hardware.bus_address(self.index),
            "name": self.name,
        }
        return f"card {self.index} " + " ".join(f"{key}={value}" for key, value in facts.items()) + "\n"


@contextlib.contextmanager
def fault(lab: Lab, node: str, words: str) -> Iterator[None]:
    """Inject a fault into the simulated driver. The file is written in place, since containers have it mounted."""
    path = ROOT / lab.nodes[node]["hardware"] / "cards"
    healthy = path.read_text()
    try:
        path.write_text(f"{healthy}fault {words}\n")
        yield
    finally:
        path.write_text(healthy)


@contextlib.contextmanager
def more_cards(lab: Lab, node: str, cards: Sequence[More]) -> Iterator[None]:
    """Add cards to a node. The device plugin's container is recreated, since it keeps the device nodes of its start."""
    path = ROOT / lab.nodes[node]["hardware"] / "cards"
    before, had = path.read_text(), lab.cards(node)
    try:
        path.write_text(before + "".join(card.line(node) for card in cards))
        lab.ssh(node, f"{MODULE} start")
        restart_plugin(lab, node)
        until(lambda: is_announced(lab, node, len(had) + len(cards)), "all cards announced", 60)
        yield
    finally:
        path.write_text(before)
        # What the module has shown of them, and its own note of that.
        lines = []
        for card in cards:
            device = f"/dev/nvidia{card.minor}"
            lines.append(f"rm -rf {device} /run/nvidia-sim/proc/nvidia/gpus/{hardware.bus_address(card.index)}")
            lines.append(f"sed -i '\\#^{device}$#d' /run/nvidia-sim/devices")
        lab.ssh(node, "; ".join(lines))
        restart_plugin(lab, node)
        until(lambda: is_announced(lab, node, len(had)) and lab.cards(node) == had, "the cards as before", 60)
