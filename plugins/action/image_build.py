# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import tempfile

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import ARGUMENTS, validate
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.local_path import local_path
from ansible_collections.kubegpu.share.plugins.plugin_utils._images.sources import pack


class ActionModule(ShareAction):
    """Copies the image's sources to the machine that builds it, if there is something to build."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        folder = self._task.args["folder"]
        if self._connection.transport == "local":
            params["folder"] = folder = local_path(folder)
        validate(params)
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as temporary:
            sources = os.path.join(temporary, "sources.tar")
            # On another machine as it was given: its ~ is the home of the user who builds there.
            arguments = {**params, "folder": folder, "sources": pack(sources)}
            predicted = self.execute_module(arguments, task_vars)
            if predicted.get("failed") or not predicted.get("changed") or self._task.check_mode:
                return predicted
            return self.execute_with_files(
                [sources], lambda _folder, copies: {**arguments, "context": copies[0]}, task_vars
            )
