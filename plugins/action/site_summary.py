# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.cluster import ClusterTasks
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.summary import Summary, summary

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "planned": {"type": "dict"},
    "claims": {"type": "bool", "default": False},
}


class ActionModule(ShareAction):
    """Prints what there is after a run of site.yml."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        planned = untagged(params["planned"] or {})
        if planned.get("summary"):
            show(self._display, Summary(**planned["summary"]).text())
            return {"changed": False, "summary": planned["summary"]}
        cluster = ClusterTasks()
        nodes = cluster.nodes(params)
        if nodes is None:
            show(self._display, f"The nodes weren't read: {cluster.missing}")
            return {"changed": False, "summary": None}
        slices = cluster.slices(params) if params["claims"] else None
        made = summary(nodes, planned.get("plan"), bool(self._task.check_mode), slices)
        show(self._display, made.text())
        return {"changed": False, "summary": dataclasses.asdict(made)}
