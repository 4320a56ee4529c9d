# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._boot import plan as boot_plan
from ansible_collections.kubegpu.share.plugins.module_utils._boot.types import Boot
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction


class ActionModule(PlannedAction):
    """Executes the module ``kernel_arguments`` only where there is something to do."""

    arguments = boot_plan.ARGUMENTS
    sections = ("boot", "iommu")

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return boot_plan.make_plan(boot_plan.options(params), _boot(observed))

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        return boot_plan.outcome(boot_plan.options(params), _boot(observed))


def _boot(observed: JsonObject) -> Boot:
    return t.cast(Boot, {**observed["boot"], "iommu": observed["iommu"]})
