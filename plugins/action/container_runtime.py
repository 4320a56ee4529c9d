# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import ARGUMENTS, wanted_of
from ansible_collections.kubegpu.share.plugins.plugin_utils._handed_plan import HandedPlan, Json
from ansible_collections.kubegpu.share.plugins.plugin_utils._runtime_plan import make_plan


class ActionModule(HandedPlan):
    """Edits the files of a node's container runtime on the controller."""

    arguments = ARGUMENTS

    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        observed = params["observed"]
        if not observed or "runtimes" not in observed:
            raise BadInput("observed: this isn't what gpu_node_info returned")
        planned = make_plan(params["runtime"], wanted_of(params), observed["runtimes"], observed.get("kubelet"))
        self.notices = list(planned.warnings)
        handed = {"runtime": planned.runtime, "files": list(planned.files), "restart": planned.restart}
        return planned.plan, handed
