# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Print a report and write it to files of the controller; see the documentation of the module of this name."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.plugin_utils import _report_files as files
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_outcome import ARGUMENTS, plain, prepare


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(ARGUMENTS)

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result: dict[str, t.Any] = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS, required_one_of=[["report", "allocation"]])
        try:
            view_text, outcome, targets = prepare(plain(params))
            result.update(text=view_text, result=outcome)
            if not params["quiet"]:
                # Before the files: where one of them can't be written, what was found is told all the same.
                self._display.display(view_text.rstrip("\n"))
            seen = files.look(targets)
            result["changed"] = any(one.changed for one in seen)
            result["files"] = [
                {"argument": one.target.argument, "path": one.target.path, "changed": one.changed} for one in seen
            ]
            result["diff"] = [one.diff() for one in seen if one.changed]
            if self._task.check_mode:
                if result["changed"]:
                    result["msg"] = "Check mode: no file was written."
            else:
                files.write(seen)
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return result
