# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugin and the role's tasks with the module, on a real API server."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from action_plugins import load
from ansible_collections.kubegpu.share.plugins.action import openshift_scheduler as action
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import scheduler as subject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.cluster import takes_policy
from own_cluster import run_playbook
from played_operator import PlayedOperator

MAPS = "/api/v1/namespaces/openshift-config/configmaps"
USERS = """\
{
  "kind": "Policy", "apiVersion": "v1",
  "predicates": [{"name": "GeneralPredicates"}],
  "extenders": [{"urlPrefix": "http://127.0.0.1:9000", "filterVerb": "filter", "nodeCacheCapable": true}]
}
"""


def act(server, check=False, **arguments):
    """Run the action with the module in this process; return its result, and which executions had a plan."""
    plugin = load(action, {"method": "policy", "kubeconfig": str(server.kubeconfig), **arguments}, check)
    executed = []

    def execute(module_args, task_vars):
        params = {name: spec.get("default") for name, spec in subject.ARGUMENTS.items()} | module_args
        executed.append("plan" in module_args)
        module = SimpleNamespace(params=params, tmpdir=str(server.folder), no_log_values=set())
        try:
            api = subject.DynamicKube.of_module(module)
            return subject.work(api, params, plugin._task.check_mode, Waiting(timeout=10, pause=0.02))
        except ShareError as error:
            return {"failed": True, "msg": str(error), **error.details}

    plugin._execute_module = execute
    return plugin.run(task_vars={}), executed


def test_users_policy_merged_and_unchanged(openshift):
    openshift.request("DELETE", MAPS)
    openshift.request("POST", MAPS, {"metadata": {"name": "team-policy"}, "data": {"policy.cfg": USERS}})
    with PlayedOperator(openshift, "4.9.23", policy="team-policy"):
        checked, executed = act(openshift, check=True)
        # Check mode only observes.
        assert checked["changed"] and executed == [False]
        done, executed = act(openshift)
        assert done["changed"] and executed == [False, True] and done["diff"] == checked["diff"]
        found = openshift.request("GET", MAPS)["items"]
        texts = {one["metadata"]["name"]: one["data"]["policy.cfg"] for one in found}
        assert texts.pop("team-policy") == USERS
        (ours,) = texts.values()
        policy = json.loads(ours)
        assert policy["predicates"] == [{"name": "GeneralPredicates"}]
        urls = [extender["urlPrefix"] for extender in policy["extenders"]]
        assert urls == ["http://127.0.0.1:9000", "http://127.0.0.1:12345/gpushare-scheduler"]
        assert policy["extenders"][1]["httpTimeout"] == 30_000_000_000
        again, executed = act(openshift)
        assert not again["changed"] and executed == [False]
        assert act(openshift, state="absent")[0]["changed"]
        assert [item["metadata"]["name"] for item in openshift.request("GET", MAPS)["items"]] == ["team-policy"]


def test_invalid_or_binding_policy_refused(openshift):
    for text, message in (
        (USERS.replace('"filterVerb"', '"bindVerb": "bind", "filterVerb"'), "binds pods already"),
        (USERS.replace('"Policy"', '"Polisy"'), "team-policy isn't a Policy"),
        ("{", "team-policy"),
    ):
        openshift.request("DELETE", MAPS)
        openshift.request("POST", MAPS, {"metadata": {"name": "team-policy"}, "data": {"policy.cfg": text}})
        with PlayedOperator(openshift, "4.9.23", policy="team-policy"):
            done, executed = act(openshift)
            assert done["failed"] and message in done["msg"] and executed == [False]
            assert len(openshift.request("GET", MAPS)["items"]) == 1


def include(openshift, tmp_path, release, *steps):
    """Run steps of role scheduler, each with variables of its own, in check mode; return the output."""
    chosen = {"mode": "openshift", "openshift": release, "takes_policy": takes_policy(release)}
    servers = {"gpushare_namespace": "gpushare-fresh", "gpushare_image": "registry.example.org/gpushare:1.1.0"}
    given = {**servers, "scheduler_kubeconfig": str(openshift.kubeconfig), "scheduler_detection": chosen}
    role = {"ansible.builtin.include_role": {"name": "kubegpu.share.scheduler"}}
    tasks = [{"name": f"Run {step}", **role, "vars": {**given, **step}} for step in steps]
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}], "--check", "--diff")
    assert done.rc == 0, done.text
    return done.text


PRESENT = ({"scheduler_step": "openshift_access"}, {"scheduler_step": "cluster"})
ABSENT = {"scheduler_step": "cluster", "scheduler_state": "absent"}


@pytest.mark.parametrize(
    ("release", "kinds"),
    [
        (
            "4.8.5",
            [
                "ConfigMap openshift-config/gpushare-scheduler-policy-",
                "Scheduler cluster",
                "http://127.0.0.1:12345/gpushare-scheduler",
            ],
        ),
        ("4.20.1", ["Subscription", "SecondaryScheduler", "NetworkPolicy", "ValidatingAdmissionPolicyBinding"]),
    ],
)
def test_role_in_check_mode_on_a_new_cluster(openshift, tmp_path, release, kinds):
    """The removal, too: without certificates, and in check mode only, since no controller completes deletions here."""
    openshift.request("DELETE", MAPS)
    with PlayedOperator(openshift, release):
        output = include(openshift, tmp_path, release, *PRESENT, ABSENT)
        assert openshift.request("GET", MAPS)["items"] == []
    assert not [kind for kind in ("SecurityContextConstraints", *kinds) if kind not in output], output
    assert openshift.ask("GET", "/api/v1/namespaces/gpushare-fresh")[0] == 404
    if release == "4.20.1":
        made, kept = re.findall(
            r"(?ms)^TASK \[[^\n]*Keep valid certificates, or make new ones\] \**\n(.*?)(?=^TASK )", output
        )
        assert kept.startswith("skipping:") and not made.startswith("skipping:"), output
