# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod for which kubelet requests units, and the units that it should take: examples and properties."""

from __future__ import annotations

import itertools
import typing as t

import pytest
from gpushare.kubelet import wire
from gpushare.kubelet.errors import NoDevices
from gpushare.kubelet.pod_resources import Entry
from gpushare.plugin import steering
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_fakes import card, container, ids, make_pod


def everything(cards: t.Sequence[contract.Card]) -> tuple[str, ...]:
    return tuple(one for each in cards for one in ids(each.index, *range(each.units)))


NOTHING = steering.ReservedUnits({}, {})
UNITS = "units of aliyun.com/gpu-mem on one card;"


def by_key(*pods: JsonObject) -> dict[str, JsonObject]:
    return {contract.pod_key(pod): pod for pod in pods}


def entry(pod: JsonObject, *held: tuple[str, ...]) -> Entry:
    names = [one["name"] for one in pod["spec"]["containers"]]
    return Entry(contract.pod_key(pod), dict(itertools.zip_longest(names, held, fillvalue=())))


# --------------------------------------------------------------------------- which pod


def test_the_listed_pod_without_units_is_the_subject() -> None:
    done, asked, other = make_pod("done", 4), make_pod("asked", 4), make_pod("unlisted", 4, booked=0)
    listing = [entry(done, ids(0, 1, 2, 3, 4)), entry(asked)]
    found = steering.identify(4, by_key(done, asked, other), listing)
    assert found is not None and (found.key, found.container, found.held) == ("default/asked", "c0", ())


def test_the_second_container_knows_what_the_first_has() -> None:
    pod = make_pod("pod", 1, 4, 4)
    found = steering.identify(4, by_key(pod), [entry(pod, ids(1, 7), ids(1, 0, 1, 2, 3))])
    assert found is not None and (found.container, found.held) == ("c2", ids(1, 7, 0, 1, 2, 3))


def test_a_container_behind_the_next_one_is_no_candidate() -> None:
    pod, small = make_pod("pod", 2, 6), make_pod("small", 3)
    assert steering.identify(6, by_key(pod, small), [entry(pod), entry(small)]) is None
    found = steering.identify(3, by_key(pod, small), [entry(pod), entry(small)])
    assert found is not None and found.key == "default/small"


SCHEDULED = {"conditions": [{"type": "PodScheduled", "lastTransitionTime": "2026-06-01T00:00:00Z"}]}


@pytest.mark.parametrize(
    ("created", "before", "now"),
    [
        ("2027-01-01T00:00:00Z", {"phase": "Failed"}, {}),
        ("2027-01-01T00:00:00Z", {"startTime": "2026-01-01T00:00:00Z"}, {}),
        ("2025-01-01T00:00:00Z", {}, {}),
        ("2026-02-01T00:00:00Z", {}, SCHEDULED),
    ],
)
def test_the_pod_under_admission_is_preferred(created: str, before: JsonObject, now: JsonObject) -> None:
    old, new = make_pod("old", 4), make_pod("new", 4)
    old["metadata"]["creationTimestamp"] = created
    old["status"].update(before)
    new["status"].update(now)
    for listing in ([entry(old), entry(new)], [entry(new), entry(old)]):
        found = steering.identify(4, by_key(old, new), listing)
        assert found is not None and found.key == "default/new"


def test_without_podresources_the_oldest_assumed_pod_of_that_size() -> None:
    pods = by_key(
        make_pod("free", 4),
        make_pod("assigned", 4, booked=0, assigned=True),
        make_pod("other", 3, booked=0),
        make_pod("oldest", 1, 4, booked=0),
        make_pod("newer", 4, booked=1),
    )
    found = steering.identify(4, pods, None)
    assert found is not None and (found.key, found.container) == ("default/oldest", "c1")
    assert steering.identify(5, pods, None) is None


def test_without_a_listed_candidate_an_assumed_pod_is_the_subject() -> None:
    complete, waiting = make_pod("complete", 4, booked=0), make_pod("waiting", 4, booked=1)
    found = steering.identify(4, by_key(complete, waiting), [entry(complete, ids(0, 0, 1, 2, 3))])
    assert found is not None and found.key == "default/waiting"


@pytest.mark.parametrize(
    ("inits", "units", "held", "pending"),
    [
        ([], [3, 2], {}, [("c0", 3)]),
        ([], [3, 2], {"c0": ids(0, 0, 1, 2)}, [("c1", 2)]),
        ([], [3, 2], {"c0": ids(0, 0, 1, 2), "c1": ids(0, 3, 4)}, []),
        ([], [0, 2], {}, [("c1", 2)]),
        ([container("i", 4)], [3], {}, [("i", 4), ("c0", 3)]),
        ([container("i", 4)], [3], {"c0": ids(0, 0, 1, 2)}, []),
        ([container("i", 4), container("s", 1, "Always"), container("j", 5)], [3], {}, [("i", 4), ("s", 1)]),
        ([container("s", 1, "Always"), container("j", 5)], [3], {"s": ids(0, 9)}, [("j", 5), ("c0", 3)]),
        ([container("s", 1, "Always"), container("j", 5)], [0], {"s": ids(0, 9)}, [("j", 5)]),
        ([container("i", 4)], [0], {}, [("i", 4)]),
        ([], [0], {}, []),
    ],
)
def test_pending(
    inits: list[JsonObject], units: list[int], held: dict[str, t.Any], pending: list[tuple[str, int]]
) -> None:
    pod = make_pod("pod", *units, inits=inits)
    assert steering.pending(pod, Entry("default/pod", held)) == pending


@pytest.mark.parametrize("known", [{"assigned": True, "booked": 0}, {"started": True}])
def test_hidden_containers_are_done_when_the_pod_is(known: dict[str, t.Any]) -> None:
    pod = make_pod("pod", 0, inits=[container("i", 4)], **known)
    assert steering.pending(pod, Entry("default/pod", {"c0": ()})) == []


def test_units_of_unknown_pods() -> None:
    known, unknown, served = make_pod("known", 4, 4), make_pod("unknown", 2, 2), make_pod("served", 1)
    listing = [entry(known, ids(0, 0)), entry(unknown, ids(1, 0, 1)), entry(served, ids(1, 9))]
    assert steering.unknown_pod_ids(by_key(known), listing) == ids(1, 0, 1)
    # Of two unknown pods either may be the subject.
    assert steering.unknown_pod_ids(by_key(known), [*listing, entry(make_pod("other", 1))]) == ()
    assert steering.unknown_pod_ids(by_key(known, unknown), listing) == steering.unknown_pod_ids({}, None) == ()


# --------------------------------------------------------------------------- which units


def test_booked_card_lowest_slots() -> None:
    cards = [card(0), card(1)]
    subject = steering.Subject(make_pod("pod", 3, booked=1))
    got = steering.choose(cards, wire.Ask(everything(cards)[::-1], (), 3), subject, NOTHING)
    assert (got.ids, got.cards) == (ids(1, 0, 1, 2), (cards[1],))


def test_required_units_decide_the_card() -> None:
    cards = [card(0), card(1)]
    subject = steering.Subject(make_pod("pod", 3, booked=0))
    got = steering.choose(cards, wire.Ask(everything(cards), ids(1, 9), 3), subject, NOTHING)
    assert got.ids == ids(1, 9, 0, 1)


def test_foreign_units_precede_best_fit() -> None:
    cards, ask = [card(0), card(1)], wire.Ask((*ids(0, 0, 1), *ids(1, 0, 1, 2, 3)), (), 2)
    for held, expected in (
        ((), ids(0, 0, 1)),
        (ids(1, 9), ids(1, 0, 1)),
        ((*ids(0, 8), *ids(1, 9)), (*ids(0, 0), *ids(1, 0))),
    ):
        assert steering.choose(cards, ask, None, NOTHING, held).ids == expected


def test_the_pods_own_units_precede_its_booking() -> None:
    cards = [card(0), card(1)]
    subject = steering.Subject(make_pod("pod", 1, 3, booked=0), "c1", ids(1, 15))
    got = steering.choose(cards, wire.Ask((*ids(0, *range(16)), *ids(1, *range(15))), (), 3), subject, NOTHING)
    assert got.cards == (cards[1],)


@pytest.mark.parametrize(
    ("free", "need", "booked", "reserved", "expected"),
    [
        ([16, 4], [4], None, {}, 1),  # best fit
        ([16, 16], [4], None, {}, 0),  # ties by index
        ([4, 16], [4, 4], None, {}, 1),  # the rest of the pod counts
        ([4, 16], [4], None, {0: 4}, 1),  # what others have booked is left
        ([4, 16], [8], None, {1: 10}, 1),  # where possible
        ([9, 8], [8], None, {0: 9, 1: 9}, 0),  # else where it hurts least
        ([4, 16], [5], 0, {}, 1),  # the booked card is full
        ([5, 16], [5], 0, {0: 5}, 0),  # a booking comes before what others have booked
        ([16, 16], [4], 7, {}, 0),  # booked on a card that isn't there
        ([16, 16], [4], -1, {}, 0),
    ],
)
def test_card(free: list[int], need: list[int], booked: int | None, reserved: dict[int, int], expected: int) -> None:
    cards = [card(n) for n in range(len(free))]
    available = tuple(one for n, count in enumerate(free) for one in ids(n, *range(count)))
    subject = steering.Subject(make_pod("pod", *need, booked=booked))
    reserved_units = {card(n).uuid: units for n, units in reserved.items()}
    got = steering.choose(cards, wire.Ask(available, (), need[0]), subject, steering.ReservedUnits(reserved_units, {}))
    assert got.cards == (cards[expected],) and set(got.ids) <= set(available)


@pytest.mark.parametrize(
    ("available", "must", "size", "subject", "message"),
    [
        ((*ids(0, 1, 2), *ids(1, 1, 2)), (), 3, None, f"a pod requests 3 {UNITS} the largest free share is 2"),
        ((), (), 1, None, f"a pod requests 1 {UNITS} the largest free share is 0"),
        (
            ids(0, *range(4)), (), 2, steering.Subject(make_pod("pod", 2, 3), "c0"),
            f"pod default/pod requests 5 {UNITS} the largest free share is 4",
        ),
        (
            (*ids(0, 1, 2), *ids(1, 1, 2, 3, 4)), (), 3, steering.Subject(make_pod("pod", 1, 3), "c1", ids(0, 9)),
            "pod default/pod is on card 0 (GPU-00000000-aaaa) and requests 3 more units of it, of which 2 are free",
        ),
        (
            ids(0, 1, 2, 3), (*ids(0, 1), *ids(1, 1)), 3, None,
            "a pod has units 00000000-1, 00000001-1, which aren't all of one card of this node",
        ),
    ],
)  # fmt: skip
def test_refused(
    available: tuple[str, ...], must: tuple[str, ...], size: int, subject: steering.Subject | None, message: str
) -> None:
    with pytest.raises(NoDevices) as caught:
        steering.choose([card(0), card(1)], wire.Ask(available, must, size), subject, NOTHING)
    assert caught.value.refusal.text == message


def test_promised() -> None:
    cards = [card(0), card(1)]
    pods = [
        make_pod("unseen", 3, booked=0),
        make_pod("partly", 2, 4, booked=1),
        make_pod("complete", 5, booked=1),
        make_pod("assigned", 6, booked=1, assigned=True),
        make_pod("unbooked", 7),
        make_pod("nowhere", 7, booked=5),
        make_pod("itself", 8, booked=0),
        make_pod("foreign", 9, booked=0, assigned=True, started=True),
    ]
    finished = make_pod("finished", 7, booked=0)
    finished["status"]["phase"] = "Succeeded"
    listing = [
        entry(pods[1], ids(1, 0, 1)),
        entry(pods[2], ids(1, 2, 3, 4, 5, 6)),
        entry(pods[7], tuple(f"GPU-other-_-{n}" for n in range(9))),
    ]
    uid = contract.pod_uid(pods[6])
    assert steering.reserved_units(cards, by_key(*pods, finished), listing, uid) == (
        {cards[0].uuid: 3, cards[1].uuid: 4},
        {cards[0].uuid: 9, cards[1].uuid: 0},
    )
    nothing = {cards[0].uuid: 0, cards[1].uuid: 0}
    assert steering.reserved_units(cards, {}, None) == (nothing, nothing)


# --------------------------------------------------------------------------- properties


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[contract.Card], wire.Ask, steering.Subject | None, dict[str, int]]:
    cards = [card(n, draw(st.integers(0, 12)), draw(st.booleans())) for n in range(draw(st.integers(0, 4)))]
    available = [one for one in everything(cards) if draw(st.booleans())]
    pod_sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    pod = make_pod("pod", *pod_sizes, booked=draw(st.one_of(st.none(), st.integers(-1, 5))))
    taken = [one for one in everything(cards) if one not in available]
    held = tuple(draw(st.lists(st.sampled_from(taken), max_size=2, unique=True))) if taken else ()
    must = tuple(draw(st.lists(st.sampled_from(available), max_size=2, unique=True))) if available else ()
    subject = draw(st.sampled_from([None, steering.Subject(pod, "c0"), steering.Subject(pod, "c0", held)]))
    size = draw(st.integers(max(1, len(must)), 10))
    reserved = {one.uuid: draw(st.integers(0, 12)) for one in cards}
    order = draw(st.permutations(available))
    return cards, wire.Ask(tuple(order), must, size), subject, reserved


@settings(deadline=None)
@given(situations())
def test_an_answer_is_units_of_one_card_that_are_free(
    situation: tuple[list[contract.Card], wire.Ask, steering.Subject | None, dict[str, int]],
) -> None:
    cards, ask, subject, reserved = situation
    try:
        got = steering.choose(cards, ask, subject, steering.ReservedUnits(reserved, {}))
    except NoDevices as error:
        assert "\n" not in str(error)
        return
    assert len(got.ids) == len(set(got.ids)) == ask.size
    assert set(got.ids) <= set(ask.available)
    assert set(ask.must_include) <= set(got.ids)
    assert set(steering.Slots(cards).by_card(got.ids)) == {one.uuid for one in got.cards}
    if subject and subject.held:
        assert set(steering.Slots(cards).by_card(subject.held)) == {one.uuid for one in got.cards} or ask.must_include


@st.composite
def bookings(draw: st.DrawFn) -> tuple[list[contract.Card], list[JsonObject]]:
    """Pods that an extender has booked, no card over its size, in any order of admission."""
    cards = [card(n, draw(st.integers(1, 10))) for n in range(draw(st.integers(1, 3)))]
    pods = []
    for one in cards:
        left = one.units
        while left and draw(st.booleans()):
            sizes = []
            while left and (not sizes or draw(st.booleans())):
                sizes.append(draw(st.integers(1, left)))
                left -= sizes[-1]
            pods.append(make_pod(f"pod{len(pods)}", *sizes, booked=one.index, card_units=one.units))
    return cards, draw(st.permutations(pods))


@settings(deadline=None)
@given(bookings(), st.booleans())
def test_in_whatever_order_every_booked_pod_gets_its_card(
    booked: tuple[list[contract.Card], list[JsonObject]], all_bound: bool
) -> None:
    cards, order = booked
    pods = by_key(*order) if all_bound else {}
    free = set(everything(cards))
    listing: list[Entry] = []
    for pod in order:
        pods[contract.pod_key(pod)] = pod
        held: dict[str, tuple[str, ...]] = {one["name"]: () for one in pod["spec"]["containers"]}
        for name, units in contract.gpu_containers(pod):
            now = [*listing, Entry(contract.pod_key(pod), dict(held))]
            subject = steering.identify(units, pods, now)
            assert subject is not None and subject.key == contract.pod_key(pod)
            reserved = steering.reserved_units(cards, pods, now, contract.pod_uid(pod))
            got = steering.choose(cards, wire.Ask(tuple(free), (), units), subject, reserved)
            booking = contract.booking(pod)
            assert booking is not None and got.cards[0].index == booking.index
            held[name] = got.ids
            free -= set(got.ids)
        listing.append(Entry(contract.pod_key(pod), held))
