# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import importlib.util
import os
import typing as t

from ansible_collections.kubegpu.share.plugins.plugin_utils._transfer import Transferring

Json = dict[str, t.Any]

# The one file that nvidia-ml-py is. Another project of that name is a folder.
BINDING = "pynvml"


def binding() -> str | None:
    """The controller's nvidia-ml-py; None where it has none, or another thing of that name."""
    try:
        found = importlib.util.find_spec(BINDING)
    except (ImportError, ValueError):
        return None
    path = found.origin if found else None
    return path if path and os.path.basename(path) == f"{BINDING}.py" and os.path.isfile(path) else None


class ActionModule(Transferring):
    """Brings the controller's nvidia-ml-py to the node, so that its version is known and no node needs it installed."""

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        arguments, path = dict(self._task.args), binding()
        if path is None or "binding" in arguments:
            done: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
        else:
            done = self.execute_with_files([path], lambda _folder, there: {**arguments, "binding": there[0]}, task_vars)
        return {**result, **done}
