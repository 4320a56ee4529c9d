# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cards that KubeVirt has to permit, from what the nodes' variables and facts say. Pure."""

from __future__ import annotations

import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kubevirt.devices import SELECTOR
from .._passthrough.facts import state_of
from .._passthrough.model import ARGUMENTS, options_of
from .._passthrough.plan import wanted

# What role passthrough's variables are called, by the module's options.
PREFIX = "passthrough_"
VARIABLES = {"exclude": "gpu_exclude", "seconds": f"{PREFIX}unbind_seconds"}


class Permitted(t.TypedDict):
    """``pci`` are entries of kubevirt_devices_pci; ``unknown`` the hosts whose cards this run doesn't know.

    ``cards`` are numbers of cards that VFIO has, by node and by vendor and device.
    """

    pci: list[JsonObject]
    unknown: list[str]
    cards: dict[str, dict[str, int]]


def permitted(hosts: t.Mapping[str, t.Mapping[str, t.Any]], nodes: t.Mapping[str, str]) -> Permitted:
    """Return the entries for the cards that hosts give to virtual machines.

    :param hosts: the variables of each host that gives cards away, with its facts ``gpu_node``; one without
        ``passthrough_cards`` gives all of them.
    :param nodes: the name of each host's node.
    """
    ids: set[str] = set()
    bound: dict[str, dict[str, int]] = {}
    unknown = []
    for host, variables in hosts.items():
        section = (variables.get("gpu_node") or {}).get("passthrough")
        found = _ids(variables) if section else None
        if found is None:
            unknown.append(host)
        else:
            ids |= set(found)
            bound[nodes[host]] = found
    rows: list[JsonObject] = [
        {"selector": name, "resource": f"nvidia.com/{name.replace(':', '_')}", "external_provider": False}
        for name in sorted(ids)
    ]
    return {"pci": rows, "unknown": unknown, "cards": bound}


def _ids(variables: t.Mapping[str, t.Any]) -> dict[str, int] | None:
    """Return vendor and device of each card that a host gives away, and how many of these VFIO has.

    None where its variables are of no use.
    """
    params = {name: variables.get(VARIABLES.get(name, PREFIX + name)) for name in ARGUMENTS}
    params = {name: ARGUMENTS[name].get("default") if value is None else value for name, value in params.items()}
    params["cards"] = variables.get(f"{PREFIX}cards") or ["all"]
    node = variables["gpu_node"]
    try:
        options = options_of(params)
        container = not node["kernel"]["installed"]
        state = state_of(node["passthrough"], node["distribution"]["family"], container, node["boot"])
    except ShareError:
        return None
    cards = [state.functions[address] for address in wanted(options, state).cards]
    numbers: dict[str, int] = {}
    for card in cards:
        if card.card:
            name = _short(str(card.vendor), str(card.device))
            # A machine that answers something else stops nobody but itself.
            if not SELECTOR.fullmatch(name):
                return None
            numbers[name] = numbers.get(name, 0) + int(card.vfio)
    return numbers


def _short(vendor: str, device: str) -> str:
    """Return two ids as KubeVirt has them: 10DE:2236."""
    return ":".join(number.removeprefix("0x").upper() for number in (vendor, device))
