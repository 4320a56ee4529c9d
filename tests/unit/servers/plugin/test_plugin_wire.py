# SPDX-License-Identifier: GPL-3.0-or-later
"""The messages against independently computed bytes, and the size that is computed without building a message."""

from __future__ import annotations

import pytest
from gpushare.kubelet import wire
from gpushare.kubelet.pod_resources import entry
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.pod_resources import decode_pod, split_pods
from hypothesis import given, settings
from hypothesis import strategies as st


def test_register_request() -> None:
    assert wire.encode(wire.register_request("a.sock")) == (
        b"\x0a\x07v1beta1"  # 1: version
        b"\x12\x06a.sock"  # 2: endpoint
        b"\x1a\x12aliyun.com/gpu-mem"  # 3: resource name
        b"\x22\x02\x10\x01"  # 4: options {2: preferred allocation}
    )


def test_device_list() -> None:
    cards = [
        contract.Card(0, "GPU-01234567-89", 0, 2048, 2),
        contract.Card(1, "GPU-fedcba98-76", 1, 1024, 1, healthy=False),
    ]
    assert wire.device_list(cards) == (
        b"\x0a\x15\x0a\x0a01234567-0\x12\x07Healthy"
        b"\x0a\x15\x0a\x0a01234567-1\x12\x07Healthy"
        b"\x0a\x17\x0a\x0afedcba98-0\x12\x09Unhealthy"
    )


def test_preferred_allocation() -> None:
    request = wire.message(wire.PREFERRED.request).FromString(b"\x0a\x0b\x0a\x01a\x0a\x01b\x12\x01b\x18\x02")
    assert wire.asks(request) == [wire.Ask(("a", "b"), ("b",), 2)]
    assert wire.encode(wire.preferred_response([("b", "a")])) == b"\x0a\x06\x0a\x01b\x0a\x01a"


def test_allocate() -> None:
    request = wire.message(wire.ALLOCATE.request).FromString(b"\x0a\x06\x0a\x01a\x0a\x01b\x0a\x03\x0a\x01c")
    assert wire.allocations(request) == [("a", "b"), ("c",)]
    assert wire.encode(wire.allocate_response([wire.Answer({"K": "v"})])) == b"\x0a\x08\x0a\x06\x0a\x01K\x12\x01v"


def test_allocate_response_has_the_fields_of_devices_and_cdi() -> None:
    one = wire.message("v1beta1.ContainerAllocateResponse")()
    one.mounts.add(container_path="c", host_path="h", read_only=True)
    one.devices.add(container_path="c", host_path="h", permissions="rw")
    one.annotations["k"] = "v"
    one.cdi_devices.add(name="n")
    assert wire.encode(one) == (
        b"\x12\x08\x0a\x01c\x12\x01h\x18\x01"
        b"\x1a\x0a\x0a\x01c\x12\x01h\x1a\x02rw"
        b"\x22\x06\x0a\x01k\x12\x01v"
        b"\x2a\x03\x0a\x01n"
    )


def test_options_and_topology() -> None:
    assert wire.encode(wire.options()) == b"\x10\x01"
    one = wire.message("v1beta1.Device")(ID="x")
    one.topology.nodes.add(ID=3)
    assert wire.encode(one) == b"\x0a\x01x\x1a\x04\x0a\x02\x08\x03"


def test_pod_resources() -> None:
    """Fields that the table doesn't have (CPUs, memory, topology) are skipped; other resources aren't ours."""
    name = contract.RESOURCE_MEMORY.encode()

    def field(number: int, body: bytes) -> bytes:
        size = len(body)
        return bytes([number << 3 | 2, *([size] if size < 128 else [size & 127 | 128, size >> 7])]) + body

    ours = field(1, name) + field(2, b"01234567-3") + field(3, field(1, b"\x08\x00"))
    other = field(1, b"nvidia.com/gpu") + field(2, b"GPU-x")
    second = field(1, name) + field(2, b"01234567-4")
    container = field(1, b"main") + field(2, ours) + field(2, other) + field(2, second) + b"\x18\x07"
    bare = field(1, b"bare")
    pod = field(1, b"web") + field(2, b"shop") + field(3, container) + field(3, bare)
    listed = field(1, pod)
    found = [entry(decode_pod(row, (contract.RESOURCE_MEMORY,))) for row in split_pods(listed)]
    assert [(one.key, one.containers) for one in found] == [
        ("shop/web", {"main": ("01234567-3", "01234567-4"), "bare": ()})
    ]
    assert found[0].ids == ("01234567-3", "01234567-4")


@pytest.mark.parametrize("method", [var for var in vars(wire).values() if isinstance(var, wire.Method)])
def test_methods_are_those_of_the_interfaces(method: wire.Method) -> None:
    _root, service, name = method.path.split("/")
    plugin = ("GetDevicePluginOptions", "ListAndWatch", "GetPreferredAllocation", "Allocate", "PreStartContainer")
    expected = {
        "v1beta1.Registration": ("Register",),
        "v1beta1.DevicePlugin": plugin,
        "v1.PodResourcesLister": ("List",),
    }
    assert name in expected[service]
    for one in filter(None, (method.request, method.response)):
        wire.message(one)()


uuids = st.lists(st.uuids(), min_size=1, max_size=5, unique=True)


@settings(max_examples=60, deadline=None)
@given(uuids, st.lists(st.integers(0, 1200), min_size=5, max_size=5))
def test_computed_size_is_the_real_one(found: list[object], units: list[int]) -> None:
    cards = [contract.Card(n, f"GPU-{uuid}", n, 0, units[n], healthy=False) for n, uuid in enumerate(found)]
    assert contract.device_list_bytes(cards) == len(wire.device_list(cards))
    # Similar UUIDs have long prefixes; the length of a message above 127 bytes has two bytes.
    cards = [contract.Card(n, f"GPU-{'0' * 120}{n}", n, 0, 1001, healthy=False) for n in range(2)]
    assert contract.device_list_bytes(cards) == len(wire.device_list(cards))


def test_size_just_below_and_above_kubelets_limit() -> None:
    def node(units: int) -> list[contract.Card]:
        return [contract.Card(0, "GPU-01234567-89", 0, units, units, healthy=False)]

    # The largest accepted number of units, and the real sizes of it and the next one.
    low, high = 1, 1_000_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            contract.check_device_list(node(middle), "MiB")
            low = middle
        except contract.ContractError as error:
            assert str(error).startswith("gpushare_memory_unit: MiB makes")
            high = middle
    assert len(wire.device_list(node(low))) <= 4 * 1024 * 1024 < len(wire.device_list(node(high)))
