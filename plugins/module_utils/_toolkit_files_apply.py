# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See and change the toolkit's files on a machine."""

from __future__ import annotations

import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _toolkit_files as toolkit
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Plan
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]

CTK = "/usr/bin/nvidia-ctk"
# systemctl's status where there is no such unit: a toolkit before 1.18.
NO_UNIT = 5


def refresh_env(system: System) -> str | None:
    """What stands in ``cdi.refresh_env``: the environment of nvidia-cdi-refresh.service, None where there is none."""
    return system.read(toolkit.ENVIRONMENT)


class ToolkitFiles:
    """The toolkit's files of the machine that the module runs on."""

    def __init__(self, params: Json, system: System) -> None:
        self._params = params
        self._system = system

    def observe(self) -> Json:
        config = self._system.read(toolkit.CONFIG)
        specification = self._system.exists(toolkit.SPECIFICATION)
        return {
            "toolkit": {"config": None if config is None else {"text": config}},
            "cdi": {
                "refresh_env": refresh_env(self._system),
                "specs": [{"path": toolkit.SPECIFICATION}] if specification else [],
            },
        }

    def plan(self, seen: Json) -> Plan:
        return toolkit.plan(self._params, seen)

    def apply(self, seen: Json, plan: Plan) -> None:
        for change in plan.changes:
            if isinstance(change.step, toolkit.Refresh):
                self._system.write(toolkit.ENVIRONMENT, change.step.pending)
                self._refresh()
                self._system.write(toolkit.ENVIRONMENT, change.step.text)
            elif isinstance(change.step, toolkit.Configure):
                self._configure(change.step)
            else:
                self._system.remove(change.step.path)
                # Refuses while something else is in it.
                self._system.run(["rmdir", posixpath.dirname(change.step.path)])

    def _configure(self, step: toolkit.Configure) -> None:
        """Write the configuration and have the toolkit read it; each container that starts reads it anew."""
        self._system.write(toolkit.CONFIG, step.text)
        if not self._system.exists(CTK):
            return
        done = self._system.run([CTK, "config", f"--config-file={toolkit.CONFIG}"], timeout=30)
        if done.rc == 0 and (not step.says or re.search(rf"^{toolkit.ACCEPT} = false$", done.out, re.MULTILINE)):
            return
        if step.before is None:
            self._system.remove(toolkit.CONFIG)
        else:
            self._system.write(toolkit.CONFIG, step.before)
        words = done.err.strip().splitlines()[-1:] or [f"it doesn't say {toolkit.ACCEPT} = false"]
        raise NotInEffect(f"nvidia-ctk doesn't take the new {toolkit.CONFIG}, and the old one is back: {words[0]}")

    def _refresh(self) -> None:
        """Have the specification made anew; where systemd doesn't run, the next boot does it."""
        if not self._system.exists("/run/systemd/system"):
            return
        done = self._system.run(["systemctl", "restart", toolkit.SERVICE], timeout=120)
        if done.rc not in (0, NO_UNIT):
            words = (done.err.strip().splitlines() or [f"status {done.rc}"])[0]
            raise NotInEffect(f"{toolkit.SERVICE} couldn't make the CDI specification anew: {words}")
