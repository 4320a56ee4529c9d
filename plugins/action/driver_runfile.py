# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import hashlib
import re
import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils import _runfile
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError

Json = dict[str, t.Any]
SECTIONS = ("driver", "packages")


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    """Brings a .run file to a node only when the node lacks its driver."""

    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: Json | None = None) -> Json:
        result: Json = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=_runfile.ARGUMENTS, **_runfile.RULES)
        try:
            result.update(self._work(params, task_vars))
        except ShareError as error:
            result.update(error.details, failed=True, msg=str(error))
        return result

    def _work(self, params: Json, task_vars: Json | None) -> Json:
        what = _runfile.wanted(params)
        observed = params["observed"]
        if observed and all(section in observed for section in SECTIONS):
            plan = _runfile.make_plan(what, _runfile.seen(observed))
            if plan.empty:
                return {"changed": False, "diff": []}
        # The node needn't be sent what it will see for itself.
        names = ("state", "file", "sha256", "version", "flavour")
        arguments = {name: params[name] for name in names if params[name] is not None}
        if not what.present:
            done: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
            return done
        remote = bool(re.match(r"https?://", params["file"]))
        if not remote:
            _require(params["file"], what.sha256)
        look: Json = self._execute_module(module_args=arguments, task_vars=task_vars)
        if look.get("failed") or not look.get("changed") or self._task.check_mode:
            return look
        try:
            folder = self._make_tmp_path()
            path = self._connection._shell.join_path(folder, "driver.run")
            if remote:
                fetched: Json = self._execute_module(
                    "ansible.builtin.get_url",
                    module_args={"url": params["file"], "dest": path, "checksum": f"sha256:{what.sha256}"},
                    task_vars=task_vars,
                )
                if fetched.get("failed"):
                    return {**fetched, "msg": f"file: {params['file']} can't be fetched: {fetched.get('msg')}"}
            else:
                self._transfer_file(params["file"], path)
                self._fixup_perms2((folder, path))
            done = self._execute_module(module_args={**arguments, "remote_path": path}, task_vars=task_vars)
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)
        return done


def _require(path: str, sha256: str) -> None:
    """Refuse a file that isn't the one asked for, before it travels.

    :raises BadInput: it isn't there, or another.
    """
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"file: {path} can't be read: {error.strerror}") from error
    if found != sha256:
        raise BadInput(f"file: {path} has SHA-256 {found}, and sha256 says {sha256}")
