# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import embedded_plan, plan
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.apply import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.control_plane import ControlPlane
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.embedded import PLACES
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import ObserveAgain, Options, SchedulerPlan
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.lease import Lease, SchedulerLease
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.planned import ControllerPlan


class ActionModule(ControllerPlan):
    """Edits kube-scheduler's files on the controller, and waits for its lease after the change."""

    arguments = ARGUMENTS
    controller_options = ("observed", "kubeconfig")

    def make_plan(self, params: JsonObject, task_vars: JsonObject | None) -> tuple[Plan, JsonObject]:
        observed = params["observed"]
        if not observed or "manifest" not in observed:
            raise BadInput("observed: this isn't a result of control_plane_info")
        options = Options(
            present=params["state"] == "present",
            extender=Extender(params["extender_url"], params["extender_timeout"], params["extender_preemption"]),
            version=params["version"],
            configuration=params["configuration"],
            versions=tuple(params["versions"]),
            patches_dir=params["patches_dir"],
        )
        self._planned = self._make_plan(options, observed, task_vars)
        self.notices = self._planned.warnings
        return self._planned.plan, self._planned.to_module()

    def restarts(self, plan: JsonObject) -> list[str]:
        name = "kube-scheduler" if plan["kind"] not in PLACES else str(plan["kind"])
        return [name] if self._planned.restarts else []

    def _make_plan(self, options: Options, observed: ControlPlane, task_vars: JsonObject | None) -> SchedulerPlan:
        """Make the plan, and observe the machine again where it needs another file."""
        make_plan = embedded_plan.make_plan if observed["kind"] in PLACES else plan.make_plan
        asked: dict[str, str] = {}
        while True:
            try:
                return make_plan(options, observed)
            except ObserveAgain as more:
                if set(more.arguments.items()) <= set(asked.items()):
                    raise NotInEffect(f"the machine changed during its observation ({more}); run again") from more
                asked.update(more.arguments)
                again = self._execute_module(
                    module_name="kubegpu.share.control_plane_info", module_args=dict(asked), task_vars=task_vars
                )
                if again.get("failed"):
                    raise NotInEffect(str(again.get("msg"))) from more
                observed = again["control_plane"]

    def apply(self, params: JsonObject, plan: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        lease = self._lease(params)
        if lease is None:
            return super().apply(params, plan, task_vars)
        return self._with_lease(lease, params, plan, task_vars)

    def _lease(self, params: JsonObject) -> SchedulerLease | None:
        """Return the lease; None where kube-scheduler uses none, or no cluster is configured."""
        if self._planned.lease is None:
            return None
        ref = Ref("coordination.k8s.io/v1", "Lease", *self._planned.lease)
        try:
            return SchedulerLease(params["kubeconfig"] or None, ref)
        except ShareError as error:
            if params["kubeconfig"]:
                raise
            # Without the option kubeconfig the controller may have no access to the cluster.
            unproven = f"{ref} isn't checked, so only kube-scheduler's health is proven ({error})"
            self.notices = [*self.notices, unproven]
            return None

    def _with_lease(
        self, lease: SchedulerLease, params: JsonObject, module_plan: JsonObject, task_vars: JsonObject | None
    ) -> JsonObject:
        """Execute the module, and wait until the lease is renewed."""
        planned = self._planned
        try:
            before = lease.read()
        except ShareError:
            if planned.lease_certain:
                raise
            # The API server may be part of the service that is down.
            before = Lease("", "")
        done = super().apply(params, module_plan, task_vars)
        if done.get("failed") or not (before.holder or planned.lease_certain):
            return done
        hostname = str(params["observed"].get("hostname", "")) if planned.restarts else ""
        try:
            done["lease"] = lease.wait_for_renewal(before, hostname, params["timeout"])
        except NotInEffect as error:
            raise self._rolled_back(error, params, task_vars) from error
        return done

    def _rolled_back(self, error: NotInEffect, params: JsonObject, task_vars: JsonObject | None) -> NotInEffect:
        """Roll the files back where kube-scheduler is healthy but doesn't renew its lease."""
        if not self._planned.files:
            return error
        done = super().apply(params, self._planned.rollback(), task_vars)
        if done.get("failed"):
            return NotInEffect(f"{error}; rolling the configuration back failed: {done.get('msg')}")
        return NotInEffect(f"{error}; rolled back, kube-scheduler runs with the old configuration")
