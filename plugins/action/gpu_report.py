# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Print a report and write it to files of the controller; see the documentation of the module of this name."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome as files
from ansible_collections.kubegpu.share.plugins.module_utils._report.outcome import (
    ARGUMENTS,
    MUTUALLY_EXCLUSIVE,
    REQUIRED_ONE_OF,
    render,
    untagged,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import GuardedAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.results import clean_result
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show


class ActionModule(GuardedAction):
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(ARGUMENTS)

    def run(self, tmp: str | None = None, task_vars: JsonObject | None = None) -> JsonObject:
        result: JsonObject = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(
            argument_spec=ARGUMENTS, required_one_of=REQUIRED_ONE_OF, mutually_exclusive=MUTUALLY_EXCLUSIVE
        )
        try:
            rendered = render(untagged(params))
            result.update(text=rendered.text, result=rendered.result)
            if rendered.text and not params["quiet"]:
                # Before the files, so that it is printed even if one of them can't be written.
                show(self._display, rendered.text.rstrip("\n"))
            planned = files.plan(rendered.targets)
            result["changed"] = any(file.changed for file in planned)
            result["files"] = [
                {"argument": file.target.argument, "path": file.target.path, "changed": file.changed}
                for file in planned
            ]
            result["diff"] = [file.diff() for file in planned if file.changed]
            if self._task.check_mode:
                if result["changed"]:
                    result["msg"] = "Check mode: no file was written."
            else:
                files.write(planned)
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return clean_result(result)
