# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Named configurations of NVIDIA's device plugin, as its configuration file has them. Pure.

https://github.com/NVIDIA/k8s-device-plugin, version 0.20
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ...module_utils._contracts import nvidia_plugin as contract
from ...module_utils._core.types import JsonObject
from . import geometry
from .geometry import Layout
from .problem import Problem

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
        found = self.announces or whole
        shared = self.resources if self.sharing != NONE and self.rename and not self.announces else ()
        whole_cards = 0 if self.layout or self.announces or self.mig_strategy != NONE else cards
        shares = self.resources if self.sharing != NONE else ()
        return {
            one + contract.SHARED if one in shared else one: whole_cards * (self.replicas if one in shares else 1)
            for one in found
        }

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
                    "resources": [{"name": one, "replicas": self.replicas} for one in self.resources],
                }
            }
        return document

    def labels(self) -> dict[str, str]:
        """Return NVIDIA's labels that follow from the configuration alone, as GPU feature discovery sets them."""
        found = {
            contract.LABEL_REPLICAS: "1",
            contract.LABEL_STRATEGY: NONE,
            contract.LABEL_MIG_STRATEGY: self.mig_strategy,
        }
        for one in self.resources if self.sharing != NONE else ():
            found.update({f"{one}.replicas": str(self.replicas), f"{one}.sharing-strategy": self.sharing})
        # The DaemonSet of the MPS control daemon selects it.
        return {**found, contract.LABEL_MPS: "true"} if self.sharing == MPS else found


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
    return {str(name): _configuration(str(name), one or {}, layouts, f"{where}.{name}") for name, one in given.items()}


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
        if not all(contract.is_gpu_resource(one) for one in given.get(option) or ()):
            raise Problem("option_value", f"{where}.{option}", "it has other resources than NVIDIA's")
    values: dict[str, t.Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if value != []
    }
    chosen = values.pop("mig_layout", "")
    if chosen and chosen not in layouts:
        raise Problem("layout_unknown", f"{where}.mig_layout", f"nvidia_device_plugin_mig_layouts has no {chosen}")
    found = Configuration(name, layout=layouts.get(chosen), **values)
    if found.sharing == MPS and "fail_requests_greater_than_one" not in values:
        # Two replicas of MPS are two parts of one card, of which a program can use one.
        found = dataclasses.replace(found, fail_requests_greater_than_one=True)
    _check(found, where)
    return found


def _check(one: Configuration, where: str) -> None:
    if one.sharing == NONE and one.replicas != 1:
        raise Problem("replicas_unused", f"{where}.replicas", "without sharing a card has one; set sharing")
    if one.sharing != NONE and one.replicas < 2:
        raise Problem("replicas_missing", f"{where}.replicas", "a shared card has 2 or more")
    if one.sharing == MPS:
        if one.replicas > MOST_MPS:
            raise Problem("replicas_too_many", f"{where}.replicas", f"an MPS server has at most {MOST_MPS} clients")
        if one.mig_strategy != NONE or one.resources != (contract.RESOURCE,):
            raise Problem("mps_with_mig", where, "the plugin doesn't share MIG devices by MPS; use time-slicing")
    if one.layout is not None and one.mig_strategy == NONE:
        raise Problem("layout_unused", where, "its MIG devices aren't announced; set mig_strategy to single or mixed")
    if one.layout is not None and one.mig_strategy == "single" and not geometry.single_profile(one.layout):
        raise Problem(
            "layout_not_single", where, "the strategy single needs all cards divided, into one profile; use mixed"
        )
    if one.mig_strategy == "mixed" and one.layout is None and not one.announces:
        raise Problem(
            "announces_missing",
            where,
            "set mig_layout, or name the profiles of the cards in announces: they are waited for",
        )
    if one.layout is not None and one.mig_strategy == "mixed" and one.sharing != NONE:
        unknown = [name for name in one.resources if name not in one.layout.resources()]
        if unknown:
            raise Problem("resource_unknown", f"{where}.resources", f"the layout has no {', '.join(unknown)}")
