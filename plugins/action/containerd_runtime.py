# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._containerd_apply import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._containerd_plan import Options, make_plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._handed_plan import HandedPlan, Json


class ActionModule(HandedPlan):
    """Edits containerd's files on the controller."""

    arguments = ARGUMENTS

    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        observed = params["observed"]
        if not observed or "runtimes" not in observed:
            raise BadInput("observed: this isn't what gpu_node_info returned")
        options = Options(
            present=params["state"] == "present",
            binary=params["binary"],
            default=params["set_default"],
            cdi=params["cdi"],
            enable_cri=params["enable_cri"],
        )
        planned = make_plan(options, observed["runtimes"].get("containerd"))
        return planned.plan, {"files": list(planned.files)}
