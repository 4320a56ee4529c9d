# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import posixpath
import tempfile

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._images.build import (
    ARGUMENTS,
    archive_of,
    bill_of,
    validate,
)
from ansible_collections.kubegpu.share.plugins.module_utils._images.sources import pack
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.local_path import local_path


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
            predicted = _with_own_names(params, self.execute_module(arguments, task_vars))
            if predicted.get("failed") or not predicted.get("changed") or self._task.check_mode:
                return predicted
            built = self.execute_with_files(
                [sources], lambda _folder, copies: {**arguments, "context": copies[0]}, task_vars
            )
            return _with_own_names(params, built)


def _with_own_names(params: JsonObject, result: JsonObject) -> JsonObject:
    """Return the result, whose files get the same names on the controller when they are fetched.

    :raises NotInEffect: the machine that builds names others, which could replace any file there.
    """
    if result.get("failed"):
        return result
    archives = {platform: posixpath.basename(archive_of(params, platform)) for platform in params["platforms"]}
    for key, names in (
        ("archives", archives),
        ("bills", {archive: bill_of(path) for archive, path in archives.items()}),
    ):
        paths = result.get(key)
        known = (
            isinstance(paths, dict)
            and {platform: posixpath.basename(str(path)) for platform, path in paths.items()} == names
        )
        if not known:
            raise NotInEffect(f"The machine that builds doesn't return the {key} that it was told to make")
    return result
