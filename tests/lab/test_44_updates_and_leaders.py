# SPDX-License-Identifier: GPL-3.0-or-later
"""Update extenders and plugins, kill and pause schedulers and extenders, while pods run and more are created.

An auditor that only watches the API sums up every card at every event.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _lab import REPORT, JsonObject, Lab, until
from _load import LEDGER, Auditor, Load, Pulse, nodes
from _pods import (
    MERGE,
    SERVERS,
    body,
    container,
    containers,
    inspect_units,
    is_announced,
    is_ready,
    pods,
    shares_of,
    wait_settled,
)
from _schedulers import Inside, holder_identity, processes

DAEMONSETS = f"/apis/apps/v1/namespaces/{SERVERS}/daemonsets"
EXTENDER, PLUGIN = "gpushare-extender", "gpushare-device-plugin"
RESTART = "kubectl.kubernetes.io/restartedAt"
# A lease of kube-scheduler that nobody gave back is free after 15 s.
LEASE_SECONDS = 60.0


@pytest.fixture(scope="module")
def auditor(lab: Lab) -> Iterator[Auditor]:
    with nodes(lab) as sizes:
        real = {node: {card["index"]: card["units"] for card in lab.cards(node)} for node in lab.gpu_nodes}
        one = Auditor(lab.api_of(lab.control_planes[0]), {**sizes, **real})
        with one.following():
            until(lambda: one.events, "pods are seen", 20)
            yield one


@pytest.fixture
def spaces(lab: Lab, auditor: Auditor, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Namespaces for the load, and for pods that run on real nodes."""
    with lab.api.namespace("lab-load") as load, lab.api.namespace("lab-tenants") as tenants:
        yield load, tenants
    # The first test may not leave its pods to the next one.
    until(lambda: not any(any(cards.values()) for cards in auditor.now().values()), "all cards are free", 60)


def update(lab: Lab, name: str, patch: JsonObject, kind: str = MERGE, seconds: float = 180) -> float:
    """Change a DaemonSet, and wait until it is rolled out; return the duration in seconds.

    :param kind: the patch's content type.
    """
    began = time.monotonic()
    wanted = lab.api.call("PATCH", f"{DAEMONSETS}/{name}", patch, kind)["metadata"]["generation"]

    def done() -> bool:
        status = lab.api.call("GET", f"{DAEMONSETS}/{name}")["status"]
        assert status["observedGeneration"] >= wanted
        count = status["desiredNumberScheduled"]
        found = [status.get(key, 0) for key in ("updatedNumberScheduled", "numberReady", "numberAvailable")]
        assert found == [count] * 3, status
        return True

    until(done, f"{name} is updated", seconds)
    return time.monotonic() - began


def rollout_restart(lab: Lab, name: str) -> float:
    """Run ``kubectl rollout restart`` of a DaemonSet; return its duration in seconds."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return update(lab, name, {"spec": {"template": {"metadata": {"annotations": {RESTART: now}}}}})


def wait_extenders_agree(lab: Lab, auditor: Auditor) -> None:
    """Wait until every extender's sum of every card equals that of the API's pods."""

    def same() -> bool:
        wanted = auditor.now()
        for name in lab.control_planes:
            seen = {node: cards for node, cards in inspect_units(lab, name).items() if node in wanted}
            assert seen == wanted, f"the extender of {name} says {seen}, the API {wanted}"
        return True

    until(same, "all extenders and the API agree", 30)


def assert_ledger_bound(lab: Lab) -> None:
    """Wait until everything in the ledger is bound as recorded, or gone."""
    pods_by_uid = {one["metadata"]["uid"]: one for one in lab.api.items("/api/v1/pods")}
    text = lab.api.call("GET", LEDGER)["metadata"]["annotations"]["kubegpu.share/bookings"]
    for entry in json.loads(text)["bookings"]:
        pod = pods_by_uid.get(entry["uid"])
        if pod is not None and pod["spec"].get("nodeName") == entry["node"]:
            assert {int(index): units for index, units in entry["cards"].items()} == shares_of(pod), entry


def server_annotations(pod: JsonObject) -> dict[str, str]:
    """Return the annotations that the servers wrote on a pod."""
    return {key: value for key, value in pod["metadata"]["annotations"].items() if "GPU" in key or "gpu" in key}


def test_rolling_updates_keep_pods_and_bookings(lab: Lab, auditor: Auditor, spaces: tuple[str, str]) -> None:
    load_space, space = spaces
    several = {"kubegpu.share/card-count": "2"}
    wanted = [body(f"tenant-{node}", container(lab, 5), node=node) for node in lab.gpu_nodes]
    wanted.append(body("wide", container(lab, 4), node=lab.gpu_nodes[0], annotations=several))
    load, pulse = Load(lab, load_space, auditor, rate=3), Pulse(lab, space, pause=2)
    with pods(lab, space, *wanted) as before:
        with load.coming(), pulse.beating():
            times = {name: rollout_restart(lab, name) for name in (EXTENDER, PLUGIN)}
            for node in lab.gpu_nodes:
                until(lambda node=node: is_announced(lab, node, len(lab.cards(node))), f"{node}'s cards", 60)
            # Updates may be over in a few seconds; pods come until there are enough to say something.
            until(
                lambda: (len(load.bound) > 50 and len(pulse.waits) > 5) or load.failed or pulse.failed, "pods run", 90
            )
            assert not load.failed and not pulse.failed, (load.failed, pulse.failed)
        load.all_bound(60)
        after = wait_settled(lab, space, [one["metadata"]["name"] for one in before])
        assert containers(after) == containers(before)
        assert [server_annotations(pod) for pod in after] == [server_annotations(pod) for pod in before]
        wait_extenders_agree(lab, auditor)
        assert_ledger_bound(lab)
    auditor.assert_nothing_wrong()
    assert len(load.bound) > 50 and len(pulse.waits) > 5, (len(load.bound), len(pulse.waits))
    # Nothing else keeps a pod from running; a controller makes such a one anew.
    assert all(one.startswith("UnexpectedAdmissionError") for one in pulse.rejected), pulse.rejected
    assert len(pulse.rejected) <= len(lab.gpu_nodes), pulse.rejected
    REPORT.append(
        f"extender updated in {times[EXTENDER]:.0f} s and plugin in {times[PLUGIN]:.0f} s: {len(load.bound)} pods were "
        f"bound meanwhile, {len(pulse.waits)} really ran, the longest after {max(pulse.waits):.1f} s, and kubelet sent "
        f"{len(pulse.rejected)} away because its plugin was just being replaced"
    )


# --------------------------------------------------------------------------- leaders


def extender_of(inside: Inside, node: str) -> list[int]:
    """Return the extender's processes on a control plane."""
    found, everything = [], processes()
    for pid in everything:
        with contextlib.suppress(OSError):
            if (
                EXTENDER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                and inside.node_of(pid, everything) == node
            ):
                found.append(pid)
    return found


def send(pids: Sequence[int], number: signal.Signals) -> None:
    assert pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def leads(lab: Lab, not_any_more: str = "") -> str:
    """Wait for a leading scheduler other than this process; return its node, which may be the same one."""

    def new() -> str:
        identity = holder_identity(lab)
        return identity if identity != not_any_more else ""

    found: str = until(new, f"another leader than {not_any_more or 'none'}", LEASE_SECONDS)
    return found.rpartition("_")[0]


def scheduler_killed(lab: Lab, inside: Inside, leader: str) -> str:
    before = holder_identity(lab)
    send(inside.schedulers()[leader], signal.SIGKILL)
    return leads(lab, before)


def scheduler_paused(lab: Lab, inside: Inside, leader: str) -> str:
    """The scheduler resumes its work after another one leads, through an extender that ran all the time."""
    pids, before = inside.schedulers()[leader], holder_identity(lab)
    send(pids, signal.SIGSTOP)
    try:
        return leads(lab, before)
    finally:
        send(pids, signal.SIGCONT)


def extender_killed(lab: Lab, inside: Inside, leader: str) -> str:
    send(extender_of(inside, leader), signal.SIGKILL)
    return leader


def extender_paused(lab: Lab, inside: Inside, leader: str) -> str:
    """The extender is paused during its binds, its scheduler dies, another one leads; then it resumes."""
    pids = extender_of(inside, leader)
    send(pids, signal.SIGSTOP)
    try:
        return scheduler_killed(lab, inside, leader)
    finally:
        send(pids, signal.SIGCONT)


WAYS = (scheduler_paused, extender_paused, extender_killed, scheduler_killed)
ROUNDS = 8


@pytest.mark.long
def test_fault_12_no_card_is_overbooked_while_leaders_change(
    lab: Lab, auditor: Auditor, spaces: tuple[str, str]
) -> None:
    assert len(lab.control_planes) == 3, "this is about several control planes"
    inside, load = Inside(lab), Load(lab, spaces[0], auditor, rate=8)
    leaders = [leads(lab)]
    with load.coming():
        time.sleep(5)
        for way in itertools.islice(itertools.cycle(WAYS), ROUNDS):
            leaders.append(way(lab, inside, leaders[-1]))
            time.sleep(5)
            auditor.assert_nothing_wrong()
        assert not load.failed, load.failed
    load.all_bound(120)
    auditor.assert_nothing_wrong()
    wait_extenders_agree(lab, auditor)
    assert_ledger_bound(lab)
    assert len(set(leaders)) > 1 and len(load.writers) > 1, (leaders, load.writers)
    assert len(load.bound) > 20 * ROUNDS, f"{len(load.bound)} of {load.made} pods were ever bound"
    REPORT.append(
        f"leaders {', '.join(leaders)}; {len(load.bound)} pods were bound, {auditor.events} events looked at, "
        f"{len(load.writers)} extenders booked, {len(auditor.wrong)} cards over their memory"
    )


def test_everything_is_ready_again(lab: Lab, auditor: Auditor) -> None:
    for command in (EXTENDER, PLUGIN):
        until(lambda command=command: all(is_ready(pod) for pod in lab.server_pods(command)), f"{command} ready", 120)
    auditor.assert_nothing_wrong()
