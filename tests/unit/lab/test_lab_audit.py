# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's auditor: watches are read completely, double bookings are found, and containers' visible cards are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import _lab
import _load
import _pods
import pytest
import test_42_attacks as attacks
import urllib3
from _lab import Api, JsonObject
from _load import Auditor
from api_double import ApiDouble, served


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
    ("one", "problem"),
    [
        (pod("b", 8, "0"), "b: card 0 of gpu1 has 17 of 16"),
        (pod("b", 18, "0,1"), "b: card 0 of gpu1 has 18 of 16"),
        (pod("b", 1, "7"), "b: card 7 of gpu1 has 1 of 0"),
        (pod("b", 1), "b is on gpu1 without a card"),
    ],
    ids=["one card", "two cards", "no such card", "no card"],
)
def test_a_double_booking_is_found_even_if_it_ends_at_once(one: JsonObject, problem: str) -> None:
    auditor = audited(("ADDED", pod("a", 9, "0")), ("ADDED", one), ("DELETED", one))
    assert problem in auditor.wrong


def test_a_failed_watch_is_reported() -> None:
    auditor = Auditor(Script(("ADDED", {})), {})  # type: ignore[arg-type]
    auditor._follow()
    assert auditor.failed


def test_a_watch_begins_with_the_list_and_is_read_completely() -> None:
    """The double cuts each event into two chunks."""
    server = ApiDouble()
    server.put("pods", pod("a", 1))
    with served(server) as url:
        api = Api.__new__(Api)
        api.server, api.warnings, api._pool = url, [], urllib3.PoolManager(retries=False)
        stop, found = threading.Event(), []
        for kind, one in api.watch("/api/v1/pods", stop):
            found.append((kind, _pods.units_of(one)))
            if len(found) == 5:
                break
            server.put("pods", pod("a", len(found) + 1))
        assert found == [("ADDED", 1), *(("MODIFIED", n) for n in range(2, 6))]
        stop.set()
        assert [kind for kind, _one in api.watch("/api/v1/pods", stop)] == ["ADDED"]


def test_shares_of_several_cards() -> None:
    assert _pods.shares_of(pod("a", 12, "0,3")) == {0: 6, 3: 6}
    assert _pods.shares_of(pod("a", 5, "1")) == {1: 5}
    assert _pods.shares_of(pod("a", 5)) == {}


class Node:
    """A node whose shell prints a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def ssh(self, _node: str, _script: str) -> str:
        return self.text


def test_visible_cards_of_containers() -> None:
    first, second = "0f4a2f1e-0000-4000-8000-00000000000a", "0f4a2f1e-0000-4000-8000-00000000000b"
    text = f"pod{first.replace('-', '_')} nvidia0 nvidia12\npod{second} nvidia[0-9]*\npod{second} nvidia1\n"
    assert attacks.visible(Node(text), "gpu1") == {first: {0, 12}, second: {1}}  # type: ignore[arg-type]


def test_the_load_tests_cards_hold_its_largest_pod() -> None:
    """Otherwise a pod stays pending, and the load test never ends."""
    widest = [sorted(sizes, reverse=True)[1] for sizes in _load.SIZES.values()]
    assert max(widest) >= 6 and all(max(sizes) >= 6 for sizes in _load.SIZES.values())
