# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._packages.options import ARGUMENTS, package_set
from ansible_collections.kubegpu.share.plugins.module_utils._packages.planner import planner
from ansible_collections.kubegpu.share.plugins.module_utils._packages.types import PackageFacts
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.package_files import packages_in
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import PlannedAction

# Package files by the section of gpu_node that is there where the node uses them.
ENDINGS = {".deb": "apt", ".rpm": "rpm"}


class ActionModule(PlannedAction):
    """Executes the module ``pinned_packages`` only where there is something to do."""

    arguments = ARGUMENTS
    sections = ("apt", "rpm", "packages")
    folder_option = "node_dir"

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        observed = params["observed"] or {}
        if params["state"] == "verified" and all(section in observed for section in self.sections):
            if not planner(package_set(params), t.cast(PackageFacts, observed)).new_keys():
                return {"changed": False, "diff": []}
            # The node downloads the keys, in check mode too; nothing is written.
            arguments = {name: value for name, value in self._task.args.items() if name != "observed"}
            return self.execute_module(arguments, task_vars)
        return super().ensure(params, task_vars)

    def plan(self, params: JsonObject, observed: JsonObject) -> Plan:
        return planner(package_set(params), t.cast(PackageFacts, observed)).plan()

    def unchanged(self, params: JsonObject, observed: JsonObject) -> JsonObject:
        spec = package_set(params)
        return {"left": planner(spec, t.cast(PackageFacts, observed)).left()} if spec.exclusive else {}

    def files(self, params: JsonObject) -> list[str]:
        observed = params["observed"] or {}
        endings = tuple(ending for ending, section in ENDINGS.items() if observed.get(section, True) is not None)
        return packages_in(params, endings)
