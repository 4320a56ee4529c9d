# SPDX-License-Identifier: GPL-3.0-or-later
"""One call of the engine after the other, with a played API server and a played run of Ansible."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from kubegpu_operator import command, engine
from kubegpu_operator.memory import Memory
from kubegpu_operator.watched import NODES

SPEC = {"gpushareNodes": ["n1"]}


def item(name="a", created="2026-01-01T00:00:00Z", **spec):
    metadata = {"name": name, "uid": f"uid-{name}", "generation": 1, "creationTimestamp": created}
    return {"metadata": metadata, "spec": spec or copy.deepcopy(SPEC)}


class Api:
    """The API server's answers, and what was written."""

    def __init__(self, *items):
        self.items = {one["metadata"]["name"]: one for one in items}
        self.nodes = [{"metadata": {"name": "n1", "uid": "1", "labels": {"gpushare": "dra"}}}]
        self.pods, self.events = {}, []

    def read(self, path):
        return self.pods.get(path)

    def pages(self, path, label="", metadata=False):
        yield from self.nodes if path == NODES else ()

    def resource(self, name):
        return copy.deepcopy(self.items.get(name))

    def resources(self):
        return copy.deepcopy(list(self.items.values()))

    def write_status(self, name, status):
        self.items[name]["status"] = status

    def write_event(self, event):
        self.events.append(event["reason"])

    def degraded(self, name="a"):
        found = {one["type"]: one for one in self.items[name].get("status", {}).get("conditions", [])}
        return found["Degraded"]["reason"] if found["Degraded"]["status"] == "True" else ""


class Engine:
    """The folder of a call, and what the engine was told."""

    def __init__(self, folder, api, monkeypatch):
        self.folder, self.api, self.told, self.given, self.ended = folder, api, [], [], ([], 0)
        self.cut = ""
        (folder / "env").mkdir(parents=True)
        self.clock = 1000.0
        monkeypatch.setattr(command, "WORK", folder / "kept")
        monkeypatch.setattr(engine, "run", self._run)
        monkeypatch.setattr(engine, "left", lambda _call: self.ended)
        monkeypatch.setattr(command.time, "time", lambda: self.clock)

    def _run(self, call, _runner, _longest, is_wanted):
        self.given.append(call.read_variables())
        return self.cut if self.cut or is_wanted() else engine.UNWANTED

    def stats(self):
        self.told.append("done")

    def again_after(self, seconds):
        self.told.append(seconds)

    def call(self, name="a", playbook="site.yml", known=None, seen=None, **more):
        """One call, with the engine's variables; returns what it was told."""
        seen = seen or self.api.items.get(name) or item(name)
        given = {"ansible_operator_meta": {"name": name}, command.OBJECT: seen, "gpu_kubeconfig": "k", **more}
        call = engine.Call(self.folder, Path(f"/p/{playbook}"), "1")
        call.write_variables(given)
        self.told.clear()
        command.Operator(call, self.api, self, known).act()
        return list(self.told)


def ended(rc, changed=0, **artifacts):
    data = {"changed": {"localhost": changed}, "artifact_data": artifacts}
    return [{"event": "playbook_on_stats", "event_data": data}], rc


@pytest.fixture
def played(tmp_path, monkeypatch):
    return Engine(tmp_path / "resource", Api(item()), monkeypatch)


def test_a_run_follows_a_change_and_no_run_where_nothing_has_changed(played):
    played.ended = ended(0, 3)
    # The engine is told when to call again: by itself it would ask an annotation of the resource.
    assert played.call() == [60.0] and len(played.given) == 1
    played.ended = ended(0)
    assert played.call() == [60.0] and len(played.given) == 2, "what was changed is looked at once more"
    assert played.call() == [60.0] and len(played.given) == 2
    played.api.nodes[0]["metadata"]["labels"] = {}
    played.call()
    assert len(played.given) == 3
    played.clock += 3600
    played.call()
    assert len(played.given) == 4, "after an hour in any case"
    assert played.api.events == ["applied"], "an Event where something was changed, or where there is something new"


def test_a_run_that_fails_is_repeated_ever_later(played):
    played.ended = ended(2)
    assert played.call() == [60.0]
    runs = []
    for _minute in range(30):
        played.clock += 60
        assert played.call() == [60.0]
        runs.append(len(played.given))
    # After 1, 3, 7, 15 and 25 minutes.
    assert runs[-1] == 6 and len(played.api.events) == 1 and played.api.degraded() == "no_result"
    played.api.items["a"]["metadata"]["generation"] = 2
    played.ended = ended(0)
    played.call()
    assert played.api.degraded() == "", "a new spec is tried at once"


def test_what_the_engine_has_cached_too_long_is_not_acted_on(played):
    seen = copy.deepcopy(played.api.items["a"])
    played.api.items["a"]["metadata"]["generation"] = 2
    assert played.call(seen=seen) == [1] and not played.given
    played.api.items["a"]["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert played.call() == [1] and not played.given, "a reconcile of a resource that is being deleted"
    assert played.call("gone") == ["done"]


def test_one_resource_decides(played):
    played.api.items["b"] = item("b", "2026-01-02T00:00:00Z", gpushareNodes=["n9"])
    assert played.call("b") == [60.0] and played.api.degraded("b") == "another_resource" and not played.given
    played.api.items["b"]["metadata"]["deletionTimestamp"] = "2026-01-03T00:00:00Z"
    assert played.call("b", "uninstall.yml") == ["done"] and not played.given, "the other's servers stay"
    # Uninstalled, and kept by somebody else's finalizer.
    played.api.items["a"]["metadata"] |= {"deletionTimestamp": "2026-01-03T00:00:00Z", "finalizers": ["x/y"]}
    del played.api.items["b"]["metadata"]["deletionTimestamp"]
    played.call("b")
    assert len(played.given) == 1, "the other one decides"
    played.api.items["a"]["metadata"]["finalizers"] += ["kubegpu.share/uninstall"]
    assert played.call("b") == [60.0] and played.api.degraded("b") == "another_resource"


def test_what_resources_leave_on_the_volume_is_bounded(played):
    for name in ("gone", "b"):
        (played.folder.parent / name / "env").mkdir(parents=True)
        (played.folder.parent / name / "env" / "extravars").write_text("{}")
    (played.folder.parent / "other").mkdir()
    played.api.items["b"] = item("b", "2026-01-02T00:00:00Z")
    played.call("b", gpushare_nodes=["n"] * 9)
    assert {path.name for path in played.folder.parent.iterdir()} == {played.folder.name, "b", "other"}
    assert json.loads((played.folder / "env" / "extravars").read_text()) == {}


def test_a_run_gets_nothing_of_the_resources_metadata(played):
    # The API server keeps keys of managedFields as a client has written them.
    hostile = {"managedFields": [{"fieldsV1": {"f:{{ lookup('pipe', 'id') }}": {}}}]}
    played.api.items["a"]["metadata"] |= hostile
    played.call(_kubegpu_share_gpushare_spec={"{{ x }}": 1})
    [made] = played.given
    assert "{{" not in json.dumps(made) and made["gpu_kubeconfig"] == "k"


def test_a_spec_with_an_option_that_is_not_listed_runs_nothing(played):
    assert played.call(known={"gpushare_placement"}) == [60.0]
    assert played.api.degraded() == "unknown_option" and not played.given


def test_an_uninstall_takes_nothing_from_a_hostile_spec_and_looks_at_every_node(played):
    hostile = {"gpushareNodes": ["other"], "gpushareState": "present", "uninstallWithPods": True, "gpuKubeconfig": "x"}
    played.api.items["a"] = item(**hostile)
    played.api.items["a"]["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    held = {"refused": "pods-hold-shares", "nodes": ["n1"], "pods": ["d/p"]}
    played.ended = ended(2, gpu_uninstall=held)
    given = {"gpushare_nodes": ["other"], "gpushare_state": "present", "uninstall_with_pods": True}
    assert played.call(playbook="uninstall.yml", **given) == [15.0]
    [made] = played.given
    assert "gpushare_state" not in made and made["uninstall_with_pods"] is False and made["gpu_kubeconfig"] == "k"
    assert made["gpushare_nodes"] == [{"__ansible_unsafe": "n1"}, {"__ansible_unsafe": "other"}]
    assert played.api.degraded() == "pods_hold_shares"
    # Nothing is run as long as the pod is there, however long that is.
    played.api.pods["/api/v1/namespaces/d/pods/p"] = {"status": {"phase": "Running"}}
    played.clock += 100000
    assert played.call(playbook="uninstall.yml", **given) == [15.0] and len(played.given) == 1
    played.api.pods.clear()
    played.ended = ended(0, 9)
    assert played.call(playbook="uninstall.yml", **given) == [] and len(played.given) == 2
    # The engine couldn't take the finalizer away, since somebody changes the resource all the time.
    played.ended = ended(0)
    assert played.call(playbook="uninstall.yml", **given) == [] and len(played.given) == 3
    assert played.call(playbook="uninstall.yml", **given) == ["done"] and len(played.given) == 3


def test_a_run_that_was_killed_is_repeated_by_the_next_call(played, monkeypatch):
    played.ended = ended(0)
    played.call()

    def killed(*_given):
        raise SystemExit(1)

    monkeypatch.setattr(engine, "run", killed)
    played.api.nodes[0]["metadata"]["labels"] = {"gpushare": "true"}
    with pytest.raises(SystemExit):
        played.call()
    assert Memory(command.WORK).recall("uid-a") is None


def test_a_run_that_was_ended_by_a_limit_says_so_and_is_repeated_ever_later(played):
    played.ended = [{"event": "playbook_on_task_start", "event_data": {"task": "Wait for the pods"}}], None
    for cut, reason in ((engine.TOO_LONG, "time_limit"), (engine.TOO_LARGE, "output_limit")):
        played.cut = cut
        played.clock += 3600
        assert played.call() == [60.0] and played.api.degraded() == reason
        message = played.api.items["a"]["status"]["conditions"][-1]["message"]
        assert "was ended in the task: Wait for the pods" in message
    assert "more than 128 MiB" in message and Memory(command.WORK).recall("uid-a").failures == 2


def test_a_run_is_ended_where_its_resource_is_being_deleted_and_the_uninstall_follows(played, monkeypatch):
    def deleted(call, *given):
        played.api.items["a"]["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
        return Engine._run(played, call, *given)

    monkeypatch.setattr(engine, "run", deleted)
    assert played.call() == [1] and played.api.degraded() == ""
    assert Memory(command.WORK).recall("uid-a") is None and played.api.events == []
    # Nobody ends the uninstall.
    played.ended = ended(0, 3)
    assert played.call(playbook="uninstall.yml") == [] and len(played.given) == 2


def test_a_program_ends_by_itself_or_by_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LOOK", 0.05)
    monkeypatch.setattr(engine, "WATCH", 0.1)
    call = engine.Call(tmp_path, Path("/p/site.yml"), "7")

    def run(source, longest=60.0, wanted=True):
        return engine.run(call, (sys.executable, "-c", source), longest, lambda: wanted)

    waiting = "import time; time.sleep(60)"
    assert run("pass") == ""
    assert run(waiting, 0.2) == engine.TOO_LONG
    assert run(waiting, wanted=False) == engine.UNWANTED
    monkeypatch.setattr(engine, "MOST_OF_A_RUN", 1000)
    (tmp_path / "artifacts" / "7").mkdir(parents=True)
    (tmp_path / "artifacts" / "7" / "stdout").write_text("x" * 1001)
    assert run(waiting) == engine.TOO_LARGE


@pytest.mark.parametrize("text", ["1m", "0", "nan", "inf", "-5", "1e9", "\x1b[2J"])
def test_a_period_that_is_none_is_one_sentence(text):
    with pytest.raises(BadInput, match=r"^KUBEGPU_OPERATOR_PERIOD is '[ -~]*', in the environment") as refused:
        command.period_of(text)
    assert str(refused.value).endswith("a number from 1 to 3600")
    assert (command.period_of(""), command.period_of("2")) == (60.0, 2.0)


def test_images_are_those_of_the_pod(played, monkeypatch):
    monkeypatch.setenv("RELATED_IMAGE_GPUSHARE", "registry/g@sha256:1")
    played.ended = ended(0)
    played.call()
    [made] = played.given
    assert made["gpushare_image"] == "registry/g@sha256:1" and made["gpushare_image_delivery"] == "registry"
    assert json.dumps(made).count("__ansible_unsafe") == 0
