# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible.template import trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import ROLES, AnsibleEngine, TaskPredictions
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.stages import walk_stages
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.walk import Walk

ARGUMENTS: JsonObject = {"cluster": {"type": "bool", "default": False}}


class ActionModule(ShareAction):
    """Plans the roles of site.yml for one host, from what this run has observed."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        variables = task_vars or {}
        groups = [name for name, hosts in variables["groups"].items() if variables["inventory_hostname"] in hosts]
        walk = Walk(AnsibleEngine(self), TaskPredictions(self), ROLES, variables)
        steps = walk_stages(walk, groups, params["cluster"], trust_as_template)
        return {
            "changed": False,
            "steps": [one.result() for one in steps],
            "refusal": walk.refusal.result() if walk.refusal else None,
            "groups": sorted(walk.groups),
            "notes": walk.notes,
        }
