# SPDX-License-Identifier: GPL-3.0-or-later
"""The plans of all hosts as one, and the summary of a run."""

from __future__ import annotations

import json

import pytest
from action_plugins import load
from ansible_collections.kubegpu.share.plugins.action import site_plan
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.model import node_of
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.site import SitePlan, about
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.summary import NEXT, summary
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan.walk import Refusal, Step

MACHINES = ("gpu_nodes", "control_plane")
EMPTY = {"steps": [], "refusal": None, "groups": MACHINES, "notes": []}


def plan(*steps, groups=MACHINES, refusal=None, notes=()):
    """A host's plan of steps, each a stage and a ``Step``."""
    made = [{"stage": stage, **step.result()} for stage, step in steps]
    return {"steps": made, "refusal": refusal, "groups": list(groups), "notes": list(notes)}


IMAGE = ("image", Step("image", "Import it", "kubegpu.share.image_import", ("gpushare:1.1.0",)))
RUNTIME = (
    "runtime",
    Step("runtime", "Configure it", "kubegpu.share.container_runtime", ("/etc/a.toml",), restarts=("containerd",)),
)
PACKAGES = ("driver", Step("driver", "Install it", "kubegpu.share.pinned_packages", tuple("abcdefg")))
SCHEDULER = (
    "scheduler",
    Step("scheduler", "Configure it", "kubegpu.share.kube_scheduler", ("m",), restarts=("kube-scheduler",)),
)
PLUGIN = (
    "device_plugin",
    Step("gpushare", "Deploy it", "kubegpu.share.cluster_objects", waits=("DaemonSet p: 1 of 2",), certain=False),
)


def test_no_play_runs_where_nothing_changes():
    made = SitePlan({"gpu1": EMPTY, "cp1": EMPTY}, EMPTY, ["cp1"])
    assert made.empty and made.seconds == 0
    for pattern in made.patterns().values():
        one, _and, other = str(pattern).partition(":!")
        assert one == other
    assert SitePlan({"gpu1": EMPTY}, EMPTY, verify=True).patterns()["verify"] == ["localhost"]
    assert made.text() == "Nothing to change: 2 machines and the cluster are as configured.\n"


def test_the_checks_of_a_run_that_was_killed_follow_in_the_next():
    made = SitePlan({"gpu1": EMPTY}, EMPTY, unverified=True)
    assert made.empty and made.patterns()["verify"] == ["localhost"]
    assert made.patterns()["unverified"] == "localhost:!localhost", "a run that changes nothing records nothing"
    assert made.text().endswith("The checks haven't passed since the last change: site.yml runs them.\n")
    assert SitePlan({"gpu1": plan(PACKAGES)}, EMPTY).patterns()["unverified"] == ["localhost"]


def test_a_play_runs_where_its_stage_or_an_earlier_one_of_the_host_changes():
    hosts = {"gpu1": plan(PACKAGES), "gpu2": plan(RUNTIME), "cp1": plan(SCHEDULER), "cp2": EMPTY}
    made = SitePlan(hosts, EMPTY, ["cp2", "cp1"]).patterns()
    assert made["driver"] == ["gpu1"]
    assert made["runtime"] == ["gpu1", "gpu2"]
    assert made["image"] == "gpu_nodes:!gpu_nodes"
    assert made["scheduler"] == ["cp1"]
    # The cluster's plays may have something to do once a machine has changed.
    assert made["extender"] == made["cluster_scheduler"] == made["device_plugin"] == made["verify"] == ["localhost"]
    late = SitePlan({"gpu1": EMPTY}, plan(PLUGIN)).patterns()
    assert late["device_plugin"] == ["localhost"]
    assert (late["driver"], late["extender"]) == ("gpu_nodes:!gpu_nodes", "localhost:!localhost")


def test_a_machine_joins_no_play_of_other_groups_because_an_earlier_one_changed_it():
    hosts = {"gpu1": plan(IMAGE, groups=["gpu_nodes"]), "cp1": plan(IMAGE, groups=["control_plane"])}
    made = SitePlan(hosts, EMPTY, ["cp1"]).patterns()
    assert made["image"] == ["gpu1", "cp1"]
    assert made["driver"] == made["runtime"] == ["gpu1"]
    assert made["scheduler"] == ["cp1"]


def test_schedulers_keep_their_order():
    hosts = {"cp1": plan(SCHEDULER), "cp2": plan(SCHEDULER)}
    assert SitePlan(hosts, EMPTY, ["cp2", "cp1"]).patterns()["scheduler"] == ["cp2", "cp1"]


def test_machines_take_their_time_at_once_and_schedulers_one_after_another():
    one = SitePlan({"cp1": plan(SCHEDULER), "gpu1": plan(PACKAGES)}, EMPTY).seconds
    assert SitePlan({"cp1": plan(SCHEDULER), "gpu1": plan(PACKAGES), "gpu2": plan(PACKAGES)}, EMPTY).seconds == one
    assert SitePlan({"cp1": plan(SCHEDULER), "cp2": plan(SCHEDULER), "gpu1": plan(PACKAGES)}, EMPTY).seconds > one
    assert [about(seconds) for seconds in (0.5, 59, 61, 130)] == [
        "about 1 s",
        "about 59 s",
        "about 2 min",
        "about 3 min",
    ]


def test_a_server_that_restarts_twice_is_counted_twice():
    """k3s restarts for its container runtime, and again for its kube-scheduler."""
    steps = [(name, Step(name, "Configure it", "m", ("f",), restarts=("k3s",))) for name in ("runtime", "scheduler")]
    made = SitePlan({"cp1": plan(*steps), "gpu1": plan(steps[0])}, plan())
    assert made.restarts == {"k3s": ["cp1", "cp1", "gpu1"]}
    assert "Restarts k3s on cp1 (2 times), gpu1." in made.text().splitlines()


def test_the_text_says_what_restarts_and_is_drained():
    hosts = {
        "gpu1": plan(PACKAGES, RUNTIME, groups=["kubegpu_maintenance"], notes=["Mind this."]),
        "gpu2": plan(RUNTIME),
    }
    lines = SitePlan(hosts, plan(PLUGIN)).text().splitlines()
    assert lines[:6] == [
        "gpu1:",
        "  note: Mind this.",
        "  driver: Install it",
        "      a; b; c; d; and 3 more",
        "  runtime: Configure it",
        "      /etc/a.toml",
    ]
    assert "the cluster:" in lines and "      waits for DaemonSet p: 1 of 2" in lines
    assert lines[-3:-1] == ["Restarts containerd on gpu1, gpu2.", "Drains, one after another: gpu1."]
    assert lines[-1].startswith("4 steps (3 on 2 machines, 1 in the cluster); about ")


def of_cluster(*changes, **more):
    return ("device_plugin", Step("gpushare", "Deploy it", "kubegpu.share.cluster_objects", changes, **more))


@pytest.mark.parametrize(
    ("host", "cluster", "beyond"),
    [
        (plan(IMAGE, PACKAGES, RUNTIME), plan(of_cluster("Node n3"), PLUGIN), []),
        # What is on another machine, or in the control plane, isn't the node's.
        (plan(SCHEDULER), EMPTY, [("gpu3", "scheduler")]),
        (EMPTY, plan(of_cluster("DaemonSet a/p", "Node n3")), [("the cluster", "gpushare")]),
        (EMPTY, plan(of_cluster("Node n30")), [("the cluster", "gpushare")]),
        # What can't be planned might change anything.
        (EMPTY, plan(of_cluster(certain=False)), [("the cluster", "gpushare")]),
    ],
)
def test_a_node_that_joins_is_all_that_changes(host, cluster, beyond):
    made = SitePlan({"gpu3": host}, cluster, alone={"gpu3": "n3"})
    assert [(name, step["role"]) for name, step in made.beyond] == beyond
    assert ("REFUSED, since only gpu3 may change: " in made.text()) == bool(beyond)
    assert SitePlan({"gpu3": host}, cluster).beyond == []


def test_the_task_fails_where_more_than_the_node_would_change_and_returns_the_steps(monkeypatch):
    monkeypatch.setattr(site_plan.Planner, "machine", lambda planner, name: {"gpu3": plan(RUNTIME)}[name])
    monkeypatch.setattr(
        site_plan.Planner, "cluster", lambda planner, cluster: plan(of_cluster("DaemonSet a/p", "Node n3"))
    )
    backends = {"gpu_backends": {"nodes": [{"node": "n3"}, {"node": "n4"}]}}
    hostvars = {"localhost": backends, "gpu3": {"gpu_node_name": "n3"}, "gpu5": {}}
    known = {"inventory_hostname": "localhost", "groups": {"gpu_nodes": ["gpu3", "gpu5"]}, "hostvars": hostvars}

    def run(*alone):
        return load(site_plan, {"machines": ["gpu3"], "alone": list(alone)}).run(task_vars=known)

    result = run("gpu3")
    assert result["failed"] and [(one["where"], one["changes"]) for one in result["beyond"]] == [
        ("the cluster", ["DaemonSet a/p"])
    ]
    assert "DaemonSet a/p (role gpushare, in the cluster: Deploy it)" in result["msg"] and "site.yml" in result["msg"]
    assert "isn't in this run" in run("gpu5")["msg"]
    assert "neither a host" in run("gpu9")["msg"]
    # A node without SSH, in gpushare_nodes.
    assert "beyond" in run("n4")


def test_a_refusal_fails_the_task_and_the_data_is_written_nevertheless(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused = plan(refusal=Refusal("runtime", "Configure it", "no runtime").result())
    monkeypatch.setattr(site_plan.Planner, "machine", lambda planner, name: {"gpu1": refused}[name])
    monkeypatch.setattr(site_plan.Planner, "cluster", lambda planner, cluster: EMPTY)
    action = load(site_plan, {"machines": ["gpu1"], "output": "p.json"})
    result = action.run(task_vars={"inventory_hostname": "localhost"})
    assert result["failed"] and result["msg"] == "The run would be refused, as listed above: runtime: no runtime"
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["hosts"]["gpu1"]["refusal"]["role"] == "runtime"
    assert "plan" not in result


def node(memory, count):
    amounts = {"aliyun.com/gpu-mem": memory, "aliyun.com/gpu-count": count}
    return {"metadata": {"name": "n"}, "status": {"capacity": amounts, "allocatable": amounts}}


def of(backend, number):
    """A node of another back end."""
    labels = {"kubegpu.share/backend": backend}
    return {"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": number}}}


@pytest.mark.parametrize(
    ("nodes", "steps", "check", "text"),
    [
        (
            [node("32", "2"), node("32", "2")],
            3,
            False,
            f"2 nodes, 4 cards, 64 GiB shared; 3 steps done; next: {NEXT}",
        ),
        ([node("32", "2")], 0, False, f"1 node, 2 cards, 32 GiB shared; nothing changed; next: {NEXT}"),
        ([node("32768", "1")], None, False, f"1 node, 1 card, 32768 MiB shared; next: {NEXT}"),
        ([node("32768", "1"), node("32", "1")], None, False, f"2 nodes, 2 cards, 32800 units shared; next: {NEXT}"),
        (
            [node("32", "2"), of("hami", "20"), of("nvidia", "2"), of("nvidia", "8")],
            0,
            False,
            "1 node, 2 cards, 32 GiB shared; HAMi: 1 node, 20 nvidia.com/gpu; NVIDIA's device plugin: 2 nodes, "
            f"10 nvidia.com/gpu; nothing changed; next: {NEXT}",
        ),
        (
            [of("hami", "0")],
            2,
            False,
            f"HAMi: 1 node, 0 nvidia.com/gpu; 2 steps done; next: {NEXT}",
        ),
        (
            [{"metadata": {"name": "n"}}],
            1,
            True,
            "No node shares a card; 1 step would be done; next: the same command without --check",
        ),
    ],
)
def test_the_summary_says_what_there_is(nodes, steps, check, text):
    made = None if steps is None else SitePlan({"h": plan(*[PACKAGES] * steps)}, EMPTY).result()
    assert summary(list(map(node_of, nodes)), made, check).text() == text
