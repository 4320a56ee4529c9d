# SPDX-License-Identifier: GPL-3.0-or-later
"""Every container is limited to its share: by the toolkit where it can, by the plugin where the limit differs."""

from __future__ import annotations

import dataclasses
import random
import typing as t

import pytest
from gpushare.kubelet.pod_resources import Entry
from gpushare.node.limit_enforcer import BLOCKED, CLOSED_SECONDS
from gpushare.node.limits import Usage
from gpushare.nvml.limits import MIB, UNLIMITED, Limit
from gpushare.plugin.leftovers import Holder
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st
from limit_fakes import (
    CARDS,
    FIRST,
    OWN,
    PODS,
    SECOND,
    FakeCgroups,
    FakeDriver,
    entry,
    folder_of,
    identifier,
    ids,
    pod,
)

ONE, TWO = identifier(1), identifier(2)


@dataclasses.dataclass
class Node:
    """A limit enforcer with a driver and cgroups; the test sets its clock."""

    mode: str = "auto"
    driver: FakeDriver = dataclasses.field(default_factory=FakeDriver)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cgroups = FakeCgroups(self.driver)
        self.restart()

    def restart(self, mode: str = "", exempt: t.Container[str] = ("exempt",)) -> None:
        self.mode = mode or self.mode
        self.enforcer = LimitEnforcer(self.mode, "GiB", self.driver, self.cgroups, lambda: self.now, exempt)
        self.enforcer.probe(CARDS)

    def run(self, *identifiers: str) -> None:
        self.driver.folders |= {folder_of(one) for one in identifiers}

    def update(self, pods: list[JsonObject], listing: list[Entry]) -> list[tuple[str, str]]:
        found = self.enforcer.once(CARDS, pods, listing)
        return [(one.reason, one.message) for one in found if one.pod is not None]


def simple(units: int = 3, uuid: str = FIRST) -> tuple[list[JsonObject], list[Entry]]:
    return [pod("a", {"x": units}, {"x": ONE})], [entry("a", x=ids(uuid, 0, units))]


# --------------------------------------------------------------------------- the probe


def test_fault_20_limits_are_announced_only_after_a_test_on_the_driver() -> None:
    node = Node()
    assert node.enforcer.state == contract.LIMIT_ENFORCED
    assert node.enforcer.environment({FIRST: 3}) == {
        "NVIDIA_GPU_MEMORY_LIMIT": "3072",
        "NVIDIA_GPU_MEMORY_REQUEST": "0",
    }
    # Tried on the plugin's own cgroup, and nothing is left there.
    assert node.driver.kept == {}
    fresh = LimitEnforcer("auto", "GiB", node.driver, node.cgroups)
    assert fresh.environment({FIRST: 3}) == {}
    assert fresh.state.startswith(contract.LIMIT_UNENFORCED)


NOT_MOUNTED = "the node's cgroups aren't mounted at /sys/fs/cgroup"
REFUSED = "can't be limited; the driver's error:"


@pytest.mark.parametrize(
    ("part", "state", "reason"),
    [
        ("driver", {"version": "580.95.05"}, "NVIDIA's driver is 580.95.05, and limits need 615 or newer"),
        ("driver", {"version": ""}, "NVIDIA's driver doesn't answer: Driver Not Loaded"),
        ("cgroups", {"number": 1}, "the node runs with cgroup version 1, and limits need version 2"),
        ("cgroups", {"number": 0}, NOT_MOUNTED),
        ("cgroups", {"mounted": False}, f"{NOT_MOUNTED}, or the plugin isn't in them"),
        ("driver", {"broken": {("set", SECOND): 3}}, f"card 1 {REFUSED} it doesn't support limits on this card"),
        ("driver", {"broken": {("set", FIRST): 4}}, f"card 0 {REFUSED} the plugin lacks the right to"),
        ("driver", {"broken": {("set", FIRST): 6}}, f"card 0 {REFUSED} it finds no controller"),
        ("driver", {"forgets": True}, "card 0 can't be limited: the driver takes a limit and doesn't show it"),
        ("driver", {"mig": {SECOND}}, "MIG is on for card 1, and MIG devices can't be limited"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_unavailable_limits_are_reported_and_fail_no_container(
    part: str, state: dict[str, t.Any], reason: str, mode: str
) -> None:
    node = Node(mode)
    vars(getattr(node, part)).update(state)
    node.restart()
    assert node.enforcer.state.startswith(f"unenforced: {reason}")
    # The toolkit's hook, requested on such a node, would keep the container from starting.
    able = [card.uuid for card in CARDS if node.enforcer.environment({card.uuid: 1})]
    assert len(able) < len(CARDS) and not node.enforcer.environment({FIRST: 1, SECOND: 1})
    if mode == "auto":
        assert not any(node.enforcer.refusal(card.uuid) for card in CARDS)
    else:
        refused = [str(found) for card in CARDS if (found := node.enforcer.refusal(card.uuid))]
        assert refused[0].startswith(
            f"MemoryLimitUnavailable: gpushare_memory_limit: limits are required, but {reason}"
        )
        assert len(refused) + len(able) == len(CARDS)
    states = [node.enforcer.card_limit(card.uuid)[0] for card in CARDS]
    assert states == ["enforced" if card.uuid in able else "MemoryLimitUnavailable" for card in CARDS]
    node.run(ONE)
    node.update(*simple())


def test_the_reason_follows_the_problem() -> None:
    node = Node("required")
    node.driver.version = ""
    assert node.enforcer.probe(CARDS) is True
    assert node.enforcer.probe(CARDS) is False
    assert node.enforcer.refusal(FIRST) is not None
    node.driver.version = "615.71.09"
    assert node.enforcer.probe(CARDS) is True
    assert node.enforcer.refusal(FIRST) is None and node.enforcer.state == "enforced"


def test_each_card_is_tested_once() -> None:
    node = Node()
    before = node.driver.sets
    node.enforcer.probe(CARDS)
    assert node.driver.sets == before
    fresh = LimitEnforcer("auto", "GiB", node.driver, node.cgroups)
    fresh.probe(CARDS[:1])
    assert fresh.environment({SECOND: 1}) == {} and fresh.environment({FIRST: 1})
    fresh.probe(CARDS)
    assert fresh.environment({SECOND: 1})
    fresh.probe([])
    assert fresh.environment({FIRST: 1}) == {} and fresh.state == "unenforced: no card answers"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_card_without_limits_leaves_other_cards_limited(mode: str) -> None:
    node = Node(mode)
    node.driver.broken["set", SECOND] = 3
    node.restart()
    node.run(ONE)
    node.update(*simple())
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072}
    assert node.enforcer.environment({FIRST: 1}) and node.enforcer.state.startswith("unenforced: card 1")
    refused = [card.index for card in CARDS if node.enforcer.refusal(card.uuid)]
    assert refused == ([1] if mode == "required" else [])
    # The driver learns it, or forgets it: the state changes.
    node.driver.broken.clear()
    assert node.enforcer.probe(CARDS) and node.enforcer.state == "enforced"


# --------------------------------------------------------------------------- enforcement


def test_fault_20_a_missing_limit_is_set() -> None:
    node = Node()
    node.run(ONE)
    assert node.update(*simple()) == []
    assert node.driver.kept == {(FIRST, folder_of(ONE)): Limit(0, 3 * 1024 * MIB), (SECOND, folder_of(ONE)): BLOCKED}
    assert node.enforcer.corrected == 1
    sets = node.driver.sets
    node.update(*simple())
    assert node.driver.sets == sets, "what is right is only read"


@pytest.mark.parametrize(
    "limit", [Limit(0, 8 * 1024 * MIB), Limit(1024 * MIB, 3 * 1024 * MIB), Limit(5 * MIB, UNLIMITED)]
)
def test_fault_20_a_different_limit_is_replaced_and_reported_once(limit: Limit) -> None:
    node = Node()
    node.run(ONE)
    node.driver.kept[FIRST, folder_of(ONE)] = limit
    ((reason, message),) = node.update(*simple())
    assert reason == "GpuMemoryLimitCorrected" and "limit is 3072 MiB now" in message
    assert node.driver.kept[FIRST, folder_of(ONE)] == Limit(0, 3072 * MIB)
    assert node.update(*simple()) == []


def test_an_unassigned_card_is_closed_to_a_container() -> None:
    node = Node()
    node.run(ONE)
    # NVIDIA_VISIBLE_DEVICES=all in the pod: the toolkit limited it on every card.
    for uuid in (FIRST, SECOND):
        node.driver.kept[uuid, folder_of(ONE)] = Limit(0, 3072 * MIB)
    ((reason, message),) = node.update(*simple())
    assert reason == "GpuCardNotGiven" and SECOND in message
    assert node.driver.kept[SECOND, folder_of(ONE)] == BLOCKED
    assert node.update(*simple()) == [] and node.enforcer.state == "enforced"


def sidecar(*more: str) -> tuple[list[JsonObject], list[Entry]]:
    """A pod with a share of the first card, and containers without units: ``s`` and an ephemeral one."""
    one = pod("a", {"x": 3, "s": 0}, {"x": ONE, "s": TWO})
    one["status"]["ephemeralContainerStatuses"] = [
        {"name": "debugger", "containerID": f"containerd://{identifier(3)}", "state": {"running": {}}}
    ]
    others = [pod(name, {"m": 0}, {"m": identifier(4)}, namespace="exempt") for name in more]
    return [one, *others], [entry("a", x=ids(FIRST, 0, 3), s=())]


@pytest.mark.parametrize("listed", [True, False])
def test_no_container_of_a_pod_with_a_share_gets_a_card_that_it_was_not_given(listed: bool) -> None:
    """NVIDIA_VISIBLE_DEVICES=all with a toolkit older than 1.20.1: no limit shows what the containers see."""
    node = Node()
    folders = [folder_of(identifier(number)) for number in range(1, 5)]
    node.run(*map(identifier, range(1, 5)))
    pods, listing = sidecar("monitoring")
    # A pod without a share in an exempt namespace, as NVIDIA's own are, keeps its memory of each card.
    node.driver.held[FIRST, folders[3]] = 300 * MIB
    assert node.update(pods, listing if listed else []) == []
    assert node.driver.mib(folders[0]) == ({FIRST: 3072, SECOND: 1} if listed else {})
    assert [node.driver.mib(folder) for folder in folders[1:]] == [{FIRST: 1, SECOND: 1}] * 2 + [{}]
    assert node.enforcer.state == "enforced"


@pytest.mark.parametrize("lowers", [False, True])
def test_memory_of_a_foreign_card_that_was_allocated_before_the_first_check(lowers: bool) -> None:
    node = Node()
    node.driver.lowers = lowers
    node.run(ONE, TWO, identifier(3))
    node.driver.held = {(SECOND, folder_of(ONE)): 700 * MIB, (FIRST, folder_of(TWO)): 200 * MIB}
    found = node.update(*sidecar())
    assert sorted((reason, text.split(" MiB")[0]) for reason, text in found) == [
        ("GpuMemoryExceeded", "ForeignMemoryHeld: container s of pod default/a holds 200"),
        ("GpuMemoryExceeded", "ForeignMemoryHeld: container x of pod default/a holds 700"),
    ]
    assert [node.enforcer.card_limit(card.uuid)[0] for card in CARDS] == ["ForeignMemoryHeld"] * 2
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1 if lowers else 700}
    node.driver.held.clear()
    node.update(*sidecar())
    assert node.enforcer.state == "enforced"
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1}


def without_a_share(number: int = 1) -> JsonObject:
    return pod(f"b{number}", {"x": 0}, {"x": identifier(number)})


@pytest.mark.parametrize("lowers", [False, True])
def test_a_pod_without_a_share_gets_no_memory_of_any_card(lowers: bool) -> None:
    node = Node()
    node.driver.lowers = lowers
    node.run(ONE, TWO)
    pods = [without_a_share(1), without_a_share(2)]
    # It allocated before the first check.
    node.driver.held[FIRST, folder_of(TWO)] = 700 * MIB
    ((reason, text),) = node.update(pods, [])
    assert reason == "GpuMemoryExceeded"
    assert text.startswith("ForeignMemoryHeld: container x of pod default/b2 holds 700 MiB of card 0")
    assert node.enforcer.card_limit(FIRST)[0] == "ForeignMemoryHeld"
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 1, SECOND: 1}
    assert node.driver.mib(folder_of(TWO)) == {FIRST: 1 if lowers else 700, SECOND: 1}
    node.driver.held.clear()
    node.update(pods, [])
    assert node.enforcer.state == "enforced" and node.driver.mib(folder_of(TWO)) == {FIRST: 1, SECOND: 1}


def test_a_blocked_container_is_checked_again_after_half_a_minute() -> None:
    """A node may have 110 of them, with eight cards."""
    node = Node()
    node.run(ONE)
    node.update([without_a_share()], [])
    node.driver.kept.clear()
    gets = node.driver.gets
    node.now = 29.0
    node.update([without_a_share()], [])
    assert node.driver.gets == gets
    node.now = 30.0
    node.update([without_a_share()], [])
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 1, SECOND: 1}
    # A card that can be limited since then.
    node.driver.broken["set", SECOND] = 3
    node.restart()
    node.update([without_a_share()], [])
    node.driver.kept.clear()
    node.driver.broken.clear()
    node.enforcer.probe(CARDS)
    node.update([without_a_share()], [])
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 1, SECOND: 1}


def test_a_container_whose_cards_are_not_known_is_reported_after_a_wait() -> None:
    """kubelet lists a recreated pod and its predecessor by one name."""
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    twice = [*listing, entry("a", x=ids(SECOND, 0, 3))]
    assert node.update(pods, twice) == [] and node.enforcer.state == "enforced"
    node.now = 11.0
    text = "MemoryLimitFailed: kubelet's list doesn't show which cards container x of pod default/a was given"
    assert node.update(pods, twice) == [("GpuMemoryUnlimited", text)]
    assert [node.enforcer.card_limit(card.uuid)[0] for card in CARDS] == ["MemoryLimitFailed"] * 2
    assert node.update(pods, listing) == []
    assert node.enforcer.state == "enforced" and node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1}


# --------------------------------------------------------------------------- memory of no share

RESERVED = tuple(dataclasses.replace(card, reserved_mib=256) for card in CARDS)


def node_events(node: Node, pods: list[JsonObject], listing: list[Entry]) -> list[tuple[str, str]]:
    found = node.enforcer.once(RESERVED, pods, listing)
    return [(one.reason, one.message) for one in found if one.pod is None]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_memory_of_no_share_is_reported_until_it_is_free(mode: str) -> None:
    """A process of a force-deleted pod, of the node itself, or of an exempt pod."""
    node = Node(mode)
    node.run(ONE)
    pods, listing = simple()
    node.driver.held[FIRST, folder_of(ONE)] = 3000 * MIB
    # Without limits nothing shows that the pod doesn't use all that it may.
    node.driver.outside[FIRST] = 1100 + (0 if mode == "auto" else 72)
    for now in (0.0, 10.0):
        node.now = now
        assert node_events(node, pods, listing) == [] and node.enforcer.suspicious
    node.now = 10.1
    ((reason, text),) = node_events(node, pods, listing)
    assert reason == "GpuMemoryUnaccounted"
    assert text.startswith(f"UnaccountedMemoryHeld: more than 1024 MiB of card 0 ({FIRST}) are used beyond its pods'")
    assert [violation.code.value for violation in node.enforcer.violations] == ["UnaccountedMemoryHeld"]
    assert node.enforcer.state == (f"unenforced: {text}" if mode == "auto" else "off")
    shown = ("UnaccountedMemoryHeld", text.partition(": ")[2])
    other = "enforced" if mode == "auto" else "off"
    assert [node.enforcer.card_limit(card.uuid) for card in CARDS] == [shown, (other, "")]
    assert node_events(node, pods, listing) == []
    node.driver.outside[FIRST] = 512
    assert node_events(node, pods, listing) == []
    assert node.enforcer.violations == () and not node.enforcer.suspicious


def test_memory_of_no_share_is_shown_where_the_driver_has_no_limits() -> None:
    node = Node()
    node.driver.version = "580.95.05"
    node.restart()
    node.driver.outside[FIRST] = 5000
    for node.now in (0.0, 10.1):
        node_events(node, [], [])
    limits = [node.enforcer.card_limit(card.uuid)[0] for card in CARDS]
    assert limits == ["UnaccountedMemoryHeld", "MemoryLimitUnavailable"]


def test_where_memory_is_not_limited_the_pods_themselves_may_use_more() -> None:
    """A pod that allocates all of its share has CUDA's context on top, 518 MiB on an H100."""
    node = Node()
    node.driver.version = "580.95.05"
    node.restart()
    node.driver.outside[FIRST] = 3 * 1024 + 518
    pods, listing = simple()
    events = []
    for node.now in (0.0, 10.1):
        events += node_events(node, pods, listing)
    ((_reason, text),) = events
    assert text.startswith("UnaccountedMemoryHeld") and "by pods that use more than their shares" in text


@pytest.mark.parametrize("fault", ["container", "card"])
def test_a_pass_in_which_a_number_cannot_be_read_keeps_what_was_found(fault: str) -> None:
    """The foreign memory is there all the time; every third pass can't compare it."""
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    node.driver.outside[FIRST] = 5000
    events, limits = [], []
    for step in range(20):
        node.now = 5.0 * step
        fails = fault if step % 3 == 2 else ""
        node.driver.silent = {FIRST} if fails == "card" else set()
        # Where kubelet doesn't list a container, its cards aren't known.
        events += node_events(node, pods, [] if fails == "container" else listing)
        limits.append(node.enforcer.card_limit(FIRST)[0])
        assert node.enforcer.suspicious
    assert [reason for reason, _text in events] == ["GpuMemoryUnaccounted"]
    assert limits == ["enforced"] * 3 + ["UnaccountedMemoryHeld"] * 17
    # It ends when a comparison doesn't find it any more, and not before.
    node.driver.outside.clear()
    node.driver.silent = {FIRST}
    node_events(node, pods, listing)
    assert node.enforcer.card_limit(FIRST)[0] == "UnaccountedMemoryHeld"
    node.driver.silent.clear()
    node_events(node, pods, listing)
    assert node.enforcer.card_limit(FIRST)[0] == "enforced" and not node.enforcer.suspicious


def test_a_container_that_cannot_be_read_does_not_hide_memory_of_no_share() -> None:
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    node.driver.outside[FIRST] = 5000
    for node.now in (0.0, 11.0):
        node_events(node, pods, listing)
    for node.now in (12.0, 30.0):
        node_events(node, pods, [])
    assert {violation.code.value for violation in node.enforcer.violations if violation.card == FIRST} == {
        "MemoryLimitFailed",
        "UnaccountedMemoryHeld",
    }
    assert node.enforcer.card_limit(FIRST)[0] == "UnaccountedMemoryHeld"


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_memory_of_a_container_that_outlived_its_pod_is_accounted_for(mode: str) -> None:
    """Its units are withheld, so no share lacks it."""
    node = Node(mode)
    node.run(ONE)
    node.update(*simple())
    node.driver.held[FIRST, folder_of(ONE)] = 3000 * MIB
    left = [Holder("default/a", "uid-a", "x", folder_of(ONE), ids(FIRST, 0, 3))]
    for node.now in (0.0, 60.0):
        node.enforcer.once(RESERVED, [], [], left)
        assert not node.enforcer.suspicious
    node.enforcer.once(RESERVED, [], [])
    assert node.enforcer.suspicious


def test_memory_is_not_compared_where_a_number_is_missing() -> None:
    node = Node()
    pods, listing = simple()
    node.driver.outside = {FIRST: 4000, SECOND: 4000}
    cards = [dataclasses.replace(RESERVED[0], reserved_mib=0), dataclasses.replace(RESERVED[1], healthy=False)]
    for now in (0.0, 60.0):
        node.now = now
        # The driver doesn't report its reserve; the card isn't given to pods.
        node.enforcer.once(cards, [], [])
        assert not node.enforcer.suspicious
    # A container's memory can't be read yet: its cgroup isn't found on the first card.
    node.enforcer.once(RESERVED, pods, listing)
    node.now = 75.0
    node.enforcer.once(RESERVED, pods, listing)
    assert {(violation.code.value, violation.card) for violation in node.enforcer.violations} == {
        ("MemoryLimitFailed", FIRST),
        ("UnaccountedMemoryHeld", SECOND),
    }


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_namespace_that_is_exempted_later_opens_the_cards_to_its_pods(mode: str) -> None:
    node = Node()
    node.restart(exempt=())
    node.run(*map(identifier, range(1, 5)))
    pods, listing = sidecar("monitoring")
    node.update(pods, listing)
    monitoring, foreign = folder_of(identifier(4)), Limit(0, 777 * MIB)
    assert node.driver.mib(monitoring) == {FIRST: 1, SECOND: 1}
    # Another's limit stays; a card that doesn't answer is tried again.
    node.driver.kept[SECOND, monitoring] = foreign
    node.restart(mode)
    node.driver.broken["set", FIRST] = 15
    node.update(pods, listing)
    node.driver.broken.clear()
    node.now = CLOSED_SECONDS
    assert node.update(pods, listing) == []
    assert node.driver.mib(monitoring) == {SECOND: 777}
    assert node.driver.mib(folder_of(ONE)) == ({FIRST: 3072, SECOND: 1} if mode == "auto" else {})
    gets = node.driver.gets
    node.now += 1
    node.update(pods, listing)
    assert node.driver.gets - gets == 2, "only the container with a share is read on each card"


def test_a_foreign_limit_for_all_pods_is_reported_for_no_container() -> None:
    node = Node()
    node.run(ONE)
    for uuid in (FIRST, SECOND):
        node.driver.kept[uuid, PODS] = Limit(0, 8000 * MIB)
    assert [reason for reason, _text in node.update(*simple())] == ["GpuMemoryLimitCorrected"]
    assert node.driver.kept[FIRST, folder_of(ONE)] == Limit(0, 3072 * MIB)
    assert node.driver.kept[SECOND, folder_of(ONE)] == BLOCKED
    assert node.enforcer.state == "enforced"


def test_a_container_using_an_unassigned_card_is_reported() -> None:
    node = Node()
    node.run(ONE)
    node.driver.kept[SECOND, folder_of(ONE)] = Limit(0, 3072 * MIB)
    node.driver.held[SECOND, folder_of(ONE)] = 500 * MIB
    ((reason, message),) = node.update(*simple())
    assert reason == "GpuMemoryExceeded"
    assert message.startswith(
        "ForeignMemoryHeld: container x of pod default/a holds 500 MiB of card 1, which it wasn't given"
    )
    assert node.enforcer.state == f"unenforced: {message}"
    assert [node.enforcer.card_limit(card.uuid)[0] for card in CARDS] == ["enforced", "ForeignMemoryHeld"]
    # It gets no more of it, and nothing of it once it holds less.
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 500}
    node.driver.held.clear()
    assert [reason for reason, _text in node.update(*simple())] == ["GpuCardNotGiven"]
    assert node.driver.kept[SECOND, folder_of(ONE)] == BLOCKED and node.enforcer.state == "enforced"


@pytest.mark.parametrize("before", [None, Limit(0, 9000 * MIB), Limit(5 * MIB, UNLIMITED)])
@pytest.mark.parametrize("lowers", [False, True])
def test_a_container_above_its_share_is_reported_until_it_is_below(before: Limit | None, lowers: bool) -> None:
    """A toolkit older than 1.20.1 set no limit, or a pod raised it, and memory was allocated before the first check."""
    node = Node()
    node.driver.lowers = lowers
    node.run(ONE)
    if before:
        node.driver.kept[FIRST, folder_of(ONE)] = before
    node.driver.held[FIRST, folder_of(ONE)] = 5000 * MIB + 1
    ((reason, message),) = node.update(*simple())
    assert reason == "GpuMemoryExceeded"
    assert message.startswith(
        "MemoryLimitExceeded: container x of pod default/a holds 5000 MiB of card 0, and its share is 3072"
    )
    assert node.enforcer.state == f"unenforced: {message}" and node.enforcer.refusal(FIRST) is None
    assert node.enforcer.card_limit(FIRST)[0] == "MemoryLimitExceeded"
    # It gets no more: a driver that refuses to lower the limit takes what the container holds.
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072 if lowers else 5001, SECOND: 1}
    assert node.update(*simple()) == []
    node.driver.held[FIRST, folder_of(ONE)] = 4000 * MIB
    assert node.update(*simple()) == []
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072 if lowers else 4000, SECOND: 1}
    node.driver.held.clear()
    corrected = [] if lowers else ["GpuMemoryLimitCorrected"]
    assert [reason for reason, _text in node.update(*simple())] == corrected
    assert node.enforcer.state == "enforced" and node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1}


def test_an_error_of_the_driver_is_no_violation() -> None:
    node = Node()
    node.run(ONE)
    node.driver.broken["set", FIRST] = 999
    ((reason, message),) = node.update(*simple())
    assert reason == "GpuMemoryUnlimited" and message.startswith(
        "MemoryLimitFailed: container x of pod default/a isn't"
    )
    assert node.enforcer.card_limit(FIRST)[0] == "MemoryLimitFailed"
    assert not any(violation.holds for violation in node.enforcer.violations)


def test_limited_and_used_memory_is_reported_by_card() -> None:
    node = Node()
    node.run(ONE, TWO)
    pods = [pod("a", {"x": 3}, {"x": ONE}), pod("b", {"x": 4}, {"x": TWO})]
    listing = [entry("a", x=ids(FIRST, 0, 3)), entry("b", x=ids(FIRST, 3, 2) + ids(SECOND, 0, 2))]
    node.driver.held = {(FIRST, folder_of(ONE)): 700 * MIB, (FIRST, folder_of(TWO)): 1, (SECOND, folder_of(TWO)): 0}
    node.update(pods, listing)
    node.update(pods, listing)
    assert node.enforcer.usage == {FIRST: Usage(2, 5120, 701), SECOND: Usage(1, 2048, 0)}


def test_a_container_without_a_cgroup_is_reported_after_a_wait() -> None:
    node = Node()
    assert node.update(*simple()) == []
    assert node.enforcer.state == "enforced"
    node.now = 60.0
    node.update(*simple())
    assert (
        node.enforcer.state == "unenforced: MemoryLimitFailed: the cgroup of container x of pod default/a isn't found"
    )
    node.run(ONE)
    node.update(*simple())
    assert node.enforcer.state == "enforced"


def test_a_container_that_ends_during_a_pass_is_no_error() -> None:
    node = Node()
    node.run(ONE)
    node.cgroups.folders = lambda given: {one: folder_of(one) for one in given}  # type: ignore[method-assign]
    node.driver.remove(folder_of(ONE))
    assert node.update(*simple()) == [] and node.enforcer.state == "enforced"


def test_a_lost_card_is_no_limit_problem() -> None:
    node = Node()
    node.run(ONE)
    node.driver.broken["get", FIRST] = 15
    pods, listing = simple()
    cards = [dataclasses.replace(CARDS[0], healthy=False), CARDS[1]]
    assert node.enforcer.once(cards, pods, listing) == []
    assert node.enforcer.state == "enforced"
    assert [reason for reason, _text in node.update(pods, listing)] == ["GpuMemoryUnlimited"]


def test_no_limit_is_lost_while_kubelets_list_fills_after_a_restart() -> None:
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    node.update(pods, listing)
    for seen in ([], [Entry("default/a", {})], [Entry("default/a", {"x": ()})]):
        node.update(pods, seen)
        assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1}


def test_a_restarted_plugin_keeps_every_limit() -> None:
    node = Node()
    node.run(ONE)
    node.update(*simple())
    sets = node.driver.sets
    node.restart()
    node.update(*simple())
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072, SECOND: 1}
    # Only the try on its own cgroup: set and taken away, for two cards.
    assert node.driver.sets == sets + 4 and node.enforcer.corrected == 0
    assert (FIRST, OWN) not in node.driver.kept


# --------------------------------------------------------------------------- off


def test_off_removes_our_limits_and_leaves_foreign_ones() -> None:
    node = Node()
    node.run(ONE, TWO)
    pods = [pod("a", {"x": 3}, {"x": ONE}), pod("b", {"x": 4}, {"x": TWO})]
    listing = [entry("a", x=ids(FIRST, 0, 3)), entry("b", x=ids(FIRST, 3, 4))]
    node.update(pods, listing)
    node.driver.kept[FIRST, folder_of(TWO)] = Limit(0, 777 * MIB)
    node.driver.kept[SECOND, folder_of(ONE)] = BLOCKED
    node.restart("off")
    assert node.update(pods, listing) == []
    assert node.enforcer.state == "off" and node.enforcer.refusal(FIRST) is None
    assert node.enforcer.card_limit(FIRST)[0] == "off"
    assert node.driver.kept == {(FIRST, folder_of(TWO)): Limit(0, 777 * MIB)}
    assert node.enforcer.environment({FIRST: 3}) == {}


def test_off_on_a_driver_without_limits_is_silent() -> None:
    node = Node("off")
    node.run(ONE)
    node.driver.version = "580.95.05"
    node.driver.broken = {(call, card.uuid): 13 for call in ("get", "set") for card in CARDS}
    assert node.update(*simple()) == []
    assert node.enforcer.state == "off"


# --------------------------------------------------------------------------- properties


@given(st.integers(0, 2**32))
def test_every_pass_limits_or_reports_each_container(seed: int) -> None:
    """Pods come and go, toolkits forget, pods ask for more, kubelet's list has gaps, the plugin is killed."""
    dice, node = random.Random(seed), Node()
    alive: dict[str, tuple[JsonObject, Entry, dict[str, int]]] = {}
    for step in range(25):
        what = dice.random()
        if what < 0.4 and len(alive) < 5:
            number, units = step + 1, dice.randint(1, 3)
            wide, name = dice.random() < 0.3, f"p{step}"
            given_ids = ids(FIRST, step % 4 * 3, units) + (ids(SECOND, 0, units) if wide else ())
            mib = dict.fromkeys((FIRST, SECOND) if wide else (FIRST,), units * 1024)
            one = pod(name, {"x": len(given_ids)}, {"x": identifier(number)})
            node.run(identifier(number))
            if dice.random() < 0.5:
                value = int(node.enforcer.environment({uuid: units for uuid in mib})["NVIDIA_GPU_MEMORY_LIMIT"])
                seen = (FIRST, SECOND) if dice.random() < 0.3 else tuple(mib)
                wrong = dice.choice([0, 0, 1000])
                for uuid in seen:
                    node.driver.kept[uuid, folder_of(identifier(number))] = Limit(0, (value + wrong) * MIB)
            alive[identifier(number)] = (one, Entry(f"default/{name}", {"x": given_ids}), mib)
        elif what < 0.6 and alive:
            gone = dice.choice(sorted(alive))
            alive.pop(gone)
            node.driver.remove(folder_of(gone))
        elif what < 0.7:
            node.restart()
        elif what < 0.85 and alive:
            # A foreign process changes a limit.
            node.driver.kept[FIRST, folder_of(dice.choice(sorted(alive)))] = Limit(0, dice.randint(1, 9000) * MIB)
        hidden = {one for one in alive if dice.random() < 0.15}
        listing = [row for one, (_pod, row, _mib) in alive.items() if one not in hidden]
        node.enforcer.once(CARDS, [pod for pod, _row, _mib in alive.values()], listing)
        for one, (_pod, _row, mib) in alive.items():
            if one in hidden:
                continue
            kept = node.driver.mib(folder_of(one))
            assert {uuid: kept.get(uuid) for uuid in mib} == mib
            assert {uuid: kept[uuid] for uuid in kept if uuid not in mib} == dict.fromkeys(
                {FIRST, SECOND} - set(mib), 1
            )
        assert node.enforcer.state == "enforced"
