# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The plan's ``Engine`` and ``Predict`` by ansible-core: templates, lookups and the collection's action plugins."""

from __future__ import annotations

import os
import typing as t

from ansible.errors import AnsibleUndefinedVariable
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template

from ...module_utils._core.errors import ShareError
from ...module_utils._core.types import JsonObject
from .._actions.base import ShareAction
from .cluster import ClusterTasks, validated
from .stages import walk_stages
from .walk import COLLECTION, Undefined, Walk

ROLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "roles")


class AnsibleEngine:
    """Templates by ansible-core's public classes.

    :param action: the action that plans.
    """

    def __init__(self, action: ActionBase) -> None:
        self._templar = action._templar.copy_with_new_env()
        self._loader = action._loader
        self._loaded: dict[str, t.Any] = {}

    def template(self, value: t.Any, variables: t.Mapping[str, t.Any]) -> t.Any:
        self._templar.available_variables = dict(variables)
        try:
            return self._templar.template(value)
        except AnsibleUndefinedVariable as error:
            raise Undefined(str(error)) from error

    def holds(self, condition: t.Any, variables: t.Mapping[str, t.Any]) -> bool:
        self._templar.available_variables = dict(variables)
        try:
            return bool(self._templar.evaluate_conditional(condition))
        except AnsibleUndefinedVariable as error:
            raise Undefined(str(error)) from error

    def load(self, path: str) -> t.Any:
        if path not in self._loaded:
            there = os.path.isfile(path)
            self._loaded[path] = self._loader.load_from_file(path, trusted_as_template=True) if there else None
        return self._loaded[path]


class TaskPredictions:
    """Predicts tasks by the cluster's functions and by the action plugins.

    :param action: the action that plans, on the host whose tasks are predicted.
    """

    def __init__(self, action: ActionBase, cluster: ClusterTasks | None = None) -> None:
        self._action = action
        self._cluster = cluster or ClusterTasks()

    def __call__(self, module: str, options: JsonObject, variables: t.Mapping[str, t.Any]) -> JsonObject | None:
        observed = _observed(module, variables)
        if observed is not None:
            return {**observed, "changed": False}
        found = self._cluster.predict(module, options)
        if found is not None or not module.startswith(COLLECTION):
            return found
        plugin = self._plugin(module, options)
        if not isinstance(plugin, ShareAction) or type(plugin).predict is ShareAction.predict:
            return None
        return plugin.predict(validated(plugin.arguments, options, plugin.rules), dict(variables))

    def _plugin(self, module: str, options: JsonObject) -> ActionBase | None:
        task = self._action._task.copy()
        task.args = options
        task.check_mode = True
        return self._action._shared_loader_obj.action_loader.get(
            module,
            task=task,
            connection=self._action._connection,
            play_context=self._action._play_context,
            loader=self._action._loader,
            templar=self._action._templar,
            shared_loader_obj=self._action._shared_loader_obj,
        )


def _observed(module: str, variables: t.Mapping[str, t.Any]) -> JsonObject | None:
    """Return what this run has observed of the machine already, as the module would return it."""
    if module == f"{COLLECTION}control_plane_info" and "scheduler_observed" in variables:
        return {"control_plane": variables["scheduler_observed"]["control_plane"]}
    if module == f"{COLLECTION}gpu_node_info" and "gpu_node" in variables:
        return {"gpu_node": variables["gpu_node"]}
    return None


def validate_host(action: ActionBase, variables: JsonObject) -> JsonObject:
    """Evaluate what the roles driver, toolkit and runtime would refuse, for preflight.

    :param action: the action that evaluates.
    :param variables: of the machine.
    :raises ShareError: a variable that they need is undefined.
    :returns: ``driver_choice``, as the filter of this name returns it; ``toolkit_refused`` and ``runtime_refused``,
        lists of reasons; and ``runtime_warnings``.
    """
    engine, predict = AnsibleEngine(action), TaskPredictions(action)
    walk = Walk(engine, predict, ROLES, variables)
    for role in ("driver", "toolkit"):
        walk.role(role, tasks="validate")
    # Role runtime has no validation of its own: its plan refuses.
    runtime = Walk(engine, predict, ROLES, variables)
    runtime.role("runtime")
    unknown = [*walk.steps, *(one for one in runtime.steps if one.reason)]
    if unknown:
        raise ShareError("; ".join(f"role {one.role} can't be validated: {one.reason}" for one in unknown))
    return {
        "driver_choice": walk.facts["__driver_choice"],
        "toolkit_refused": walk.facts["__toolkit_refused"],
        "runtime_refused": [runtime.refusal.reason] if runtime.refusal else [],
        "runtime_warnings": runtime.notes,
    }


def plan_host(action: ActionBase, variables: JsonObject, cluster: ClusterTasks | None = None) -> JsonObject:
    """Plan the roles of site.yml for one host, and return the plan as data.

    :param action: the action that plans.
    :param variables: of the host.
    :param cluster: plan the plays of localhost, by this connection; None for those of machines.
    """
    groups = [name for name, hosts in variables["groups"].items() if variables["inventory_hostname"] in hosts]
    walk = Walk(AnsibleEngine(action), TaskPredictions(action, cluster), ROLES, variables)
    steps = walk_stages(walk, groups, cluster is not None, trust_as_template)
    return {
        "steps": steps,
        "refusal": walk.refusal.result() if walk.refusal else None,
        "groups": sorted({*groups, *walk.groups}),
        "notes": walk.notes,
    }
