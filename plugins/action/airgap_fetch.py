# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Fetch the package repositories that a machine has made into the archive's folder on the controller."""

from __future__ import annotations

import os

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.fetched import Repositories
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap.store import Store

ARGUMENTS: JsonObject = {
    "repositories": {"type": "list", "elements": "dict", "required": True},
    "others": {"type": "list", "elements": "dict", "default": []},
    "source": {"type": "str", "required": True},
    "folder": {"type": "path", "required": True},
}


class ActionModule(ShareAction):
    """Fetches the files that the controller hasn't, each held to the digest that the machine returned."""

    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        if not params["folder"]:
            raise BadInput("airgap_folder: name the folder that becomes the archive")
        repositories = Repositories(untagged(params["repositories"]), untagged(params["others"]))
        store = Store(os.path.abspath(params["folder"]))
        store.examine()
        changes = [
            *(file.path for file in repositories.missing(store)),
            *repositories.superfluous(store),
            *repositories.described(store),
        ]
        if changes and not self._task.check_mode:
            repositories.fetch(store, params["source"], self._connection.fetch_file)
        return {
            "changed": bool(changes),
            "count": len(repositories.files),
            "folders": sorted(repositories.descriptions),
        }
