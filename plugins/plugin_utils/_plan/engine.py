# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan's ``Engine`` and ``Predict`` by ansible-core: templates, lookups and the collection's action plugins."""

from __future__ import annotations

import contextlib
import os
import typing as t

from ansible.errors import AnsibleError, AnsibleUndefinedVariable
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
    :ivar templar: has the variables of the last text.
    """

    def __init__(self, action: ActionBase) -> None:
        self.templar = action._templar.copy_with_new_env()
        self._loader = action._loader
        self._loaded: dict[str, t.Any] = {}

    def template(self, value: t.Any, variables: t.Mapping[str, t.Any]) -> t.Any:
        self.templar.available_variables = dict(variables)
        try:
            return self.templar.template(value)
        except AnsibleUndefinedVariable as error:
            raise Undefined(str(error)) from error

    def holds(self, condition: t.Any, variables: t.Mapping[str, t.Any]) -> bool:
        self.templar.available_variables = dict(variables)
        try:
            return bool(self.templar.evaluate_conditional(condition))
        except AnsibleUndefinedVariable as error:
            raise Undefined(str(error)) from error

    def load(self, path: str) -> t.Any:
        if path not in self._loaded:
            there = os.path.isfile(path)
            self._loaded[path] = self._loader.load_from_file(path, trusted_as_template=True) if there else None
        return self._loaded[path]


class TaskPredictions:
    """Predicts tasks by the cluster's functions and by the action plugins.

    :param action: the action that plans.
    :param engine: evaluates the tasks' options, just before they are predicted.
    """

    def __init__(self, action: ActionBase, engine: AnsibleEngine, cluster: ClusterTasks | None = None) -> None:
        self._action = action
        self._engine = engine
        self._cluster = cluster or ClusterTasks()

    def __call__(self, module: str, options: JsonObject, variables: t.Mapping[str, t.Any]) -> JsonObject | None:
        observed = _observed(module, variables)
        if observed is not None:
            return {**observed, "changed": False}
        predicted = self._cluster.predict(module, options)
        if predicted is not None or not module.startswith(COLLECTION):
            return predicted
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
            templar=self._engine.templar,
            shared_loader_obj=self._action._shared_loader_obj,
        )


def _observed(module: str, variables: t.Mapping[str, t.Any]) -> JsonObject | None:
    """Return what this run has observed of the machine already, as the module would return it."""
    if module == f"{COLLECTION}control_plane_info" and "scheduler_observed" in variables:
        return {"control_plane": variables["scheduler_observed"]["control_plane"]}
    if module == f"{COLLECTION}gpu_node_info" and "gpu_node" in variables:
        return {"gpu_node": variables["gpu_node"]}
    return None


@contextlib.contextmanager
def _naming(host: str) -> t.Iterator[None]:
    """Name the host in errors: the task runs on localhost."""
    try:
        yield
    except AnsibleError as error:
        raise AnsibleError(f"Host {host}: {error}") from error


class Planner:
    """Plans hosts one after another in one process, which loads each file and each plugin once.

    :param action: the action that plans, on localhost.
    :param known: its variables.
    :param machines: the hosts of the plays that change machines.
    """

    def __init__(self, action: ActionBase, known: JsonObject, machines: t.Sequence[str] = ()) -> None:
        self._action = action
        self._known = known
        self._machines = list(machines)
        self._engine = AnsibleEngine(action)
        task = action._task
        self._of_play: JsonObject = task.get_play().get_vars() if task._parent else {}
        self._validated: dict[str, JsonObject] = {}

    def validate(self, name: str) -> JsonObject:
        """Evaluate what the roles driver, toolkit and runtime would refuse of a machine, for preflight; once for each.

        :raises ShareError: a variable that they need is undefined.
        :returns: ``driver_choice``, as the filter of this name returns it; ``toolkit_refused`` and ``runtime_refused``,
            lists of reasons; and ``runtime_warnings``.
        """
        if name not in self._validated:
            self._validated[name] = self._validate(name)
        return self._validated[name]

    def _validate(self, name: str) -> JsonObject:
        with _naming(name):
            variables = self._variables(name)
            walk = self._walk(variables)
            for role in ("driver", "toolkit"):
                walk.role(role, tasks="validate")
            # Role runtime has no validation of its own: its plan refuses.
            runtime = self._walk(variables)
            runtime.role("runtime")
        unknown = [*walk.steps, *(step for step in runtime.steps if step.reason)]
        if unknown:
            reasons = "; ".join(f"role {step.role} can't be validated: {step.reason}" for step in unknown)
            raise ShareError(f"host {name}: {reasons}")
        return {
            "driver_choice": walk.facts["__driver_choice"],
            "toolkit_refused": walk.facts["__toolkit_refused"],
            "runtime_refused": [runtime.refusal.reason] if runtime.refusal else [],
            "runtime_warnings": runtime.notes,
        }

    def machine(self, name: str) -> JsonObject:
        """Plan the roles of site.yml for a machine and return the plan as data."""
        with _naming(name):
            return self._plan(self._variables(name))

    def cluster(self, cluster: ClusterTasks) -> JsonObject:
        """Plan the plays of localhost and return the plan as data.

        :param cluster: the connection.
        """
        return self._plan(self._known, cluster)

    def _plan(self, variables: JsonObject, cluster: ClusterTasks | None = None) -> JsonObject:
        groups = [name for name, hosts in variables["groups"].items() if variables["inventory_hostname"] in hosts]
        walk = self._walk(variables, cluster)
        steps = walk_stages(walk, groups, cluster is not None, trust_as_template)
        return {
            "steps": steps,
            "refusal": walk.refusal.result() if walk.refusal else None,
            "groups": sorted({*groups, *walk.groups}),
            "notes": walk.notes,
        }

    def _walk(self, variables: JsonObject, cluster: ClusterTasks | None = None) -> Walk:
        return Walk(self._engine, TaskPredictions(self._action, self._engine, cluster), ROLES, variables)

    def _variables(self, name: str) -> JsonObject:
        """Return a machine's variables as a task in a play of machines has them, with their templates."""
        own = self._known["hostvars"].raw_get(name)
        # hostvars has none of a play that imports this playbook: stronger than the inventory's, weaker than extra ones.
        play = {key: value for key, value in self._of_play.items() if self._known.get(key, value) == value}
        magic = {"hostvars": self._known["hostvars"], "ansible_play_hosts": self._machines}
        return {**own, **play, **magic}
