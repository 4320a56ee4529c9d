# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names as users write them, and what the variables of the inventory ask for on each node."""

from __future__ import annotations

import typing as t

from .._allocation import node_software
from .._allocation.allocators import EXTENDER
from .._allocation.node_backends import Wanted
from .._contracts import card_exclusion
from .._contracts.backends import GPUSHARE, VIRTUAL

NODE = "gpu_node_name"


def node_name(host: str, variables: t.Mapping[str, t.Any]) -> str:
    """Return the name that the cluster has for a host: ``gpu_node_name``, or else the host's own."""
    return str(variables.get(NODE) or host)


def node_names(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """Return the names that the cluster has for hosts, in their order."""
    # The get of Ansible's hostvars has no default.
    return [node_name(host, hostvars[host] if host in hostvars else {}) for host in hosts]  # noqa: SIM401


def listed(given: t.Any) -> list[str]:
    """Return a list that may be text with commas, as from the command line or a survey of AWX."""
    words = given.split(",") if isinstance(given, str) else given
    return [word for word in (str(word).strip() for word in words) if word]


def limit_mode(value: t.Any) -> str:
    """Return the variable ``gpushare_memory_limit``; YAML parses a bare ``off`` as false."""
    text = str(value)
    return "off" if text.lower() in ("off", "false", "no") else text


BACKEND, ALLOCATION, EXCLUDE = "gpu_backend", "gpushare_allocation", "gpu_exclude"
# Of role passthrough; on a node of another back end these cards are left alone by that one.
CARDS, ALL_CARDS = "passthrough_cards", "all"


def wanted_backends(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Mapping[str, str] | None = None,
) -> list[Wanted]:
    """Return what is asked for on each node; see the documentation of the filter.

    :param hostvars: the variables of all hosts.
    :param hosts: those of the group gpu_nodes.
    :param nodes: the variable ``gpushare_nodes``: nodes with gpushare; empty for those of ``hosts``.
    :param given: ``gpu_backend`` and ``gpushare_allocation`` of nodes that have none of their own.
    """
    names = dict(zip(node_names(hosts, hostvars), hosts, strict=True))
    # YAML reads a name of digits without quotes as a number.
    nodes = listed(nodes)

    def of(node: str) -> Wanted:
        host = names.get(node, node)
        # The get of Ansible's hostvars has no default.
        own = hostvars[host] if host in hostvars else {}  # noqa: SIM401
        usual = given or {}
        backend = own.get(BACKEND) or usual.get(BACKEND) or GPUSHARE
        allocation = own.get(ALLOCATION) or usual.get(ALLOCATION) or EXTENDER
        row: Wanted = {"node": node, "backend": str(backend), "allocation": str(allocation)}
        return {**row, "cards": True} if own.get(CARDS) else row

    rows = [of(node) for node in dict.fromkeys([*nodes, *names])]
    return [row for row in rows if not nodes or row["node"] in nodes or row["backend"] != GPUSHARE]


def wanted_software(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Any = None,
) -> list[node_software.Wanted]:
    """Return who is to install the software of each node: of the hosts, and of the nodes that are none.

    :param hosts: those of the group gpu_nodes.
    :param nodes: the variable ``gpushare_nodes``.
    :param given: ``gpu_node_software`` of nodes that have none of their own.
    """
    usual = str(given or node_software.AUTO)
    rows = [
        node_software.Wanted(
            node=node_name(host, hostvars[host]),
            software=str(hostvars[host].get(node_software.VARIABLE) or usual),
            machine=True,
        )
        for host in hosts
        if host in hostvars
    ]
    known = {row["node"] for row in rows}
    others = [node for node in dict.fromkeys(listed(nodes)) if node not in known]
    return [*rows, *(node_software.Wanted(node=node, software=usual, machine=False) for node in others)]


def cards_left_alone(exclude: t.Any, cards: t.Any = None, backend: t.Any = None) -> list[str]:
    """Return the entries of the cards that the back end of a node leaves alone: the user's, and virtual machines'.

    :param exclude: ``gpu_exclude`` of the node.
    :param cards: ``passthrough_cards`` of the node.
    :param backend: ``gpu_backend`` of the node; one for virtual machines has all cards, so that none is left alone.
    """
    entries = listed(exclude or ())
    if backend in VIRTUAL:
        return entries
    return list(dict.fromkeys([*entries, *(entry for entry in listed(cards or ()) if entry != ALL_CARDS)]))


def card_exclusions(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Sequence[str] = (),
) -> list[str]:
    """Return the values of the servers' option for cards that are left alone; see the documentation of the filter.

    :param hostvars: the variables of all hosts.
    :param hosts: those of the group gpu_nodes.
    :param nodes: nodes with gpushare.
    :param given: ``gpu_exclude`` of nodes that are no hosts.
    :raises BadInput: an entry is unusable.
    """

    def kept(host: str) -> list[str]:
        own = hostvars[host]
        return cards_left_alone(own.get(EXCLUDE), own.get(CARDS), own.get(BACKEND))

    by_node = {node: node for node in listed(nodes)} | dict(zip(node_names(hosts, hostvars), hosts, strict=True))
    return card_exclusion.options(
        {
            node: card_exclusion.parse(kept(host) if host in hostvars else listed(given))
            for node, host in by_node.items()
        }
    )
