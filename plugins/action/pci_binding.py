# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.facts import state_of
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import ARGUMENTS, State, options_of
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.plan import make_plan
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.report import report
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module ``pci_binding`` where there is something to do, and to prove an external binding."""

    arguments = ARGUMENTS
    sections = ("boot", "distribution", "kernel", "passthrough")

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        # The kernel's word on a group is asked on the node, and a record that can't be read is reported there.
        if params["state"] == "external" or (params.get("observed") or {}).get("passthrough") is None:
            return None
        return super().predict(params, task_vars)

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return make_plan(options_of(params), _state(observed))

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return report(options_of(params), _state(observed))


def _state(observed: JsonObject) -> State:
    section = t.cast(t.Any, observed["passthrough"])
    container = not observed["kernel"]["installed"]
    return state_of(section, observed["distribution"]["family"], container, observed["boot"])
