# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _rpm
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._package_files import packages_in
from ansible_collections.kubegpu.share.plugins.plugin_utils._planned_action import PlannedAction

Json = dict[str, t.Any]


class ActionModule(PlannedAction):
    """Executes the module ``rpm_packages`` only where there is something to do."""

    arguments = _rpm.ARGUMENTS
    sections = ("rpm", "packages")
    folder_option = "node_dir"

    def plan(self, params: Json, observed: Json) -> Plan:
        return _rpm.plan(_rpm.package_set(params), observed)

    def files(self, params: Json) -> list[str]:
        return packages_in(params, ".rpm")
