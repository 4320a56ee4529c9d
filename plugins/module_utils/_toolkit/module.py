# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``toolkit_config``: its arguments, and the reconciler of the toolkit's files and of replaced tools."""

from __future__ import annotations

import typing as t

from .._core import plan as core_plan
from .._core.types import JsonObject
from .._host.system import System
from . import config, legacy_apply, stop_program
from .config import ConfigReconciler
from .legacy import observe_record
from .legacy_apply import LegacyReconciler

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "files": {"type": "bool", "default": True},
    "old_cdi": {"type": "bool", "default": False},
    "accept_unprivileged": {"type": "bool", "default": True},
    "driver_root": {"type": "path", "default": "/"},
    "keep": {"type": "list", "elements": "path", "default": []},
    "remove_sources": {"type": "bool", "default": False},
    "remove_packages": {"type": "list", "elements": "str", "default": []},
    "observed": {"type": "dict"},
}


def plan(params: JsonObject, observed: t.Mapping[str, t.Any]) -> core_plan.Plan:
    """Plan all changes.

    Replaced tools are removed before the toolkit is configured, and restored after its files are removed.

    :param observed: ``gpu_node``, or the observations of ``ToolkitConfig``.
    """
    files = config.make_plan(params, observed).changes if params["files"] else ()
    files = (*stop_program.plan(observed.get("started") or ()).changes, *files)
    replaced = legacy_apply.make_plan(legacy_apply.options_of(params), observed).changes
    return core_plan.Plan((*replaced, *files) if params["state"] == "present" else (*files, *replaced))


class ToolkitConfig:
    """The toolkit's files and the replaced tools on the machine that the module runs on."""

    def __init__(self, params: JsonObject, system: System) -> None:
        self._params = params
        self._system = system
        self._removes = params["files"] and params["state"] == "absent"
        self._config = ConfigReconciler(params, system)
        self._legacy = LegacyReconciler(legacy_apply.options_of(params), system)

    def observe(self) -> JsonObject:
        # While the toolkit is there, containers are stopped by its own runtime.
        started = stop_program.observe(self._system) if self._removes else []
        return {**self._config.observe(), **self._legacy.observe(), "started": started}

    def plan(self, seen: JsonObject) -> core_plan.Plan:
        return plan(self._params, seen)

    def apply(self, seen: JsonObject, plan: core_plan.Plan) -> None:
        # First: until then nothing can stop these containers.
        stop_program.apply(self._system, stop_program.plan(seen["started"]))
        parts: list[ConfigReconciler | LegacyReconciler] = [self._legacy]
        if self._params["files"]:
            parts.insert(1 if self._params["state"] == "present" else 0, self._config)
        for reconciler in parts:
            part = reconciler.plan(seen)
            if not part.empty:
                reconciler.apply(seen, part)


def reconcile(params: JsonObject, check: bool, system: System) -> JsonObject:
    """Reconcile, and add the removed packages and the found drop-ins to the results."""
    before = legacy_apply.record_of({"toolkit_legacy": observe_record(system)})
    result = core_plan.run(ToolkitConfig(params, system), check)
    seen = {"toolkit_legacy": observe_record(system)}
    return {**result, **legacy_apply.results(seen, legacy_apply.record_of(seen) or before)}
