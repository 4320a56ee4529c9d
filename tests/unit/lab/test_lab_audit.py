# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's auditor finds double bookings, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import _lab
import pytest
from _lab import JsonObject
from _load import Auditor


def pod(
    name: str, units: int, card: str = "", node: str = "gpu1", phase: str = "Running", version: int = 1
) -> JsonObject:
    annotations = {"ALIYUN_COM_GPU_MEM_IDX": card.partition(",")[0]} if card else {}
    if "," in card:
        annotations["kubegpu.share/card-indices"] = card
    limits = {_lab.RESOURCE: str(units)}
    return {
        "metadata": {"name": name, "uid": name, "annotations": annotations, "resourceVersion": str(version)},
        "spec": {"nodeName": node, "containers": [{"name": "c0", "resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


class Script:
    """An API whose watch returns given events."""

    def __init__(self, *events: tuple[str, JsonObject]) -> None:
        self.events = events

    def watch(self, _path: str, _stop: threading.Event) -> Iterator[tuple[str, JsonObject]]:
        yield from self.events


def audited(*events: tuple[str, JsonObject]) -> Auditor:
    auditor = Auditor(Script(*events), {"gpu1": {0: 16, 1: 8}})  # type: ignore[arg-type]
    auditor._follow()
    assert not auditor.failed and auditor.events == len(events)
    return auditor


def test_full_cards_are_no_double_booking() -> None:
    auditor = audited(
        ("ADDED", pod("a", 9, "0")),
        ("MODIFIED", pod("a", 9, "0")),
        ("ADDED", pod("b", 14, "0,1")),
        ("ADDED", pod("waits", 9, node="")),
        ("ADDED", pod("elsewhere", 99, "0", node="cp1")),
        ("DELETED", pod("a", 9, "0")),
        ("ADDED", pod("c", 9, "0")),
        ("MODIFIED", pod("c", 9, "0", phase="Succeeded")),
        ("ADDED", pod("d", 9, "0")),
    )
    assert auditor.wrong == [] and auditor.now() == {"gpu1": {0: 16, 1: 7}}


@pytest.mark.parametrize(
    ("booked", "problem"),
    [
        (pod("b", 8, "0"), "b: card 0 of gpu1 has 17 of 16"),
        (pod("b", 18, "0,1"), "b: card 0 of gpu1 has 18 of 16"),
        (pod("b", 1, "7"), "b: card 7 of gpu1 has 1 of 0"),
        (pod("b", 1), "b is on gpu1 without a card"),
    ],
    ids=["one card", "two cards", "no such card", "no card"],
)
def test_a_double_booking_is_found_even_if_it_ends_at_once(booked: JsonObject, problem: str) -> None:
    auditor = audited(("ADDED", pod("a", 9, "0")), ("ADDED", booked), ("DELETED", booked))
    assert problem in auditor.wrong
