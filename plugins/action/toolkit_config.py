# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._toolkit import legacy_apply, module
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module ``toolkit_config`` only where it has something to change."""

    arguments = module.ARGUMENTS
    sections = ("toolkit", "cdi", "sources_stale", "toolkit_legacy", "packages")

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return module.plan(params, observed)

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return legacy_apply.results(observed, legacy_apply.record_of(observed))
