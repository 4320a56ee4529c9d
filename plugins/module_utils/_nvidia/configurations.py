# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Configurations of NVIDIA's device plugin and MIG layouts, validated before anything is changed. Pure.

An entry of a MIG layout says of some cards whether MIG is on, and how many instances of each profile a card gets.
https://github.com/NVIDIA/mig-parted

https://github.com/NVIDIA/k8s-device-plugin, version 0.20
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._contracts import card_layouts
from .._contracts import nvidia_plugin as contract
from .._contracts.card_layouts import Cards, Problem, parse_cards, whole
from .._core.types import JsonObject

ENTRY_KEYS = frozenset(("devices", "device-filter", "mig-enabled", "mig-devices"))
# Compute slices and memory in GB, with the slices of a compute instance in front and the engines behind.
PROFILE = re.compile(
    r"(?:(?P<compute>[1-7])c\.)?(?P<slices>[1-7])g\.(?P<memory>[1-9][0-9]{0,2})gb(?P<engines>[+-][a-z.]+)?"
)
# Each card that supports MIG has as many.
SLICES = 7


@dataclasses.dataclass(frozen=True)
class Entry:
    """
    :param profiles: the number of instances by profile; empty where MIG is off.
    """

    cards: Cards
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
        return tuple(sorted({name for entry in self.entries for name, count in entry.profiles.items() if count}))

    @property
    def whole_cards(self) -> bool:
        """Whether a card may stay undivided."""
        return not all(entry.enabled for entry in self.entries)

    def resources(self) -> tuple[str, ...]:
        """Return the resources that the plugin announces for it by the strategy ``mixed``."""
        whole = (contract.RESOURCE,) if self.whole_cards else ()
        return (*whole, *(resource_of(profile) for profile in self.profiles))


def resource_of(profile: str) -> str:
    """Return the plugin's resource for a profile; a resource's name has no ``+``."""
    return contract.RESOURCE_MIG + profile.replace("+", ".")


def parse_layouts(document: t.Any, where: str) -> dict[str, Layout]:
    """Return the layouts of a document by name.

    :param document: as YAML has it; empty for none.
    :param where: the variable that has it.
    :raises Problem: mig-parted wouldn't accept it, or no card can have it.
    """
    parsed = card_layouts.parse_layouts(document, "mig-configs", _entry, where)
    return {name: Layout(name, entries) for name, entries in parsed.items()}


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
    return Entry(parse_cards(given, where), enabled, _profiles(profiles, where))


def _profiles(given: t.Any, where: str) -> dict[str, int]:
    where = f"{where}.mig-devices"
    if not isinstance(given, dict):
        raise Problem("geometry_entry", where, "it has the number of instances by profile, as 1g.5gb: 7")
    slices = media = 0
    for name, count in given.items():
        match = PROFILE.fullmatch(str(name))
        if match is None or not whole(count):
            raise Problem("geometry_profile", f"{where}.{name}", "it is a profile and a number, as 1g.5gb: 7")
        if match["compute"] and match["compute"] != match["slices"]:
            raise Problem("geometry_profile", f"{where}.{name}", "the plugin announces no part of a GPU instance")
        slices += int(match["slices"]) * count
        if match["engines"] == "+me":
            media += count
    if slices > SLICES:
        raise Problem(
            "geometry_too_large", where, f"its instances need {slices} compute slices, and a card has {SLICES}"
        )
    if media > 1:
        raise Problem("geometry_too_large", where, "a card has media engines for one instance with +me")
    return {str(name): count for name, count in given.items()}


def single_profile(layout: Layout) -> bool:
    """Return whether the plugin's strategy ``single`` can serve a layout: every card divided into one profile."""
    return len(layout.profiles) == 1 and all(entry.enabled and any(entry.profiles.values()) for entry in layout.entries)


NONE, TIME_SLICING, MPS = "none", "time-slicing", "mps"
SHARING = (NONE, TIME_SLICING, MPS)
MIG = (NONE, "single", "mixed")
ENVVAR, CDI_CRI = "envvar", "cdi-cri"
LIST_STRATEGIES = (ENVVAR, "volume-mounts", "cdi-annotations", CDI_CRI)
# Clients of an MPS server since Volta.
MOST_MPS = 48
# A key of a ConfigMap, which is a label's value, too.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """How the plugin announces the cards of a node.

    :param sharing: ``none`` (one pod has a card), ``time-slicing`` (no limits) or ``mps`` (equal memory).
    :param replicas: pods of one card, or of one MIG device.
    :param rename: the resource of shared cards ends with ``.shared``.
    :param fail_requests_greater_than_one: a container may not request two replicas.
    :param resources: which resources are shared.
    :param mig_strategy: ``none`` (MIG devices aren't announced), ``single`` or ``mixed``.
    :param layout: how the cards are divided; None as they are.
    :param device_list_strategy: how a container gets its card; empty by what the node has.
    :param announces: resources that the nodes announce, where that doesn't follow from the rest.
    """

    name: str
    sharing: str = NONE
    replicas: int = 1
    rename: bool = False
    fail_requests_greater_than_one: bool = False
    resources: tuple[str, ...] = (contract.RESOURCE,)
    mig_strategy: str = NONE
    layout: Layout | None = None
    device_list_strategy: str = ""
    announces: tuple[str, ...] = ()

    def announced(self, cards: int) -> dict[str, int]:
        """Return the resources that a node with this configuration announces, and how many; 0 where it depends on MIG.

        :param cards: of the node; 0 if unknown.
        """
        whole = self.layout.resources() if self.layout and self.mig_strategy == "mixed" else (contract.RESOURCE,)
        resources = self.announces or whole
        shared = self.resources if self.sharing != NONE and self.rename and not self.announces else ()
        whole_cards = 0 if self.layout or self.announces or self.mig_strategy != NONE else cards
        shares = self.resources if self.sharing != NONE else ()
        announced = {}
        for resource in resources:
            name = resource + contract.SHARED if resource in shared else resource
            announced[name] = whole_cards * (self.replicas if resource in shares else 1)
        return announced

    def document(self, list_strategy: str) -> JsonObject:
        """Return the plugin's configuration file.

        :param list_strategy: of nodes for which the configuration itself has none.
        """
        plugin = {"deviceListStrategy": [self.device_list_strategy or list_strategy], "deviceIDStrategy": "uuid"}
        document: JsonObject = {"version": "v1", "flags": {"migStrategy": self.mig_strategy, "plugin": plugin}}
        if self.sharing != NONE:
            document["sharing"] = {
                {TIME_SLICING: "timeSlicing", MPS: "mps"}[self.sharing]: {
                    "renameByDefault": self.rename,
                    "failRequestsGreaterThanOne": self.fail_requests_greater_than_one,
                    "resources": [{"name": resource, "replicas": self.replicas} for resource in self.resources],
                }
            }
        return document

    def labels(self) -> dict[str, str]:
        """Return NVIDIA's labels that follow from the configuration alone, as GPU feature discovery sets them."""
        labels = {
            contract.LABEL_REPLICAS: "1",
            contract.LABEL_STRATEGY: NONE,
            contract.LABEL_MIG_STRATEGY: self.mig_strategy,
        }
        for resource in self.resources if self.sharing != NONE else ():
            labels.update({f"{resource}.replicas": str(self.replicas), f"{resource}.sharing-strategy": self.sharing})
        # The DaemonSet of the MPS control daemon selects it.
        return {**labels, contract.LABEL_MPS: "true"} if self.sharing == MPS else labels


# Each option, with its type.
OPTIONS: t.Mapping[str, type] = {
    "sharing": str,
    "replicas": int,
    "rename": bool,
    "fail_requests_greater_than_one": bool,
    "resources": list,
    "mig_strategy": str,
    "mig_layout": str,
    "device_list_strategy": str,
    "announces": list,
}
CHOICES: t.Mapping[str, t.Sequence[str]] = {
    "sharing": SHARING,
    "mig_strategy": MIG,
    "device_list_strategy": ("", *LIST_STRATEGIES),
}


def configurations(given: t.Any, layouts: t.Mapping[str, Layout], where: str) -> dict[str, Configuration]:
    """Return the configurations by name.

    :param given: the user's, a mapping of options by name.
    :param layouts: MIG layouts by name.
    :param where: the variable that has the configurations.
    :raises Problem: the plugin wouldn't accept one, or would ignore a part of it.
    """
    if not isinstance(given, dict) or not given:
        raise Problem("configuration_missing", where, "it needs at least one named configuration")
    return {
        str(name): _configuration(str(name), configuration or {}, layouts, f"{where}.{name}")
        for name, configuration in given.items()
    }


def _configuration(name: str, given: t.Any, layouts: t.Mapping[str, Layout], where: str) -> Configuration:
    if not NAME.fullmatch(name):
        raise Problem("configuration_name", where, "a name is the value of a label: letters, digits, '-', '_' and '.'")
    if not isinstance(given, dict):
        raise Problem("option_type", where, "it has options and their values")
    for option, value in given.items():
        if option not in OPTIONS:
            raise Problem("option_unknown", f"{where}.{option}", f"it isn't one of {', '.join(OPTIONS)}")
        # A bool is an int for Python, and none for us.
        if not isinstance(value, OPTIONS[option]) or (OPTIONS[option] is int and isinstance(value, bool)):
            raise Problem("option_type", f"{where}.{option}", f"it isn't of type {OPTIONS[option].__name__}")
        if value not in CHOICES.get(option, (value,)):
            raise Problem(
                "option_value", f"{where}.{option}", f"it isn't one of {', '.join(filter(None, CHOICES[option]))}"
            )
    for option in ("resources", "announces"):
        if not all(contract.is_gpu_resource(resource) for resource in given.get(option) or ()):
            raise Problem("option_value", f"{where}.{option}", "it has other resources than NVIDIA's")
    values: dict[str, t.Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value != []
    }
    chosen = values.pop("mig_layout", "")
    if chosen and chosen not in layouts:
        raise Problem("layout_unknown", f"{where}.mig_layout", f"nvidia_device_plugin_mig_layouts has no {chosen}")
    configuration = Configuration(name, layout=layouts.get(chosen), **values)
    if configuration.sharing == MPS and "fail_requests_greater_than_one" not in values:
        # Two replicas of MPS are two parts of one card, of which a program can use one.
        configuration = dataclasses.replace(configuration, fail_requests_greater_than_one=True)
    _check(configuration, where)
    return configuration


def _check(configuration: Configuration, where: str) -> None:
    if configuration.sharing == NONE and configuration.replicas != 1:
        raise Problem("replicas_unused", f"{where}.replicas", "without sharing a card has one; set sharing")
    if configuration.sharing != NONE and configuration.replicas < 2:
        raise Problem("replicas_missing", f"{where}.replicas", "a shared card has 2 or more")
    if configuration.sharing == MPS:
        if configuration.replicas > MOST_MPS:
            raise Problem("replicas_too_many", f"{where}.replicas", f"an MPS server has at most {MOST_MPS} clients")
        if configuration.mig_strategy != NONE or configuration.resources != (contract.RESOURCE,):
            raise Problem("mps_with_mig", where, "the plugin doesn't share MIG devices by MPS; use time-slicing")
    if configuration.layout is not None and configuration.mig_strategy == NONE:
        raise Problem("layout_unused", where, "its MIG devices aren't announced; set mig_strategy to single or mixed")
    if (
        configuration.layout is not None
        and configuration.mig_strategy == "single"
        and not single_profile(configuration.layout)
    ):
        raise Problem(
            "layout_not_single", where, "the strategy single needs all cards divided, into one profile; use mixed"
        )
    if configuration.mig_strategy == "mixed" and configuration.layout is None and not configuration.announces:
        raise Problem(
            "announces_missing",
            where,
            "set mig_layout, or name the profiles of the cards in announces: they are waited for",
        )
    if configuration.layout is not None and configuration.mig_strategy == "mixed" and configuration.sharing != NONE:
        unknown = [name for name in configuration.resources if name not in configuration.layout.resources()]
        if unknown:
            raise Problem("resource_unknown", f"{where}.resources", f"the layout has no {', '.join(unknown)}")
