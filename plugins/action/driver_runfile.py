# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import hashlib
import re

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._driver import runfile
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.local_path import local_path

SECTIONS = ("driver", "packages")


class ActionModule(ShareAction):
    """Copies a .run file to a node only if the node lacks its driver."""

    arguments = runfile.ARGUMENTS
    rules = runfile.RULES

    def predict(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject | None:
        observed = params["observed"]
        if not observed or not all(section in observed for section in SECTIONS):
            return None
        plan = runfile.plan(runfile.options(params), runfile.observed(observed))
        return {"changed": not plan.empty, "diff": plan.diff()}

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        want = runfile.options(params)
        predicted = self.predict(params, task_vars)
        if predicted is not None and not predicted["changed"]:
            return predicted
        # The module observes the node itself.
        names = ("state", "file", "sha256", "version", "flavour")
        arguments = {name: params[name] for name in names if params[name] is not None}
        if not want.present:
            return self.execute_module(arguments, task_vars)
        remote = bool(re.match(r"https?://", params["file"]))
        if not remote:
            arguments["file"] = params["file"] = local_path(params["file"])
            _require(params["file"], want.sha256)
        checked = self.execute_module(arguments, task_vars)
        if checked.get("failed") or not checked.get("changed") or self._task.check_mode:
            return checked
        with self.temporary_folder() as folder:
            path = self._connection._shell.join_path(folder, "driver.run")
            if remote:
                fetched: JsonObject = self._execute_module(
                    "ansible.builtin.get_url",
                    module_args={"url": params["file"], "dest": path, "checksum": f"sha256:{want.sha256}"},
                    task_vars=task_vars,
                )
                if fetched.get("failed"):
                    return {**fetched, "msg": f"file: {params['file']} can't be downloaded: {fetched.get('msg')}"}
            else:
                self._transfer_file(params["file"], path)
                self._fixup_perms2((folder, path))
            return self.execute_module({**arguments, "remote_path": path}, task_vars)


def _require(path: str, sha256: str) -> None:
    """Validate the file before it is copied.

    :raises BadInput: it can't be read, or has another SHA-256.
    """
    try:
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"file: {path} can't be read: {error.strerror}") from error
    if actual != sha256:
        raise BadInput(f"file: {path} has SHA-256 {actual}, and sha256 is {sha256}")
