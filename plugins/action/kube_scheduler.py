# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._static_pod import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.plugin_utils._handed_plan import HandedPlan, Json
from ansible_collections.kubegpu.share.plugins.plugin_utils._lease import Lease, SchedulerLease
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import Options, OtherFile, make_plan


class ActionModule(HandedPlan):
    """Edits kube-scheduler's manifest and configuration on the controller, and looks at its lease afterwards."""

    arguments = ARGUMENTS

    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        observed = params["observed"]
        if not observed or "manifest" not in observed:
            raise BadInput("observed: this isn't what control_plane_info returned")
        options = Options(
            present=params["state"] == "present",
            extender=Extender(params["extender_url"], params["extender_timeout"]),
            version=params["version"],
        )
        try:
            planned = make_plan(options, observed)
        except OtherFile as other:
            look = self._execute_module(
                module_name="kubegpu.share.control_plane_info",
                module_args={"config_path": other.path},
                task_vars=task_vars,
            )
            if look.get("failed"):
                raise NotInEffect(str(look.get("msg"))) from other
            planned = make_plan(options, look["control_plane"])
        return planned.plan, {"files": list(planned.files), "config": planned.config, "urls": list(planned.urls)}

    def carry_out(self, params: Json, handed: Json, task_vars: Json | None) -> Json:
        lease = SchedulerLease(params["kubeconfig"]) if params["kubeconfig"] else None
        before = lease.read() if lease is not None else Lease("", "")
        done = super().carry_out(params, handed, task_vars)
        if lease is not None and not done.get("failed"):
            done["lease"] = lease.taken(before, str(params["observed"].get("hostname", "")), params["timeout"])
        return done
