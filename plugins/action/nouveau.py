# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau_plan
from ansible_collections.kubegpu.share.plugins.module_utils._driver.types import NodeFacts
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module ``nouveau`` only where there is something to do."""

    arguments = nouveau_plan.ARGUMENTS
    sections = ("distribution", "kernel", "nouveau")

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return nouveau_plan.make_plan(params["state"] == "present", t.cast(NodeFacts, observed), params["keep_file"])

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return {
            "reboot_required": nouveau_plan.reboot_required(params["state"] == "present", t.cast(NodeFacts, observed))
        }
