# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe and change the toolkit's files on a machine."""

from __future__ import annotations

import posixpath

from .._core.errors import NotInEffect
from .._core.plan import Plan
from .._core.types import JsonObject
from .._host.file_transaction import replace_text
from .._host.system import System
from . import config as toolkit
from .facts import CONFIG, CTK, ENVIRONMENT, refresh_env

# systemctl's status for an unknown unit: the toolkit is older than 1.18.
NO_UNIT = 5


class ConfigReconciler:
    """The toolkit's files of the machine that the module runs on."""

    def __init__(self, params: JsonObject, system: System) -> None:
        self._params = params
        self._system = system

    def observe(self) -> JsonObject:
        config = self._system.read(CONFIG)
        specification = self._system.exists(toolkit.SPECIFICATION)
        return {
            "toolkit": {"config": None if config is None else {"text": config}},
            "cdi": {
                "refresh_env": refresh_env(self._system),
                "specs": [{"path": toolkit.SPECIFICATION}] if specification else [],
            },
        }

    def plan(self, seen: JsonObject) -> Plan:
        return toolkit.plan(self._params, seen)

    def apply(self, seen: JsonObject, plan: Plan) -> None:
        for change in plan.changes:
            if isinstance(change.step, toolkit.Refresh):
                replace_text(self._system, ENVIRONMENT, change.step.pending)
                self._refresh()
                replace_text(self._system, ENVIRONMENT, change.step.text)
            elif isinstance(change.step, toolkit.Configure):
                self._configure(change.step)
            else:
                self._system.remove(change.step.path)
                # rmdir refuses a directory that holds other files.
                self._system.run(["rmdir", posixpath.dirname(change.step.path)])

    def _configure(self, step: toolkit.Configure) -> None:
        """Write the configuration and have nvidia-ctk parse it; each new container reads it."""
        replace_text(self._system, CONFIG, (toolkit.ROOT_PENDING if step.regenerate else "") + step.text)
        if self._system.exists(CTK):
            self._confirm(step)
            if step.regenerate:
                self._refresh()
        if step.regenerate:
            replace_text(self._system, CONFIG, step.text)

    def _confirm(self, step: toolkit.Configure) -> None:
        """Have nvidia-ctk parse the configuration, or roll it back.

        :raises NotInEffect: it rejects the configuration.
        """
        done = self._system.run([CTK, "config", f"--config-file={CONFIG}"], timeout=30)
        lines = [line.strip() for line in done.out.splitlines()]
        missing = [line for line in step.confirmed if line not in lines]
        if done.rc == 0 and not missing:
            return
        if step.before is None:
            self._system.remove(CONFIG)
        else:
            replace_text(self._system, CONFIG, step.before)
        errors = done.err.strip().splitlines()[-1:] or [f"its output lacks {', '.join(missing)}"]
        raise NotInEffect(f"nvidia-ctk rejects the new {CONFIG}, which was rolled back: {errors[0]}")

    def _refresh(self) -> None:
        """Regenerate the specification; without a running systemd the next boot does that."""
        masked = self._system.link(f"/etc/systemd/system/{toolkit.SERVICE}") == "/dev/null"
        # Who has masked the service makes the specification himself.
        if masked or not self._system.exists("/run/systemd/system"):
            return
        done = self._system.run(["systemctl", "restart", toolkit.SERVICE], timeout=120)
        if done.rc not in (0, NO_UNIT):
            error = (done.err.strip().splitlines() or [f"status {done.rc}"])[0]
            raise NotInEffect(f"{toolkit.SERVICE} couldn't regenerate the CDI specification: {error}")
