# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _first_look as look
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._planned_action import PlannedAction

Json = dict[str, t.Any]


class ActionModule(PlannedAction):
    """Executes the module ``first_look`` only where there is none to keep, or one to compare with."""

    arguments = look.ARGUMENTS
    sections = ("first_look",)

    def plan(self, params: Json, observed: Json) -> Plan:
        return look.plan(params["state"], observed)

    def unchanged(self, params: Json, observed: Json) -> Json:
        return {"notes": [look.NO_LOOK] if params["state"] == "compared" else []}
