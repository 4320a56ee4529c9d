# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults while real kubelets restart real schedulers.

In every case each control plane ends with one healthy scheduler, the old or the new, and the next run finishes the
change. A pod without a GPU is created every second throughout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from _lab import REPORT, Done, Lab, until
from _schedulers import (
    API_SERVER,
    CONFIG,
    FOLDER,
    SCHEDULER,
    ControlPlane,
    SchedulingProbe,
    State,
    Watch,
    assert_healthy,
    holder,
    summary,
)
from _snapshot import BASELINE

from lab import engine as engines
from lab.shell import in_background

SITE = "playbooks/site.yml"
CHANGE = "tests/lab/change_scheduler.yml"
PENDING = f"{FOLDER}/backup/pending.json"
# The longest that a pod may wait: a lease that nobody gave back (15 s), a scheduler that starts, a slow machine.
LONGEST = 60.0
OLD, NEW = 30, 31


@pytest.fixture(scope="module")
def watch(lab: Lab) -> Iterator[Watch]:
    found = Watch(lab)
    with found.running():
        yield found


@pytest.fixture(scope="module")
def probe(lab: Lab) -> Iterator[SchedulingProbe]:
    found = SchedulingProbe(lab)
    with found.at_work():
        yield found


@pytest.fixture(scope="module")
def planes(lab: Lab, watch: Watch) -> dict[str, ControlPlane]:
    assert len(lab.control_planes) == 3, "these tests are about several control planes: make lab-down lab-up"
    return {name: ControlPlane(lab, watch.inside, name) for name in lab.control_planes}


@pytest.fixture(autouse=True)
def all_end_healthy(
    lab: Lab, watch: Watch, probe: SchedulingProbe, planes: dict[str, ControlPlane], request: pytest.FixtureRequest
) -> Iterator[None]:
    """After each test: no node ran two schedulers, and each has a healthy one with the old configuration."""
    probe.during = request.node.name
    yield
    lab.wait_ready()
    assert_healthy(lab, list(planes.values()))
    for plane in planes.values():
        plane.assert_no_leftovers()
        assert plane.seconds() == f"{OLD}s", f"{plane.node} isn't as it was"
    assert watch.wrong == []


def change(lab: Lab, target: str, seconds: int = NEW, *more: str) -> Done:
    """Change the extender's timeout in the schedulers of these hosts."""
    return lab.playbook(CHANGE, *arguments(target, seconds), *more)


def arguments(target: str, seconds: int) -> list[str]:
    return ["-e", f"target={target}", "-e", f"scheduler_extender_timeout={seconds}"]


def changed_by_the_next_run(lab: Lab, plane: ControlPlane) -> None:
    again = change(lab, plane.node)
    assert again.rc == 0, again.out[-6000:]
    assert plane.seconds() == f"{NEW}s"


def changed_back(lab: Lab, planes: dict[str, ControlPlane], before: dict[str, State]) -> None:
    done = change(lab, "control_plane", OLD, "-e", f"at_once={len(planes)}")
    assert done.rc == 0, done.out[-6000:]
    assert {name: plane.state() for name, plane in planes.items()} == before


def states(planes: dict[str, ControlPlane]) -> dict[str, State]:
    return {name: plane.state() for name, plane in planes.items()}


def leading(lab: Lab, planes: dict[str, ControlPlane]) -> ControlPlane:
    """Return the control plane whose scheduler leads, since a fault there affects pods."""
    return planes[until(lambda: holder(lab), "a lease holder", 60)]


@contextlib.contextmanager
def act_when(happens: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Run an action as soon as a condition is true, while the body runs."""
    stop, acted = threading.Event(), threading.Event()

    def wait() -> None:
        end = time.monotonic() + 120
        while not stop.is_set() and time.monotonic() < end:
            if happens():
                act()
                acted.set()
                return
            time.sleep(0.005)

    with in_background(wait, stop):
        yield
    assert acted.is_set(), "what should have failed never came about"


# --------------------------------------------------------------------------- in order


# test_20_site.py asserts the order of a first run.
@pytest.mark.long
def test_one_control_plane_at_a_time_and_the_leader_last(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    before = states(planes)
    last: str = until(lambda: holder(lab), "a lease holder", 60)
    done = lab.playbook(SITE, "-e", f"scheduler_extender_timeout={NEW}")
    assert done.rc == 0, done.out[-8000:]
    order = re.findall(r"^changed: \[(cp\d)\]", done.out, re.MULTILINE)
    assert sorted(order) == lab.control_planes, done.out[-8000:]
    assert order[-1] == last, f"{last} held the lease, and the order was {order}"
    assert [plane.seconds() for plane in planes.values()] == [f"{NEW}s"] * 3
    changed_back(lab, planes, before)


# --------------------------------------------------------------------------- faults


def edit(lab: Lab, node: str, script: str) -> None:
    """Edit the manifest atomically: outside of its folder, then moved into place."""
    aside = "/root/edited.yaml"
    lab.ssh(node, f"cp -p {SCHEDULER} {aside} && {script} {aside} && mv {aside} {SCHEDULER}")


@pytest.mark.long
def test_a_configuration_that_the_scheduler_rejects(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    """The image's tag has no version and the variable a wrong one, so that the API version isn't supported."""
    plane = leading(lab, planes)
    original = plane.state()
    image = re.findall(rb"image: (\S+)", original.manifest)[0].decode()
    own = "localhost/kubegpu-lab/scheduler:own"
    lab.ssh(plane.node, f"ctr -n k8s.io images tag --force {image} {own}")
    edit(lab, plane.node, f"sed -i 's|image: {image}|image: {own}|'")
    try:
        assert_healthy(lab, [plane])
        before = states(planes)
        done = change(lab, plane.node, NEW, "-e", "scheduler_version=1.24.9")
        assert done.rc != 0
        assert "v1beta3" in done.out, done.out[-6000:]
        assert "it runs with the old one" in done.out, done.out[-6000:]
        assert states(planes) == before
        assert_healthy(lab, [plane])
    finally:
        edit(lab, plane.node, f"sed -i 's|image: {own}|image: {image}|'")
        lab.ssh(plane.node, f"ctr -n k8s.io images rm {own}")
    until(lambda: plane.state() == original, "the manifest as it was", 5)


@pytest.mark.long
def test_an_image_that_cannot_start(lab: Lab, planes: dict[str, ControlPlane], watch: Watch) -> None:
    """The image has no kube-scheduler while the new manifest is in place."""
    plane = leading(lab, planes)
    before = states(planes)
    image = re.findall(rb"image: (\S+)", before[plane.node].manifest)[0].decode()
    lab.ssh(plane.node, f"ctr -n k8s.io images tag --force {image} localhost/kubegpu-lab/kept:1")
    lab.ssh(plane.node, f"ctr -n k8s.io images tag --force {lab.state['base_image']} {image}")

    def is_new() -> bool:
        return watch.inside.read(plane.node, SCHEDULER) != before[plane.node].manifest

    def repair() -> None:
        until(lambda: not is_new(), "the old manifest is back", 100, 0.02)
        lab.ssh(plane.node, f"ctr -n k8s.io images tag --force localhost/kubegpu-lab/kept:1 {image}")

    try:
        with act_when(is_new, repair):
            done = change(lab, plane.node, NEW, "-e", "scheduler_timeout=40")
    finally:
        lab.ssh(plane.node, f"ctr -n k8s.io images tag --force localhost/kubegpu-lab/kept:1 {image}")
        lab.ssh(plane.node, "ctr -n k8s.io images rm localhost/kubegpu-lab/kept:1")
    assert done.rc != 0
    assert "it runs with the old one" in done.out, done.out[-6000:]
    assert states(planes) == before


@pytest.mark.long
def test_a_bad_flag_stops_the_run_at_the_first_node(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    """A user's flag keeps one scheduler from starting: earlier nodes are changed, later ones untouched."""
    first, second, third = (planes[name] for name in lab.control_planes)
    before = states(planes)
    edit(lab, second.node, "sed -i 's|^    - --leader-elect=true|&\\n    - --no-such-flag|'")
    until(lambda: second.health() != "200", "the scheduler ends", 60)
    broken = second.state()
    try:
        done = change(lab, "control_plane", NEW, "-e", "scheduler_timeout=30")
        assert done.rc != 0
        assert "no-such-flag" in done.out, done.out[-6000:]
        assert third.node not in done.recap or done.recap[third.node]["changed"] == 0
        assert (first.seconds(), third.state()) == (f"{NEW}s", before[third.node])
        assert second.state() == broken, "the old bytes aren't back"
        assert_healthy(lab, [first, third])
    finally:
        edit(lab, second.node, "sed -i '/--no-such-flag/d'")
    assert_healthy(lab, [second])
    changed_back(lab, planes, before)


@pytest.mark.long
@pytest.mark.parametrize("place", ["the kubeconfig's", "another"])
def test_api_server_stops_during_the_change(
    lab: Lab, planes: dict[str, ControlPlane], watch: Watch, place: str
) -> None:
    """The scheduler's own API server, and in one case the one that the run asks for the lease."""
    first, last = planes[lab.control_planes[0]], planes[lab.control_planes[-1]]
    other = leading(lab, planes)
    plane = first if place == "the kubeconfig's" else other if other is not first else last
    before = states(planes)
    there, aside = (watch.inside.path(plane.node, path) for path in (API_SERVER, "/root/kube-apiserver.yaml"))
    # On one file system, so that kubelet sees it go and come at once.
    assert there.parent.stat().st_dev == aside.parent.stat().st_dev

    def is_new() -> bool:
        return watch.inside.read(plane.node, SCHEDULER) != before[plane.node].manifest

    def away() -> None:
        there.rename(aside)

    try:
        with act_when(is_new, away):
            done = change(lab, plane.node, NEW, "-e", "scheduler_timeout=40")
        # Without the API server the module can see that the scheduler is healthy, but not that its lease is renewed.
        assert done.rc != 0 or plane.seconds() == f"{NEW}s"
        assert "Traceback" not in done.out, done.out[-6000:]
        assert len(plane.pids()) == 1
    finally:
        if aside.exists():
            aside.rename(there)
    lab.wait_ready()
    assert_healthy(lab, [plane])
    assert plane.seconds() in (f"{OLD}s", f"{NEW}s")
    changed_by_the_next_run(lab, plane)
    changed_back(lab, planes, before)


@pytest.mark.long
def test_paused_kubelet(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    """No kubelet starts the new scheduler or stops the old one."""
    plane = planes[lab.control_planes[-1]]
    before, pids = states(planes), plane.pids()
    lab.ssh(plane.node, "systemctl stop kubelet")
    try:
        done = change(lab, plane.node, NEW, "-e", "scheduler_timeout=10")
        assert done.rc != 0
        assert (states(planes), plane.pids(), plane.health()) == (before, pids, "200")
    finally:
        lab.ssh(plane.node, "systemctl start kubelet")
    assert_healthy(lab, [plane])
    again = change(lab, plane.node, OLD)
    assert again.rc == 0, again.out[-6000:]


@pytest.mark.long
def test_node_loses_power_during_the_change(lab: Lab, planes: dict[str, ControlPlane], watch: Watch) -> None:
    plane = leading(lab, planes)
    before, engine = states(planes), engines.find()
    assert engine is not None

    def is_new() -> bool:
        return watch.inside.read(plane.node, SCHEDULER) != before[plane.node].manifest

    def power_cut() -> None:
        engine.docker("kill", lab.nodes[plane.node]["container"])

    try:
        with act_when(is_new, power_cut):
            done = change(lab, plane.node, NEW, "-e", "scheduler_timeout=40")
        assert done.rc != 0
    finally:
        lab.manage("up")
        watch.inside.refresh(lab)
    lab.wait_ready()
    # Before the next run.
    assert_healthy(lab, [plane])
    changed_by_the_next_run(lab, plane)
    changed_back(lab, planes, before)


@pytest.mark.long
def test_a_manifest_that_is_a_link_is_refused(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    plane = planes[lab.control_planes[-1]]
    before = plane.state()
    mine, link = "/root/mine.yaml", "/root/link"
    lab.ssh(plane.node, f"cp -p {SCHEDULER} {mine} && ln -s {mine} {link} && mv -T {link} {SCHEDULER}")
    try:
        plane_pids = until(plane.pids, "a scheduler", 60)
        done = change(lab, plane.node)
        assert done.rc != 0
        said = [line for line in done.out.splitlines() if SCHEDULER in line and "link" in line]
        assert said, done.out[-6000:]
        assert lab.ssh(plane.node, f"readlink {SCHEDULER}").strip() == mine
        assert lab.ssh(plane.node, f"cat {mine}").encode() == before.manifest
        assert len(plane_pids) == 1
    finally:
        lab.ssh(plane.node, f"mv -T {mine} {SCHEDULER}")
    assert_healthy(lab, [plane])
    assert plane.state() == before


@pytest.mark.long
def test_a_configuration_rewritten_by_another_program(lab: Lab, planes: dict[str, ControlPlane], watch: Watch) -> None:
    """As kubespray's cluster.yml does it: the scheduler ends and starts with the file that has no extender."""
    plane = leading(lab, planes)
    before, pids = states(planes), plane.pids()
    cut, aside = "'/^extenders:/,/^[a-z]/{/^extenders:/d;/^[ -]/d}'", "/root/rewritten.yaml"
    lab.ssh(plane.node, f"cp {CONFIG} {aside} && sed -i {cut} {aside} && ! grep -q urlPrefix {aside}")
    lab.ssh(plane.node, f"mv {aside} {CONFIG} && sleep 2 && kill {own_pid(lab, plane)}")
    without = until(lambda: [pid for pid in plane.pids() if pid not in pids], "kubelet starts it again", 60)
    assert_healthy(lab, [plane])
    done = change(lab, plane.node, OLD)
    assert done.rc == 0, done.out[-6000:]
    assert not set(plane.pids()) & set(without), "the process without the extender still runs"
    assert states(planes) == before
    change(lab, plane.node, OLD).assert_unchanged()


def own_pid(lab: Lab, plane: ControlPlane) -> str:
    """The scheduler's process ID on its node."""
    return lab.ssh(plane.node, "pgrep -x kube-scheduler").strip()


# --------------------------------------------------------------------------- kill -9

# When, and whether the module dies on its node too, as when the node loses its power.
MOMENTS = [
    pytest.param("the old files are kept", True, marks=pytest.mark.long),
    pytest.param("the configuration is written", True, marks=pytest.mark.long),
    pytest.param("the manifest is written", True, marks=pytest.mark.long),
    pytest.param("the manifest is written", False, marks=pytest.mark.long),
    pytest.param("the old scheduler has ended", True, marks=pytest.mark.long),
    pytest.param("a new scheduler was started", True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("when", "module_too"), MOMENTS)
def test_killed(lab: Lab, planes: dict[str, ControlPlane], watch: Watch, when: str, module_too: bool) -> None:
    plane, inside = leading(lab, planes), watch.inside
    before, pids = states(planes), plane.pids()
    own = before[plane.node]
    moments: dict[str, Callable[[], bool]] = {
        "the old files are kept": lambda: inside.read(plane.node, PENDING) is not None,
        "the configuration is written": lambda: inside.read(plane.node, CONFIG) != own.config,
        "the manifest is written": lambda: inside.read(plane.node, SCHEDULER) != own.manifest,
        "the old scheduler has ended": lambda: not set(plane.pids()) & set(pids),
        "a new scheduler was started": lambda: bool(set(plane.pids()) - set(pids)),
    }

    def module_dies() -> None:
        for pid in inside.modules(plane.node) if module_too else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    lab.interrupted_playbook(CHANGE, *arguments(plane.node, NEW), moment=moments[when], and_then=module_dies)
    # Before the next run.
    assert_healthy(lab, [plane])
    assert plane.seconds() in (f"{OLD}s", f"{NEW}s")
    if not module_too:
        until(lambda: inside.read(plane.node, PENDING) is None, "the module on the node ends by itself", 60)
    changed_by_the_next_run(lab, plane)
    assert_healthy(lab, [plane])
    plane.assert_no_leftovers()
    change(lab, plane.node).assert_unchanged()
    changed_back(lab, planes, before)


# --------------------------------------------------------------------------- out, and in again


@pytest.mark.long
def test_removal_restores_kubeadms_manifest(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    plane = planes[lab.control_planes[-1]]
    before = states(planes)
    digest = hashlib.sha256(before[plane.node].manifest).hexdigest()
    first = json.loads(BASELINE.read_text())["before"][plane.node][SCHEDULER].split()[-1]
    assert digest != first
    done = change(lab, plane.node, OLD, "-e", "scheduler_state=absent")
    assert done.rc == 0, done.out[-6000:]
    assert plane.digest(SCHEDULER) == first
    assert lab.ssh(plane.node, f"ls -d {FOLDER} 2>/dev/null; true") == ""
    assert_healthy(lab, [plane])
    changed_back(lab, planes, before)


@pytest.mark.long
def test_every_pod_was_scheduled_throughout(lab: Lab, watch: Watch, probe: SchedulingProbe) -> None:
    until(lambda: not probe.unscheduled()[:-3], "the last pods are scheduled", LONGEST)
    REPORT.append(summary(watch, probe))
    assert len(probe.waits) > probe.seconds() / 3, f"only {len(probe.waits)} pods in {probe.seconds():.0f} s"
    assert probe.longest()[0] < LONGEST, probe.longest()
    assert watch.samples > probe.seconds() / 3 and watch.wrong == []


@pytest.mark.long
def test_site_changes_nothing_afterwards(lab: Lab, planes: dict[str, ControlPlane]) -> None:
    lab.playbook(SITE).assert_unchanged()
