# SPDX-License-Identifier: GPL-3.0-or-later
"""Evidence that a node's own pod of the servers gives, where nobody logs in to its machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._check import collect, node_pods
from ansible_collections.kubegpu.share.plugins.module_utils._check.node_pods import pod_of
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import CommandFailed
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import FIELD_MANAGER, Ref
from check_kit import found, recorded
from check_worlds import NODE
from fake_kube import FakeKube

PLUGIN, SPACE = "gpushare-device-plugin", "gpushare-system"
EXCLUDED = '{"cards":["0000:3b:00.0"],"nodes":["gpu1","gpu2"]}'


def server_pod(name: str = PLUGIN, **spec: Any) -> JsonObject:
    """A pod of a server's DaemonSet, as the API has it."""
    container = node_pods.SERVERS[name]
    command = [name, "--kubelet-dir=/srv/kubelet", f"--exclude-cards={EXCLUDED}", "--log-format=json"]
    labels = {node_pods.NAME: name, "app.kubernetes.io/component": container, "app.kubernetes.io/part-of": "gpushare"}
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "uid": f"uid-of-{name}", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-x7k2p",
            "namespace": SPACE,
            "uid": "u",
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {
            "nodeName": NODE,
            "serviceAccountName": name,
            "containers": [{"name": container, "image": "x", "command": command}],
            **spec,
        },
        "status": {"phase": "Running", "containerStatuses": [{"name": container, "state": {"running": {}}}]},
    }


class Api(FakeKube):
    """A world's lists, and the servers' DaemonSets."""

    def __init__(self, world: JsonObject, *pods: JsonObject) -> None:
        super().__init__()
        self.world, self.more = world, pods
        for name in node_pods.SERVERS:
            about = {"name": name, "namespace": SPACE, "uid": f"uid-of-{name}"}
            self.add({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": about}, FIELD_MANAGER)

    def list_all(self, api_version: str, kind: str, *_more: Any, **_selectors: Any) -> list[JsonObject]:
        if kind == "ResourceClaimTemplate":
            names = [name.split("/") for name in self.world.get("templates", ())]
            return [{"metadata": {"namespace": space, "name": name}} for space, name in names]
        listed = {"Node": "nodes", "Pod": "pods", "ResourceSlice": "slices", "ResourceClaim": "claims"}[kind]
        return [*self.world.get(listed, ()), *(self.more if kind == "Pod" else ())]


class Execute:
    """Answers with a text, or fails; and keeps what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[tuple[str, str, str, list[str]]]()

    def __call__(self, namespace: str, pod: str, container: str, argv: Sequence[str]) -> str:
        self.asked.append((namespace, pod, container, list(argv)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, str) else json.dumps(self.answer)


def params(world: JsonObject, given: JsonObject, **pods: Any) -> JsonObject:
    return {
        **{name: one.get("default") for name, one in collect.ARGUMENTS.items()},
        "nodes": given,
        "extender": world["extender"],
        "pods": {"namespace": SPACE, "nodes": [], "timeout": 30, **pods},
    }


def answer_of(world: JsonObject) -> JsonObject:
    evidence = world["evidence"][NODE]
    return {"version": 1, "node": NODE, "nvml": evidence["nvml"], "kubelet": evidence["kubelet"]}


def checked(
    world: JsonObject, pod: JsonObject, execute: Execute, nodes: JsonObject, only: Sequence[str] = ()
) -> JsonObject:
    # The world's own device plugin makes room for the server's.
    world["pods"] = [one for one in world["pods"] if "device-plugin" not in one["metadata"]["name"]]
    api, given = Api(world, pod), params(world, nodes, nodes=list(only))
    return collect.check(api, given, world["now"], executor=lambda _seconds: execute)["report"]


SILENT = json.dumps({"nvml": None, "kubelet": None, "problem": "its machine is unreachable: no route"})


@pytest.mark.parametrize("nodes", [{}, {NODE: SILENT}, {NODE: json.loads(SILENT)}], ids=["absent", "text", "object"])
def test_a_pod_answers_as_the_machine_would(nodes: JsonObject) -> None:
    world = recorded("ours_envvar")
    execute = Execute(answer_of(world))
    report = checked(world, server_pod(hostPID=True), execute, nodes)
    assert (report["result"], found(report, "FAIL", "WARN", "UNKNOWN")) == ("PASS", [])
    (row,) = report["nodes"]
    assert row["source"] == f"pod {SPACE}/{PLUGIN}-x7k2p" and row["cards"][0]["used_mib"]
    own = '--exclude-cards={"cards":["0000:3b:00.0"],"nodes":["gpu1"]}'
    argv = ["gpushare-node-facts", "--timeout=30", "--kubelet-dir=/srv/kubelet", own, "--host-pid"]
    assert execute.asked == [(SPACE, f"{PLUGIN}-x7k2p", "device-plugin", argv)]


def test_claims_are_checked_by_the_drivers_pod() -> None:
    world = recorded("claims_enforced")
    execute = Execute(answer_of(world))
    report = checked(world, server_pod("gpushare-dra-driver", hostPID=True), execute, {})
    assert found(report, "FAIL", "WARN", "UNKNOWN") == []
    assert [row["source"] for row in report["nodes"]] == [f"pod {SPACE}/gpushare-dra-driver-x7k2p"]


def test_without_the_nodes_process_ids_nothing_is_denied() -> None:
    """A hostile node that claims to see no process, and no device in a container, isn't believed."""
    world = recorded("ours_envvar")
    answer = answer_of(world)
    for card in answer["nvml"]["cards"]:
        card["processes"] = []
    answer["kubelet"]["device_nodes"] = []
    execute = Execute(answer)
    report = checked(world, server_pod(), execute, {})
    assert "--host-pid" not in execute.asked[0][3]
    assert {finding["check"] for finding in report["findings"]} >= {"C2", "C8"} and report["counts"]["FAIL"] == 0
    assert {finding["evidence"]["source"] for finding in report["findings"]} == {f"pod {SPACE}/{PLUGIN}-x7k2p"}
    texts = [finding["what"] for finding in report["findings"] if finding["check"] == "C2"]
    assert texts and all("hasn't its process IDs (gpushare_host_pid)" in text for text in texts)
    assert [card["foreign_mib"] for card in report["nodes"][0]["cards"]] == [None] * len(answer["nvml"]["cards"])


def test_a_contradiction_says_whose_word_it_is() -> None:
    world = recorded("ours_envvar")
    answer = answer_of(world)
    answer["nvml"]["cards"][0]["processes"][0].update(where="host", pod_uid="", name="intruder")
    report = checked(world, server_pod(hostPID=True), Execute(answer), {})
    (finding,) = [one for one in report["findings"] if (one["check"], one["level"]) == ("C2", "FAIL")]
    assert finding["evidence"]["source"] == f"pod {SPACE}/{PLUGIN}-x7k2p"


def test_a_machine_that_was_observed_is_believed_and_its_pod_not_asked() -> None:
    world = recorded("ours_envvar")
    for evidence in (world["evidence"][NODE], json.dumps(world["evidence"][NODE]), ["GPU-1"]):
        execute = Execute(ShareError("not asked"))
        checked(recorded("ours_envvar"), server_pod(), execute, {NODE: evidence})
        assert execute.asked == []
    execute = Execute(answer_of(world))
    checked(world, server_pod(), execute, {}, only=["another"])
    assert execute.asked == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (CommandFailed("exec in pod x: pods is forbidden"), "pods is forbidden"),
        ("", "its answer isn't JSON"),
        ("[" * 100_000, "its answer isn't JSON"),
        ("[]", "its answer has another form"),
        ({"version": 2, "node": NODE}, "its answer has another form"),
        ({"version": 1, "node": "another", "nvml": {}}, "it answers for node another"),
    ],
    ids=["refused", "nothing", "deep", "list", "newer", "another"],
)
def test_no_answer_is_unknown_with_the_reason(answer: Any, why: str) -> None:
    report = checked(recorded("ours_envvar"), server_pod(), Execute(answer), {NODE: SILENT})
    (text,) = [finding["what"] for finding in report["findings"] if finding["check"] == "C9"]
    assert (
        "no route, and pod gpushare-system/gpushare-device-plugin-x7k2p doesn't answer for it: " in text and why in text
    )
    assert report["result"] == "UNKNOWN" and report["counts"]["FAIL"] == 0


@pytest.mark.parametrize("part", ["nvml", "kubelet"])
@pytest.mark.parametrize(
    "value", [None, 1, "x", [], [[]], {"cards": 1}, {"available": True, "cards": [1, {"index": {}}]}]
)
def test_answers_of_any_shape(part: str, value: Any) -> None:
    world = recorded("ours_envvar")
    report = checked(world, server_pod(), Execute({**answer_of(world), part: value}), {})
    assert report["result"] == "UNKNOWN" and not [
        one for one in report["findings"] if one["cause"] == "unexpected_error"
    ]


def test_only_pods_of_our_daemon_sets_are_asked() -> None:
    pod = server_pod()
    assert pod_of(pod, SPACE) is not None and pod_of(pod, "another") is None

    def changed(*path: Any, value: Any) -> JsonObject:
        raw = json.loads(json.dumps(pod))
        place = raw
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return raw

    for path, value in (
        (("metadata", "labels", node_pods.NAME), "gpushare-dra-driver"),
        (("metadata", "deletionTimestamp"), "2026-11-22T12:00:00Z"),
        (("metadata", "ownerReferences"), []),
        (("metadata", "ownerReferences", 0, "kind"), "Node"),
        (("metadata", "ownerReferences", 0, "name"), "mine"),
        (("metadata", "ownerReferences", 0, "controller"), False),
        (("spec", "serviceAccountName"), "default"),
        (("spec", "containers", 0, "name"), "another"),
        (("spec", "containers", 0, "command"), ["gpushare-device-plugin-v2"]),
        (("status",), {}),
        (("status", "containerStatuses", 0, "state"), {"waiting": {}}),
        (("spec",), None),
    ):
        assert pod_of(changed(*path, value=value), SPACE) is None, path
    assert [pod_of(raw, SPACE) for raw in (None, 1, [], {}, {"metadata": None, "spec": {}})] == [None] * 5


def test_a_pod_of_another_daemon_set_of_that_name_is_not_asked() -> None:
    """Whoever could bind a pod with made-up owners: the owner's UID is the API's."""
    pod, execute = server_pod(), Execute({})
    pod["metadata"]["ownerReferences"][0]["uid"] = "made-up"
    report = checked(recorded("ours_envvar"), pod, execute, {})
    assert execute.asked == [] and "of another DaemonSet" in json.dumps(report["findings"])


def test_a_daemon_set_that_cannot_be_read_is_a_reason() -> None:
    world, execute = recorded("ours_envvar"), Execute({})
    api = Api(world, server_pod())
    api.delete(Ref("apps/v1", "DaemonSet", SPACE, PLUGIN))
    report = collect.check(api, params(world, {}), world["now"], executor=lambda _seconds: execute)["report"]
    assert execute.asked == [] and "doesn't exist" in json.dumps(report["findings"])


def test_the_library_is_needed_only_where_a_pod_is_asked() -> None:
    """And where it is missing, everything else is checked all the same."""
    world, calls = recorded("ours_envvar"), list[float]()

    def executor(seconds: float) -> Execute:
        calls.append(seconds)
        raise ShareError("the Python lacks kubernetes")

    def report(nodes: JsonObject) -> JsonObject:
        api = Api(world, server_pod())
        return collect.check(api, params(world, nodes), world["now"], executor=executor)["report"]

    report(world["evidence"])
    assert calls == []
    lacking = report({})
    assert calls == [30 + collect.ANSWER_SECONDS] and "lacks kubernetes" in json.dumps(lacking["findings"])


def test_a_time_limit_out_of_range_is_refused() -> None:
    world = recorded("ours_envvar")
    with pytest.raises(BadInput, match=r"pods\.timeout: 0 isn't between 1 and 600 seconds"):
        collect.check(Api(world), params(world, {}, timeout=0))
