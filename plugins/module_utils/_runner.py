# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The one runner: observe, plan, (check mode: stop), apply, observe again.

``changed`` is "the plan was not empty" and the diff is that plan, so the two can never disagree.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError

Seen = t.TypeVar("Seen")


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that a plan changes.

    :param header: what it is, as the user knows it: a path, a package, ``Kind namespace/name``.
    :param before: its text before; empty where it doesn't exist.
    :param after: its text after; empty where it is removed.
    :param step: what ``apply`` needs to do it; never shown.
    """

    header: str
    before: str
    after: str
    step: t.Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What has to be done, in order."""

    changes: tuple[Change, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.changes

    def diff(self) -> list[dict[str, str]]:
        """The plan in the form that Ansible prints with --diff."""
        return [
            {"before_header": one.header, "after_header": one.header, "before": one.before, "after": one.after}
            for one in self.changes
        ]

    def headers(self) -> str:
        return ", ".join(one.header for one in self.changes)


class Concern(t.Protocol[Seen]):
    """One concern of a node or a cluster: how to see it, what is missing, how to mend that."""

    def observe(self) -> Seen: ...

    def plan(self, seen: Seen) -> Plan: ...

    def apply(self, seen: Seen, plan: Plan) -> None: ...


def run(concern: Concern[Seen], check: bool) -> dict[str, t.Any]:
    """Bring a concern to where it should be.

    :param check: say what would change and change nothing.
    :returns: ``changed`` and ``diff``, ready for ``exit_json``.
    :raises NotInEffect: the change was made and a second look doesn't show it.
    """
    seen = concern.observe()
    plan = concern.plan(seen)
    if not plan.empty and not check:
        concern.apply(seen, plan)
        left = concern.plan(concern.observe())
        if not left.empty:
            raise NotInEffect(f"changed, but still not as asked for: {left.headers()}")
    return {"changed": not plan.empty, "diff": plan.diff()}


class Exits(t.Protocol):
    """The part of AnsibleModule that ends a module."""

    check_mode: bool

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any: ...

    def exit_json(self, **kwargs: t.Any) -> t.Any: ...


def finish(module: Exits, work: t.Callable[[], dict[str, t.Any]]) -> None:
    """Run a module's work and turn its outcome into exit_json or fail_json: the only edge."""
    try:
        result = work()
    except ShareError as error:
        module.fail_json(msg=str(error), **error.details)
    else:
        module.exit_json(**result)
