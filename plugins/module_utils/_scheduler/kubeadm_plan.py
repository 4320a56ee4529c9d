# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the change of kubeadm's configuration from the ConfigMap and the observed machines. Pure."""

from __future__ import annotations

import typing as t

from .._core.errors import BadInput
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .extenders import Extender
from .kubeadm import KEY, NAME
from .kubeadm_edit import ExtenderFile, Reason, Result, cluster_configuration
from .plan import Options, extender_file

Machines = t.Optional[t.Mapping[str, t.Optional[ExtenderFile]]]


def plan_of(params: JsonObject, machines: Machines, config_map: JsonObject) -> tuple[str, JsonObject]:
    """Return the configuration's new text, and the task's result in check mode.

    :param params: the task's options.
    :param machines: as ``machines_of`` returns them.
    :param config_map: what the module has read.
    :raises BadInput: the configuration can't be changed.
    """
    present = params["state"] == "present"
    before, result = str(config_map["text"] or ""), Result("", False, Reason.NO_CONFIG_MAP)
    if before:
        result = cluster_configuration(before, present, str(params["configuration"]), machines)
    changes = (Change(f"{NAME}, {KEY}", before, result.text),) if result.text != before else ()
    done: JsonObject = {"changed": bool(changes), "diff": Plan(changes).diff()}
    return result.text, {**done, "kept": result.kept, "reason": result.message}


def machines_of(params: JsonObject) -> Machines:
    """Return the file by which each machine's kube-scheduler gets the extender, None for one that was not observed.

    :param params: the task's options.
    :returns: None where the extender is removed, or no machine is given.
    :raises BadInput: one of them can't be configured as requested.
    """
    if params["state"] != "present" or not params["machines"]:
        return None
    # The extender's address makes no difference here.
    options = Options(True, Extender("", 0), params["version"], str(params["configuration"]))
    machines: dict[str, ExtenderFile | None] = {}
    for name, observed in params["machines"].items():
        if not observed:
            machines[name] = None
        elif "manifest" not in observed:
            raise BadInput("machines: this isn't a result of control_plane_info")
        else:
            machines[name] = extender_file(options, observed) if observed["manifest"] is not None else None
    return machines
