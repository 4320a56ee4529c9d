# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _nouveau
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._planned_action import PlannedAction

Json = dict[str, t.Any]


class ActionModule(PlannedAction):
    """Executes the module ``nouveau`` only where there is something to do."""

    arguments = _nouveau.ARGUMENTS
    sections = ("distribution", "kernel", "nouveau")

    def plan(self, params: Json, observed: Json) -> Plan:
        return _nouveau.plan(params["state"] == "present", observed, params["keep_file"])

    def unchanged(self, params: Json, observed: Json) -> Json:
        return {"reboot_required": _nouveau.reboot_required(params["state"] == "present", observed)}
