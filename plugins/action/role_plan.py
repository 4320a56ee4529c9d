# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import plan_host, validate_host

ARGUMENTS: JsonObject = {"validate": {"type": "bool", "default": False}}


class ActionModule(ShareAction):
    """Plans the roles of site.yml for one machine, from what this run has observed of it."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        evaluate = validate_host if params["validate"] else plan_host
        return {"changed": False, **evaluate(self, task_vars or {})}
