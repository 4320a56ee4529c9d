# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts of an inventory, and the nodes and cards that its variables name."""

from __future__ import annotations

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import Wanted
    from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_software import (
        Wanted as WantedSoftware,
    )
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject


def cards_left_alone(exclude: t.Any, cards: t.Any = None, backend: t.Any = None) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.cards_left_alone(exclude, cards, backend)


def card_exclusions(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Sequence[str] = (),
) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.card_exclusions(hostvars, hosts, nodes, given)


def initial_inventory(
    nodes: t.Sequence[JsonObject],
    gpu_nodes: str | t.Sequence[str] = (),
    control_plane: str | t.Sequence[str] = (),
    ssh: bool = True,
    server: str = "",
) -> dict[str, t.Any]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import initial_inventory as preflight

    return preflight.initial_inventory(nodes, gpu_nodes, control_plane, ssh, server)


def listed(given: t.Any) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.listed(given)


def node_names(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.node_names(hosts, hostvars)


def wanted_backends(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Mapping[str, str] | None = None,
) -> list[Wanted]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.wanted_backends(hostvars, hosts, nodes, given)


def wanted_software(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Any = None,
) -> list[WantedSoftware]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.wanted_software(hostvars, hosts, nodes, given)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "card_exclusions": card_exclusions,
            "cards_left_alone": cards_left_alone,
            "initial_inventory": initial_inventory,
            "listed": listed,
            "node_names": node_names,
            "wanted_backends": wanted_backends,
            "wanted_software": wanted_software,
        }
