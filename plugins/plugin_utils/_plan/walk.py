# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make a role's plan from the role's own tasks, without executing anything. Pure but for what its ``Engine`` does.

There is no second description of what a role does: the tasks are read, their conditions and options are evaluated as in
check mode, and each module of the collection predicts its result by the function with which it plans itself. What only
an execution can tell (another collection's module whose conditions hold) is a step that *may* change something.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ...module_utils._core.errors import ShareError
from ...module_utils._core.types import JsonObject

COLLECTION = "kubegpu.share."
GROUP = "group/kubegpu.share.cluster"
# The collection whose group of modules that one extends.
EXTENDED = "kubernetes.core."
BUILTIN = "ansible.builtin."
# A task's keywords that have no effect on its prediction, and those that `_task` and its helpers read. The roles use no
# others; `_list` reads those of a block.
IGNORED = frozenset(
    (
        *("check_mode", "delegate_facts", "delegate_to", "no_log", "ignore_unreachable", "run_once", "throttle"),
        *("until", "retries", "delay"),
    )
)
READ = frozenset(
    ("name", "when", "vars", "loop", "loop_control", "register", "failed_when", "changed_when", "module_defaults")
)
BLOCK = frozenset(("name", "when", "vars", "module_defaults", "block", "rescue", "always"))
# The name of a step that stands for the rest of a role.
LATER = "Plan the rest when the steps before have run"


class Undefined(Exception):
    """A template needs a value that isn't known before an earlier step has run."""


class Engine(t.Protocol):
    """What Ansible does with texts of a role."""

    def template(self, value: t.Any, variables: t.Mapping[str, t.Any]) -> t.Any:
        """Return a value with its templates replaced.

        :raises Undefined: it names a value that doesn't exist.
        """

    def holds(self, condition: t.Any, variables: t.Mapping[str, t.Any]) -> bool:
        """Return whether a condition holds.

        :raises Undefined: it names a value that doesn't exist.
        """

    def load(self, path: str) -> t.Any:
        """Return a YAML file's content, whose texts may be templates; None if the file doesn't exist."""


class Predict(t.Protocol):
    """Predicts the result of a module in check mode."""

    def __call__(self, module: str, options: JsonObject, variables: t.Mapping[str, t.Any]) -> JsonObject | None:
        """Return the result; None if only an execution can tell.

        :param module: its full name.
        :raises ShareError: the module would fail.
        """


@dataclasses.dataclass(frozen=True)
class Step:
    """A task that would change something.

    :param changes: the names of what changes: paths, packages, objects.
    :param certain: it is known that it changes something; otherwise the role decides when it runs.
    :param restarts: services that it restarts.
    :param waits: what it waits for, with the reasons.
    :param reason: why it can't be planned now; empty where it could.
    """

    role: str
    task: str
    module: str
    changes: tuple[str, ...] = ()
    certain: bool = True
    restarts: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    reason: str = ""

    def result(self) -> JsonObject:
        """Return the step as data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A task that would fail before anything changes."""

    role: str
    task: str
    reason: str

    def result(self) -> JsonObject:
        """Return the refusal as data."""
        return dict(vars(self))


class _Refused(Exception):
    """Ends the walk of a host."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The variables and conditions that a task inherits.

    :param host: the host's variables.
    :param defaults: defaults of the role and of the roles that include it; the weakest.
    :param own: the roles' ``vars/main.yml``, then those of blocks and tasks.
    :param given: parameters of the role; the strongest.
    :param options: defaults of the modules of the action group ``cluster``.
    """

    role: str
    folder: str
    host: t.Mapping[str, t.Any]
    defaults: t.Mapping[str, t.Any]
    own: t.Mapping[str, t.Any]
    given: t.Mapping[str, t.Any]
    conditions: tuple[t.Any, ...] = ()
    options: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)

    def inner(self, task: t.Mapping[str, t.Any], conditional: bool = True) -> _Scope:
        """Return the scope inside a block or a task.

        :param conditional: its conditions hold for what is inside, and aren't evaluated beforehand.
        """
        when = tuple(listed(task.get("when"))) if conditional else ()
        return dataclasses.replace(
            self,
            own={**self.own, **(task.get("vars") or {})},
            conditions=(*self.conditions, *when),
            options={**self.options, **((task.get("module_defaults") or {}).get(GROUP) or {})},
        )


class Walk:
    """The plan of one host's roles, in the order in which they run; what one role sets, the next ones see.

    :param roles: the folder of the roles.
    :param host: the host's variables.
    :ivar steps: what would change.
    :ivar refusal: why the walk ended early; None if it didn't.
    :ivar facts: what the roles have set and registered.
    :ivar groups: groups that the host would join.
    :ivar notes: what the roles would print, and warnings.
    """

    def __init__(self, engine: Engine, predict: Predict, roles: str, host: t.Mapping[str, t.Any]) -> None:
        self._engine = engine
        self._predict = predict
        self._roles = roles
        self._host = {**host, "ansible_check_mode": True}
        # The modules to which module_defaults of the group apply.
        groups = (engine.load(f"{roles}/../meta/runtime.yml") or {}).get("action_groups") or {}
        self._grouped = {module for module in groups.get("cluster") or [] if isinstance(module, str)}
        self.facts: JsonObject = {}
        self.steps: list[Step] = []
        self.refusal: Refusal | None = None
        self.groups: set[str] = set()
        self.notes: list[str] = []
        self._planned: set[tuple[tuple[str, str], ...]] = set()

    def role(
        self, name: str, given: t.Mapping[str, t.Any] | None = None, when: t.Any = None, tasks: str = "main"
    ) -> bool:
        """Plan a role, unless an earlier one was refused.

        :param name: without the collection's name.
        :param given: the role's parameters.
        :param when: its condition or conditions.
        :param tasks: the name of its file of tasks.
        :returns: whether the role runs.
        """
        if self.refusal is not None:
            return False
        outer = _Scope(name, "", self._host, {}, {}, {})
        try:
            scope = self._enter(outer, name, given or {})
            if not self._all(listed(when), scope):
                return False
            self._file(f"{scope.folder}/tasks/{tasks}.yml", scope)
        except _Refused as refused:
            self.refusal = refused.refusal
        except Undefined as error:
            # The role itself decides, when the steps before have run.
            self.steps.append(Step(name, LATER, "", certain=False, reason=str(error)))
        return True

    # ----------------------------------------------------------------- scopes

    def _enter(self, outer: _Scope, name: str, given: t.Mapping[str, t.Any]) -> _Scope:
        """Return the scope of a role."""
        folder = f"{self._roles}/{name}"
        defaults = self._engine.load(f"{folder}/defaults/main.yml") or {}
        own = self._engine.load(f"{folder}/vars/main.yml") or {}
        return _Scope(
            name,
            folder,
            self._host,
            {**outer.defaults, **defaults},
            {**outer.own, **own},
            {**outer.given, **given},
            options=outer.options,
        )

    def _variables(self, scope: _Scope, more: t.Mapping[str, t.Any] | None = None) -> JsonObject:
        place = {
            "role_name": scope.role,
            "ansible_role_name": COLLECTION + scope.role,
            "role_path": scope.folder,
            "ansible_search_path": [scope.folder],
        }
        return {**scope.defaults, **scope.host, **scope.own, **self.facts, **scope.given, **place, **(more or {})}

    def _all(self, conditions: t.Iterable[t.Any], scope: _Scope, more: t.Mapping[str, t.Any] | None = None) -> bool:
        variables = None
        for condition in conditions:
            variables = variables or self._variables(scope, more)
            if not self._engine.holds(condition, variables):
                return False
        return True

    # ----------------------------------------------------------------- tasks

    def _file(self, path: str, scope: _Scope) -> None:
        tasks = self._engine.load(path)
        if tasks is None:
            raise _Refused(Refusal(scope.role, "", f"{path} doesn't exist"))
        self._list(tasks, scope)

    def _list(self, tasks: t.Iterable[t.Mapping[str, t.Any]], scope: _Scope) -> None:
        for task in tasks:
            if "block" in task:
                # A failure that `rescue` would handle is reported as it is.
                self._list([*task["block"], *(task.get("always") or [])], scope.inner(task))
            else:
                self._task(task, scope)

    def _task(self, task: t.Mapping[str, t.Any], outer: _Scope) -> None:
        action = action_of(task)
        scope = outer.inner(task)
        if action.endswith("import_tasks"):
            self._file(self._path(task[action], scope), scope)
            return
        if "loop" in task:
            variable = (task.get("loop_control") or {}).get("loop_var", "item")
            results = [self._once(task, action, scope, {variable: item}) for item in self._items(task["loop"], scope)]
            changed = any(result.get("changed") for result in results)
            result: JsonObject = {"results": results, "changed": changed, "skipped": not results}
        else:
            result = self._once(task, action, scope, {})
        if "register" in task:
            self.facts[task["register"]] = result

    def _items(self, loop: t.Any, scope: _Scope) -> list[t.Any]:
        try:
            return list(self._engine.template(loop, self._variables(scope)))
        except Undefined:
            # As in Ansible: without its loop's value a task is still skipped by conditions that don't need it.
            if self._all(scope.conditions, scope):
                raise
            return []

    def _once(self, task: t.Mapping[str, t.Any], action: str, scope: _Scope, item: t.Mapping[str, t.Any]) -> JsonObject:
        """Evaluate a task for one item of its loop and return its result."""
        if not self._all(scope.conditions, scope, item):
            return {"changed": False, "skipped": True}
        variables = self._variables(scope, item)
        short = action.removeprefix(BUILTIN)
        handler = getattr(self, f"_do_{short}", None)
        if handler is None:
            return self._module(task, action, scope, variables)
        handler(task[action], task, scope, variables)
        return {"changed": False}

    def _tolerates(self, task: t.Mapping[str, t.Any], result: JsonObject, variables: t.Mapping[str, t.Any]) -> bool:
        """Return whether a task doesn't fail by this result, which is a failure without its ``failed_when``."""
        if task.get("failed_when") is False:
            return True
        conditions = listed(task.get("failed_when"))
        known = {**variables, **({task["register"]: result} if "register" in task else {})}
        return bool(conditions) and not all(self._engine.holds(condition, known) for condition in conditions)

    def _name(self, task: t.Mapping[str, t.Any], action: str, variables: t.Mapping[str, t.Any]) -> str:
        try:
            return str(self._engine.template(task.get("name", action), variables))
        except Undefined:
            return str(task["name"])

    def _module(
        self, task: t.Mapping[str, t.Any], action: str, scope: _Scope, variables: t.Mapping[str, t.Any]
    ) -> JsonObject:
        name = self._name(task, action, variables)
        result: JsonObject | None
        try:
            grouped = action.startswith(EXTENDED) or action.removeprefix(COLLECTION) in self._grouped
            given = {**(scope.options if grouped else {}), **(task[action] or {})}
            options = self._engine.template(given, variables)
            result = self._predict(action, options, variables)
        except ShareError as error:
            failed = {**error.details, "changed": False, "failed": True, "msg": str(error)}
            if self._tolerates(task, failed, variables):
                return failed
            raise _Refused(Refusal(scope.role, name, str(error))) from error
        reads = task.get("changed_when") is False
        if result is None:
            if not reads:
                self.steps.append(Step(scope.role, name, action, certain=task.get("changed_when") is True))
            return {"changed": not reads}
        self.notes += [str(warning) for warning in result.get("warnings") or []]
        if reads:
            return {**result, "changed": False}
        waits = tuple(result.get("unready") or ())
        changed = bool(result["changed"])
        diff = result.get("diff") or []
        # Where an earlier step makes the same change, such as a label of two components, this one finds it made.
        news = [part for part in diff if "after" not in part or tuple(sorted(part.items())) not in self._planned]
        if diff and not news:
            changed = False
        if changed or waits:
            self._planned.update(tuple(sorted(part.items())) for part in news)
            changes = tuple(dict.fromkeys(part["after_header"] for part in news))
            restarts = tuple(result.get("restarts") or ()) if changed else ()
            self.steps.append(Step(scope.role, name, action, changes, changed, restarts=restarts, waits=waits))
        return result

    # ----------------------------------------------------------------- Ansible's own actions

    def _path(self, given: t.Any, scope: _Scope, variables: JsonObject | None = None) -> str:
        name = given["file"] if isinstance(given, dict) else given
        return f"{scope.folder}/tasks/{self._engine.template(name, variables or self._variables(scope))}"

    def _do_include_tasks(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        # The conditions hold for the task alone.
        inside = dataclasses.replace(scope, conditions=())
        self._file(self._path(given, scope, variables), inside)

    def _do_include_role(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        arguments = self._engine.template(given, variables)
        name = str(arguments["name"]).removeprefix(COLLECTION)
        inside = self._enter(dataclasses.replace(scope, conditions=()), name, task.get("vars") or {})
        self._file(f"{inside.folder}/tasks/{arguments.get('tasks_from', 'main')}.yml", inside)

    def _do_set_fact(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        self.facts.update(
            {str(self._engine.template(key, variables)): self._engine.template(given[key], variables) for key in given}
        )

    def _do_include_vars(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        path = self._engine.template(given["file"], variables)
        self.facts.update(self._engine.load(path if path.startswith("/") else f"{scope.folder}/vars/{path}") or {})

    def _do_group_by(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        self.groups.add(str(self._engine.template(given["key"], variables)))

    def _do_debug(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        text = self._engine.template(given["msg"], variables)
        self.notes.append(" ".join(text) if isinstance(text, list) else str(text))

    def _do_fail(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        reason = str(self._engine.template(given["msg"], variables)).strip()
        raise _Refused(Refusal(scope.role, self._name(task, "fail", variables), reason))

    def _do_assert(self, given: t.Any, task: t.Any, scope: _Scope, variables: JsonObject) -> None:
        if not all(self._engine.holds(condition, variables) for condition in listed(given["that"])):
            self._do_fail({"msg": given["fail_msg"]}, task, scope, variables)


def listed(value: t.Any) -> list[t.Any]:
    """Return a keyword's value as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def action_of(task: t.Mapping[str, t.Any]) -> str:
    """Return the name of the task's action, its only key that isn't a keyword.

    :raises ValueError: there is another number of them, as with a keyword that isn't known here.
    """
    names = [key for key in task if key not in IGNORED and key not in READ]
    if len(names) != 1:
        raise ValueError(f"task {task.get('name')!r}: one action is expected, not {names}")
    return str(names[0])
