# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""MIG layouts in the format of NVIDIA's mig-parted, checked before anything is changed. Pure.

A document has named layouts, each a list of entries: which cards (``devices``, ``device-filter``), whether MIG is on,
and how many instances of each profile a card gets. https://github.com/NVIDIA/mig-parted
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ...module_utils._contracts import nvidia_plugin as contract
from .problem import Problem

VERSION = "v1"
DOCUMENT_KEYS = frozenset(("version", "mig-configs"))
ENTRY_KEYS = frozenset(("devices", "device-filter", "mig-enabled", "mig-devices"))
# Compute slices and memory in GB, with the slices of a compute instance in front and the engines behind.
PROFILE = re.compile(
    r"(?:(?P<compute>[1-7])c\.)?(?P<slices>[1-7])g\.(?P<memory>[1-9][0-9]{0,2})gb(?P<engines>[+-][a-z.]+)?"
)
# Of every card that supports MIG.
SLICES = 7


@dataclasses.dataclass(frozen=True)
class Entry:
    """
    :param devices: indices of the cards; None for all.
    :param filter: PCI ids of the cards; empty for all.
    :param profiles: the number of instances by profile; empty where MIG is off.
    """

    devices: tuple[int, ...] | None
    filter: tuple[str, ...]
    enabled: bool
    profiles: t.Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One named layout."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profiles of all cards, sorted."""
        return tuple(sorted({name for one in self.entries for name, count in one.profiles.items() if count}))

    @property
    def whole_cards(self) -> bool:
        """Whether a card may stay undivided."""
        return not all(one.enabled for one in self.entries)

    def resources(self) -> tuple[str, ...]:
        """Return the resources that the plugin announces for it by the strategy ``mixed``."""
        whole = (contract.RESOURCE,) if self.whole_cards else ()
        return (*whole, *(resource_of(one) for one in self.profiles))


def resource_of(profile: str) -> str:
    """Return the plugin's resource for a profile; a resource's name has no ``+``."""
    return contract.RESOURCE_MIG + profile.replace("+", ".")


def layouts(document: t.Any, where: str) -> dict[str, Layout]:
    """Return the layouts of a document by name.

    :param document: as YAML has it; empty for none.
    :param where: the variable that has it.
    :raises Problem: mig-parted wouldn't accept it, or no card can have it.
    """
    if not document:
        return {}
    if not isinstance(document, dict) or set(document) != DOCUMENT_KEYS or document["version"] != VERSION:
        raise Problem(
            "geometry_document", where, f"it needs the keys version ({VERSION}) and mig-configs, and no others"
        )
    configs = document["mig-configs"]
    if not isinstance(configs, dict) or not configs:
        raise Problem("geometry_document", f"{where}.mig-configs", "it needs at least one named layout")
    return {str(name): _layout(str(name), one, f"{where}.mig-configs.{name}") for name, one in configs.items()}


def _layout(name: str, entries: t.Any, where: str) -> Layout:
    if not isinstance(entries, list) or not entries:
        raise Problem("geometry_entry", where, "it needs a list of entries")
    found = tuple(_entry(one, f"{where}[{number}]") for number, one in enumerate(entries))
    for number, one in enumerate(found):
        if any(_overlap(one, other) for other in found[:number]):
            raise Problem("geometry_overlap", where, "two entries are for the same cards; name other devices in one")
    return Layout(name, found)


def _overlap(one: Entry, other: Entry) -> bool:
    """Return whether two entries can be for one card; entries of different kinds of cards can't."""
    kinds = not one.filter or not other.filter or set(one.filter) & set(other.filter)
    return bool(kinds) and (one.devices is None or other.devices is None or bool({*one.devices} & {*other.devices}))


def _entry(given: t.Any, where: str) -> Entry:
    if not isinstance(given, dict) or not {"devices", "mig-enabled"} <= set(given) <= ENTRY_KEYS:
        raise Problem(
            "geometry_entry", where, "it needs devices and mig-enabled, and may have device-filter and mig-devices"
        )
    enabled, profiles = given["mig-enabled"], given.get("mig-devices") or {}
    if not isinstance(enabled, bool):
        raise Problem("geometry_entry", f"{where}.mig-enabled", "it is true or false")
    if profiles and not enabled:
        raise Problem("geometry_entry", f"{where}.mig-devices", "a card without MIG has none; set mig-enabled to true")
    pci = given.get("device-filter") or ()
    pci = (pci,) if isinstance(pci, str) else tuple(pci) if isinstance(pci, (list, tuple)) else (None,)
    if not all(isinstance(one, str) and re.fullmatch(r"0x[0-9A-Fa-f]{8}", one) for one in pci):
        raise Problem("geometry_entry", f"{where}.device-filter", "it has PCI ids, as 0x20B010DE: device, then vendor")
    return Entry(
        _devices(given["devices"], where), tuple(one.upper() for one in pci), enabled, _profiles(profiles, where)
    )


def whole(value: t.Any) -> bool:
    """Return whether a value is a whole number; Ansible's numbers are of a class of their own."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _devices(given: t.Any, where: str) -> tuple[int, ...] | None:
    if given == "all":
        return None
    indices = isinstance(given, list) and given and all(map(whole, given))
    if not indices or len(set(given)) != len(given):
        raise Problem("geometry_entry", f"{where}.devices", "it is all, or a list of different indices of cards")
    return tuple(given)


def _profiles(given: t.Any, where: str) -> dict[str, int]:
    where = f"{where}.mig-devices"
    if not isinstance(given, dict):
        raise Problem("geometry_entry", where, "it has the number of instances by profile, as 1g.5gb: 7")
    slices = media = 0
    for name, count in given.items():
        found = PROFILE.fullmatch(str(name))
        if found is None or not whole(count):
            raise Problem("geometry_profile", f"{where}.{name}", "it is a profile and a number, as 1g.5gb: 7")
        if found["compute"] and found["compute"] != found["slices"]:
            raise Problem("geometry_profile", f"{where}.{name}", "the plugin announces no part of a GPU instance")
        slices += int(found["slices"]) * count
        media += count * (found["engines"] == "+me")
    if slices > SLICES:
        raise Problem(
            "geometry_too_large", where, f"its instances need {slices} compute slices, and a card has {SLICES}"
        )
    if media > 1:
        raise Problem("geometry_too_large", where, "a card has media engines for one instance with +me")
    return {str(name): count for name, count in given.items()}


def single_profile(layout: Layout) -> bool:
    """Return whether the plugin's strategy ``single`` can serve a layout: every card divided into one profile."""
    return len(layout.profiles) == 1 and all(one.enabled and any(one.profiles.values()) for one in layout.entries)
