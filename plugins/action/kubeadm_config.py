# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import Change, Plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.kubeadm import ARGUMENTS, KEY, NAME
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.form import Extender
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.kubeadm import (
    ExtenderFile,
    Reason,
    Result,
    cluster_configuration,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler.plan import Options, extender_file

# Options that the module doesn't use.
CONTROLLER_ONLY = ("machines", "version")
# Others change this ConfigMap in upgrades and joins only, so a few attempts suffice.
ATTEMPTS = 5


class ActionModule(ShareAction):
    """Edits kubeadm's configuration on the controller; the module reads it and replaces it if it is unchanged."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        # Ansible's values carry tags, which the YAML library can't represent.
        params = json.loads(json.dumps(params))
        present = params["state"] == "present"
        machines = _machines(params) if present and params["machines"] else None
        for _attempt in range(ATTEMPTS):
            read = self._module({}, task_vars)
            if read.get("failed"):
                return read
            before, result = str(read["config_map"]["text"] or ""), Result("", False, Reason.NO_CONFIG_MAP)
            if before:
                result = cluster_configuration(before, present, str(params["configuration"]), machines)
            changes = (Change(f"{NAME}, {KEY}", before, result.text),) if result.text != before else ()
            done: JsonObject = {
                "changed": bool(changes),
                "diff": Plan(changes).diff(),
                "kept": result.kept,
                "reason": result.message,
            }
            if not changes or self._task.check_mode:
                return done
            plan = {"text": result.text, "resource_version": read["config_map"]["resource_version"]}
            written = self._module({"plan": plan}, task_vars)
            if not written.get("conflict"):
                return {**written, **done} if not written.get("failed") else written
        raise NotInEffect(f"{NAME} was changed by another client {ATTEMPTS} times in a row; nothing was written")

    def _module(self, more: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        arguments = {name: value for name, value in self._task.args.items() if name not in CONTROLLER_ONLY}
        return self.execute_module({**arguments, **more}, task_vars)


def _machines(params: JsonObject) -> dict[str, ExtenderFile | None]:
    """Return the file by which each machine's kube-scheduler gets the extender; None where it was not observed.

    :raises BadInput: one of them can't be configured as requested.
    """
    # The extender's address makes no difference here.
    options = Options(True, Extender("", 0), params["version"], str(params["configuration"]))
    found: dict[str, ExtenderFile | None] = {}
    for name, observed in params["machines"].items():
        if not observed:
            found[name] = None
        elif "manifest" not in observed:
            raise BadInput("machines: this isn't a result of control_plane_info")
        else:
            found[name] = extender_file(options, observed) if observed["manifest"] is not None else None
    return found
