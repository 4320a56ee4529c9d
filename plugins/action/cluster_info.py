# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import contextlib
import os

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import LibraryMissing
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import detect
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.connection import Connection


class ActionModule(ShareAction):
    """Reads the cluster in the task's own process where the module would run on the controller as the same user."""

    arguments = detect.ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        if self._is_here():
            connection = Connection(self._absolute(untagged(params)))
            # The module may run by another Python than ansible-playbook.
            with contextlib.suppress(LibraryMissing), connection.masked():
                return detect.collect(connect(connection), connection.params)
        return self.execute_module(dict(self._task.args), task_vars)

    def _is_here(self) -> bool:
        """Return whether the module would see this process's own environment."""
        changed = any(self._task.environment or []) or self._task.async_val
        return self._connection.transport == "local" and self._connection.become is None and not changed

    def _absolute(self, params: JsonObject) -> JsonObject:
        """Resolve the path of the kubeconfig as the module would, which runs in the playbook's folder."""
        given = params["kubeconfig"]
        if not isinstance(given, str) or not given or os.pathsep in given:
            return params
        return {**params, "kubeconfig": os.path.join(self._loader.get_basedir(), os.path.expanduser(given))}
