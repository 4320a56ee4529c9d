# SPDX-License-Identifier: GPL-3.0-or-later
"""The subnet that the lab takes."""

from __future__ import annotations

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
