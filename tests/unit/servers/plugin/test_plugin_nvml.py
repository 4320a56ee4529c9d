# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards between two reads, their health, and the NVML client over a library that fails like the real one."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
import types
import typing as t
from unittest.mock import Mock

import pynvml
import pytest
from gpushare.nvml import health
from gpushare.nvml import inventory as nvml_inventory
from gpushare.nvml.library import (
    MIG,
    RECOVERY_ACTIONS,
    REMAP_FAILED,
    UNIFIED,
    UNREGISTERED,
    NvidiaMl,
    NvmlCard,
    NvmlError,
    Xid,
)
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.card_exclusion import Exclusion, parse
from gpushare.shared._contracts.gpushare import Reason, Refusal
from plugin_fakes import FakeNvml, seen

# --------------------------------------------------------------------------- cards


BROKEN = Refusal(Reason.RECOVERY_REQUIRED, "broken")


def test_merge_keeps_lost_cards_and_their_index() -> None:
    first = nvml_inventory.merge([], [seen(0), seen(1), seen(2)], "GiB")
    assert [(one.index, one.units, one.healthy) for one in first] == [(0, 16, True), (1, 16, True), (2, 16, True)]
    # NVML renumbers the cards after one has fallen off the bus.
    shifted = [dataclasses.replace(seen(2), index=1), seen(0)]
    second = nvml_inventory.merge(first, shifted, "GiB")
    assert nvml_inventory.merge(second, [seen(0, 15)], "GiB")[0].units == 15, "a card's memory may change"
    assert [(one.uuid, one.index, one.healthy) for one in second] == [
        (seen(0).uuid, 0, True),
        (seen(1).uuid, 1, False),
        (seen(2).uuid, 2, True),
    ]
    third = nvml_inventory.merge(second, [*shifted, dataclasses.replace(seen(3, 40), index=2)], "GiB")
    assert [(one.index, one.units) for one in third] == [(0, 16), (1, 16), (2, 16), (3, 40)]
    assert nvml_inventory.merge(third, [seen(n, 40 if n == 3 else 16) for n in range(4)], "GiB")[1].healthy


@pytest.mark.parametrize(("unit", "units"), [("GiB", 15), ("MiB", 15784)])
def test_what_the_driver_keeps_is_not_shared(unit: str, units: int) -> None:
    driver = FakeNvml(dataclasses.replace(seen(0), reserved_mib=450))
    inventory = nvml_inventory.Inventory(driver, unit, reserve_mib=150)
    inventory.refresh()
    (card,) = inventory.cards
    assert (card.memory_mib, card.reserved_mib, card.shared_mib, card.units) == (16384, 600, 15784, units)
    assert contract.cards_from_annotation(contract.cards_to_annotation([card])) == [card]
    # Units don't come and go with a few MiB, nor with an answer that lacks the reserve.
    for reserved in (440, 0, 450):
        driver.found = [dataclasses.replace(seen(0), reserved_mib=reserved)]
        assert not inventory.refresh()
    driver.found = [dataclasses.replace(seen(0), reserved_mib=1 << 20)]
    inventory.refresh()
    assert inventory.reason == f"no card of this node holds one whole unit of 1 {unit}"


def test_an_update_takes_no_unit_that_a_pod_holds() -> None:
    """A plugin of before announced 16 units, and the driver keeps a part of the last one."""
    held: list[int | None] = [None, 16, 15]
    driver = FakeNvml(dataclasses.replace(seen(0), reserved_mib=450), seen(1))
    inventory = nvml_inventory.Inventory(driver, "GiB")
    inventory.restore(nvml_inventory.merge([], [seen(0), seen(1)], "GiB"), {0})
    asked: list[int] = []
    inventory.held_slots = lambda card: (asked.append(card.index), held[0])[1]  # type: ignore[func-returns-value]
    found = []
    while held:
        inventory.refresh()
        found.append([(card.units, card.reserved_mib) for card in inventory.cards])
        held.pop(0)
    assert found == [[(16, 0), (16, 0)], [(16, 0), (16, 0)], [(15, 450), (16, 0)]]
    assert asked == [0, 0, 0]
    inventory.refresh()
    assert [card.units for card in inventory.cards] == [15, 16], "for good"


def test_a_reserve_that_costs_no_unit_needs_no_wait() -> None:
    driver = FakeNvml(dataclasses.replace(seen(0), memory_mib=15360 + 500, reserved_mib=450))
    inventory = nvml_inventory.Inventory(driver, "GiB")
    inventory.restore([contract.Card(0, seen(0).uuid, 0, 15360 + 500, 15)], {0})
    inventory.held_slots = lambda card: None
    inventory.refresh()
    assert [(card.units, card.reserved_mib) for card in inventory.cards] == [(15, 450)]


def test_inventory_reports_a_reason_and_announces_no_unusable_card() -> None:
    driver = FakeNvml()
    driver.problem = "no driver"
    inventory = nvml_inventory.Inventory(driver, "GiB")
    assert inventory.reason == "the cards haven't been read yet"
    assert not inventory.refresh() and inventory.reason == "no driver" and inventory.cards == ()
    driver.problem = ""
    inventory.refresh()
    assert inventory.reason == "NVIDIA's driver answers, but has no card"
    driver.problem, driver.found = "", [seen(0), dataclasses.replace(seen(1), uuid=seen(0).uuid + "-")]
    inventory.refresh()
    assert inventory.reason is not None and "same UUID" in inventory.reason and inventory.cards == ()
    driver.found, inventory = [seen(0)], nvml_inventory.Inventory(driver, "GiB")
    inventory.refresh()
    driver.problem = "the driver is gone"
    inventory.refresh()
    assert inventory.reason == "the driver is gone" and [card.healthy for card in inventory.cards] == [False]


def test_inventory_of_cards_below_one_unit() -> None:
    inventory = nvml_inventory.Inventory(FakeNvml(dataclasses.replace(seen(0), memory_mib=1000)), "GiB")
    assert not inventory.refresh()
    assert inventory.reason == "no card of this node holds one whole unit of 1 GiB"


def test_inventory_of_a_card_without_memory_of_its_own() -> None:
    """It is announced with no unit, so that the node's annotation says why there is none."""
    unified = dataclasses.replace(seen(0), memory_mib=0, problem=UNIFIED)
    inventory = nvml_inventory.Inventory(FakeNvml(unified), "GiB")
    assert inventory.refresh()
    assert inventory.reason == f"no card of this node can be given to pods: {UNIFIED.text}"
    assert [(card.units, card.healthy, card.code) for card in inventory.cards] == [(0, False, "UnifiedMemory")]
    text = contract.cards_to_annotation(inventory.cards)
    assert contract.cards_from_annotation(text) == list(inventory.cards)


def test_a_card_that_is_excluded_later_stays_while_pods_have_it() -> None:
    driver = FakeNvml(seen(0), seen(1))
    inventory = nvml_inventory.Inventory(driver, "GiB")
    inventory.refresh()
    driver.found, driver.left_out = [seen(1)], frozenset({seen(0).uuid})
    in_use = {seen(0).uuid}
    inventory.in_use = lambda card: card.uuid in in_use
    inventory.refresh()
    assert [(card.index, card.healthy, card.code) for card in inventory.cards] == [
        (0, False, "Excluded"),
        (1, True, ""),
    ]
    in_use.clear()
    inventory.refresh()
    assert [(card.index, card.healthy) for card in inventory.cards] == [(1, True)] and inventory.reason is None
    driver.found, driver.left_out = [], driver.left_out | {seen(1).uuid}
    inventory.refresh()
    assert inventory.reason == "gpu_exclude names every card of this node" and inventory.cards == ()
    assert inventory.seconds_without_cards == 0, "no restart would change it"


# --------------------------------------------------------------------------- health of a card


def test_application_xids_do_not_make_a_card_unhealthy() -> None:
    memory = health.Health(quiet=300, ignored=[74])
    assert not any(memory.note("GPU-a", xid, 0) for xid in (13, 31, 43, 45, 68, 109, 74, 154))
    assert memory.xid("GPU-a", 1) is None


@pytest.mark.parametrize("xid", [48, 4711])
def test_other_xids_last_until_the_quiet_period_ends(xid: int) -> None:
    memory = health.Health(quiet=300)
    assert memory.note("GPU-a", xid, 100)
    assert memory.note("GPU-a", xid, 200)
    assert memory.xid("GPU-b", 201) is None
    assert memory.xid("GPU-a", 499) == xid
    assert memory.xid("GPU-a", 500) is None


def conditions(inventory: nvml_inventory.Inventory) -> list[tuple[int, bool, str]]:
    return [(card.index, card.healthy, card.reason) for card in inventory.cards]


def test_a_card_with_an_xid_is_unhealthy_with_the_reason_and_recovers() -> None:
    driver = FakeNvml(seen(0), seen(1))
    inventory = nvml_inventory.Inventory(driver, "GiB", health.Health(quiet=0.3))
    reported: list[tuple[str, int]] = []
    inventory.on_xid = lambda uuid, xid: reported.append((uuid, xid))
    assert inventory.refresh() and not inventory.refresh()
    driver.fail(1, 31)
    driver.fail(1, 95)
    began = time.monotonic()
    inventory.watch(30, threading.Event())
    assert time.monotonic() - began < 5
    assert reported == [(seen(1).uuid, 31), (seen(1).uuid, 95)]
    assert inventory.refresh()
    assert conditions(inventory) == [(0, True, ""), (1, False, "XID 95 (an uncontained memory error)")]
    assert inventory.reason is None
    time.sleep(0.4)
    assert inventory.refresh()
    assert conditions(inventory) == [(0, True, ""), (1, True, "")]


def test_watch_ends_on_the_stop_event() -> None:
    inventory = nvml_inventory.Inventory(FakeNvml(seen(0)), "GiB")
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    inventory.watch(60, stop)
    assert time.monotonic() - began < 3


def test_a_driver_without_events_causes_no_busy_loop() -> None:
    calls: list[float] = []

    class Silent(FakeNvml):
        def xids(self, seconds: float) -> list[Xid]:
            calls.append(seconds)
            return []

    inventory = nvml_inventory.Inventory(Silent(seen(0)), "GiB")
    inventory.watch(2.5, threading.Event())
    assert len(calls) == 3


def test_mig_is_reported_and_not_shared() -> None:
    driver = FakeNvml(seen(0), dataclasses.replace(seen(1), problem=MIG))
    inventory = nvml_inventory.Inventory(driver, "GiB")
    inventory.refresh()
    assert conditions(inventory) == [(0, True, ""), (1, False, MIG.text)]
    assert inventory.reason is None
    driver.found = [dataclasses.replace(seen(n), problem=MIG) for n in range(2)]
    inventory.refresh()
    assert inventory.reason is not None and inventory.reason.startswith(
        "no card of this node can be given to pods: MIG is on"
    )
    driver.found[0] = dataclasses.replace(seen(0), problem=BROKEN)
    inventory.refresh()
    assert inventory.reason.startswith("no card of this node can be given to pods: card 0: broken; card 1: MIG is")
    driver.found = [seen(0), seen(1)]
    inventory.refresh()
    assert conditions(inventory) == [(0, True, ""), (1, True, "")] and inventory.reason is None


def test_guards_follow_the_cards_own_problem() -> None:
    driver = FakeNvml(seen(0), dataclasses.replace(seen(1), problem=BROKEN))
    inventory = nvml_inventory.Inventory(driver, "GiB")
    refreshed: list[list[int]] = []
    inventory.on_refresh = lambda cards: refreshed.append([card.index for card in cards])
    inventory.guards = [lambda uuid: None, lambda uuid: Refusal(Reason.CDI_UNAVAILABLE, "not here")]
    inventory.refresh()
    assert conditions(inventory) == [(0, False, "not here"), (1, False, "broken")]
    assert refreshed == [[0]]


# --------------------------------------------------------------------------- after the plugin's own restart


def announced(*cards: NvmlCard) -> tuple[contract.Card, ...]:
    """The cards that an earlier plugin wrote on the node."""
    return nvml_inventory.merge((), cards, "GiB")


def test_fault_07_cards_keep_their_index_when_the_plugin_starts_with_one_of_them_lost() -> None:
    """NVML calls the second card 0 now; pods that are booked on card 1 mustn't be counted on another one."""
    inventory = nvml_inventory.Inventory(FakeNvml(dataclasses.replace(seen(1), index=0)), "GiB")
    inventory.restore(announced(seen(0), seen(1)), held=[0, 1])
    inventory.refresh()
    assert [(card.uuid, *rest) for card, rest in zip(inventory.cards, conditions(inventory), strict=True)] == [
        (seen(0).uuid, 0, False, nvml_inventory.LOST.text),
        (seen(1).uuid, 1, True, ""),
    ]


def test_a_removed_card_without_bookings_is_dropped() -> None:
    driver = FakeNvml(dataclasses.replace(seen(1), index=0))
    driver.problem = "NVIDIA's driver isn't there"
    inventory = nvml_inventory.Inventory(driver, "GiB")
    inventory.restore(announced(seen(0), seen(1)), held=[1])
    inventory.refresh()
    assert inventory.cards == (), "restored cards wait for the driver"
    driver.problem = ""
    inventory.refresh()
    assert conditions(inventory) == [(1, True, "")]


def test_a_card_announced_twice_is_one() -> None:
    inventory = nvml_inventory.Inventory(FakeNvml(seen(0)), "GiB")
    twice = [dataclasses.replace(announced(seen(0))[0], index=n) for n in range(2)]
    inventory.restore(twice, held=[0, 1])
    inventory.refresh()
    assert [condition[1:] for condition in conditions(inventory)] == [(True, "")]


def test_restored_cards_use_the_current_unit() -> None:
    inventory = nvml_inventory.Inventory(FakeNvml(seen(1)), "MiB")
    inventory.restore(announced(seen(0), seen(1)), held=[0])
    inventory.refresh()
    assert [card.units for card in inventory.cards] == [16384, 16384]


# --------------------------------------------------------------------------- NVML


class Library(types.ModuleType):
    """nvidia-ml-py with its own errors and structures, over two cards that a test breaks."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.inits = self.shutdowns = 0
        self.init_error: Exception | None = None
        self.errors: dict[int, Exception] = {}
        self.count_errors: list[Exception] = []
        self.mig: dict[int, int] = {}
        self.recovery: dict[int, int] = {}
        self.remapped: dict[int, tuple[int, int, int, int]] = {}
        self.fabric: dict[int, tuple[int, int]] = {}
        self.unified: set[int] = set()
        self.reserve: int | Exception = 0
        self.inside_a_limit = 0
        self.sets: list[dict[int, int]] = []
        self.freed: list[int] = []
        self.events: list[t.Any] = []
        self.register_error: Exception | None = None
        self._handles = [pynvml.struct_c_nvmlDevice_t() for _turn in range(2)]

    def __getattr__(self, name: str) -> t.Any:
        # Errors, structures and constants are the real ones; a function that isn't simulated here isn't used.
        if name.startswith(("NVML", "c_nvml", "nvmlEventType", "nvmlMemory")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _number(self, handle: t.Any) -> int:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        number = next(n for n, one in enumerate(self._handles) if ctypes.addressof(one) == address)
        if number in self.errors:
            raise self.errors[number]
        return number

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_errors:
            raise self.count_errors.pop()
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> t.Any:
        if index in self.errors:
            raise self.errors[index]
        return ctypes.pointer(self._handles[index])

    def nvmlDeviceGetUUID(self, handle: t.Any) -> str:
        return f"GPU-{self._number(handle)}"

    def nvmlDeviceGetMinorNumber(self, handle: t.Any) -> int:
        return self._number(handle) + 3

    def nvmlDeviceGetPciInfo(self, handle: t.Any) -> t.Any:
        if (number := self._number(handle)) == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(domain=1, bus=0xC1, device=number)

    nvmlDeviceGetName = Mock(return_value="Card")

    def nvmlDeviceGetGpuFabricInfo(self, handle: t.Any, info: t.Any) -> None:
        if (number := self._number(handle)) not in self.fabric:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info._obj.state, info._obj.status = self.fabric[number]

    def nvmlDeviceGetMemoryInfo(self, handle: t.Any, version: int = 0) -> t.Any:
        if self._number(handle) in self.unified:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        total = (16 << 30) + 12345
        if not version:
            return types.SimpleNamespace(total=total, used=(3 << 30) + 1)
        assert version == pynvml.nvmlMemory_v2
        match self.reserve:
            case Exception() as error:
                raise error
            case reserve:
                return types.SimpleNamespace(total=total - self.inside_a_limit, reserved=reserve, used=1)

    def nvmlDeviceGetMigMode(self, handle: t.Any) -> list[int]:
        if (number := self._number(handle)) not in self.mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [self.mig[number], self.mig[number]]

    def nvmlDeviceGetFieldValues(self, handle: t.Any, fields: list[int]) -> t.Any:
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        number = self._number(handle)
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        values[0].nvmlReturn = pynvml.NVML_SUCCESS if number in self.recovery else pynvml.NVML_ERROR_NOT_SUPPORTED
        values[0].value.uiVal = self.recovery.get(number, 1)
        return values

    def nvmlDeviceGetRemappedRows(self, handle: t.Any) -> tuple[int, int, int, int]:
        if (number := self._number(handle)) not in self.remapped:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.remapped[number]

    def nvmlEventSetCreate(self) -> int:
        self.sets.append({})
        return len(self.sets) - 1

    def nvmlEventSetFree(self, number: int) -> None:
        self.freed.append(number)

    def nvmlDeviceRegisterEvents(self, handle: t.Any, types_: int, number: int) -> None:
        if self.register_error:
            raise self.register_error
        assert types_ == pynvml.nvmlEventTypeXidCriticalError
        self.sets[number][self._number(handle)] = types_

    def nvmlEventSetWait_v2(self, number: int, milliseconds: int) -> t.Any:
        assert number not in self.freed
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        if isinstance(event := self.events.pop(0), Exception):
            raise event
        index, kind, data = event
        found = pynvml.c_nvmlEventData_t()
        found.device, found.eventType, found.eventData = ctypes.pointer(self._handles[index]), kind, data
        return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    one = Library()
    monkeypatch.setitem(sys.modules, "pynvml", one)
    return one


def error(code: str) -> Exception:
    return t.cast(Exception, pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}")))


def test_nvml_cards(library: Library) -> None:
    driver = NvidiaMl()
    assert driver.cards() == [
        NvmlCard(0, "GPU-0", 3, 16384, "Card", 3073, bus="0001:c1:00.0"),
        NvmlCard(1, "GPU-1", 4, 16384, "Card", 3073),
    ]
    driver.cards()
    assert (library.inits, library.shutdowns) == (1, 0)


@pytest.mark.parametrize(
    ("reserve", "inside_a_limit", "mib"),
    [
        ((450 << 20) + 1, 0, 451),
        # R510 was the first with version 2; WSL has the function and no answer.
        *((pynvml.NVMLError(code), 0, 0) for code in (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_UNKNOWN)),
        (pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH), 0, 0),
        # R615 tells a process in a limited cgroup of the limit, not of the card.
        (0, 1 << 30, 0),
        (7 << 20, 1 << 30, 0),
    ],
)
def test_the_reserve_of_driver_and_firmware(
    library: Library, reserve: int | Exception, inside_a_limit: int, mib: int
) -> None:
    library.reserve, library.inside_a_limit = reserve, inside_a_limit
    assert [(card.memory_mib, card.reserved_mib) for card in NvidiaMl().cards()] == [(16384, mib)] * 2


def test_nvml_without_library_or_driver(library: Library) -> None:
    driver = NvidiaMl()
    library.init_error = error("LIBRARY_NOT_FOUND")
    with pytest.raises(NvmlError, match=r"libnvidia-ml\.so\.1 can't be loaded"):
        driver.cards()
    library.init_error = error("DRIVER_NOT_LOADED")
    with pytest.raises(NvmlError, match="doesn't answer: Driver Not Loaded"):
        driver.cards()
    library.init_error = None
    assert len(driver.cards()) == 2


def test_nvml_one_lost_card_leaves_the_other(library: Library) -> None:
    driver = NvidiaMl()
    library.errors[0] = error("GPU_IS_LOST")
    assert [card.index for card in driver.cards()] == [1]


def test_nvml_is_initialised_again(library: Library) -> None:
    driver = NvidiaMl()
    driver.cards()
    library.count_errors.append(error("UNINITIALIZED"))
    assert len(driver.cards()) == 2 and (library.inits, library.shutdowns) == (2, 1)


def test_nvml_problems(library: Library) -> None:
    driver = NvidiaMl()
    library.mig[1] = 0
    library.remapped[1] = (1, 0, 1, 0)
    # Actions that concern the links between cards are no problem of one card.
    for action in (0, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, pynvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN):
        library.recovery[1] = action
        assert [card.problem for card in driver.cards()] == [None, None]
    library.remapped[1] = (0, 1, 0, 1)
    assert [card.problem for card in driver.cards()] == [None, REMAP_FAILED]
    library.recovery[1] = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    reset = Refusal(Reason.RECOVERY_REQUIRED, "the driver requests a reset of the card")
    assert [card.problem for card in driver.cards()] == [None, reset]
    library.mig[1] = 1
    assert [card.problem for card in driver.cards()] == [None, MIG]


@pytest.mark.parametrize(
    ("state", "status", "registered"),
    [
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, 0, True),
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, 0, True),
        (pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0, False),
        (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, True),
        (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_ERROR_UNKNOWN, False),
    ],
)
def test_nvml_a_card_that_isnt_registered_with_its_nvswitches(
    library: Library, state: int, status: int, registered: bool
) -> None:
    library.fabric[1] = (state, status)
    assert [card.problem for card in NvidiaMl().cards()] == [None, None if registered else UNREGISTERED]


def test_nvml_a_card_without_memory_of_its_own(library: Library) -> None:
    library.unified.add(0)
    first, second = NvidiaMl().cards()
    assert (first.memory_mib, first.used_mib, first.problem) == (0, 0, UNIFIED) and second.problem is None


@pytest.mark.parametrize("entry", ["GPU-0", "0001:c1:00.0"])
def test_nvml_cards_that_are_left_alone(library: Library, entry: str) -> None:
    """Nothing but its identity is read of it: its memory can't be, and no error of it is waited for."""
    # The card's UUID is a shorter one than any of the driver.
    driver = NvidiaMl(Exclusion((entry.lower(),)))
    library.mig[0] = 1
    assert [(card.index, card.uuid) for card in driver.cards()] == [(1, "GPU-1")]
    assert driver.left_out == {"GPU-0"} and set(library.sets[-1]) == {1}
    assert NvidiaMl(parse(["card*"])).cards() == []


def test_nvml_xids(library: Library) -> None:
    driver = NvidiaMl()
    assert driver.xids(0.1) == []
    driver.cards()
    critical = pynvml.nvmlEventTypeXidCriticalError
    library.events = [(1, critical, 79), (0, pynvml.nvmlEventTypeClock, 5), (0, critical, 48)]
    assert [driver.xids(0.1) for _turn in range(4)] == [[Xid("GPU-1", 79)], [], [Xid("GPU-0", 48)], []]


def test_nvml_an_xid_of_a_lost_card_still_names_it(library: Library) -> None:
    driver = NvidiaMl()
    driver.cards()
    library.errors[1] = error("GPU_IS_LOST")
    library.events = [(1, pynvml.nvmlEventTypeXidCriticalError, 79)]
    assert driver.xids(0.1) == [Xid("GPU-1", 79)]


def test_nvml_events_follow_the_cards_that_are_there(library: Library) -> None:
    driver = NvidiaMl()
    for _turn in range(3):
        driver.cards()
    assert [set(one) for one in library.sets] == [{0, 1}] and library.freed == []
    library.errors[1] = error("GPU_IS_LOST")
    library.events = [error("GPU_IS_LOST")]
    assert driver.xids(0.1) == []
    driver.cards()
    driver.cards()
    del library.errors[1]
    driver.cards()
    assert [set(one) for one in library.sets] == [{0, 1}, {0}, {0, 1}] and library.freed == [0, 1]


def test_nvml_events_end_with_the_driver(library: Library) -> None:
    driver = NvidiaMl()
    driver.cards()
    library.count_errors.append(error("UNINITIALIZED"))
    driver.cards()
    assert library.freed == [0] and len(library.sets) == 2
    library.init_error = error("DRIVER_NOT_LOADED")
    library.count_errors.append(error("UNINITIALIZED"))
    with pytest.raises(NvmlError):
        driver.cards()
    assert library.freed == [0, 1] and driver.xids(0.1) == []


def test_nvml_cards_without_events_are_shared_nevertheless(library: Library) -> None:
    driver = NvidiaMl()
    library.register_error = error("NOT_SUPPORTED")
    for _turn in range(3):
        assert len(driver.cards()) == 2
    assert len(library.sets) == 1 and driver.xids(0.01) == []


def test_nvml_real_library_has_the_expected_interface() -> None:
    for name in (name for name in vars(Library) if name.startswith("nvml")):
        assert callable(getattr(pynvml, name))
    for name in ("LibraryNotFound", "Uninitialized", "Timeout", "NotSupported", "FunctionNotFound", "InvalidArgument"):
        assert issubclass(getattr(pynvml, f"NVMLError_{name}"), pynvml.NVMLError)
    assert pynvml.c_nvmlEventData_t._fields_[0] == ("device", pynvml.c_nvmlDevice_t)
    names = ("GPU_RESET", "NODE_REBOOT", "DRAIN_AND_RESET", "BUS_RESET", "SYSTEM_REBOOT")
    assert {getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{name}") for name in names} == RECOVERY_ACTIONS.keys()
