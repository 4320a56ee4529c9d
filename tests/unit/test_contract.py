# SPDX-License-Identifier: GPL-3.0-or-later
"""gpushare's contract: units of memory, device IDs and annotations."""

from __future__ import annotations

import fnmatch
import json
import time
import tracemalloc

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from hypothesis import given
from hypothesis import strategies as st


def card(index: int = 0, units: int = 16, uuid: str = "") -> contract.Card:
    return contract.Card(index, uuid or f"GPU-{index:08x}-1111-2222-3333-444444444444", index, units * 1024, units)


def container(units: int = 0, **more: object) -> dict[str, object]:
    return {"name": "c", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}, **more}


def pod(*units: int, init: tuple[dict[str, object], ...] = (), **more: object) -> dict[str, object]:
    spec = {"containers": [container(unit) for unit in units], "initContainers": list(init), "nodeName": "n1"}
    return {
        "metadata": {"name": "p", "namespace": "d", "uid": "u"},
        "spec": spec,
        "status": {"phase": "Running"},
        **more,
    }


def on(index: int, units: int, assigned: bool) -> dict[str, str]:
    """The annotations of a pod with a card."""
    return contract.merge_only(contract.booking_annotations([card(index)], pod(units), 1, assigned), {})


@pytest.mark.parametrize(
    ("mib", "unit", "expected"), [(11178, "GiB", 10), (16127, "GiB", 15), (16384, "GiB", 16), (16127, "MiB", 16127)]
)
def test_units_are_rounded_down(mib: int, unit: str, expected: int) -> None:
    assert contract.units_of(mib, unit) == expected


def test_unknown_unit_is_refused() -> None:
    with pytest.raises(contract.ContractError, match="'GB' is neither GiB nor MiB"):
        contract.units_of(1, "GB")


@pytest.mark.parametrize(
    ("given_pod", "expected"),
    [
        (pod(2, 3), 5),
        (pod(0), 0),
        (pod(2, init=(container(7),)), 7),
        (pod(4, init=(container(3),)), 4),
        # A sidecar runs beside everything after it.
        (pod(2, init=(container(3, restartPolicy="Always"), container(5))), 8),
        (pod(6, init=(container(3, restartPolicy="Always"), container(5))), 9),
        # What ran before the sidecar started doesn't add to it.
        (pod(1, init=(container(5), container(3, restartPolicy="Always"))), 5),
    ],
)
def test_pod_units_follow_kubernetes(given_pod: dict[str, object], expected: int) -> None:
    assert contract.pod_units(given_pod) == expected


def test_pods_on_a_node_count_until_they_are_finished() -> None:
    terminating, done, unbound, big = pod(4), pod(4), pod(4), pod(40)
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    done["status"]["phase"] = "Succeeded"
    unbound["spec"]["nodeName"] = None
    for one in (terminating, done, unbound):
        one["metadata"]["annotations"] = on(0, 4, True)
    # More units than the card has are reported as they are.
    big["metadata"]["annotations"] = on(1, 40, True)
    assert contract.used_units([card(0), card(1)], [terminating, done, unbound, big]) == ({0: 4, 1: 40}, 0)


@pytest.mark.parametrize("index", ["-1", "7", "x", ""])
def test_an_index_without_a_card_is_unknown(index: str) -> None:
    one = pod(4)
    one["metadata"]["annotations"] = {contract.POD_INDEX: index}
    assert contract.used_units([card(0)], [one]) == ({0: 0}, 4)


def test_short_uuids_grow_until_they_differ() -> None:
    uuids = ["GPU-aaaaaaaa-0000-x", "GPU-aaaaaaaa-0001-x"]
    assert sorted(contract.short_uuids(uuids).values()) == ["aaaaaaaa0000", "aaaaaaaa0001"]
    with pytest.raises(contract.ContractError, match="same UUID"):
        contract.short_uuids(["GPU-1", "GPU-1"])


@given(st.lists(st.uuids(), min_size=1, max_size=8, unique=True), st.integers(0, 100000))
def test_a_device_id_identifies_its_card(uuids: list[object], slot: int) -> None:
    cards = [card(n, uuid=f"GPU-{uuid}") for n, uuid in enumerate(uuids)]
    shorts = contract.short_uuids([card.uuid for card in cards])
    for one in cards:
        identifier = contract.device_id(shorts[one.uuid], slot)
        assert contract.card_by_short(cards, contract.card_of_device_id(identifier)) == one


@pytest.mark.parametrize("identifier", ["", "abc", "-1", "abc-", "abc-x"])
def test_foreign_device_ids_are_refused(identifier: str) -> None:
    with pytest.raises(contract.ContractError, match="doesn't name a card and a slot"):
        contract.card_of_device_id(identifier)


def test_too_many_device_ids_name_the_variable() -> None:
    contract.check_device_list([card(0, units=80)], "GiB")
    with pytest.raises(contract.ContractError, match=r"^gpushare_memory_unit: MiB makes 163840 device IDs .* use GiB$"):
        contract.check_device_list([card(0, units=81920), card(1, units=81920)], "MiB")


# Control characters, and what reorders text, are replaced.
shown = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")), max_size=20)


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), shown), max_size=6))
def test_cards_survive_the_annotation(rows: list[tuple[int, bool, str]]) -> None:
    cards = [
        contract.Card(n, f"GPU-{n}", n + 2, units * 1024, units, healthy, model)
        for n, (units, healthy, model) in enumerate(rows)
    ]
    assert contract.cards_from_annotation(contract.cards_to_annotation(cards)) == cards


def listed(**changes: object) -> str:
    """A node annotation of one card that is wrong in one thing."""
    row = {"index": 0, "uuid": "GPU-0", "minor": 0, "memoryMiB": 16384, "units": 16, "healthy": True}
    return json.dumps([row | changes])


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}x", "[1]", '[{"index":0}]', "null", '{"a":1}', "[null]", "[" * 100_000),
        *(listed(units=float("inf")), listed(index=float("nan")), listed(units=-1)),
        # -1 is the index of an unknown card.
        listed(index=-1),
    ],
)
def test_a_broken_annotation_is_named_and_capacity_counts_instead(text: str) -> None:
    with pytest.raises(contract.ContractError, match=r"kubegpu\.share/cards"):
        contract.cards_from_annotation(text)
    node = {
        "metadata": {"annotations": {contract.NODE_CARDS: text}},
        "status": {"capacity": {contract.RESOURCE_MEMORY: "31", contract.RESOURCE_COUNT: "2"}},
    }
    assert [card.units for card in contract.node_cards(node)] == [15, 15]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2k", 2000), ("1Ki", 1024), ("1e3", 1000), ("2E2", 200), ("2E", 2 * 10**18), ("x", 0), ("-1", 0), (5, 5)],
)
def test_quantities(text: object, expected: int) -> None:
    assert contract.quantity(text) == expected


# ----------------------------------------------------------------- demands


def annotated(*units: int, **annotations: str) -> dict[str, object]:
    one = pod(*units)
    one["metadata"]["annotations"] = {
        f"kubegpu.share/{key.replace('_', '-')}": text for key, text in annotations.items()
    }
    return one


def test_the_demand_of_a_pod_without_annotations() -> None:
    assert contract.demand(pod(2, 3)) == contract.Demand(5)
    assert contract.demand(annotated(0, card_count="x")) == contract.Demand(0), "it requests no memory"


def test_the_demand_of_all_annotations() -> None:
    given_pod = annotated(4, 8, placement="spread", card_count="2", models="*A100*, tesla-t4", exclude_models="*MIG*")
    demand = contract.demand(given_pod)
    assert demand == contract.Demand(12, 2, "spread", ("*a100*", "tesla-t4"), ("*mig*",))
    assert demand.share == 6


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"placement": ""}, "kubegpu.share/placement: '' is neither binpack nor spread"),
        ({"placement": "Binpack"}, "kubegpu.share/placement: 'Binpack' is neither binpack nor spread"),
        *(
            ({"card_count": text}, f"kubegpu.share/card-count: {text!r} is no number of cards")
            for text in ("0", "", "-1", " 2", "2.0", "\u0662")
        ),
        (
            {"card_count": "4"},
            "kubegpu.share/card-count: the 6 units of container c can't be spread equally over 4 cards",
        ),
        ({"models": ""}, "kubegpu.share/models: '' is no list of models, separated by commas"),
        ({"models": "a," * 16 + "b"}, "kubegpu.share/models: the list has more than 16 patterns"),
        ({"models": "a" * 129}, "kubegpu.share/models: a pattern has more than 128 characters"),
        ({"models": "a,,b"}, "kubegpu.share/models: 'a,,b' is no list of models, separated by commas"),
        ({"exclude_models": "a,"}, "kubegpu.share/exclude-models: 'a,' is no list of models, separated by commas"),
    ],
)
def test_an_invalid_annotation_is_named(annotations: dict[str, str], message: str) -> None:
    with pytest.raises(contract.ContractError) as error:
        contract.demand(annotated(6, **annotations))
    assert str(error.value) == message


def test_each_container_must_be_divisible_not_only_the_sum() -> None:
    with pytest.raises(contract.ContractError, match="the 3 units of container c"):
        contract.demand(annotated(3, 1, card_count="2"))
    with pytest.raises(contract.ContractError, match="the 5 units of container c"):
        contract.demand(annotated(8, card_count="2") | {"spec": pod(8, init=(container(5),))["spec"]})


ALWAYS = "Always"


@pytest.mark.parametrize(
    ("inits", "containers", "refused"),
    [
        # The whole share of an init container, or more, is equal shares again.
        (((4, ""),), (4,), None),
        (((4, ""),), (8, 2), None),
        (((2, ""), (4, "")), (4,), None),
        (((0, ""),), (2,), None),
        # The share of a sidecar is never allocated again.
        (((4, ALWAYS),), (2,), None),
        (((4, ""), (4, ALWAYS)), (2,), None),
        # A part of it may be of either card.
        (((4, ""),), (2,), ("c0", 2, 4)),
        (((4, ""), (2, "")), (4,), ("i1", 2, 4)),
        (((4, ""), (2, ALWAYS)), (4,), ("i1", 2, 4)),
        (((4, ""),), (0, 2), ("c1", 2, 4)),
    ],
)
def test_several_cards_and_init_containers(
    inits: tuple[tuple[int, str], ...], containers: tuple[int, ...], refused: tuple[str, int, int] | None
) -> None:
    spec = {
        "initContainers": [
            container(units) | {"name": f"i{n}"} | ({"restartPolicy": policy} if policy else {})
            for n, (units, policy) in enumerate(inits)
        ],
        "containers": [container(units) | {"name": f"c{n}"} for n, units in enumerate(containers)],
    }
    for count in (1, 2):
        one = annotated(2, card_count=str(count)) | {"spec": spec}
        if refused is None or count == 1:
            assert contract.demand(one).count == count
            continue
        name, units, pool = refused
        message = (
            f"kubegpu.share/card-count: its container {name} asks for {units} units and would be given a part of the "
            f"{pool} that an init container had, of any card"
        )
        with pytest.raises(contract.ContractError, match=f"^{message}$"):
            contract.demand(one)


@pytest.mark.parametrize(
    ("models", "excluded", "model", "allowed"),
    [
        ((), (), "", True),
        (("*a100*",), (), "NVIDIA A100-SXM4-80GB", True),
        (("*a100*",), (), "Tesla T4", False),
        (("tesla t4",), (), "Tesla T4", True),
        ((), ("*t4",), "Tesla T4", False),
        ((), ("*t4",), "NVIDIA A100", True),
        (("tesla*",), ("*t4",), "Tesla T4", False),
        (("*",), (), "", False),
        ((), ("*t4",), "", False),
    ],
)
def test_models(models: tuple[str, ...], excluded: tuple[str, ...], model: str, allowed: bool) -> None:
    one = contract.Card(0, "GPU-0", 0, 1024, 1, True, model)
    assert contract.Demand(1, models=models, excluded=excluded).accepts(one) is allowed


@given(st.text("aB*?\n", max_size=12), st.text("aB*?\n", max_size=10))
def test_patterns_match_as_fnmatchs_do(text: str, pattern: str) -> None:
    assert contract.matches(text, pattern) is fnmatch.fnmatchcase(text, pattern)


def test_many_different_patterns_take_no_memory_and_little_time() -> None:
    """A module that keeps what it compiled would take 50 KB for each."""
    model = "NVIDIA H100 80GB HBM3"
    tracemalloc.start()
    began = time.thread_time()
    for number in range(1000):
        demand = contract.Demand(1, models=("*a" * 60 + f"{number}",))
        assert not demand.accepts_model(model)
    taken, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 100_000 and time.thread_time() - began < 5


@given(st.dictionaries(st.sampled_from(contract.POD_DEMANDS), st.text(max_size=12)), st.integers(0, 40))
def test_any_annotations_are_a_demand_or_an_error(annotations: dict[str, str], units: int) -> None:
    one = pod(units)
    one["metadata"]["annotations"] = annotations
    try:
        demand = contract.demand(one)
    except contract.ContractError as error:
        assert str(error).startswith(tuple(f"{key}: " for key in annotations))
    else:
        assert demand.units == units and demand.count >= 1 and demand.share * demand.count == units


# ----------------------------------------------------------------- bookings of several cards


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.sets(st.integers(0, 9), min_size=1, max_size=4))
def test_a_booking_survives_its_annotations(containers: list[int], indices: set[int]) -> None:
    count = len(indices)
    one = pod(*(units * count for units in containers))
    cards = [card(index) for index in sorted(indices)]
    annotations = contract.booking_annotations(cards, one, 7, True)
    assert sorted(annotations) == sorted(contract.POD_ANNOTATIONS)
    one["metadata"]["annotations"] = contract.merge_only(annotations, one)
    assert contract.booking(one) == contract.Booking(tuple(sorted(indices)), True, 7)
    share = sum(containers)
    assert contract.shares(one) == dict.fromkeys(sorted(indices), share)
    assert contract.used_units(cards, [one]) == (dict.fromkeys(sorted(indices), share), 0)


def test_several_cards_are_written_for_kubectl_inspect() -> None:
    annotations = contract.booking_annotations([card(0), card(2, units=40)], pod(4, 0, 8), 1, False)
    assert annotations == {
        contract.POD_INDEX: "0",
        contract.POD_CARD_UNITS: "16",
        contract.POD_UNITS: "12",
        contract.POD_ASSIGNED: "false",
        contract.POD_ASSUME_TIME: "1",
        contract.POD_INDICES: "0,2",
        contract.POD_ALLOCATION: '{"0":{"0":2,"2":2},"2":{"0":4,"2":4}}',
    }


def test_a_booking_of_one_card_removes_the_annotations_of_several() -> None:
    one = pod(4)
    several = contract.booking_annotations([card(0), card(1)], one, 1, False)
    one["metadata"]["annotations"] = several
    single = contract.booking_annotations([card(0)], one, 2, False)
    assert single[contract.POD_INDICES] is None and single[contract.POD_ALLOCATION] is None
    one["metadata"]["annotations"] = {**several, **contract.merge_only(single, one)}
    assert contract.booking(one) == contract.Booking((0,), False, 2)
    assert contract.merge_only(single, {}) == {key: text for key, text in single.items() if text is not None}


@pytest.mark.parametrize("text", ["", "x", "1,2", "0", "0,0", "0,-1", "0, 1", "0,1,", None, 7])
def test_an_invalid_list_of_cards_is_ignored_for_the_index(text: object) -> None:
    one = pod(4)
    one["metadata"]["annotations"] = {contract.POD_INDEX: "0", contract.POD_INDICES: text}
    assert contract.shares(one) == {0: 4}


def test_a_share_on_a_missing_card_is_unknown() -> None:
    one = pod(8)
    one["metadata"]["annotations"] = contract.booking_annotations([card(0), card(7)], one, 1, True)
    assert contract.used_units([card(0), card(1)], [one]) == ({0: 4, 1: 0}, 4)


def test_the_reason_why_a_card_cannot_be_shared_survives_the_annotation() -> None:
    ill = contract.Card(0, "GPU-0", 0, 1024, 1, False, "M", "MIG is on")
    text = contract.cards_to_annotation([ill])
    assert contract.cards_from_annotation(text) == [ill]
    assert "reason" not in contract.cards_to_annotation([card(0)])


def test_a_priority_is_a_number() -> None:
    assert [contract.pod_priority({"spec": {"priority": value}}) for value in (7, -7, None, "7")] == [7, -7, 0, 0]


# ----------------------------------------------------------------- what is kept is bounded


def one(name: str, units: int = 0, **more: object) -> dict[str, object]:
    return {"name": name, "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}, **more}


@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ([one("c", 1)] * contract.MOST_SHARES + [one("d")] * 900, ""),
        ([one("c", 1)] * (contract.MOST_SHARES + 1), "33 of its containers ask for"),
        ([one("c", 1)] + [one("d")] * contract.MOST_CONTAINERS, "has 1001 containers"),
        ([one("d")] * (contract.MOST_CONTAINERS + 1), ""),
    ],
)
def test_a_pod_with_a_share_has_so_many_containers(containers: list[dict[str, object]], reason: str) -> None:
    whole = {"spec": {"containers": containers}}
    if reason:
        with pytest.raises(contract.ContractError, match=reason):
            contract.demand(whole)
    else:
        assert contract.demand(whole).units == sum(map(contract.container_units, containers))


def test_a_node_has_no_more_cards_than_a_machine() -> None:
    """A taken node writes its annotation and its capacity."""
    many = contract.cards_to_annotation([card(index) for index in range(contract.MOST_CARDS + 1)])
    large = contract.cards_to_annotation([card(0, units=10**400)])
    long = contract.cards_to_annotation([contract.Card(0, "GPU-0", 0, 1024, 1, model="x" * contract.CARDS_LENGTH)])
    for text, reason in ((many, "more than 128 cards"), (large, "a number above"), (long, "characters")):
        with pytest.raises(contract.ContractError, match=reason):
            contract.cards_from_annotation(text)
        assert contract.node_cards({"metadata": {"annotations": {contract.NODE_CARDS: text}}}) == []
    status = {"capacity": {contract.RESOURCE_MEMORY: "8000000000", contract.RESOURCE_COUNT: "1000000000"}}
    assert contract.node_cards({"status": status}) == []
