# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._embedded import PLACES
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler_apply import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.plugin_utils import _embedded_plan, _scheduler_plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._handed_plan import HandedPlan, Json
from ansible_collections.kubegpu.share.plugins.plugin_utils._lease import Lease, SchedulerLease
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import LookAgain, Options, Planned


class ActionModule(HandedPlan):
    """Edits kube-scheduler's files on the controller, and looks at its lease afterwards."""

    arguments = ARGUMENTS
    only_here = ("observed", "kubeconfig")

    def make(self, params: Json, task_vars: Json | None) -> tuple[Plan, Json]:
        observed = params["observed"]
        if not observed or "manifest" not in observed:
            raise BadInput("observed: this isn't what control_plane_info returned")
        options = Options(
            present=params["state"] == "present",
            extender=Extender(params["extender_url"], params["extender_timeout"], params["extender_preemption"]),
            version=params["version"],
            configuration=params["configuration"],
            versions=tuple(params["versions"]),
            patches_dir=params["patches_dir"],
        )
        self._planned = self._make_plan(options, observed, task_vars)
        return self._planned.plan, self._planned.handed()

    def _make_plan(self, options: Options, observed: Json, task_vars: Json | None) -> Planned:
        """The plan; the machine is looked at again for what else it needs."""
        make_plan = _embedded_plan.make_plan if observed.get("kind") in PLACES else _scheduler_plan.make_plan
        asked: dict[str, str] = {}
        while True:
            try:
                return make_plan(options, observed)
            except LookAgain as more:
                if set(more.arguments.items()) <= set(asked.items()):
                    raise NotInEffect(f"the machine changed while this run was looking at it ({more})") from more
                asked.update(more.arguments)
                look = self._execute_module(
                    module_name="kubegpu.share.control_plane_info", module_args=dict(asked), task_vars=task_vars
                )
                if look.get("failed"):
                    raise NotInEffect(str(look.get("msg"))) from more
                observed = look["control_plane"]

    def carry_out(self, params: Json, handed: Json, task_vars: Json | None) -> Json:
        lease = self._lease(params)
        if lease is None:
            return super().carry_out(params, handed, task_vars)
        return self._with_lease(lease, params, handed, task_vars)

    def _lease(self, params: Json) -> SchedulerLease | None:
        """The lease, where kube-scheduler takes one and a cluster is named to ask."""
        if self._planned.lease is None:
            return None
        ref = Ref("coordination.k8s.io/v1", "Lease", *self._planned.lease)
        try:
            return SchedulerLease(params["kubeconfig"] or None, ref=ref)
        except ShareError as error:
            if params["kubeconfig"]:
                raise
            # Whoever names no cluster may have none at hand.
            self.notices = [f"{ref} isn't looked at, and kube-scheduler's health is all that is proven ({error})"]
            return None

    def _with_lease(self, lease: SchedulerLease, params: Json, handed: Json, task_vars: Json | None) -> Json:
        """Execute the module, and wait until the lease is renewed."""
        planned = self._planned
        try:
            before = lease.read()
        except ShareError:
            if planned.lease_certain:
                raise
            # The API server may be part of what has to be started again.
            before = Lease("", "")
        done = super().carry_out(params, handed, task_vars)
        if done.get("failed") or not (before.holder or planned.lease_certain):
            return done
        hostname = str(params["observed"].get("hostname", "")) if planned.restarts else ""
        try:
            done["lease"] = lease.taken(before, hostname, params["timeout"])
        except NotInEffect as error:
            raise self._taken_back(error, params, task_vars) from error
        return done

    def _taken_back(self, error: NotInEffect, params: Json, task_vars: Json | None) -> NotInEffect:
        """Healthy, but at work nowhere: the old files are put back by the same means."""
        if not self._planned.files:
            return error
        back = super().carry_out(params, self._planned.back(), task_vars)
        if back.get("failed"):
            return NotInEffect(f"{error}; the old configuration couldn't be put back: {back.get('msg')}")
        return NotInEffect(f"{error}; the old configuration is back and kube-scheduler runs with it")
