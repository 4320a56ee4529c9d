# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_files as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._planned_action import PlannedAction

Json = dict[str, t.Any]


class ActionModule(PlannedAction):
    """Executes the module ``toolkit_files`` only where there is something to do."""

    arguments = toolkit.ARGUMENTS
    sections = ("toolkit", "cdi")

    def plan(self, params: Json, observed: Json) -> Plan:
        if "refresh_env" not in observed["cdi"] and params["old_cdi"]:
            return Plan((Change(toolkit.ENVIRONMENT, "", ""),))
        return toolkit.plan(params, observed)
