# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory limits in the preflight's findings and in the table of the allocation."""

from __future__ import annotations

import pytest
from allocation_snapshots import allocation, ours
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import table
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import Host, Options, described, examine
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.node import NodeOptions
from gpu_nodes import HEALTHY, gpu_node

NEED_615, NEED_1_20 = "and limits need 615 or newer", "and limits need 1.20.1 or newer"
TOOLKIT = "NVIDIA's container toolkit"


def of_615(**options):
    return NodeOptions(driver_version="615.71.09", **options)


R615 = of_615()


def facts(driver="615.71.09", toolkit="1.20.1", cgroup=2, mig=False):
    card = {**HEALTHY["driver"]["cards"][0], "mig": mig}
    versions = {"driver__module_version": driver, "driver__library_version": driver, "toolkit__version": toolkit}
    return gpu_node(**versions, driver__version=driver, nvswitches=[], driver__cards=[card], cgroup__version=cgroup)


def findings(limit, node, options=R615, **more):
    found = examine(Options(memory_limit=limit, **more), None, [Host("gpu1", "gpu1", "gpu_nodes", node, options)])
    return [(one.severity, one.text) for one in found if one.variable == "gpushare_memory_limit"]


@pytest.mark.parametrize("limit", ["auto", "required", "off"])
def test_no_note_if_shares_are_enforced(limit):
    assert findings(limit, facts()) == []
    # The roles will bring node isn't there yet.
    assert findings(limit, facts(driver=None, toolkit=None)) == []
    assert findings(limit, facts(driver="580.95.05", toolkit="1.17.0")) == []


@pytest.mark.parametrize(
    ("node", "options", "why"),
    [
        (facts(cgroup=1), R615, "the node doesn't run with cgroup version 2"),
        (facts(), NodeOptions(), f"the driver is 580.95.05, {NEED_615}"),
        (facts(driver="610.57.04"), of_615(driver_state="external"), f"the driver is 610.57.04, {NEED_615}"),
        (facts(mig=True), R615, "MIG is on for card 0, and MIG devices can't be limited"),
        (facts(toolkit="1.19.0"), of_615(toolkit_state="external"), f"{TOOLKIT} is 1.19.0, {NEED_1_20}"),
        (facts(), of_615(toolkit_version="1.18.2-1"), f"{TOOLKIT} is 1.18.2-1, {NEED_1_20}"),
    ],
)
def test_auto_reports_a_note_and_required_a_problem(node, options, why):
    assert findings("auto", node, options) == [
        ("note", f"gpushare_memory_limit: host gpu1 doesn't limit pods to their shares, because {why}")
    ]
    ((severity, message),) = findings("required", node, options)
    assert severity == "problem"
    assert message.startswith(f"gpushare_memory_limit: host gpu1 can't limit pods to their shares, because {why}; ")
    assert findings("off", node, options) == []
    assert findings("required", node, options, device_plugin_image="registry.example/upstream:1") == []


@pytest.mark.parametrize("limit", ["auto", "required"])
def test_a_card_with_mig_leaves_the_others_limited(limit):
    node = facts()
    node["driver"]["cards"].append({**HEALTHY["driver"]["cards"][0], "index": 1, "uuid": "GPU-bbbbbbbb", "mig": True})
    assert findings(limit, node) == []


def test_several_reasons_are_one_message():
    ((_level, message),) = findings("auto", facts(cgroup=1, mig=True), NodeOptions())
    assert message.endswith(
        "because the driver is 580.95.05, and limits need 615 or newer; the node doesn't run with cgroup version 2; "
        "MIG is on for card 0, and MIG devices can't be limited"
    )


def test_a_required_limit_can_be_skipped_for_a_host():
    assert "memory-limit" in described()
    hosts = [Host("gpu1", "gpu1", "gpu_nodes", facts(cgroup=1), R615)]
    assert examine(Options(memory_limit="required"), None, hosts, ["memory-limit@gpu1"]).problems == []


@pytest.mark.parametrize(
    ("value", "mode"), [(False, "off"), ("off", "off"), ("False", "off"), ("auto", "auto"), (1, "1")]
)
def test_false_means_off(value, mode):
    assert inventory.limit_mode(value) == mode


def limited(name, limit=None):
    node = ours(name)
    if limit is not None:
        node["metadata"]["annotations"][contract.NODE_LIMIT] = limit
    return node


def test_the_table_has_the_memory_limit():
    nodes = [limited("gpu1", contract.LIMIT_ENFORCED), limited("gpu2", "unenforced: old"), limited("gpu3")]
    found = allocation(nodes, [])
    assert [node["memory_limit"] for node in found["nodes"]] == ["enforced", "unenforced: old", ""]
    lines = table(found).splitlines()
    assert lines[:3] == ["NAME:       gpu1", "IPADDRESS:  192.0.2.7", "LIMIT:      enforced"]
    assert [line for line in lines if line.startswith("LIMIT")] == [
        "LIMIT:      enforced",
        "LIMIT:      unenforced: old",
    ]
