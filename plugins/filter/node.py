# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the facts of a node from module gpu_node_info say about its driver and its container runtime."""

from __future__ import annotations

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.types import Choice, NodeFacts


def containerd_cdi(state: t.Mapping[str, t.Any]) -> bool:
    from ansible_collections.kubegpu.share.plugins.module_utils._runtime.properties import injects_cdi

    return injects_cdi(state)


def driver_choice(gpu_node: NodeFacts, catalog: JsonObject | None, options: JsonObject) -> Choice:
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.select import choose
    from ansible_collections.kubegpu.share.plugins.plugin_utils._pins.table import driver_tables

    return choose(gpu_node, catalog, {**options, "tables": driver_tables()})


def driver_problems(gpu_node: NodeFacts, options: JsonObject) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.select import verify

    return verify(gpu_node, options)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "containerd_cdi": containerd_cdi,
            "driver_choice": driver_choice,
            "driver_problems": driver_problems,
        }
