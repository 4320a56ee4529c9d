# SPDX-License-Identifier: GPL-3.0-or-later
"""Which slices a node's cards make, and that any state of them in the API becomes that by the planned requests."""

from __future__ import annotations

import copy
import dataclasses
import typing as t

import pytest
from dra_kit import NODE
from gpushare.dra import slices
from gpushare.dra.command import check_unique
from gpushare.dra.topology import pcie_root
from gpushare.nvml import inventory as nvml_inventory
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from hypothesis import given
from hypothesis import strategies as st
from plugin_fakes import FakeNvml, seen

OWNER = "uid-node"


def card(index: int, units: int = 16, **more: t.Any) -> contract.Card:
    return contract.Card(index, f"GPU-{index:08X}-AAAA", index, units * 1024, units, model="Simulated GPU", **more)


def test_a_card_as_a_device() -> None:
    facts = slices.Facts(
        "580.95.05", {card(1).uuid: "0000:02:00.0"}, {card(1).uuid: "pci0000:00"}, {card(1).uuid: "enforced"}
    )
    assert slices.device(card(1), "GiB", facts) == {
        "name": "gpu-00000001-aaaa",
        "attributes": {
            "uuid": {"string": "GPU-00000001-AAAA"},
            "index": {"int": 1},
            "model": {"string": "Simulated GPU"},
            "driverVersion": {"version": "580.95.5"},
            "memoryLimit": {"string": "enforced"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:02:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
        },
        "capacity": {
            "memory": {
                "value": "16Gi",
                "requestPolicy": {"default": "16Gi", "validRange": {"min": "1Gi", "step": "1Gi"}},
            }
        },
        "allowMultipleAllocations": True,
    }
    bare = slices.device(dataclasses.replace(card(0), model=""), "GiB", slices.Facts())
    assert set(bare["attributes"]) == {"uuid", "index"}
    lost = dataclasses.replace(card(0), healthy=False, code="XIDError", reason="XID 79 (…)")
    taint = {"key": "gpu.kubegpu.share/unhealthy", "value": "XIDError", "effect": "NoSchedule"}
    assert slices.device(lost, "GiB", slices.Facts())["taints"] == [taint]


def test_devices_in_the_order_of_the_cards_and_only_with_a_whole_unit() -> None:
    found = slices.devices([card(2), card(0), card(1, units=0), card(3, units=1)], "GiB", slices.Facts())
    assert [one["name"] for one in found] == ["gpu-00000000-aaaa", "gpu-00000002-aaaa", "gpu-00000003-aaaa"]
    policy = {"default": "1Gi", "validValues": ["1Gi"]}
    assert found[-1]["capacity"]["memory"] == {"value": "1Gi", "requestPolicy": policy}
    (odd,) = slices.devices([card(0, units=15784)], "MiB", slices.Facts())
    assert odd["capacity"]["memory"] == {
        "value": "15784Mi",
        "requestPolicy": {"default": "15784Mi", "validRange": {"min": "1Mi", "step": "1Mi"}},
    }


@given(st.integers(1, 1 << 40))
def test_a_quantity_is_the_same_memory(mib: int) -> None:
    assert contract.quantity(slices.quantity(mib)) == mib << 20


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.95.05", "580.95.5"),
        ("615.71", "615.71.0"),
        ("570.00.1", "570.0.1"),
        ("", ""),
        ("a.b", ""),
        ("1.2.3.4", ""),
    ],
)
def test_a_drivers_version_is_a_semantic_one(text: str, version: str) -> None:
    assert slices.semantic_version(text) == version


@given(st.text("abc-.0", min_size=1, max_size=253).map(lambda text: f"a{text}"[:252] + "a"))
def test_names_of_slices_sort_by_their_numbers_and_are_short_enough(node: str) -> None:
    names = [slices.slice_name(node, number) for number in (0, 1, 9, 10, 200)]
    assert names == sorted(names) and len(set(names)) == 5 and max(map(len, names)) <= 253
    assert slices.slice_name("a" * 253, 0) != slices.slice_name("a" * 252 + "b", 0)


def test_the_root_of_a_card(tmp_path: t.Any) -> None:
    place = tmp_path / "devices" / "pci0000:40" / "0000:40:01.0" / "0000:41:00.0"
    place.mkdir(parents=True)
    links = tmp_path / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    (links / "0000:41:00.0").symlink_to("../../../devices/pci0000:40/0000:40:01.0/0000:41:00.0")
    assert pcie_root(tmp_path, "0000:41:00.0") == "pci0000:40"
    assert pcie_root(tmp_path, "0000:42:00.0") == pcie_root(tmp_path, "") == ""


# --------------------------------------------------------------------------- plans


class Api:
    """The slices in the API, which adds times to taints and refuses what the real one refuses."""

    def __init__(self) -> None:
        self.found: dict[str, JsonObject] = {}
        self.version = 0
        self.requests = 0

    def apply(self, plan: slices.Plan) -> None:
        for body in plan.create:
            assert body["metadata"]["name"] not in self.found
            self._put(body)
        for body in plan.replace:
            before = self.found[body["metadata"]["name"]]
            assert body["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
            for path in (("driver",), ("nodeName",), ("pool", "name")):
                assert at(body["spec"], *path) == at(before["spec"], *path), "it can't be changed"
            self._put(body)
        for name in plan.delete:
            self.requests += 1
            del self.found[name]

    def _put(self, body: JsonObject) -> None:
        self.requests += 1
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"]["resourceVersion"] = str(self.version)
        devices = body["spec"]["devices"]
        assert len(devices) <= (64 if any("taints" in device for device in devices) else 128)
        for device in devices:
            for taint in device.get("taints", []):
                taint.setdefault("timeAdded", f"at {self.version}")
        if not devices:
            del body["spec"]["devices"]
        self.found[body["metadata"]["name"]] = body

    def complete(self) -> list[str]:
        """The devices that the scheduler would see, in its order; it needs all slices of the highest generation."""
        pools = [one["spec"]["pool"] for one in self.found.values()]
        highest = max(pool["generation"] for pool in pools)
        rows = [self.found[name] for name in sorted(self.found)]
        rows = [row for row in rows if row["spec"]["pool"]["generation"] == highest]
        assert {row["spec"]["pool"]["resourceSliceCount"] for row in rows} == {len(rows)}
        return [device["name"] for row in rows for device in row["spec"].get("devices", [])]


def at(value: t.Any, *path: str) -> t.Any:
    for key in path:
        value = value[key]
    return value


def settle(api: Api, wanted: list[JsonObject], generation: int = 0) -> int:
    for _pass in range(3):
        plan = slices.plan(NODE, OWNER, wanted, api.found.values(), generation)
        generation = max(generation, plan.generation)
        if plan.empty:
            return generation
        api.apply(plan)
    raise AssertionError("it doesn't come to rest")


def names(count: int, units: int = 16, **more: t.Any) -> list[JsonObject]:
    return slices.devices([card(n, units, **more) for n in range(count)], "GiB", slices.Facts())


def test_slices_are_written_once_and_only_for_a_change() -> None:
    api = Api()
    generation = settle(api, names(100))
    assert len(api.found) == 2 and api.complete() == [name["name"] for name in names(100)]
    requests = api.requests
    assert settle(api, names(100), generation) == generation and api.requests == requests
    # Any card's change is a new generation of both slices.
    changed = settle(api, [*names(99), names(100, units=15)[99]], generation)
    assert changed == generation + 1 and api.requests == requests + 2
    # One slice is deleted: it comes back as it was, and the other is still complete with it.
    del api.found[slices.slice_name(NODE, 1)]
    assert settle(api, [*names(99), names(100, units=15)[99]], changed) == changed and api.requests == requests + 3
    # All are, by kubelet's start.
    api.found.clear()
    assert settle(api, names(100), changed) == changed + 1
    # Fewer cards: the second slice goes.
    settle(api, names(3), changed + 1)
    assert list(api.found) == [slices.slice_name(NODE, 0)] and len(api.complete()) == 3


def test_a_node_without_cards_offers_an_empty_pool() -> None:
    api = Api()
    settle(api, names(2))
    settle(api, [])
    assert api.complete() == [] and len(api.found) == 1


def test_a_taint_keeps_its_time_and_goes_when_the_card_is_back() -> None:
    api = Api()
    sick = dataclasses.replace(card(0), healthy=False, code="CardLost", reason="x")
    tainted = slices.devices([sick, card(1)], "GiB", slices.Facts())
    generation = settle(api, tainted)
    [one] = list(api.found.values())
    since = one["spec"]["devices"][0]["taints"][0]["timeAdded"]
    requests = api.requests
    assert settle(api, tainted, generation) == generation and api.requests == requests
    settle(api, slices.devices([sick, card(1, 15)], "GiB", slices.Facts()), generation)
    [one] = list(api.found.values())
    assert one["spec"]["devices"][0]["taints"][0]["timeAdded"] == since
    settle(api, names(2), generation + 1)
    assert all("taints" not in each for one in api.found.values() for each in one["spec"]["devices"])


def test_the_cards_are_read_from_the_slices_again() -> None:
    api = Api()
    found = [card(0, 16), card(3, 1), card(1, 8)]
    settle(api, slices.devices(found, "GiB", slices.Facts()))
    recalled = slices.announced_cards(api.found.values(), "GiB")
    assert [(one.index, one.uuid, one.units, one.model) for one in recalled] == [
        (one.index, one.uuid, one.units, one.model) for one in sorted(found, key=lambda one: one.index)
    ]
    foreign: list[t.Any] = [
        {},
        {"spec": {"devices": [{"name": "x"}, {"name": "", "attributes": {"index": {"int": -1}}}]}},
    ]
    assert slices.announced_cards(foreign, "GiB") == []


def test_a_node_that_was_made_again_owns_its_slices() -> None:
    api = Api()
    generation = settle(api, names(1))
    plan = slices.plan(NODE, "uid-new", names(1), api.found.values(), generation)
    assert [one["metadata"]["ownerReferences"][0]["uid"] for one in plan.replace] == ["uid-new"]


garbage = st.fixed_dictionaries(
    {},
    optional={
        "driver": st.sampled_from(["gpu.kubegpu.share", "other"]),
        "nodeName": st.sampled_from([NODE, "gpu2"]),
        "pool": st.fixed_dictionaries(
            {
                "name": st.sampled_from([NODE, "other"]),
                "generation": st.integers(0, 5),
                "resourceSliceCount": st.integers(1, 3),
            }
        ),
        "devices": st.lists(st.sampled_from(names(70)), max_size=3),
    },
)


@given(st.integers(0, 140), st.dictionaries(st.integers(0, 4), garbage), st.integers(0, 7), st.sets(st.integers(0, 2)))
def test_any_state_becomes_the_wanted_one(
    count: int, before: dict[int, JsonObject], generation: int, lost: set[int]
) -> None:
    """Slices of another version, of another node, of several generations, or a part of the right ones."""
    api = Api()
    for number, spec in before.items():
        name = slices.slice_name(NODE, number)
        pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
        whole = {"driver": "gpu.kubegpu.share", "nodeName": NODE, "pool": pool, **copy.deepcopy(spec)}
        api.found[name] = {"metadata": {"name": name, "resourceVersion": f"0{number}"}, "spec": whole}
    api.version = 10
    generation = settle(api, names(count), generation)
    assert api.complete() == [one["name"] for one in names(count)]
    for number in lost:
        api.found.pop(slices.slice_name(NODE, number), None)
    settle(api, names(count), generation)
    assert api.complete() == [one["name"] for one in names(count)]


def test_a_small_unit_is_no_obstacle_to_a_slice() -> None:
    """Device IDs of one MiB each are too many for kubelet; a capacity isn't."""
    big = [seen(0, gib=192), seen(1, gib=192)]
    for check, reason in ((contract.check_device_list, "gpushare_memory_unit"), (check_unique, "")):
        inventory = nvml_inventory.Inventory(FakeNvml(*big), "MiB", check=check)
        inventory.refresh()
        assert (inventory.reason or "").startswith(reason) and bool(inventory.cards) == (not reason)
    with pytest.raises(contract.ContractError, match=r"the same UUID: gpu-00000001-aaaa$"):
        check_unique([card(1), dataclasses.replace(card(2), uuid="gpu-00000001-aaaa")], "GiB")
