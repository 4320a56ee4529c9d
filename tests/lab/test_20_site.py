# SPDX-License-Identifier: GPL-3.0-or-later
"""``site.yml`` from bare machines, killed on the way, and again from bare machines in one go: the same end state."""

from __future__ import annotations

import json
import re

import pytest
from _lab import Json, Lab, until
from _snapshot import UNTOUCHED, cluster_objects, everything, node_files

SITE = "playbooks/site.yml"

# A line of the output, and how many seconds after it everything is killed: in the middle of what that role does.
MOMENTS = [
    (r"^TASK \[kubegpu\.share\.driver : ", 8.0),
    (r"^TASK \[kubegpu\.share\.runtime : ", 2.0),
    (r"^TASK \[kubegpu\.share\.image : ", 3.0),
    (r"^TASK \[kubegpu\.share\.scheduler : ", 3.0),
    (r"^PLAY \[Let the nodes announce their cards", 3.0),
]


@pytest.fixture(scope="module")
def after_kills(lab: Lab) -> Json:
    """The end state after five kills and a run that was left alone."""
    for marker, delay in MOMENTS:
        lab.killed_playbook(SITE, marker, delay)
    done = lab.playbook(SITE)
    assert done.rc == 0, done.out[-8000:]
    return everything(lab)


def test_second_run_changes_nothing(lab: Lab, after_kills: Json) -> None:
    lab.playbook(SITE).assert_unchanged()


def test_check_mode_sees_nothing_to_do(lab: Lab, after_kills: Json) -> None:
    lab.playbook(SITE, "--check", "--diff").assert_unchanged()


def test_nothing_half_done_is_left(lab: Lab, after_kills: Json) -> None:
    for name, node in after_kills["nodes"].items():
        assert node["half-written"] == [], name
        assert node["unfinished"] == [], name


def test_only_kubeadms_four_manifests(lab: Lab, after_kills: Json) -> None:
    """A copy kept beside a manifest would be a second scheduler."""
    for name in lab.control_planes:
        assert lab.ssh(name, "ls -A /etc/kubernetes/manifests").split() == [
            "etcd.yaml",
            "kube-apiserver.yaml",
            "kube-controller-manager.yaml",
            "kube-scheduler.yaml",
        ]


def test_every_card_is_announced(lab: Lab, after_kills: Json) -> None:
    for name in lab.gpu_nodes:
        uuids = [card["uuid"] for card in lab.cards(name)]
        assert uuids == lab.nodes[name]["cards"]
        assert lab.allocatable(name) == sum(card["units"] for card in lab.cards(name)) > 0


def test_check_mode_had_shown_everything(lab: Lab, after_kills: Json) -> None:
    """Each file that no package owns, and each object, was in the diff of the check-mode run before."""
    assert UNTOUCHED.exists(), "test_10_check_mode.py has to run before"
    seen = json.loads(UNTOUCHED.read_text())
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
    # Made by the packages' own scripts, by the device plugin at work, or by Kubernetes for each namespace.
    made_by_others = (
        r"nvidia-container-runtime/|ld\.so\.conf\.d|systemd/system/.*\.wants/|aliyungpushare|controllerrevision"
        r"|/var/lib/kubelet/device-plugins/|serviceaccount.*/default$|configmap.*/kube-root-ca\.crt$"
    )
    assert [one for one in missing if not re.search(made_by_others, one)] == []


# Another lab, and all of the work once more.
@pytest.mark.long
def test_one_run_from_bare_machines_ends_the_same(lab: Lab, after_kills: Json) -> None:
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
