# SPDX-License-Identifier: GPL-3.0-or-later
"""``uninstall.yml`` restores cluster and machines to their state before the first run of site.yml."""

from __future__ import annotations

import json
import typing as t

import pytest
from _lab import Done, Lab, until
from _pods import body, container, create
from _snapshot import BASELINE, cluster_objects, node_files

UNINSTALL = "playbooks/uninstall.yml"
RUNTIME = "/usr/bin/nvidia-container-runtime"
# kubelet's own record of what it gave away.
LEFT = ("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",)


@pytest.fixture(scope="module")
def shown(lab: Lab) -> Done:
    """The output of check mode, which removes nothing."""
    before = cluster_objects(lab)
    done = lab.playbook(UNINSTALL, "--check", "--diff")
    assert cluster_objects(lab) == before
    return done


class Uninstalled(t.NamedTuple):
    """The run, and what there was after it of the pods that it let run: restarts by pod, and a program by node."""

    done: Done
    restarts: dict[str, list[int]]
    programs: dict[str, str]


@pytest.fixture(scope="module")
def uninstalled(lab: Lab, every_test: bool, request: pytest.FixtureRequest) -> Uninstalled:
    if every_test:
        # Before everything is gone.
        request.getfixturevalue("shown")
    with lab.api.namespace("lab-outlive") as space:
        # Without a share; NVIDIA's runtime is the node's default and starts them.
        create(lab, space, *(body(name, container(lab), node=name) for name in lab.gpu_nodes))
        lab.api.wait_running(space, lab.gpu_nodes)
        done = lab.playbook(UNINSTALL)
        found = {pod["metadata"]["name"]: pod["status"]["containerStatuses"] for pod in lab.api.pods(space)}
        return Uninstalled(
            done,
            {name: [one["restartCount"] for one in each if "running" in one["state"]] for name, each in found.items()},
            {name: lab.ssh(name, f"cat {RUNTIME} || true") for name in lab.gpu_nodes},
        )


@pytest.fixture(scope="module")
def taken(uninstalled: Uninstalled) -> Done:
    return uninstalled.done


@pytest.mark.long
def test_check_mode_lists_what_is_removed(shown: Done) -> None:
    assert shown.rc == 0, shown.out[-8000:]
    for name in ("DaemonSet gpushare-system/gpushare-extender", "manifests/kube-scheduler.yaml", "kubeadm-config"):
        assert name in shown.out, name


def test_it_succeeds(taken: Done) -> None:
    assert taken.rc == 0, taken.out[-8000:]


def test_pods_that_nvidias_runtime_started_run_on_and_can_be_stopped(
    lab: Lab, uninstalled: Uninstalled, every_test: bool
) -> None:
    assert uninstalled.restarts == {name: [0] for name in lab.gpu_nodes}
    for name in lab.gpu_nodes:
        assert "Written by kubegpu.share" in uninstalled.programs[name]
        if every_test:
            # Other tests have restarted nodes: then the runtime has started the pods of DaemonSets, too.
            for pod in lab.api.items(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}"):
                lab.api.delete("/api/v1/namespaces/{namespace}/pods/{name}".format(**pod["metadata"]))
        # The fixture has deleted their namespace.
        until(lambda name=name: not lab.ssh(name, f"ls {RUNTIME} 2>/dev/null || true"), f"{RUNTIME} goes", 60)


def test_fault_16_cluster_is_restored(lab: Lab, taken: Done) -> None:
    before = json.loads(BASELINE.read_text())["before"]["objects"]
    until(lambda: "gpushare-system" not in lab.api.namespaces(), "the namespace goes")
    assert cluster_objects(lab) == before
    for name in lab.gpu_nodes:
        node = lab.api.node(name)
        assert not [key for key in node["metadata"]["annotations"] if "kubegpu" in key]
        assert "aliyun.com/gpu-count" not in node["status"]["capacity"]
        # kubelet itself goes on to show the size of a resource whose plugin is gone, with nothing of it to be had.
        until(lambda name=name: lab.allocatable(name) == 0, "nothing can be had")


def test_schedulers_run_with_kubeadms_own_manifests(lab: Lab, taken: Done) -> None:
    before = json.loads(BASELINE.read_text())["before"]
    for name in lab.control_planes:
        now = node_files(lab, name)
        assert {path: text for path, text in now.items() if path not in before[name]} == {}
        path = "/etc/kubernetes/manifests/kube-scheduler.yaml"
        assert now[path] == before[name][path]
        assert "--config" not in lab.ssh(name, "tr '\\0' ' ' < /proc/$(pgrep -x kube-scheduler)/cmdline")


def test_nodes_are_restored(lab: Lab, taken: Done) -> None:
    before = json.loads(BASELINE.read_text())["before"]
    for name in lab.gpu_nodes:
        now = {path: text for path, text in node_files(lab, name).items() if not path.startswith(LEFT)}
        was = {path: text for path, text in before[name].items() if not path.startswith(LEFT)}
        assert {path: text for path, text in now.items() if was.get(path) != text} == {}
        assert set(was) - set(now) == set()


# Role by role, unit tests show the same.
@pytest.mark.long
def test_second_run_changes_nothing_more(lab: Lab, taken: Done) -> None:
    again = lab.playbook(UNINSTALL)
    assert again.rc == 0, again.out[-8000:]
    again.assert_unchanged()


@pytest.mark.long
def test_uninstall_refuses_while_pods_hold_a_share(lab: Lab, taken: Done) -> None:
    """Set up again, with a pod that holds a share: nothing is removed, and one sentence says why."""
    done = lab.playbook("playbooks/site.yml")
    assert done.rc == 0, done.out[-8000:]
    with lab.api.namespace("lab-uninstall") as space:
        lab.api.create_pod(space, "holder", [2], lab.image())
        lab.api.wait_running(space, ["holder"])
        refused = lab.playbook(UNINSTALL)
        assert refused.rc != 0 and "uninstall_with_pods" in refused.out, refused.out[-4000:]
        assert {host: sums["changed"] for host, sums in refused.recap.items() if sums["changed"]} == {}
        assert lab.api.pod(space, "holder")["status"]["phase"] == "Running"
