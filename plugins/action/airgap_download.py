# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Fill an archive with what a run of site.yml downloads for this inventory."""

from __future__ import annotations

import platform

from ansible_collections.kubegpu.share.plugins.module_utils._core import plan
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import download, table
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import needed

ARGUMENTS: JsonObject = {**needed.ARGUMENTS, **download.ARGUMENTS}


class ActionModule(ShareAction):
    """Downloads on the machine on which Ansible runs, and prints a line for each artifact."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        given = params["needed"]
        items = download.listed(given).items if given else needed.need(self, params, task_vars or {}).items
        settings = download.settings(params, items, platform.machine())
        wanted = download.requested(items, table.listed(), settings)
        work = download.Download(wanted, settings, lambda text: show(self._display, text))
        work.require()
        result = plan.run(work, bool(self._task.check_mode), work.summary)
        for text in download.lacking(result["left_out"]):
            show(self._display, text, stderr=True)
        return result
