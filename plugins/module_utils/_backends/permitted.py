# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cards and vGPUs that KubeVirt has to permit, from what the nodes' variables and facts say. Pure.

vGPUs that are mediated devices are selected by their type's name, and those that are virtual functions by vendor and
device alone, from KubeVirt 1.9 on (kubevirt/kubevirt#16890). Resources are named as NVIDIA's device plugin names them.
"""

from __future__ import annotations

import collections
import re
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kubevirt.devices import SELECTOR
from .._node.gpus import UNKNOWN, generation
from .._passthrough.facts import state_of
from .._passthrough.model import ARGUMENTS, options_of
from .._passthrough.plan import wanted
from .._vgpu.sysfs import MDEV, VENDOR, short
from .._vgpu.vgpu import entries_of

# What role passthrough's variables are called, by the module's options.
PREFIX = "passthrough_"
VARIABLES = {"exclude": "gpu_exclude", "seconds": f"{PREFIX}unbind_seconds"}


# More cards than any machine has. What a node says of itself is waited for.
MOST_CARDS = 64
VARIABLE = "kubevirt_devices_allowed_ids"


class Permitted(t.TypedDict):
    """``pci`` and ``mediated`` are entries of these variables; ``unknown`` the hosts whose cards this run doesn't know.

    ``cards`` are numbers of cards that VFIO has, and of vGPUs, by node and by selector.
    ``refused`` are what nodes say they have, and nobody permits: each with ``code`` and ``text``.
    """

    pci: list[JsonObject]
    mediated: list[JsonObject]
    unknown: list[str]
    cards: dict[str, dict[str, int]]
    refused: list[JsonObject]


def permitted(
    hosts: t.Mapping[str, t.Mapping[str, t.Any]],
    nodes: t.Mapping[str, str],
    allowed: t.Collection[str] = (),
    divided: t.Collection[str] = (),
    external: bool = False,
) -> Permitted:
    """Return the entries for the cards and vGPUs that hosts give to virtual machines.

    A permission is the whole cluster's, and who is root on a node may say that it has any card. So an id counts only
    where the administrator has named it, or else is one of a card's that is known here.

    :param hosts: the variables of each host that gives cards away, with its facts ``gpu_node``; one without
        ``passthrough_cards`` gives all of them.
    :param nodes: the name of each host's node.
    :param divided: hosts with vGPUs, by a layout. Of what these say they have only the layout's types are permitted.
    :param allowed: vendor and device of the only cards that may be permitted; empty for all that are known.
    :param external: NVIDIA's device plugin announces them, which names whole cards by the database of PCI ids, and
        doesn't know virtual functions (kubevirt-gpu-device-plugin v1.6.0): such entries have to be given.
    """
    named = frozenset(str(name).upper() for name in allowed)
    ids: set[str] = set()
    bound: dict[str, dict[str, int]] = {}
    unknown: list[str] = []
    refused: list[JsonObject] = []
    for host in (name for name in hosts if name not in divided):
        variables = hosts[host]
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
    pci = {name: f"nvidia.com/{name.replace(':', '_')}" for name in ids}
    vgpus = {host: _vgpus(hosts[host]) for host in hosts if host in divided}
    unknown += [host for host, seen in vgpus.items() if seen is None]
    known = {host: seen for host, seen in vgpus.items() if seen is not None}
    types: dict[str, set[str]] = collections.defaultdict(set)
    for host, seen in known.items():
        bound[nodes[host]] = seen.numbers
        for selector, names in seen.functions.items():
            types[selector] |= names
        refused += [row for row in _refused(nodes[host], dict.fromkeys(seen.functions, 0), named)]
    for selector, names in sorted(types.items()):
        if len(names) == 1 and selector not in pci:
            pci[selector] = _resource(f"NVIDIA {next(iter(names))}")
        else:
            refused.append(_mixed(selector, names, selector in pci))
    mediated = {name: _resource(name) for seen in known.values() for name in seen.mediated}
    if external:
        refused += [_nameless(name) for name in sorted(pci)]
        pci = {}
    return {
        "pci": _rows(pci, external),
        "mediated": _rows(mediated, external),
        "unknown": unknown,
        "cards": bound,
        "refused": refused,
    }


def _rows(resources: t.Mapping[str, str], external: bool) -> list[JsonObject]:
    return [
        {"selector": selector, "resource": name, "external_provider": external}
        for selector, name in sorted(resources.items())
    ]


def _nameless(name: str) -> JsonObject:
    """Return why a card can't be permitted whose resource a device plugin names."""
    text = (
        f"kubevirt_devices_external_provider is true, and NVIDIA's device plugin names a card {name} by the database "
        "of PCI ids: name it in kubevirt_devices_pci with that resource, as nvidia.com/GA102GL_A10"
    )
    return {"code": "needs_name", "id": name, "text": text}


def _resource(name: str) -> str:
    """Return the resource of a type of vGPU, as NVIDIA's device plugin names it."""
    return f"nvidia.com/{name.replace(' ', '_')}"


def _mixed(selector: str, names: t.Collection[str], whole: bool) -> JsonObject:
    """Return why KubeVirt can't permit virtual functions, which it knows by vendor and device alone."""
    has = [*sorted(names), *(["whole cards"] if whole else [])]
    text = (
        f"nodes have {' and '.join(has)} of {selector}, and KubeVirt can't tell virtual functions of one vendor and "
        "device from each other, nor from whole cards: give all nodes one type of that model, or name the entry that "
        "you want in kubevirt_devices_pci"
    )
    return {"code": "mixed_functions", "id": selector, "types": sorted(names), "whole": whole, "text": text}


class _Vgpus(t.NamedTuple):
    """vGPUs of a host.

    :param mediated: the names of types of mediated devices, with the maker.
    :param functions: by vendor and device of virtual functions, the types that the layout has, without the maker.
    :param numbers: of vGPUs that exist, by selector.
    """

    mediated: frozenset[str]
    functions: dict[str, set[str]]
    numbers: dict[str, int]


# As the driver names a type: its maker's word, and what the layout has.
_MAKERS = re.compile(r"(?:(?:NVIDIA|GRID) )?(\S{1,60})")


def _vgpus(variables: t.Mapping[str, t.Any]) -> _Vgpus | None:
    """Return the vGPUs of a host that its layout has; None where layout or facts are of no use."""
    node = variables.get("gpu_node") or {}
    params = {
        "state": "present",
        "layouts": variables.get("vgpu_layouts") or {},
        "layout": variables.get("vgpu_layout") or "",
    }
    try:
        wished = {name for entry in entries_of(params) for name in entry.wanted}
    except ShareError:
        return None
    mediated: set[str] = set()
    functions: dict[str, set[str]] = {}
    numbers: dict[str, int] = {}
    for card in node.get("gpus") or ():
        host, ids = card["vgpu_host"], _short(str(card["vendor"]), str(card["device"]))
        if host["framework"] == VENDOR and wished and SELECTOR.fullmatch(ids):
            functions[ids] = wished
            numbers[ids] = numbers.get(ids, 0) + len(host["vgpus"])
        if host["framework"] == MDEV:
            names = {str(row["id"]): str(row["name"]) for row in host["types"]}
            fitting = (number for number, name in names.items() if short(name) in wished and _MAKERS.fullmatch(name))
            given = {number: names[number] for number in fitting}
            mediated |= set(given.values())
            for vgpu in host["vgpus"]:
                name = given.get(str(vgpu["type"]))
                if name:
                    numbers[name] = numbers.get(name, 0) + 1
    return _Vgpus(frozenset(mediated), functions, numbers) if mediated or functions else None


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
