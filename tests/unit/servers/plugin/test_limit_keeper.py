# SPDX-License-Identifier: GPL-3.0-or-later
"""Every container is held to its share: by the toolkit where it can, by the plugin where it must be mended."""

from __future__ import annotations

import dataclasses
import random
import typing as t

import pytest
from gpushare import contract
from gpushare.limit_keeper import CLOSED, LimitKeeper
from gpushare.limits import MIB, UNLIMITED, Limit, Usage
from gpushare.podresources import Entry
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

Json = dict[str, t.Any]
ONE, TWO = identifier(1), identifier(2)


@dataclasses.dataclass
class Node:
    """A keeper between a driver and cgroups; its clock is moved by hand."""

    mode: str = "auto"
    driver: FakeDriver = dataclasses.field(default_factory=FakeDriver)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cgroups = FakeCgroups(self.driver)
        self.restart()

    def restart(self, mode: str = "") -> None:
        self.mode = mode or self.mode
        self.keeper = LimitKeeper(self.mode, "GiB", self.driver, self.cgroups, lambda: self.now)
        self.keeper.look(CARDS)

    def run(self, *identifiers: str) -> None:
        self.driver.folders |= {folder_of(one) for one in identifiers}

    def told(self, pods: list[Json], listing: list[Entry]) -> list[tuple[str, str]]:
        return [(one.reason, one.message) for one in self.keeper.once(CARDS, pods, listing)]


def simple(units: int = 3, uuid: str = FIRST) -> tuple[list[Json], list[Entry]]:
    return [pod("a", {"x": units}, {"x": ONE})], [entry("a", x=ids(uuid, 0, units))]


# --------------------------------------------------------------------------- can it be done


def test_fault_20_nothing_is_promised_before_the_driver_has_shown_it() -> None:
    node = Node()
    assert node.keeper.state == contract.LIMIT_ENFORCED
    assert node.keeper.environment({FIRST: 3}) == {
        "NVIDIA_GPU_MEMORY_LIMIT": "3072",
        "NVIDIA_GPU_MEMORY_REQUEST": "0",
    }
    # Tried on the plugin's own cgroup, and nothing is left there.
    assert node.driver.kept == {}
    fresh = LimitKeeper("auto", "GiB", node.driver, node.cgroups)
    assert fresh.environment({FIRST: 3}) == {}
    assert fresh.state.startswith(contract.LIMIT_UNENFORCED)


def old_driver(node: Node) -> None:
    node.driver.version = "580.95.05"


def no_driver(node: Node) -> None:
    node.driver.version = ""


def cgroup_1(node: Node) -> None:
    node.cgroups.number = 1


def no_cgroups(node: Node) -> None:
    node.cgroups.number = 0


def not_mounted(node: Node) -> None:
    node.cgroups.mounted = False


def turned_off(node: Node) -> None:
    node.driver.broken["set", SECOND] = 3


def no_right(node: Node) -> None:
    node.driver.broken["set", FIRST] = 4


def no_controller(node: Node) -> None:
    node.driver.broken["set", FIRST] = 6


def forgets(node: Node) -> None:
    node.driver.forgets = True


def mig(node: Node) -> None:
    node.driver.mig = {SECOND}


TROUBLES = {
    "the driver is before R615": (old_driver, "NVIDIA's driver is 580.95.05, and limits need 615 or newer"),
    "no driver": (no_driver, "NVIDIA's driver doesn't answer: Driver Not Loaded"),
    "cgroup version 1": (cgroup_1, "the node runs with cgroup version 1, and limits need version 2"),
    "no cgroups": (no_cgroups, "the node's cgroups aren't mounted at /sys/fs/cgroup"),
    "not the node's": (not_mounted, "the node's cgroups aren't mounted at /sys/fs/cgroup, or the plugin isn't in them"),
    "turned off": (turned_off, "card 1 can't be limited, as the driver says: it doesn't support limits on this card"),
    "no right": (no_right, "card 0 can't be limited, as the driver says: the plugin lacks the right to"),
    "no controller": (no_controller, "card 0 can't be limited, as the driver says: it finds no controller"),
    "forgets": (forgets, "card 0 can't be limited: the driver takes a limit and doesn't show it"),
    "MIG": (mig, "MIG is on for card 1, and MIG devices can't be limited"),
}


@pytest.mark.parametrize(("trouble", "words"), TROUBLES.values(), ids=TROUBLES)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_where_it_cant_be_done_the_node_says_so_and_no_container_can_fail(
    trouble: t.Callable[[Node], None], words: str, mode: str
) -> None:
    driver = FakeDriver()
    node = Node(mode, driver)
    trouble(node)
    node.restart()
    assert node.keeper.state.startswith(f"unenforced: {words}")
    # The hook of the toolkit, asked on such a node, would keep the container from starting.
    able = [card.uuid for card in CARDS if node.keeper.environment({card.uuid: 1})]
    assert len(able) < len(CARDS) and not node.keeper.environment({FIRST: 1, SECOND: 1})
    if mode == "auto":
        assert node.keeper.refusal is None
    else:
        assert (node.keeper.refusal or "").startswith(f"gpushare_memory_limit: limits are required, but {words}")
    node.run(ONE)
    node.told(*simple())


def test_the_reason_goes_when_the_trouble_goes_and_comes_back_with_it() -> None:
    node = Node("required")
    node.driver.version = ""
    assert node.keeper.look(CARDS) is True
    assert node.keeper.look(CARDS) is False
    assert node.keeper.refusal is not None
    node.driver.version = "615.71.09"
    assert node.keeper.look(CARDS) is True
    assert node.keeper.refusal is None and node.keeper.state == "enforced"


def test_a_card_is_tried_once_and_a_new_one_when_it_comes() -> None:
    node = Node()
    before = node.driver.sets
    node.keeper.look(CARDS)
    assert node.driver.sets == before
    fresh = LimitKeeper("auto", "GiB", node.driver, node.cgroups)
    fresh.look(CARDS[:1])
    assert fresh.environment({SECOND: 1}) == {} and fresh.environment({FIRST: 1})
    fresh.look(CARDS)
    assert fresh.environment({SECOND: 1})
    fresh.look([])
    assert fresh.environment({FIRST: 1}) == {} and fresh.state == "unenforced: no card answers"


def test_one_card_that_cant_be_limited_doesnt_set_the_other_ones_pods_free() -> None:
    node = Node()
    node.driver.broken["set", SECOND] = 3
    node.restart()
    node.run(ONE)
    node.told(*simple())
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072}
    assert node.keeper.environment({FIRST: 1}) and node.keeper.state.startswith("unenforced: card 1")


# --------------------------------------------------------------------------- is it so


def test_fault_20_a_limit_that_the_toolkit_didnt_set_is_set() -> None:
    node = Node()
    node.run(ONE)
    assert node.told(*simple()) == []
    assert node.driver.kept == {(FIRST, folder_of(ONE)): Limit(0, 3 * 1024 * MIB)}
    assert node.keeper.mended == 1
    sets = node.driver.sets
    node.told(*simple())
    assert node.driver.sets == sets, "what is right is only read"


@pytest.mark.parametrize(
    "found",
    [Limit(0, 8 * 1024 * MIB), Limit(0, 1024 * MIB), Limit(1024 * MIB, 3 * 1024 * MIB), Limit(5 * MIB, UNLIMITED)],
)
def test_fault_20_a_pod_that_asked_for_another_limit_gets_its_share_and_is_told_once(found: Limit) -> None:
    node = Node()
    node.run(ONE)
    node.driver.kept[FIRST, folder_of(ONE)] = found
    ((reason, message),) = node.told(*simple())
    assert reason == "GpuMemoryLimitMended" and "held to its 3072 MiB now" in message
    assert node.driver.kept[FIRST, folder_of(ONE)] == Limit(0, 3072 * MIB)
    assert node.told(*simple()) == []


def test_a_card_that_a_container_wasnt_given_is_closed_to_it() -> None:
    node = Node()
    node.run(ONE)
    # NVIDIA_VISIBLE_DEVICES=all in the pod: the toolkit limited it on every card.
    for uuid in (FIRST, SECOND):
        node.driver.kept[uuid, folder_of(ONE)] = Limit(0, 3072 * MIB)
    ((reason, message),) = node.told(*simple())
    assert reason == "GpuCardNotGiven" and SECOND in message
    assert node.driver.kept[SECOND, folder_of(ONE)] == CLOSED
    assert node.told(*simple()) == [] and node.keeper.state == "enforced"


def test_somebodys_limit_for_all_pods_accuses_no_container() -> None:
    node = Node()
    node.run(ONE)
    for uuid in (FIRST, SECOND):
        node.driver.kept[uuid, PODS] = Limit(0, 8000 * MIB)
    assert [reason for reason, _text in node.told(*simple())] == ["GpuMemoryLimitMended"]
    assert node.driver.kept[FIRST, folder_of(ONE)] == Limit(0, 3072 * MIB)
    assert (SECOND, folder_of(ONE)) not in node.driver.kept
    assert node.keeper.state == "enforced"


def test_a_container_that_holds_a_card_that_it_wasnt_given_is_named() -> None:
    node = Node()
    node.run(ONE)
    node.driver.kept[SECOND, folder_of(ONE)] = Limit(0, 3072 * MIB)
    node.driver.held[SECOND, folder_of(ONE)] = 500 * MIB
    ((reason, message),) = node.told(*simple())
    assert reason == "GpuMemoryUnlimited"
    assert message.startswith("container x of pod default/a holds 500 MiB of card 1, which it wasn't given")
    assert node.keeper.state == f"unenforced: {message}"


def test_a_container_that_holds_more_than_its_share_is_named_until_it_gives_it_back() -> None:
    node = Node()
    node.run(ONE)
    node.driver.kept[FIRST, folder_of(ONE)] = Limit(0, 9000 * MIB)
    node.driver.held[FIRST, folder_of(ONE)] = 5000 * MIB
    ((reason, message),) = node.told(*simple())
    assert reason == "GpuMemoryUnlimited" and message.endswith("it holds 5000 MiB already")
    assert node.keeper.state == f"unenforced: {message}" and node.keeper.refusal is None
    assert node.told(*simple()) == []
    node.driver.held.clear()
    assert [reason for reason, _text in node.told(*simple())] == ["GpuMemoryLimitMended"]
    assert node.keeper.state == "enforced" and node.driver.mib(folder_of(ONE)) == {FIRST: 3072}


def test_what_is_limited_and_used_is_told_by_card() -> None:
    node = Node()
    node.run(ONE, TWO)
    pods = [pod("a", {"x": 3}, {"x": ONE}), pod("b", {"x": 4}, {"x": TWO})]
    listing = [entry("a", x=ids(FIRST, 0, 3)), entry("b", x=ids(FIRST, 3, 2) + ids(SECOND, 0, 2))]
    node.driver.held = {(FIRST, folder_of(ONE)): 700 * MIB, (FIRST, folder_of(TWO)): 1, (SECOND, folder_of(TWO)): 0}
    node.told(pods, listing)
    node.told(pods, listing)
    assert node.keeper.usage == {FIRST: Usage(2, 5120, 701), SECOND: Usage(1, 2048, 0)}


def test_a_container_without_its_cgroup_is_waited_for_and_then_named() -> None:
    node = Node()
    assert node.told(*simple()) == []
    assert node.keeper.state == "enforced"
    node.now = 60.0
    node.told(*simple())
    assert node.keeper.state == "unenforced: the cgroup of container x of pod default/a isn't found"
    node.run(ONE)
    node.told(*simple())
    assert node.keeper.state == "enforced"


def test_a_container_that_ends_in_the_middle_is_no_trouble() -> None:
    node = Node()
    node.run(ONE)
    cgroups = node.cgroups
    cgroups.folder = folder_of  # type: ignore[method-assign]
    node.driver.remove(folder_of(ONE))
    assert node.told(*simple()) == [] and node.keeper.state == "enforced"


def test_a_lost_card_is_told_elsewhere() -> None:
    node = Node()
    node.run(ONE)
    node.driver.broken["get", FIRST] = 15
    pods, listing = simple()
    cards = [dataclasses.replace(CARDS[0], healthy=False), CARDS[1]]
    assert node.keeper.once(cards, pods, listing) == []
    assert node.keeper.state == "enforced"
    assert [one.reason for one in node.keeper.once(CARDS, pods, listing)] == ["GpuMemoryUnlimited"]


def test_a_restarted_container_gets_its_limit_anew_and_units_given_on_follow_kubelet() -> None:
    node = Node()
    node.run(ONE)
    node.told(*simple())
    node.driver.remove(folder_of(ONE))
    node.run(TWO)
    node.told([pod("a", {"x": 3}, {"x": TWO})], [entry("a", x=ids(FIRST, 0, 3))])
    assert node.driver.mib(folder_of(TWO)) == {FIRST: 3072}
    # The same units, released and given to another pod, on another card of the same container ID's successor.
    node.driver.remove(folder_of(TWO))
    node.run(ONE)
    node.told([pod("b", {"y": 2}, {"y": ONE})], [entry("b", y=ids(SECOND, 0, 2))])
    assert node.driver.mib(folder_of(ONE)) == {SECOND: 2048}


def test_while_kubelets_list_fills_after_its_restart_no_limit_is_lost() -> None:
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    node.told(pods, listing)
    for seen in ([], [Entry("default/a", {})], [Entry("default/a", {"x": ()})]):
        node.told(pods, seen)
        assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072}


def test_a_plugin_that_starts_anew_loses_none_and_changes_none() -> None:
    node = Node()
    node.run(ONE)
    node.told(*simple())
    sets = node.driver.sets
    node.restart()
    node.told(*simple())
    assert node.driver.mib(folder_of(ONE)) == {FIRST: 3072}
    # Only the try on its own cgroup: set and taken away, for two cards.
    assert node.driver.sets == sets + 4 and node.keeper.mended == 0
    assert (FIRST, OWN) not in node.driver.kept


# --------------------------------------------------------------------------- off


def test_off_takes_our_limits_away_and_leaves_everybody_elses() -> None:
    node = Node()
    node.run(ONE, TWO)
    pods = [pod("a", {"x": 3}, {"x": ONE}), pod("b", {"x": 4}, {"x": TWO})]
    listing = [entry("a", x=ids(FIRST, 0, 3)), entry("b", x=ids(FIRST, 3, 4))]
    node.told(pods, listing)
    node.driver.kept[FIRST, folder_of(TWO)] = Limit(0, 777 * MIB)
    node.driver.kept[SECOND, folder_of(ONE)] = CLOSED
    node.restart("off")
    assert node.told(pods, listing) == []
    assert node.keeper.state == "off" and node.keeper.refusal is None
    assert node.driver.kept == {(FIRST, folder_of(TWO)): Limit(0, 777 * MIB)}
    assert node.keeper.environment({FIRST: 3}) == {}


def test_off_on_a_driver_without_limits_is_silent() -> None:
    node = Node("off")
    node.run(ONE)
    node.driver.version = "580.95.05"
    node.driver.broken = {(call, card.uuid): 13 for call in ("get", "set") for card in CARDS}
    assert node.told(*simple()) == []
    assert node.keeper.state == "off"


def test_leaving_the_node_releases_what_is_held() -> None:
    node = Node()
    node.run(ONE)
    pods, listing = simple()
    node.told(pods, listing)
    node.keeper.release(CARDS, pods, listing)
    assert node.driver.kept == {}


# --------------------------------------------------------------------------- whatever happens


@given(st.integers(0, 2**32))
def test_after_every_pass_each_container_is_held_to_its_share_or_named(seed: int) -> None:
    """Pods come and go, toolkits forget, pods ask for more, kubelet's list has gaps, the plugin is killed."""
    dice, node = random.Random(seed), Node()
    alive: dict[str, tuple[Json, Entry, dict[str, int]]] = {}
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
                value = int(node.keeper.environment({uuid: units for uuid in mib})["NVIDIA_GPU_MEMORY_LIMIT"])
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
            # Somebody else turns a knob.
            node.driver.kept[FIRST, folder_of(dice.choice(sorted(alive)))] = Limit(0, dice.randint(1, 9000) * MIB)
        hidden = {one for one in alive if dice.random() < 0.15}
        listing = [row for one, (_pod, row, _mib) in alive.items() if one not in hidden]
        node.keeper.once(CARDS, [pod for pod, _row, _mib in alive.values()], listing)
        for one, (_pod, _row, mib) in alive.items():
            if one in hidden:
                continue
            kept = node.driver.mib(folder_of(one))
            assert {uuid: kept.get(uuid) for uuid in mib} == mib
            assert all(kept[uuid] == 1 for uuid in kept if uuid not in mib)
        assert node.keeper.state == "enforced"
