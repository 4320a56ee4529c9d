# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reconcile desired and observed state: observe, plan, (check mode: stop), apply, observe again.

``changed`` means "the plan was not empty" and the diff shows that plan, so the two always agree.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .errors import NotInEffect, ShareError
from .types import JsonObject

State = t.TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a plan.

    :param header: the object's name for the user: a path, a package, ``Kind namespace/name``.
    :param before: its text before the change; empty if it does not exist.
    :param after: its text after the change; empty if it is removed.
    :param step: data for ``apply``; never printed.
    """

    header: str
    before: str
    after: str
    step: t.Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Changes in the order in which they are applied."""

    changes: tuple[Change, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.changes

    def diff(self) -> list[dict[str, str]]:
        """Return the plan as Ansible prints it with --diff."""
        rows = []
        for change in self.changes:
            name = change.header
            rows.append({"before_header": name, "after_header": name, "before": change.before, "after": change.after})
        return rows

    def headers(self) -> str:
        """Return the names of what changes, for a message."""
        return ", ".join(change.header for change in self.changes)


class Reconciler(t.Protocol[State]):
    """Observes a part of a node or cluster, plans its changes and applies them."""

    def observe(self) -> State: ...

    def plan(self, state: State) -> Plan: ...

    def apply(self, state: State, plan: Plan) -> None: ...


def run(
    reconciler: Reconciler[State], check: bool, details: t.Callable[[State], JsonObject] = lambda _state: {}
) -> JsonObject:
    """Apply the changes that a reconciler plans.

    :param check: predict the changes without applying them.
    :param details: returns more keys of the result.
    :returns: ``changed`` and ``diff``, for ``exit_json``; an error of a change has them, too.
    :raises NotInEffect: observing again shows that changes are missing.
    """
    state = reconciler.observe()
    plan = reconciler.plan(state)
    result = {"changed": not plan.empty, "diff": plan.diff(), **details(state)}
    if plan.empty or check:
        return result
    try:
        reconciler.apply(state, plan)
        missing = reconciler.plan(reconciler.observe())
        if not missing.empty:
            raise NotInEffect(f"these changes were made but have no effect: {missing.headers()}")
    except ShareError as error:
        error.details = {**result, **error.details}
        raise
    return result


class ModuleResult(t.Protocol):
    """The part of AnsibleModule that returns a result."""

    check_mode: bool

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any: ...

    def exit_json(self, **kwargs: t.Any) -> t.Any: ...


def run_module(module: ModuleResult, ensure: t.Callable[[], JsonObject]) -> None:
    """Exit a module with the result of a function, or fail it with its ``ShareError``."""
    try:
        result = ensure()
    except ShareError as error:
        module.fail_json(msg=str(error), **error.details)
    else:
        module.exit_json(**result)
