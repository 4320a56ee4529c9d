# SPDX-License-Identifier: GPL-3.0-or-later
"""gpushare's contract: how memory is counted, what IDs and annotations mean."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from hypothesis import given
from hypothesis import strategies as st


def card(index: int = 0, units: int = 16, uuid: str = "") -> contract.Card:
    return contract.Card(index, uuid or f"GPU-{index:08x}-1111-2222-3333-444444444444", index, units * 1024, units)


def container(units: int = 0, **more: object) -> dict[str, object]:
    return {"name": "c", "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}, **more}


def pod(*units: int, init: tuple[dict[str, object], ...] = (), **more: object) -> dict[str, object]:
    spec = {"containers": [container(one) for one in units], "initContainers": list(init), "nodeName": "n1"}
    return {
        "metadata": {"name": "p", "namespace": "d", "uid": "u"},
        "spec": spec,
        "status": {"phase": "Running"},
        **more,
    }


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


def test_unbound_pod_with_left_over_annotations_counts_nothing() -> None:
    left_over = pod(4)
    left_over["metadata"]["annotations"] = contract.booking_annotations(card(1), 4, 1, False)
    left_over["spec"]["nodeName"] = None
    assert contract.used_units([card(0), card(1)], [left_over]) == ({0: 0, 1: 0}, 0)


def test_terminating_counts_and_finished_does_not() -> None:
    terminating, done = pod(4), pod(4)
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    done["status"]["phase"] = "Succeeded"
    for one in (terminating, done):
        one["metadata"]["annotations"] = contract.booking_annotations(card(0), 4, 1, True)
    assert contract.used_units([card(0)], [terminating, done]) == ({0: 4}, 0)


def test_more_than_a_card_holds_is_reported_not_wrapped() -> None:
    big = pod(40)
    big["metadata"]["annotations"] = contract.booking_annotations(card(0), 40, 1, True)
    assert contract.used_units([card(0, units=16)], [big])[0][0] == 40


@pytest.mark.parametrize("index", ["-1", "7", "x", ""])
def test_a_card_that_the_node_does_not_have_is_unknown(index: str) -> None:
    one = pod(4)
    one["metadata"]["annotations"] = {contract.POD_INDEX: index}
    assert contract.used_units([card(0)], [one]) == ({0: 0}, 4)


def test_short_uuids_grow_until_they_differ() -> None:
    uuids = ["GPU-aaaaaaaa-0000-x", "GPU-aaaaaaaa-0001-x"]
    assert sorted(contract.short_uuids(uuids).values()) == ["aaaaaaaa0000", "aaaaaaaa0001"]
    with pytest.raises(contract.ContractError, match="same UUID"):
        contract.short_uuids(["GPU-1", "GPU-1"])


@given(st.lists(st.uuids(), min_size=1, max_size=8, unique=True), st.integers(0, 100000))
def test_a_device_id_leads_back_to_its_card(uuids: list[object], slot: int) -> None:
    cards = [card(n, uuid=f"GPU-{uuid}") for n, uuid in enumerate(uuids)]
    shorts = contract.short_uuids([one.uuid for one in cards])
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


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.text(max_size=20)), max_size=6))
def test_cards_survive_the_annotation(rows: list[tuple[int, bool, str]]) -> None:
    cards = [
        contract.Card(n, f"GPU-{n}", n + 2, units * 1024, units, healthy, model)
        for n, (units, healthy, model) in enumerate(rows)
    ]
    assert contract.cards_from_annotation(contract.cards_to_annotation(cards)) == cards


@pytest.mark.parametrize("text", ["", "{}x", "[1]", '[{"index":0}]', "null", '{"a":1}', "[null]"])
def test_a_broken_annotation_is_named_and_capacity_counts_instead(text: str) -> None:
    with pytest.raises(contract.ContractError, match=r"kubegpu\.share/cards"):
        contract.cards_from_annotation(text)
    node = {
        "metadata": {"annotations": {contract.NODE_CARDS: text}},
        "status": {"capacity": {contract.RESOURCE_MEMORY: "31", contract.RESOURCE_COUNT: "2"}},
    }
    assert [one.units for one in contract.node_cards(node)] == [15, 15]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("2k", 2000),
        ("1Ki", 1024),
        ("1e3", 1000),
        ("2E2", 200),
        ("2E", 2 * 10**18),
        ("1Gi", 2**30),
        ("x", 0),
        ("-1", 0),
        (5, 5),
    ],
)
def test_quantities(text: object, expected: int) -> None:
    assert contract.quantity(text) == expected
