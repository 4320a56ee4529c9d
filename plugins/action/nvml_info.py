# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import importlib.util
import os

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction

# The single file of nvidia-ml-py. Another project of that name is a package.
BINDING = "pynvml"


def binding() -> str | None:
    """Return the path of the controller's nvidia-ml-py; None if there is none."""
    try:
        spec = importlib.util.find_spec(BINDING)
    except (ImportError, ValueError):
        return None
    path = spec.origin if spec else None
    return path if path and os.path.basename(path) == f"{BINDING}.py" and os.path.isfile(path) else None


class ActionModule(ShareAction):
    """Copies the controller's nvidia-ml-py to the node, so that no node needs it installed."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        arguments, path = dict(self._task.args), binding()
        if path is None or "binding" in arguments:
            return self.execute_module(arguments, task_vars)
        return self.execute_with_files([path], lambda _folder, copies: {**arguments, "binding": copies[0]}, task_vars)
