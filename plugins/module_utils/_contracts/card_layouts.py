# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The form that NVIDIA's documents of MIG and vGPU layouts share, validated before anything is changed. Pure.

A document has named layouts, each a list of entries, and an entry says which cards it is for: by ``devices`` (their
indices in the order of their PCI addresses), and by ``device-filter`` (their PCI ids).
https://github.com/NVIDIA/mig-parted, https://github.com/NVIDIA/vgpu-device-manager
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.types import JsonObject

VERSION = "v1"
PCI_ID = re.compile(r"0x[0-9A-Fa-f]{8}")


class Problem(Exception):
    """A reason, where it is and what to do.

    :param code: what kind of problem it is.
    :param where: the variable, with the keys below it.
    :param text: one sentence, which is printed after ``where``.
    """

    def __init__(self, code: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.code, self.where = code, where

    def result(self) -> JsonObject:
        """Return it as data, with the whole sentence as ``message``."""
        return {"code": self.code, "where": self.where, "message": str(self)}


@dataclasses.dataclass(frozen=True)
class Cards:
    """
    :param devices: indices of the cards; None for all.
    :param filter: PCI ids of the cards, device then vendor; empty for all.
    """

    devices: tuple[int, ...] | None
    filter: tuple[str, ...]

    def overlap(self, other: Cards) -> bool:
        """Return whether both can be for one card; cards of different kinds can't be."""
        kinds = not self.filter or not other.filter or set(self.filter) & set(other.filter)
        return bool(kinds) and (
            self.devices is None or other.devices is None or bool({*self.devices} & {*other.devices})
        )

    def match(self, index: int, pci_id: str) -> bool:
        """Return whether they are for this card.

        :param pci_id: as ``0x20B010DE``.
        """
        return (self.devices is None or index in self.devices) and (not self.filter or pci_id.upper() in self.filter)


class Entry(t.Protocol):
    """One entry of a layout."""

    @property
    def cards(self) -> Cards: ...


Parsed = t.TypeVar("Parsed", bound=Entry)


def parse_layouts(
    document: t.Any, key: str, parse: t.Callable[[t.Any, str], Parsed], where: str
) -> dict[str, tuple[Parsed, ...]]:
    """Return the entries of a document's layouts by the layouts' names.

    :param document: as YAML has it; empty for none.
    :param key: of the layouts in it.
    :param parse: returns an entry; its second argument is where that is.
    :param where: the variable that has the document.
    :raises Problem: NVIDIA's tool wouldn't accept it.
    """
    if not document:
        return {}
    if not isinstance(document, dict) or set(document) != {"version", key} or document["version"] != VERSION:
        raise Problem("geometry_document", where, f"it needs the keys version ({VERSION}) and {key}, and no others")
    configs = document[key]
    if not isinstance(configs, dict) or not configs:
        raise Problem("geometry_document", f"{where}.{key}", "it needs at least one named layout")
    return {str(name): _entries(config, parse, f"{where}.{key}.{name}") for name, config in configs.items()}


def _entries(entries: t.Any, parse: t.Callable[[t.Any, str], Parsed], where: str) -> tuple[Parsed, ...]:
    if not isinstance(entries, list) or not entries:
        raise Problem("geometry_entry", where, "it needs a list of entries")
    parsed = tuple(parse(entry, f"{where}[{number}]") for number, entry in enumerate(entries))
    for number, entry in enumerate(parsed):
        if any(entry.cards.overlap(other.cards) for other in parsed[:number]):
            raise Problem("geometry_overlap", where, "two entries are for the same cards; name other devices in one")
    return parsed


def whole(value: t.Any) -> bool:
    """Return whether a value is a whole number; Ansible's numbers are of a class of their own."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_cards(entry: JsonObject, where: str) -> Cards:
    """Return the cards that an entry is for.

    :param entry: it has ``devices``, and may have ``device-filter``.
    :raises Problem: NVIDIA's tool wouldn't accept it.
    """
    pci_ids = entry.get("device-filter") or ()
    if isinstance(pci_ids, str):
        pci_ids = (pci_ids,)
    if not isinstance(pci_ids, (list, tuple)) or not all(
        isinstance(pci_id, str) and PCI_ID.fullmatch(pci_id) for pci_id in pci_ids
    ):
        raise Problem("geometry_entry", f"{where}.device-filter", "it has PCI ids, as 0x20B010DE: device, then vendor")
    return Cards(_devices(entry["devices"], where), tuple(pci_id.upper() for pci_id in pci_ids))


def _devices(given: t.Any, where: str) -> tuple[int, ...] | None:
    if given == "all":
        return None
    indices = isinstance(given, list) and given and all(map(whole, given))
    if not indices or len(set(given)) != len(given):
        raise Problem("geometry_entry", f"{where}.devices", "it is all, or a list of different indices of cards")
    return tuple(given)
