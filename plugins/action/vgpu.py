# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.vgpu import (
    ARGUMENTS,
    Facts,
    entries_of,
    make_plan,
    report,
    texts,
)
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.vgpu import (
    observed as facts_of,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module ``vgpu`` only where there is something to do."""

    arguments = ARGUMENTS
    sections = ("python", "gpus", "driver", "vgpu")

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        facts, wanted = _facts(observed)
        return make_plan(entries_of(params), facts, wanted, params["exclude"])

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return report(_facts(observed)[0].cards)


def _facts(observed: JsonObject) -> tuple[Facts, dict[str, str]]:
    node = t.cast(t.Any, observed)
    wanted = texts(node["python"]["executable"])
    return facts_of(node["gpus"], node["vgpu"], wanted), wanted
