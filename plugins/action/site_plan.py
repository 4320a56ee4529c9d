# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import dataclasses
import json
import os

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import node_name
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction, untagged
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import show
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.cluster import ClusterTasks
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.engine import Planner
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.site import SitePlan, told
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.summary import summary

# When site.yml runs its checks.
CHANGES, ALWAYS = "changes", "always"
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "machines": {"type": "list", "elements": "str", "default": []},
    "schedulers": {"type": "list", "elements": "str", "default": []},
    "verify": {"type": "str", "choices": [CHANGES, ALWAYS], "default": CHANGES},
    "claims": {"type": "bool", "default": False},
    "alone": {"type": "list", "elements": "str", "default": []},
    "unverified": {"type": "bool"},
    "taken_from": {"type": "str", "default": ""},
    "output": {"type": "path"},
}


class ActionModule(ShareAction):
    """Plans the changes of all machines and of the cluster, prints them as one, and writes them as data."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        cluster = ClusterTasks()
        planner = Planner(self, task_vars or {}, params["machines"])
        hosts = untagged({name: planner.machine(name) for name in params["machines"]})
        made = planner.cluster(cluster)
        alone = _nodes(params, task_vars or {})
        verify, taken_from = params["verify"] == ALWAYS, params["taken_from"]
        plan = SitePlan(hosts, made, params["schedulers"], verify, alone=alone, taken_from=taken_from)
        if plan.empty and not plan.refusals:
            known = params["unverified"]
            plan = dataclasses.replace(plan, unverified=cluster.unverified(params) if known is None else known)
        data = plan.result()
        show(self._display, plan.text().rstrip("\n"))
        stats = {name: value for name, value in data.items() if name != "patterns"}
        result: JsonObject = {"changed": False, "plan": data}
        # As set_stats has it: AWX keeps it as an artifact.
        result["ansible_stats"] = {"data": {"gpu_plan": stats}, "per_host": False, "aggregate": False}
        if params["output"]:
            result["output"] = _write(params["output"], stats)
            show(self._display, f"The plan is in {result['output']}.")
        if plan.refusals:
            # Without the data, which Ansible would print.
            refused = "; ".join(
                dict.fromkeys(f"{refusal['role']}: {refusal['reason']}" for _name, refusal in plan.refusals)
            )
            return {"changed": False, "failed": True, "msg": f"The run would be refused, as listed above: {refused}"}
        if plan.beyond:
            what = "; ".join(told(name, step) for name, step in plan.beyond)
            return {
                "changed": False,
                "failed": True,
                "beyond": [{"where": name, **step} for name, step in plan.beyond],
                "msg": f"More than {', '.join(alone)} would change: {what}. Nothing was changed. site.yml makes these "
                "changes; run it first, then this again.",
            }
        if plan.empty:
            # The nodes that the plan has read: without changes nothing else is there at the end.
            nodes = cluster.nodes(params)
            slices = cluster.slices(params) if params["claims"] and nodes is not None else None
            result["summary"] = None if nodes is None else dataclasses.asdict(summary(nodes, data, False, slices))
        return result


def _nodes(params: JsonObject, variables: JsonObject) -> dict[str, str]:
    """Return the nodes beside which nothing may change, by host.

    :raises BadInput: one is no GPU node of this run.
    """
    hostvars, machines = variables.get("hostvars", {}), variables.get("groups", {}).get("gpu_nodes", [])
    names: dict[str, str] = {}
    for name in params["alone"]:
        names[name] = node_name(name, hostvars[name] if name in machines else {})
        if name in machines and name not in params["machines"]:
            raise BadInput(f"Host {name} isn't in this run: leave --limit out, or name it there, with localhost")
        wanted = [node["node"] for node in hostvars["localhost"]["gpu_backends"]["nodes"]]
        if names[name] not in wanted:
            raise BadInput(
                f"{name} is neither a host of the group gpu_nodes nor in gpushare_nodes: add it to the inventory"
            )
    return names


def _write(given: str, data: JsonObject) -> str:
    """Write the plan and return the file's absolute path, also in check mode: it is what the user asked for.

    :raises BadInput: the file can't be written.
    """
    path = os.path.abspath(given)
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, sort_keys=True)
            file.write("\n")
    except OSError as error:
        raise BadInput(f"plan_output: {path} can't be written: {error.strerror}") from error
    return path
