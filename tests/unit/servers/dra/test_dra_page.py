# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/dra-driver.md and docs/monitoring.md have the driver's codes, attributes and metrics, and no others."""

from __future__ import annotations

import dataclasses
import re
import typing as t
from pathlib import Path

from dra_kit import DriverNode, until
from gpushare.dra.claims import Code
from gpushare.dra.command import METRICS_PORT
from gpushare.extender.metrics import METRICS_PORT as EXTENDER_PORT
from gpushare.plugin.command import METRICS_PORT as PLUGIN_PORT

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "dra-driver.md").read_text()
MONITORING = (DOCS / "monitoring.md").read_text()


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_codes_are_in_the_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section(PAGE, "Reasons"), re.M)
    assert sorted(listed) == sorted(code.value for code in Code)


def test_the_attributes_and_metrics_are_in_the_pages(make: t.Callable[..., DriverNode]) -> None:
    node = make()
    bus = node.root / "sys" / "bus" / "pci" / "devices"
    bus.mkdir(parents=True)
    (node.root / "sys" / "devices" / "pci0000:00" / "0000:01:00.0").mkdir(parents=True)
    (bus / "0000:01:00.0").symlink_to("../../../devices/pci0000:00/0000:01:00.0")
    node.nvml.found = [dataclasses.replace(one, bus="0000:01:00.0") for one in node.nvml.found]
    node.up()
    row = next(line for line in section(PAGE, "Slices").splitlines() if line.startswith("| attributes"))
    for device in node.devices():
        assert all(f"`{name}`" in row for name in device["attributes"])
        assert len(device["attributes"]) == 7
    until(lambda: node.metric("gpushare_dra_pool_generation"))
    names = set(re.findall(r"^# TYPE (gpushare_\w+) ", node.page("/metrics")[1], re.M))
    own = set(re.findall(r"^\| `(gpushare_dra_\w+)` \|", section(MONITORING, "Metrics of the DRA driver"), re.M))
    assert {name for name in names if name.startswith("gpushare_dra_") and not name.endswith("_created")} == own
    others = {
        name
        for title in ("Metrics of the device plugin", "Metrics of every server")
        for name in re.findall(r"^\| `(gpushare_\w+)` \|", section(MONITORING, title), re.M)
    }
    absent = {"gpushare_plugin_allocations_total", "gpushare_plugin_corrections_total"}
    assert {name for name in names if not name.endswith("_created")} - own == others - absent


def test_the_servers_of_one_node_have_different_ports() -> None:
    assert len({METRICS_PORT, PLUGIN_PORT, EXTENDER_PORT}) == 3
