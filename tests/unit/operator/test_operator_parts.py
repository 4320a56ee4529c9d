# SPDX-License-Identifier: GPL-3.0-or-later
"""What the operator's program decides without a cluster: options, conditions, outcomes and what a digest depends on."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re

import pytest
import yaml
from kubegpu_operator import __version__, conditions, engine, options, watched
from kubegpu_operator.conditions import Outcome
from kubegpu_operator.engine import KEPT, Call, _tidy
from kubegpu_operator.memory import Last, Memory
from kubegpu_operator.outcome import outcome_of
from kubegpu_operator.resource import Malformed, owner_of, refused, resource_of, snake
from own_cluster import ROOT

OPERATOR = ROOT / "operator"
ITEM = {
    "metadata": {"name": "a", "uid": "u", "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z"},
    "spec": {"gpushareNodes": ["n"]},
}
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
# What the API accepts as a condition's reason (apimachinery's meta/v1, Condition).
REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def test_the_version_is_the_collections():
    assert __version__ == yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]


def test_the_image_has_the_packages_that_the_collection_is_tested_with():
    def pins(file):
        lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        return {tuple(line.split("==")) for line in lines if "==" in line}

    ours, theirs = pins("operator/requirements.txt"), pins("requirements.txt")
    both = {name.lower() for name, _version in ours} & {name.lower() for name, _version in theirs}
    assert {"ansible-core", "kubernetes", "orjson", "jinja2"} <= both
    assert {(name.lower(), version) for name, version in ours if name.lower() in both} == {
        (name.lower(), version) for name, version in theirs if name.lower() in both
    }
    assert pins("operator/collections.txt") <= theirs


@pytest.mark.parametrize(
    "option",
    [
        *(
            "gpushareState",
            "gpuKubeconfig",
            "ansibleConnection",
            "ansible_python_interpreter",
            "_x",
            "uninstallWithPods",
        ),
        *(
            "schedulerStep",
            "gpushareNamespace",
            "gpuOwner",
            "GpushareNodes",
            "gpushare nodes",
            "{{ 1 }}",
            "toolkitSourceDir",
        ),
    ],
)
def test_a_resource_has_no_option_that_decides_what_a_run_is(option):
    problem = refused({"gpushareNodes": [], option: 1}, None)
    assert problem and problem.id == "unknown-option" and "spec." in problem.text, option
    # Whatever the list says.
    assert refused({option: 1}, {snake(option)})


def test_only_what_is_listed_is_an_option(tmp_path):
    listed = tmp_path / "options.yml"
    listed.write_text("allowed: {gpushare: {gpushare_nodes: {least: 1}}, _shared: {gpu_exclude: }}\nexcluded: {}\n")
    known = options.known(listed)
    assert known == {"gpushare_nodes", "gpu_exclude"} and options.known(tmp_path / "none") is None
    assert refused({"gpushareNodes": ["n"]}, known) is None
    assert refused({"gpusharePlacement": "spread"}, known)
    listed.write_text("allowed: {}\n")
    with pytest.raises(ValueError, match="has no names"):
        options.known(listed)


def test_a_resource_is_parsed_once():
    one = resource_of({**ITEM, "metadata": {**ITEM["metadata"], "deletionTimestamp": NOW}})
    assert (one.name, one.generation, one.deleting, one.held) == ("a", 3, True, False)
    for broken in ({}, {"metadata": {}}, None, {**ITEM, "spec": "x"}, {**ITEM, "metadata": {"name": "a"}}):
        with pytest.raises(Malformed):
            resource_of(broken)
    younger = resource_of({**ITEM, "metadata": {**ITEM["metadata"], "name": "0", "creationTimestamp": LATER}})
    assert owner_of([younger, one]) == younger, "uninstalled, and kept by another finalizer"
    held = dataclasses.replace(one, held=True)
    assert owner_of([younger, held]) == held and owner_of([]) is None


def statuses(status):
    return {one["type"]: one["status"] for one in status["conditions"]}


def test_conditions_from_the_first_run_to_one_that_fails():
    begun = conditions.begun(3, {}, False, NOW)
    assert statuses(begun) == {"Available": "Unknown", "Progressing": "True", "Degraded": "False"}
    well = conditions.ended(3, begun, outcome_of([stats(changed=2)], 0, False), LATER)
    assert statuses(well) == {"Available": "True", "Progressing": "False", "Degraded": "False"}
    assert {one["lastTransitionTime"] for one in well["conditions"] if one["type"] != "Degraded"} == {LATER}
    again = conditions.ended(3, well, outcome_of([stats()], 0, False), "2026-01-03T00:00:00Z")
    assert {one["lastTransitionTime"] for one in again["conditions"]} == {NOW, LATER}, "no status has changed"
    assert not conditions.differs(
        again, conditions.ended(3, again, outcome_of([stats()], 0, False), "2027-01-01T00:00:00Z")
    )
    # What works goes on working where a run stops before it changes anything.
    bad = conditions.ended(4, again, Outcome("wrong-value", "x isn't y", True), LATER)
    assert statuses(bad) == {"Available": "True", "Progressing": "False", "Degraded": "True"}
    [degraded] = [one for one in bad["conditions"] if one["type"] == "Degraded"]
    assert degraded["reason"] == "wrong_value" and degraded["observedGeneration"] == bad["observedGeneration"] == 4
    broken = conditions.ended(4, bad, Outcome("not_announced", "s", True, False), LATER)
    assert statuses(broken)["Available"] == "False"
    again = conditions.begun(5, broken, False, LATER)
    assert again["observedGeneration"] == 4, "of the last run that ended"
    assert {one["type"]: one["observedGeneration"] for one in again["conditions"]}["Progressing"] == 5
    assert "observedGeneration" not in begun


@pytest.mark.parametrize("id", ["wrong-value", "S4", "9lives", "-", "not_announced", "a-b--c"])
def test_every_id_is_a_reason_that_the_api_takes(id):
    assert REASON.fullmatch(conditions.reason_of(id))


def stats(changed=0, **artifacts):
    data = {"changed": {"localhost": changed} if changed else {}, "artifact_data": artifacts}
    return {"event": "playbook_on_stats", "event_data": data}


def failed(**result):
    return {"event": "runner_on_failed", "event_data": {"task": "T", "res": result}}


FINDING = {
    "id": "wrong-value",
    "severity": "problem",
    "found": "x isn't y",
    "do": "set it to z",
    "hosts": ["localhost"],
}
REPORTED = {
    "event": "runner_on_ok",
    "event_data": {"resolved_action": "kubegpu.share.preflight", "res": {"findings": [{"severity": "note"}, FINDING]}},
}
CHECKED = {
    "result": "FAIL",
    "findings": [{"check": "S4", "cause": "not_announced", "node": "n", "text": "it announces none"}],
}
HELD = {"refused": "pods-hold-shares", "nodes": ["n"], "pods": ["a/b", "c/d"]}


@pytest.mark.parametrize(
    ("events", "rc", "id", "words", "works"),
    [
        ([stats()], 0, "unchanged", "everything is as", True),
        ([stats(changed=2)], 0, "applied", "2 tasks", True),
        ([REPORTED, failed(msg="Problems"), stats()], 2, "wrong-value", "x isn't y; set it to z", None),
        (
            [failed(msg="Checks"), stats(gpu_verify=CHECKED)],
            2,
            "not_announced",
            "check S4 on n: it announces none",
            False,
        ),
        ([failed(msg="Pods"), stats(gpu_uninstall=HELD)], 2, "pods-hold-shares", "on n: a/b, c/d; delete them", None),
        ([failed(msg="a\nb", cause="quota")], 2, "quota", "T: a b", None),
        ([failed(msg="a")], 2, "task-failed", "T: a", None),
        ([], None, "killed", "repeated", None),
        # A run without tasks proves nothing.
        ([], 0, "no-result", "repeated", None),
    ],
)
def test_an_outcome_is_made_of_codes(events, rc, id, words, works):
    made = outcome_of(copy.deepcopy(events), rc, False)
    assert (made.id, made.works, made.failed) == (id, works, rc != 0 or id == "no-result") and words in made.message


def test_a_message_has_several_findings():
    reported = copy.deepcopy(REPORTED)
    reported["event_data"]["res"]["findings"] *= 5
    message = outcome_of([reported, stats()], 2, False).message
    assert message.count("x isn't y; set it to z") == 3 and message.endswith("(2 more)")


def test_pods_that_hold_shares_are_remembered_by_name():
    made = outcome_of([stats(gpu_uninstall=HELD)], 2, True)
    assert made.holders == (("a", "b"), ("c", "d"))
    many = {**HELD, "pods": [f"a/{number}" for number in range(30)]}
    made = outcome_of([stats(gpu_uninstall=many)], 2, True)
    assert len(made.holders) == 10 and "and 20 more" in made.message


CONTROL = {"node-role.kubernetes.io/control-plane": ""}
DAEMONS, RECORDS = "/apis/apps/v1/namespaces/gpushare-system/daemonsets", "/api/v1/namespaces/kube-system/configmaps"


class Api:
    """Objects of an API server, by their path."""

    def __init__(self):
        self.nodes = [
            {"metadata": {"name": f"n{at}", "uid": str(at), "labels": {"gpushare": "dra"}}} for at in range(2)
        ]
        daemons = {
            "metadata": {"uid": "d", "generation": 1},
            "spec": {"x": 1},
            "status": {"numberReady": 1, "conditions": []},
        }
        record = {"metadata": {"uid": "r"}, "data": {"owner": "GPUShare/main"}}
        self.lists = {watched.NODES: self.nodes, DAEMONS: [daemons], RECORDS: [record]}
        self.objects = {"/version": {"gitVersion": "v1"}}

    def read(self, path):
        return self.objects.get(path)

    def pages(self, path, label="", metadata=False):
        assert metadata is (path == watched.NODES) and "pods" not in path and "secrets" not in path
        yield from self.lists.get(path, [])


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda api: api.lists[DAEMONS].clear(), True),
        (lambda api: api.lists[DAEMONS][0]["status"].update(numberReady=0), True),
        (lambda api: api.lists[DAEMONS][0]["spec"].update(x=2), True),
        (
            lambda api: api.lists[DAEMONS][0]["metadata"].update(resourceVersion="9", managedFields=[1]),
            False,
        ),
        (lambda api: api.nodes[0]["metadata"].update(labels={}), True),
        (lambda api: api.nodes.append({"metadata": {"name": "n9", "uid": "9"}}), True),
        (lambda api: api.nodes.append({"metadata": {"name": "n8", "uid": "8", "labels": CONTROL}}), True),
        # Nodes of others come and go.
        (lambda api: api.nodes.append({"metadata": {"name": "n8", "uid": "8", "labels": {"x": "y"}}}), False),
        (lambda api: api.nodes[0]["metadata"].update(annotations={"kubegpu.share/cards": "x"}), True),
        (lambda api: api.nodes[0]["metadata"].update(annotations={"other/heartbeat": "x"}, resourceVersion="7"), False),
        (lambda api: api.lists[RECORDS][0]["data"].update(unverified="true"), True),
        (lambda api: api.objects["/version"].update(gitVersion="v2"), True),
    ],
)
def test_the_digest_has_what_a_run_depends_on_and_nothing_that_changes_by_itself(change, seen):
    api = Api()
    before = watched.look(api, ["spec"], {"n9"})
    assert (before.ours, before.nodes) == (["n0", "n1"], 2) and before != watched.look(api, ["other"], {"n9"})
    change(api)
    assert (watched.look(api, ["spec"], {"n9"}).digest != before.digest) is seen


def test_nobodys_namespace_is_read_but_the_operators_own():
    # Whoever may create ConfigMaps somewhere would fill the memory of a call, and have a run follow each change.
    vars_of = yaml.safe_load((OPERATOR / "watches.yaml").read_text())[0]["vars"]
    own = {vars_of["gpushare_namespace"], vars_of["scheduler_dedicated_namespace"], "kube-system"}
    listed = [path.split("/") for path in watched.LISTS]
    assert own == {path[path.index("namespaces") + 1] for path in listed if "namespaces" in path[:-1]}
    everywhere = {path[-1] for path in listed if "namespaces" not in path[:-1]}
    rights = yaml.safe_load((OPERATOR / "rights.yml").read_text())
    anybodys = {"configmaps", "services", "daemonsets", "deployments", "serviceaccounts", "roles", "rolebindings"}
    assert everywhere and everywhere.isdisjoint(anybodys)
    assert {path[-1] for path in listed} <= {kind for rule in rights for kind in rule["resources"]}


def test_a_run_that_was_killed_is_not_remembered(tmp_path):
    memory = Memory(tmp_path / "state")
    last = Last("d", 1.5, 2, False, (("a", "b"),))
    assert memory.recall("u-1") is None
    memory.keep("u-1", last)
    assert memory.recall("u-1") == last
    memory.forget("u-1")
    assert memory.recall("u-1") is None
    (tmp_path / "state" / "u-1.json").write_text(json.dumps({"digest": "d"}))
    assert memory.recall("u-1") is None, "of another version"


def test_annotations_decide_neither_verbosity_nor_how_much_is_kept():
    call = Call.parse(["run", "/d", "--rotate-artifacts", "0", "-p", "/p/site.yml", "-i", "7", "-vvvvvvv"])
    assert call and (str(call.folder), call.playbook.name, call.ident) == ("/d", "site.yml", "7")
    assert Call.parse(["--version"]) is None


def test_artifacts_are_bounded_also_where_a_call_left_none(tmp_path, monkeypatch):
    for number in range(KEPT + 3):
        (tmp_path / str(number)).mkdir()
    # As ansible-operator leaves it after a call that ran nothing.
    (tmp_path / "latest").symlink_to(tmp_path / "none")
    _tidy(tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == KEPT - 1
    _tidy(tmp_path / "none")
    monkeypatch.setattr(engine, "MOST_KEPT", 15)
    for number, path in enumerate(sorted(path for path in tmp_path.iterdir() if path.is_dir())):
        (path / "stdout").write_text("x" * 10)
        os.utime(path, (number, number))
        newest = path
    _tidy(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [newest]
