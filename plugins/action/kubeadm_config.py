# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kubeadm_config import ARGUMENTS, KEY, NAME
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._kubeadm_plan import Kept, Told, cluster_configuration
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_plan import Options, told

Json = dict[str, t.Any]

# Not for the module: it has no use for them.
ONLY_HERE = ("machines", "version")
# Others change this ConfigMap in upgrades and joins, not all the time.
ATTEMPTS = 5


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Edits kubeadm's configuration on the controller; the module reads it and replaces it as it was read."""

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            result.update(self._work(json.loads(json.dumps(params)), task_vars))
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return result

    def _work(self, params: Json, task_vars: Json | None) -> Json:
        present = params["state"] == "present"
        machines = _machines(params) if present and params["machines"] else None
        for _attempt in range(ATTEMPTS):
            look = self._module({}, task_vars)
            if look.get("failed"):
                return look
            before, kept = str(look["seen"]["text"] or ""), Kept("", False, f"{NAME} isn't there")
            if before:
                kept = cluster_configuration(before, present, str(params["configuration"]), machines)
            changes = (Change(f"{NAME}, {KEY}", before, kept.text),) if kept.text != before else ()
            done: Json = {
                "changed": bool(changes),
                "diff": Plan(changes).diff(),
                "kept": kept.kept,
                "reason": kept.reason,
            }
            if not changes or self._task.check_mode:
                return done
            plan = {"text": kept.text, "resource_version": look["seen"]["resource_version"]}
            written = self._module({"plan": plan}, task_vars)
            if not written.get("conflict"):
                return {**written, **done} if not written.get("failed") else written
        raise NotInEffect(f"{NAME} was changed by somebody else {ATTEMPTS} times in a row; nothing was written")

    def _module(self, more: Json, task_vars: Json | None) -> Json:
        arguments = {name: value for name, value in self._task.args.items() if name not in ONLY_HERE}
        done: Json = self._execute_module(module_args={**arguments, **more}, task_vars=task_vars)
        return done


def _machines(params: Json) -> dict[str, Told | None]:
    """How each machine's kube-scheduler is told of the extender.

    :raises BadInput: one of them can't be told as asked for.
    """
    # How it is reached makes no difference here.
    options = Options(True, Extender("", 0), params["version"], str(params["configuration"]))
    found: dict[str, Told | None] = {}
    for name, seen in params["machines"].items():
        if not seen:
            found[name] = None
        elif "manifest" not in seen:
            raise BadInput("machines: this isn't what control_plane_info returned")
        else:
            found[name] = told(options, seen) if seen["manifest"] is not None else None
    return found
