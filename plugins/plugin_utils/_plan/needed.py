# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory needs of the list, from the facts and variables of a run's hosts."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._core.untrusted import line
from .._actions.base import untagged
from .._actions.terminal import show
from .._airgap import inventory, table
from .._airgap.needed import Inventory, Item, needed, without_credentials
from .engine import Planner

ARGUMENTS: JsonObject = {
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "cluster": {"type": "dict"},
    "kubernetes": {"type": "str", "default": ""},
    "outside": {"type": "dict", "default": {}},
}


class Need(t.NamedTuple):
    """:param refused: hosts of whose choice role driver refuses a part, which may be missing from the items."""

    items: list[Item]
    inventory: Inventory
    refused: list[str]


def need(action: ActionBase, params: JsonObject, task_vars: JsonObject) -> Need:
    """Return what site.yml downloads for an inventory; what role driver refuses is printed.

    :param params: as ``ARGUMENTS``.
    :raises BadInput: a variable isn't valid, the cluster's version is needed and isn't known, or a node wasn't reached.
    """
    unknown = [name for name in params["gpu_nodes"] if "gpu_node" not in task_vars["hostvars"].get(name, {})]
    if unknown:
        raise BadInput(
            f"The facts of {', '.join(map(line, unknown))} aren't known, and what a GPU node needs depends on its "
            "distribution and kernel: make it reachable, or set airgap_gpu_nodes to the other nodes",
            code="no_facts",
            hosts=unknown,
        )
    planner = Planner(action, task_vars)
    choices = untagged({name: planner.validate(name)["driver_choice"] for name in params["gpu_nodes"]})
    cluster, outside = untagged(params["cluster"] or {}), inventory.moved(untagged(params["outside"]))
    hostvars = task_vars["hostvars"]
    known = inventory.inventory(hostvars, choices, cluster, params["kubernetes"], planned=True, outside=outside)
    refused = {host: line(" ".join(choice["refusals"])) for host, choice in choices.items() if choice["refusals"]}
    for text in refused.values():
        show(action._display, f"What role driver refuses may be missing from the list: {text}", stderr=True)
    return Need([without_credentials(item) for item in needed(table.listed(), known)], known, list(refused))
