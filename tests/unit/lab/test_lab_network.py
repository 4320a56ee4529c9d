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
def test_a_free_subnet_is_chosen(used: list[str], taken: str) -> None:
    assert network.free_subnet(WANTED, used, fixed=False) == taken


@pytest.mark.parametrize(("used", "fixed"), [("172.30.77.0/24", True), ("172.16.0.0/12", False)])
def test_a_given_subnet_is_never_replaced_and_a_full_range_is_an_error(used: str, fixed: bool) -> None:
    with pytest.raises(LabError, match="LAB_SUBNET"):
        network.free_subnet(WANTED, [used], fixed=fixed)


def test_routes_of_the_machine() -> None:
    routes = [{"dst": one} for one in ("default", "10.0.0.0/24", "fe80::/64", "10.9.9.9")]
    assert network.routed_networks(routes) == ["10.0.0.0/24", "10.9.9.9"]


def test_addresses_are_fixed_and_distinct() -> None:
    table = network.addresses(WANTED, ["cp1", "cp2", "cp3"], [f"gpu{number}" for number in range(1, 10)])
    fixed = {"gateway": 1, "repository": 2, "cp1": 11, "cp3": 13, "gpu1": 21, "gpu9": 29}
    assert {name: table[name] for name in fixed} == {name: f"172.30.77.{last}" for name, last in fixed.items()}
    assert len(set(table.values())) == len(table) == 14


def test_every_node_has_a_route_to_every_other() -> None:
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
