# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cards that KubeVirt has to permit, from what the nodes' variables and facts say. Pure."""

from __future__ import annotations

import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kubevirt.devices import SELECTOR
from .._node.gpus import UNKNOWN, generation
from .._passthrough.facts import state_of
from .._passthrough.model import ARGUMENTS, options_of
from .._passthrough.plan import wanted

# What role passthrough's variables are called, by the module's options.
PREFIX = "passthrough_"
VARIABLES = {"exclude": "gpu_exclude", "seconds": f"{PREFIX}unbind_seconds"}


# More cards than any machine has. What a node says of itself is waited for.
MOST_CARDS = 64
VARIABLE = "kubevirt_devices_allowed_ids"


class Permitted(t.TypedDict):
    """``pci`` are entries of kubevirt_devices_pci; ``unknown`` the hosts whose cards this run doesn't know.

    ``cards`` are numbers of cards that VFIO has, by node and by vendor and device. ``refused`` are what nodes say they
    have, and nobody permits: each with ``code``, ``node`` and ``text``.
    """

    pci: list[JsonObject]
    unknown: list[str]
    cards: dict[str, dict[str, int]]
    refused: list[JsonObject]


def permitted(
    hosts: t.Mapping[str, t.Mapping[str, t.Any]], nodes: t.Mapping[str, str], allowed: t.Collection[str] = ()
) -> Permitted:
    """Return the entries for the cards that hosts give to virtual machines.

    A permission is the whole cluster's, and who is root on a node may say that it has any card. So an id counts only
    where the administrator has named it, or else is one of a card's that is known here.

    :param hosts: the variables of each host that gives cards away, with its facts ``gpu_node``; one without
        ``passthrough_cards`` gives all of them.
    :param nodes: the name of each host's node.
    :param allowed: vendor and device of the only cards that may be permitted; empty for all that are known.
    """
    named = frozenset(str(name).upper() for name in allowed)
    ids: set[str] = set()
    bound: dict[str, dict[str, int]] = {}
    unknown: list[str] = []
    refused: list[JsonObject] = []
    for host, variables in hosts.items():
        section = (variables.get("gpu_node") or {}).get("passthrough")
        numbers = _ids(variables) if section else None
        if numbers is None:
            unknown.append(host)
            continue
        problems = [*_refused(nodes[host], numbers, named)]
        if problems:
            unknown.append(host)
            refused += problems
        else:
            ids |= set(numbers)
            bound[nodes[host]] = numbers
    rows: list[JsonObject] = [
        {"selector": name, "resource": f"nvidia.com/{name.replace(':', '_')}", "external_provider": False}
        for name in sorted(ids)
    ]
    return {"pci": rows, "unknown": unknown, "cards": bound, "refused": refused}


def _refused(node: str, numbers: t.Mapping[str, int], named: frozenset[str]) -> t.Iterator[JsonObject]:
    """Return what of a node's cards isn't permitted.

    :param numbers: by vendor and device.
    :param named: as ``allowed`` for ``permitted``.
    """
    for name in sorted(numbers):
        if named and name not in named:
            text = f"node {node} says that it has a card {name}, which {VARIABLE} doesn't name"
            yield {"code": "not_allowed", "node": node, "id": name, "text": text}
        elif not named and generation(name.partition(":")[2]) == UNKNOWN:
            text = (
                f"node {node} says that it has a card {name}, which is of no generation that this release knows; "
                f"if that is so, name it and all other cards of virtual machines in {VARIABLE}"
            )
            yield {"code": "unknown_id", "node": node, "id": name, "text": text}
    total = sum(numbers.values())
    if total > MOST_CARDS:
        text = f"node {node} says that VFIO has {total} of its cards; no machine has more than {MOST_CARDS}"
        yield {"code": "too_many", "node": node, "number": total, "text": text}


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
