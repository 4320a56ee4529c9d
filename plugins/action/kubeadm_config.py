# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.kubeadm import ARGUMENTS, NAME
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.kubeadm_plan import machines_of, plan_of
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged

# Options that the module doesn't use.
CONTROLLER_ONLY = ("machines", "version")
# Others change this ConfigMap in upgrades and joins only, so a few attempts suffice.
ATTEMPTS = 5


class ActionModule(ShareAction):
    """Edits kubeadm's configuration on the controller; the module reads it and replaces it if it is unchanged."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        params = untagged(params)
        machines = machines_of(params)
        for _attempt in range(ATTEMPTS):
            read = self._module({}, task_vars)
            if read.get("failed"):
                return read
            text, done = plan_of(params, machines, read["config_map"])
            if not done["changed"] or self._task.check_mode:
                return done
            plan = {"text": text, "resource_version": read["config_map"]["resource_version"]}
            written = self._module({"plan": plan}, task_vars)
            if not written.get("conflict"):
                return {**written, **done} if not written.get("failed") else written
        raise NotInEffect(f"{NAME} was changed by another client {ATTEMPTS} times in a row; nothing was written")

    def _module(self, more: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        arguments = {name: value for name, value in self._task.args.items() if name not in CONTROLLER_ONLY}
        return self.execute_module({**arguments, **more}, task_vars)
