# SPDX-License-Identifier: GPL-3.0-or-later
"""A real ``kubeadm upgrade`` to the next minor release rewrites the manifests and keeps what site.yml added.

Only `make test-all` runs it: it builds a second Kubernetes (ten minutes, once), and replaces a lab that is up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from _lab import LOGS, ROOT, Lab, until
from _schedulers import CONFIG, FOLDER, ControlPlane, Inside, SchedulingProbe, Watch, assert_healthy

from lab import aptsources, build, cluster, components, engine, nodes, rootfs

OLDER, NEWER = build.OLDER[0].version, build.SETS["kubernetes"].version
SITE = "playbooks/site.yml"


def manage(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    manage("down")
    manage("up", f"--kubernetes-version={OLDER}")
    try:
        LOGS.mkdir(parents=True, exist_ok=True)
        yield Lab()
    finally:
        manage("down")


@pytest.fixture(scope="module")
def planes(lab: Lab) -> list[ControlPlane]:
    inside = Inside(lab)
    return [ControlPlane(lab, inside, name) for name in lab.control_planes]


def bring(lab: Lab) -> None:
    """Provide the newer kubeadm and images, as a package manager and a registry would."""
    folder = build.binaries(build.kubernetes(NEWER).name)
    base = rootfs.rootfs("base", rootfs.BASE_PACKAGES, aptsources.read_machine())
    archives = components.archives(folder, build.binaries("etcd"), base, NEWER)
    running = engine.find()
    assert running is not None
    wanted = [nodes.Node(name, node["address"], 0, ()) for name, node in lab.nodes.items()]
    cluster.load_images(running, wanted, set(lab.control_planes), archives)
    for name in lab.control_planes:
        running.docker("cp", str(folder / "kubeadm"), f"{lab.nodes[name]['container']}:/usr/bin/kubeadm")


def parts(text: bytes) -> dict[str, object]:
    """Return a manifest's parts that kubeadm may change, and those that must stay."""
    manifest = yaml.safe_load(text)
    container = manifest["spec"]["containers"][0]
    return {
        "image": container["image"].rpartition(":")[2],
        "flag": f"--config={CONFIG}" in container["command"],
        "mount": [volume_mount for volume_mount in container["volumeMounts"] if volume_mount["mountPath"] == FOLDER]
        != [],
        "volume": [volume for volume in manifest["spec"]["volumes"] if volume["hostPath"]["path"] == FOLDER] != [],
    }


def expected(version: str) -> dict[str, object]:
    return {"image": f"v{version}", "flag": True, "mount": True, "volume": True}


def test_site_on_the_older_release(lab: Lab, planes: list[ControlPlane]) -> None:
    assert lab.api.call("GET", "/version")["gitVersion"] == f"v{OLDER}"
    done = lab.playbook(SITE)
    assert done.rc == 0, done.out[-8000:]
    assert [parts(plane.state().manifest) for plane in planes] == [expected(OLDER)] * 3
    lab.playbook(SITE).assert_unchanged()


def test_upgrade_keeps_it(lab: Lab, planes: list[ControlPlane]) -> None:
    """One control plane at a time; pods are scheduled throughout, and no node runs two schedulers."""
    bring(lab)
    watch, probe = Watch(lab), SchedulingProbe(lab)
    # There is no CoreDNS in the lab, and etcd is the same.
    common = "--etcd-upgrade=false --ignore-preflight-errors=all"
    with watch.running(), probe.at_work():
        for number, plane in enumerate(planes):
            what = "node" if number else f"apply v{NEWER} --yes --skip-phases=addon/coredns"
            lab.ssh(plane.node, f"kubeadm upgrade {what} {common}", seconds=600)
            assert parts(plane.state().manifest) == expected(NEWER)
            assert_healthy(lab, [plane])
        until(lambda: not probe.unscheduled()[:-3], "the last pods are scheduled", 60)
    assert watch.wrong == []
    assert probe.longest()[0] < 60, probe.longest()
    print(f"{len(probe.waits)} pods without a GPU, the longest waited {probe.longest()[0]:.1f} s")


def test_pods_share_cards_before_the_next_site_run(lab: Lab) -> None:
    with lab.api.namespace("lab-upgrade") as namespace:
        lab.api.create_pod(namespace, "after", [2], lab.image())
        lab.api.wait_running(namespace, ["after"], 90)
        until(
            lambda: lab.assert_agreement([lab.api.pod(namespace, "after")]),
            "annotation, checkpoint and devices agree",
            30,
        )


def test_site_finishes_it_and_has_nothing_to_do_then(lab: Lab, planes: list[ControlPlane]) -> None:
    done = lab.playbook(SITE)
    assert done.rc == 0, done.out[-8000:]
    assert_healthy(lab, planes)
    for plane in planes:
        state = plane.state()
        ours = yaml.safe_load(state.manifest)["metadata"]["annotations"]
        assert [value for name, value in ours.items() if name.startswith("kubegpu.share/")] == [plane.digest(CONFIG)]
        assert parts(state.manifest) == expected(NEWER)
    lab.playbook(SITE).assert_unchanged()
