# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_legacy as legacy
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._planned_action import PlannedAction

Json = dict[str, t.Any]


class ActionModule(PlannedAction):
    """Executes the module ``toolkit_legacy`` only where there is something to take away or to give back."""

    arguments = legacy.ARGUMENTS
    sections = ("sources_stale", "packages")

    def plan(self, params: Json, observed: Json) -> Plan:
        if params["state"] == "given_back" and "toolkit_legacy" not in observed:
            return Plan((Change(legacy.STORE, "", ""),))
        return legacy.plan(legacy.wanted(params), observed)

    def unchanged(self, params: Json, observed: Json) -> Json:
        return legacy.told(observed, legacy.record_of(observed))
