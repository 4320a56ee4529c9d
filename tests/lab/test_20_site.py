# SPDX-License-Identifier: GPL-3.0-or-later
"""``site.yml`` from bare machines: killed in between or uninterrupted, it ends in the same state."""

from __future__ import annotations

import json
import re

import pytest
from _lab import JsonObject, Lab, until
from _schedulers import holder
from _snapshot import BASELINE, cluster_objects, everything, node_files

SITE = "playbooks/site.yml"

# A line of the output, and how many seconds after it everything is killed: in the middle of what that role does.
MOMENTS = [
    (r"^TASK \[kubegpu\.share\.image : ", 3.0),
    (r"^TASK \[kubegpu\.share\.driver : ", 8.0),
    (r"^TASK \[kubegpu\.share\.runtime : ", 2.0),
    (r"^PLAY \[Configure kube-scheduler to use the extender", 6.0),
    (r"^PLAY \[Deploy the device plugin", 3.0),
]


@pytest.fixture(scope="module")
def after_kills(lab: Lab, every_test: bool) -> JsonObject:
    """The end state after an uninterrupted run; with the long tests after runs that were killed at MOMENTS, too."""
    orders = []
    for marker, delay in MOMENTS if every_test else ():
        leader = leading(lab)
        orders.append((leader, changed_control_planes(lab.killed_playbook(SITE, marker, delay))))
    leader = leading(lab)
    done = lab.playbook(SITE)
    assert done.rc == 0, done.out[-8000:]
    return {**everything(lab), "orders": [*orders, (leader, changed_control_planes(done.out))]}


def leading(lab: Lab) -> str:
    return str(until(lambda: holder(lab), "a lease holder", 60))


def changed_control_planes(output: str) -> list[str]:
    """Return the control planes that the play of kube-scheduler changed, in this order."""
    plays = [
        play for play in output.split("\nPLAY [") if play.startswith("Configure kube-scheduler to use the extender")
    ]
    return list(dict.fromkeys(re.findall(r"^changed: \[(cp\d)\]", "\n".join(plays), re.MULTILINE)))


def test_the_leader_is_changed_last(after_kills: JsonObject) -> None:
    """Each run observes the leader before; a killed one may have changed some control planes."""
    orders = [(leader, order) for leader, order in after_kills["orders"] if order]
    assert orders, "no run changed a control plane"
    assert all(order[-1] == leader for leader, order in orders), orders


def test_second_run_changes_nothing(lab: Lab, after_kills: JsonObject) -> None:
    # As verbose as possible, for test_70_secrets.py, which reads the logs of all runs.
    lab.playbook(SITE, "-vvv", "--diff").assert_unchanged()


def test_no_temporary_files_are_left(lab: Lab, after_kills: JsonObject) -> None:
    for name, node in after_kills["nodes"].items():
        assert node["half-written"] == [], name
        assert node["unfinished"] == [], name


def test_only_kubeadms_four_manifests(lab: Lab, after_kills: JsonObject) -> None:
    """A copy beside a manifest would start a second scheduler."""
    for name in lab.control_planes:
        assert lab.ssh(name, "ls -A /etc/kubernetes/manifests").split() == [
            "etcd.yaml",
            "kube-apiserver.yaml",
            "kube-controller-manager.yaml",
            "kube-scheduler.yaml",
        ]


def test_no_change_is_left_without_checks(lab: Lab, after_kills: JsonObject) -> None:
    [record] = [
        one
        for one in lab.api.items("/api/v1/namespaces/kube-system/configmaps")
        if one["metadata"]["name"] == "kubegpu-share"
    ]
    assert record["data"] == {"owner": "playbook"}


def test_every_card_is_announced(lab: Lab, after_kills: JsonObject) -> None:
    for name in lab.gpu_nodes:
        uuids = [card["uuid"] for card in lab.cards(name)]
        assert uuids == lab.nodes[name]["cards"]
        assert lab.allocatable(name) == sum(card["units"] for card in lab.cards(name)) > 0


def test_check_mode_had_listed_every_change(lab: Lab, after_kills: JsonObject) -> None:
    """Every file without a package and every object was in the diff of the check-mode run before."""
    assert BASELINE.exists(), "test_10_check_mode.py has to run before"
    seen = json.loads(BASELINE.read_text())
    missing = []
    for name in lab.nodes:
        new = [path for path in node_files(lab, name) if path not in seen["before"][name]]
        listed = "\n".join(new)
        unowned = lab.ssh(
            name, f'while read -r f; do dpkg -S "$f" >/dev/null 2>&1 || echo "$f"; done <<\'E\'\n{listed}\nE'
        )
        missing += [f"{name}: {path}" for path in unowned.split("\n") if path and path not in seen["diff"]]
    for key in cluster_objects(lab).keys() - seen["before"]["objects"].keys():
        if not re.search(rf"\b{re.escape(key.partition(' ')[2].strip('/'))}\b", seen["diff"]):
            missing.append(key)
    # Made by the packages' own scripts, by the device plugin at work, or by Kubernetes for each namespace; and
    # the record of whose the set-up is, which a run writes before its first change and never plans.
    made_by_others = (
        r"nvidia-container-runtime/|ld\.so\.conf\.d|systemd/system/.*\.wants/|aliyungpushare|controllerrevision"
        r"|/var/lib/kubelet/device-plugins/|serviceaccount.*/default$|configmap.*/kube-root-ca\.crt$"
        r"|^configmaps kube-system/kubegpu-share$"
    )
    assert [one for one in missing if not re.search(made_by_others, one)] == []


# Another lab, and all of the work once more.
@pytest.mark.long
def test_one_uninterrupted_run_gives_the_same_state(lab: Lab, after_kills: JsonObject) -> None:
    lab.manage("down")
    lab.manage("up")
    lab.load()
    done = lab.playbook(SITE)
    assert done.rc == 0, done.out[-8000:]
    until(lambda: all(lab.allocatable(name) > 0 for name in lab.gpu_nodes), "cards announced")
    once = everything(lab)
    for name, node in once["nodes"].items():
        for what, value in node.items():
            assert after_kills["nodes"][name][what] == value, f"{what} of {name}"
    assert after_kills["objects"] == once["objects"]
    assert after_kills["resources"] == once["resources"]
    assert after_kills["cards"] == once["cards"]
    lab.playbook(SITE).assert_unchanged()
