# SPDX-License-Identifier: GPL-3.0-or-later
"""Values derived from pods are computed once for each state of a pod."""

from __future__ import annotations

import typing as t

import pytest
from gpushare.kubelet import wire
from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import limits, pod_facts, reconcile, steering
from gpushare.plugin.admission import trim_pod
from gpushare.shared._contracts import gpushare as contract
from hypothesis import given
from hypothesis import strategies as st
from plugin_fakes import container, make_pod

CARDS = tuple(contract.Card(n, f"GPU-{n:08x}-aaaa", n, 16384, 16) for n in range(2))


def everything(pods: dict[str, dict[str, t.Any]], listing: list[Entry]) -> list[t.Any]:
    """All that the plugin asks of its pods for one admission and one pass."""
    subject = steering.identify(3, pods, listing)
    reserved = steering.reserved_units(CARDS, pods, listing, contract.pod_uid(subject.pod) if subject else "")
    free = tuple(f"{card.index:08x}-{slot}" for card in CARDS for slot in range(8, 16))
    return [
        subject,
        reserved,
        steering.choose(CARDS, wire.Ask(free, (), 3), subject, reserved),
        reconcile.corrections(CARDS, pods, listing, {}, 1),
        [contract.pod_key(holder) for card in CARDS for holder in reconcile.holders(card, CARDS, pods, listing)],
        limits.targets(CARDS, list(pods.values()), listing, "GiB"),
    ]


def world() -> tuple[list[dict[str, t.Any]], list[Entry]]:
    inits = [container("load", 2), container("side", 1, "Always")]
    found = [
        make_pod("done", 4, booked=0, assigned=True, started=True),
        make_pod("moved", 2, 1, booked=1, assigned=True, started=True),
        make_pod("inits", 1, inits=inits, booked=0, started=True),
        make_pod("new", 3, booked=1),
        make_pod("waits", 5, booked=0),
    ]
    found[0]["status"]["containerStatuses"] = [
        {"name": "c0", "containerID": "containerd://" + "a" * 64, "state": {"running": {}}}
    ]
    listing = [
        Entry("default/done", {"c0": tuple(f"00000000-{slot}" for slot in range(4))}),
        Entry("default/moved", {"c0": ("00000000-4", "00000000-5"), "c1": ("00000000-6",)}),
        Entry("default/inits", {"side": ("00000001-0",), "c0": ("00000001-1",)}),
        Entry("default/new", {"c0": ()}),
    ]
    return found, listing


def test_facts_of_mirrored_pods_are_computed_once_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    found, listing = world()
    expected = everything(pod_facts.by_key(found), listing)
    assert expected[0].key == "default/new" and len(expected[3]) == 2 and len(expected[5]) == 1
    asked: list[str] = []
    real = contract.container_units

    def counted(one: dict[str, t.Any]) -> int:
        asked.append(one["name"])
        return real(one)

    monkeypatch.setattr(contract, "container_units", counted)
    kept = pod_facts.by_key([trim_pod(one) for one in found])
    first, at_first = everything(kept, listing), len(asked)
    asked.clear()
    # The pod that is asked for, and those that are corrected, have something to be worked out; the others haven't.
    assert everything(kept, listing) == first
    assert len(asked) < at_first / 3
    assert (first[1], first[2], first[4], first[5]) == (expected[1], expected[2], expected[4], expected[5])
    assert [(one.annotations, one.notice) for one in first[3]] == [(o.annotations, o.notice) for o in expected[3]]


def test_a_changed_pod_is_computed_again() -> None:
    pod = make_pod("pod", 4, booked=0)
    before = trim_pod(pod)
    assert (pod_facts.units(before), pod_facts.assigned(before)) == (4, False)
    pod["metadata"]["annotations"][contract.POD_ASSIGNED] = "true"
    after = trim_pod(pod)
    assert before != after and pod_facts.assigned(after) and not pod_facts.assigned(before)


def test_a_pod_outside_the_mirror_may_change_in_place() -> None:
    pod = make_pod("pod", 4, booked=0)
    assert pod_facts.units(pod) == 4
    pod["spec"]["containers"].append(container("more", 3))
    assert pod_facts.units(pod) == 7


def test_a_result_is_reused_for_the_same_arguments_only() -> None:
    """A pod that agrees with its card, and the card is another one: its units are, or its index."""
    pod = trim_pod(make_pod("pod", 4, booked=0, assigned=True, started=True))
    listing = [Entry("default/pod", {"c0": tuple(f"00000000-{slot}" for slot in range(4))})]

    def wanted(*cards: contract.Card) -> list[t.Mapping[str, str | None]]:
        return [
            correction.annotations for correction in reconcile.corrections(cards, {"default/pod": pod}, listing, {}, 1)
        ]

    assert wanted(*CARDS) == [] == wanted(*CARDS)
    larger = contract.Card(0, CARDS[0].uuid, 0, 32768, 32)
    assert wanted(larger, CARDS[1]) == [{contract.POD_CARD_UNITS: "32"}]
    assert wanted(*CARDS) == []


def test_a_missing_time_is_written() -> None:
    pod = make_pod("pod", 4, booked=0, assigned=True, started=True)
    listing = [Entry("default/pod", {"c0": tuple(f"00000000-{slot}" for slot in range(4))})]
    for before in ("0", None):
        pod["metadata"]["annotations"][contract.POD_ASSUME_TIME] = before
        pods = pod_facts.by_key([trim_pod(pod)])
        (one,) = reconcile.corrections(CARDS, pods, listing, {}, 77)
        assert one.annotations == {contract.POD_ASSUME_TIME: "77"}


@given(st.lists(st.tuples(st.sampled_from("abz"), st.integers(0, 10**6)), max_size=40))
def test_the_lowest_slots_are_chosen_in_any_order(found: list[tuple[str, int]]) -> None:
    ids = list(dict.fromkeys(f"{short}-{slot}" for short, slot in found if short == "a"))
    taken = steering._take(len(ids) // 2, (), ids)
    assert taken == sorted(ids, key=lambda one: int(one.partition("-")[2]))[: len(ids) // 2]
