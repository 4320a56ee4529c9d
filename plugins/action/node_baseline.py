# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._node import baseline
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module only where a baseline is to be recorded, compared or removed."""

    arguments = baseline.ARGUMENTS
    sections = ("baseline",)

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return baseline.make_plan(params["state"], observed["baseline"])

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return {"notes": [baseline.NO_BASELINE] if params["state"] == "compared" else []}
