# SPDX-License-Identifier: GPL-3.0-or-later
"""What servers keep of a pod is bounded, and means the same as the pod."""

from __future__ import annotations

import pytest
from gpushare.api.kept import ANNOTATION_LENGTH, kept_annotations, kept_containers
from gpushare.shared._contracts import gpushare as contract


def one(name: str, units: int = 0, **more: object) -> dict[str, object]:
    return {"name": name, "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}, **more}


def card(index: int) -> contract.Card:
    return contract.Card(index, f"GPU-{index}", index, 16384, 16)


@pytest.mark.parametrize(
    "containers",
    [
        [one("c", 1)] * contract.MOST_SHARES + [one("d")] * 900,
        [one("c", 1)] * (contract.MOST_SHARES + 1),
        [one("c", 1)] + [one("d")] * contract.MOST_CONTAINERS,
    ],
)
def test_a_pod_with_too_many_containers_still_has_too_many(containers: list[dict[str, object]]) -> None:
    texts = []
    for each in (containers, kept_containers(containers)):
        try:
            texts.append(str(contract.demand({"spec": {"containers": each}})))
        except contract.ContractError as error:
            texts.append(str(error))
    assert texts[0] == texts[1]


def test_kept_containers_stay_at_their_places() -> None:
    """kubectl's plugin counts them."""
    containers = [one("a"), one("b", 2), one("c", flag=True), one("d"), one("e", 4)]
    kept = kept_containers(containers, lambda each: "flag" in each)
    assert kept == [{}, containers[1], containers[2], {}, containers[4]]
    whole, reduced = ({"spec": {"containers": each}} for each in (containers, kept))
    cards = [card(0), card(1)]
    assert contract.booking_annotations(cards, whole, 1, True) == contract.booking_annotations(cards, reduced, 1, True)


def test_many_containers_take_little() -> None:
    """Whatever they are: of those without a share a place, of the others 33 of each kind."""
    flagged = [one(f"f{at}", flag=True) for at in range(5000)]
    asking = [one(f"a{at}", 1) for at in range(5000)]
    kept = kept_containers([*flagged, *asking, *[one("x")] * 5000], lambda each: "flag" in each)
    assert len([each for each in kept if each]) == 2 * (contract.MOST_SHARES + 1)
    assert len(kept) <= contract.MOST_CONTAINERS + 1 + 2 * (contract.MOST_SHARES + 1)


def test_a_long_annotation_is_kept_in_part_and_stays_invalid() -> None:
    annotations = {
        contract.POD_INDEX: "1" * 5000,
        contract.POD_MODELS: "a," * 5000,
        contract.POD_CARD_COUNT: "1",
        "other": "x" * 5000,
    }
    kept = kept_annotations(annotations, (*contract.POD_ANNOTATIONS, *contract.POD_DEMANDS))
    assert {name: len(text) for name, text in kept.items()} == {
        contract.POD_INDEX: ANNOTATION_LENGTH + 1,
        contract.POD_MODELS: contract.PATTERNS_LENGTH + 1,
        contract.POD_CARD_COUNT: 1,
    }
    for each in (annotations, kept):
        with pytest.raises(contract.ContractError, match="2200 characters"):
            contract.demand({"metadata": {"annotations": each}, "spec": {"containers": [one("c", 1)]}})
