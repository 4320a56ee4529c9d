# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses, routes and the pods' network."""

from __future__ import annotations

import ipaddress
import json

import pytest

from lab import network
from lab.shell import LabError

WANTED = "172.30.77.0/24"


@pytest.mark.parametrize(
    ("used", "taken"),
    [
        ([], WANTED),
        (["0.0.0.0/0", "192.168.1.0/24"], WANTED),
        (["172.30.77.0/24"], "172.30.78.0/24"),
        (["172.30.77.128/25", "172.30.78.0/23"], "172.30.80.0/24"),
        (["172.30.77.9"], "172.30.78.0/24"),
    ],
)
def test_a_free_subnet_is_taken(used: list[str], taken: str) -> None:
    assert network.free_subnet(WANTED, used, fixed=False) == taken


def test_a_subnet_that_was_asked_for_is_never_exchanged() -> None:
    with pytest.raises(LabError, match="LAB_SUBNET"):
        network.free_subnet(WANTED, ["172.16.0.0/12"], fixed=True)
    with pytest.raises(LabError, match="LAB_SUBNET"):
        network.free_subnet(WANTED, ["172.16.0.0/12"], fixed=False)


def test_routes_of_the_machine() -> None:
    routes = [
        {"dst": "default", "gateway": "10.0.0.1"},
        {"dst": "10.0.0.0/24"},
        {"dst": "fe80::/64"},
        {"dst": "10.9.9.9"},
    ]
    assert network.routed_networks(routes) == ["10.0.0.0/24", "10.9.9.9"]


def test_addresses_are_fixed_and_distinct() -> None:
    table = network.addresses(WANTED, ["cp1", "cp2", "cp3"], [f"gpu{number}" for number in range(1, 10)])
    assert table["gateway"] == "172.30.77.1"
    assert table["repository"] == "172.30.77.2"
    assert (table["cp1"], table["cp3"], table["gpu1"], table["gpu9"]) == (
        "172.30.77.11",
        "172.30.77.13",
        "172.30.77.21",
        "172.30.77.29",
    )
    assert len(set(table.values())) == len(table) == 14


def test_every_node_knows_the_way_to_every_other_and_not_to_itself() -> None:
    table = network.addresses(WANTED, ["cp1"], ["gpu1", "gpu2"])
    cidrs = network.pod_cidrs(["cp1", "gpu1", "gpu2"])
    assert network.routes("gpu1", cidrs, table) == [
        ("10.244.0.0/24", "172.30.77.11"),
        ("10.244.2.0/24", "172.30.77.22"),
    ]
    pods = ipaddress.IPv4Network(network.POD_NETWORK)
    assert all(ipaddress.IPv4Network(cidr).subnet_of(pods) for cidr in cidrs.values())


def test_conflist() -> None:
    found = json.loads(network.conflist("10.244.7.0/24"))
    bridge = found["plugins"][0]
    assert (bridge["type"], bridge["ipMasq"], bridge["isGateway"]) == ("bridge", True, True)
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.7.0/24"}]]
