# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers that outlive their pod: their memory isn't given to another pod until their processes have ended."""

from __future__ import annotations

import typing as t

import pytest
from fake_clock import FakeClock
from gpushare.extender.state import node_row, view_of
from gpushare.kubelet import wire
from gpushare.kubelet.errors import NoDevices
from gpushare.plugin.leftovers import ENDING_SECONDS, Leftovers
from gpushare.shared._contracts import gpushare as contract
from limit_fakes import FIRST, SECOND, FakeCgroups, FakeDriver, entry, folder_of, identifier, ids, pod
from plugin_fakes import NODE, Node, Rejected, make_pod, seen, until

ONE, TWO = identifier(1), identifier(2)


def leftovers(clock: FakeClock | None = None) -> tuple[Leftovers, FakeCgroups]:
    driver, clock = FakeDriver(), clock or FakeClock()
    driver.folders |= {folder_of(ONE), folder_of(TWO)}
    cgroups = FakeCgroups(driver)
    return Leftovers(cgroups, clock.now, clock.sleep), cgroups


def test_a_container_is_left_over_until_its_processes_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = FakeClock()
    left, cgroups = leftovers(clock)
    cgroups.outlived.add(folder_of(ONE))
    mine, listed = pod("a", {"x": 3}, {"x": ONE}), entry("a", x=ids(FIRST, 0, 3))
    assert left.observe([mine], [listed]) == ()
    # kubelet may list its IDs for longer than the API lists the pod, and the other way round.
    assert left.observe([], [listed]) == () and left.observe([mine], []) == ()
    # kubelet is about to kill it.
    assert left.observe([], []) == ()
    clock.time += ENDING_SECONDS
    (holder,) = left.observe([], [])
    assert (holder.pod, holder.container, holder.ids) == ("default/a", "x", ids(FIRST, 0, 3))
    # A successor of that name has other containers.
    again = pod("a", {"x": 3}, {"x": TWO}, uid="uid-again")
    assert left.observe([again], [entry("a", x=ids(FIRST, 3, 3))]) == (holder,)
    cgroups.outlived.clear()
    assert left.observe([again], [entry("a", x=ids(FIRST, 3, 3))]) == ()
    assert caplog.messages == ["container recorded"] * 2


def test_a_pod_that_has_failed_may_be_left_over() -> None:
    """kubelet frees the IDs of a pod that it has evicted."""
    clock = FakeClock()
    left, cgroups = leftovers(clock)
    cgroups.outlived.add(folder_of(ONE))
    mine = pod("a", {"x": 3}, {"x": ONE})
    left.observe([mine], [entry("a", x=ids(FIRST, 0, 3))])
    failed = {**mine, "status": {"phase": "Failed"}}
    left.observe([failed], [])
    clock.time += ENDING_SECONDS
    assert len(left.observe([failed], [])) == 1


def test_ids_are_taken_before_the_api_shows_that_the_pod_is_gone() -> None:
    clock = FakeClock()
    left, cgroups = leftovers(clock)
    mine = [pod("a", {"x": 3}, {"x": ONE}), pod("b", {"x": 2}, {"x": TWO})]
    left.observe(mine, [entry("a", x=ids(FIRST, 0, 3)), entry("b", x=ids(SECOND, 0, 2))])
    cgroups.outlived |= {folder_of(ONE), folder_of(TWO)}
    assert left.taken(ids(FIRST, 0, 16)) == frozenset(ids(FIRST, 0, 3))
    # So long the processes are waited for, once.
    assert clock.time == pytest.approx(ENDING_SECONDS, abs=0.1)
    assert left.taken(ids(FIRST, 0, 16)) == frozenset(ids(FIRST, 0, 3)) and clock.time < ENDING_SECONDS + 0.1
    cgroups.outlived.clear()
    assert left.taken(ids(FIRST, 0, 16)) == frozenset()


def test_a_call_waits_for_processes_that_kubelet_is_killing() -> None:
    clock = FakeClock()
    left, cgroups = leftovers(clock)
    left.observe([pod("a", {"x": 3}, {"x": ONE})], [entry("a", x=ids(FIRST, 0, 3))])
    cgroups.outlived.add(folder_of(ONE))
    clock.listeners.append(lambda: cgroups.outlived.clear() if clock.time > 2 else None)
    assert left.taken(ids(FIRST, 0, 16)) == frozenset()
    assert 2 < clock.time < ENDING_SECONDS


def test_ids_of_two_pods_of_one_name_are_recorded_for_none() -> None:
    left, cgroups = leftovers()
    cgroups.outlived.add(folder_of(ONE))
    twice = [entry("a", x=ids(FIRST, 0, 3)), entry("a", x=ids(FIRST, 3, 3))]
    left.observe([pod("a", {"x": 3}, {"x": ONE})], twice)
    assert left.observe([], []) == ()


# --------------------------------------------------------------------------- on a node


def cgroup(pod: t.Mapping[str, t.Any]) -> str:
    return folder_of(f"{pod['metadata']['uid']}-c0")


def test_scenario_j_a_force_deleted_pod_whose_process_ignores_sigterm(make: t.Callable[..., Node]) -> None:
    node = make(seen(0)).up()
    first = node.run(make_pod("first", 12, booked=0))
    until(lambda: node.running.leftovers._holders)
    node.outlived.add(cgroup(first))
    # kubelet has freed the IDs, and the plugin's watch doesn't show it yet.
    node.kubelet.remove(first)
    second = make_pod("second", 8, booked=0)
    node.kube.put(second)
    with pytest.raises(Rejected, match="InsufficientGPUMemory"):
        node.kubelet.add(second)
    node.kube.remove(second)
    node.kube.remove(first)
    until(lambda: len(node.kubelet.unhealthy) == 12 and len(node.kubelet.healthy) == 4)
    until(lambda: contract.node_cards(node.kube.node())[0].unreleased == 12)
    until(lambda: "GpuMemoryNotReleased" in node.kube.reasons(f"/{NODE}"))
    (event,) = (one for one in node.kube.events if one["reason"] == "GpuMemoryNotReleased")
    assert event["message"].startswith(
        "pod default/first is deleted, and processes of its container c0 still run: 12 units of card 0 aren't given"
    )
    labels = f'card="0",model="{seen(0).model}",node="{NODE}",uuid="{seen(0).uuid}"'
    assert node.metric(f"gpushare_plugin_card_unreleased_units{{{labels}}}") == 12
    # The extender sees no more than what kubelet can give.
    shown = node.kube.node()
    shown["status"]["capacity"] = {contract.RESOURCE_MEMORY: "16"}
    assert view_of(node_row(shown), {}, 0).largest == 4
    # What is left of the card goes on to be given.
    small = node.run(make_pod("small", 4, booked=0))
    until(lambda: node.agrees(small))
    # Its processes end.
    node.outlived.clear()
    until(lambda: len(node.kubelet.healthy) == 16)
    until(lambda: contract.node_cards(node.kube.node())[0].unreleased == 0)
    third = node.run(make_pod("third", 12, booked=0))
    until(lambda: node.agrees(third))


def test_a_pod_of_an_unknown_predecessor_gets_other_units(make: t.Callable[..., Node]) -> None:
    node = make(seen(0)).up()
    held = node.run(make_pod("first", 4, booked=0))
    until(lambda: node.running.leftovers._holders)
    former = {one for each in node.kubelet.devices[held["metadata"]["uid"]].values() for one in each}
    node.outlived.add(cgroup(held))
    node.kubelet.remove(held)
    free = tuple(sorted(node.kubelet.healthy))
    chosen = node.running.admission.preferred(wire.Ask(free, (), 12))
    assert len(chosen) == 12 and not former & set(chosen)
    with pytest.raises(NoDevices):
        node.running.admission.preferred(wire.Ask(free, (), 13))
