# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards and vGPUs for virtual machines in each form of the report: all say the same, no tenant's name escapes."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.virtual import HELD, REASONS
from ansible_collections.kubegpu.share.plugins.module_utils._report import html, prometheus, text_output
from ansible_collections.kubegpu.share.plugins.module_utils._report.parse import view
from hostile import FORBIDDEN, TEXTS
from prometheus_client.parser import text_string_to_metric_families
from report_samples import HEALTHY

POD = {
    "namespace": "team",
    "name": "virt-launcher-desktop-x7k2p",
    "units": 1,
    "phase": "Running",
    "terminating": False,
    "problem": "",
    "kind": "virtual_machine",
    "machine": "desktop",
}


def device(address, state="free", reason="", pods=(), **more):
    known = {"kind": "card", "card": address, "uuid": "", "type": "", "device": "10de:2236", "model": "GA102GL_A10"}
    about = {"driver": "vfio-pci", "iommu_group": 14, "resource": "nvidia.com/GA102GL_A10"}
    return {**known, **about, "address": address, "state": state, "reason": reason, "pods": list(pods), **more}


def allocation(*devices, resources=()):
    node = {
        "name": "gpu7",
        "backend": "passthrough",
        "unit": "count",
        "cards": [],
        "pending": [],
        "resources": list(resources),
        "devices": list(devices),
        "problem": "",
        "memory_limit": "",
        "also": [],
    }
    return {"cluster": "https://192.0.2.1:6443", "time": "2026-11-30T12:00:00Z", "unit": "count", "nodes": [node]}


VGPU = {"kind": "vgpu", "type": "A10-4Q", "driver": "nvidia", "uuid": "c2b1a5f4-0000-4000-8000-0123456789ab"}
GIVEN = allocation(
    device("0000:3b:00.0"),
    device("0000:5e:00.0", HELD, pods=[POD]),
    device("0000:86:00.0", "unknown", "not_announced", resource="", **VGPU),
    resources=[{"name": "nvidia.com/GA102GL_A10", "capacity": 2, "allocatable": 2, "used": 1}],
)


def test_the_terminal_has_a_line_for_each():
    text = text_output.render(view(None, GIVEN))
    rows = [line.split("  ") for line in text.splitlines()]
    rows = [[cell.strip() for cell in row if cell] for row in rows]
    assert ["gpu7", "0000:3b:00.0", "GA102GL_A10 (10de:2236)", "vfio-pci", "14", "free"] in rows
    named = "virtual machine team/desktop (pod virt-launcher-desktop-x7k2p)"
    assert ["gpu7", "0000:5e:00.0", "GA102GL_A10 (10de:2236)", "vfio-pci", "14", named] in rows
    unknown = f"unknown: {REASONS['not_announced']}"
    assert ["gpu7", "0000:86:00.0", "vGPU A10-4Q", "nvidia", "14", unknown] in rows
    assert "1 node, 0 cards, 3 for virtual machines." in text and "no card" not in text


def checked(*states):
    """A report whose node has a recorded function in each state of V1."""
    rows = [{"address": f"0000:3b:00.{at}", "group": str(14 + at), "state": state} for at, state in enumerate(states)]
    report = copy.deepcopy(HEALTHY)
    report["nodes"][0]["virtual_machines"] = rows
    return report


STATES = {
    "held": "a program of the machine has its IOMMU group open, as a virtual machine does",
    "viable": "free: nobody has its IOMMU group open",
    "not_viable": "unknown: its IOMMU group isn't viable",
    "absent": "unknown: the kernel didn't say",
    "": "unknown: the kernel didn't say",
}


def test_what_the_kernel_said_of_recorded_functions_is_in_text_and_page():
    """V1 passes while a virtual machine has a group open: the report says which these are."""
    shown = view(checked(*STATES), None)
    lines = text_output.render(shown).splitlines()
    page = html.render(shown)
    for at, (state, says) in enumerate(STATES.items()):
        [line] = [line for line in lines if f"0000:3b:00.{at}" in line]
        assert line.rstrip().endswith(says) and f" {14 + at} " in line, state
        assert f"0000:3b:00.{at}" in page and says.removeprefix("unknown: ").partition("'")[0] in page
    assert "kubegpu_virtual_device" not in prometheus.render(shown)
    # What the machines were asked for by inspect says more.
    both = copy.deepcopy(GIVEN)
    both["nodes"][0]["name"] = checked()["nodes"][0]["name"]
    assert "recorded function" not in text_output.render(view(checked("held"), both))


def test_the_page_has_them_and_marks_what_is_unknown():
    page = html.render(view(None, GIVEN))
    for shown in ("0000:5e:00.0", "virtual machine team/desktop", "vGPU A10-4Q", VGPU["uuid"], "1 of unknown holder"):
        assert shown in page
    assert "of 3 cards and vGPUs for virtual machines held, 1 unknown" in page
    assert "Its cards are unknown" not in page and "its cards are unknown" not in page
    # The pod counts in its namespace.
    assert '<th scope="row">team</th><td class="n">1</td>' in page


def test_metrics_have_no_value_for_what_is_unknown():
    families = text_string_to_metric_families(prometheus.render(view(None, GIVEN)))
    found = {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }
    name = "kubegpu_virtual_device_held"
    assert {key: value for key, value in found.items() if key[0] == name} == {
        (name, "0000:3b:00.0", "card", "gpu7", ""): 0,
        (name, "0000:5e:00.0", "card", "gpu7", ""): 1,
    }
    count = "kubegpu_virtual_devices"
    assert {key: value for key, value in found.items() if key[0] == count} == {
        (count, "card", "gpu7", "free"): 1,
        (count, "card", "gpu7", "held"): 1,
        (count, "vgpu", "gpu7", "unknown"): 1,
    }


def test_a_report_of_checks_shows_them_too():
    given = copy.deepcopy(GIVEN)
    given["nodes"][0]["name"] = "gpu1"
    both = view(HEALTHY, given)
    assert [one.address for node, one in both.devices if node.name == "gpu1"] == [
        "0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0"
    ]  # fmt: skip
    assert "virtual machine team/desktop" in html.render(both)


@pytest.mark.parametrize("state", ["", "FREE", None, 1])
def test_a_state_that_is_none_is_unknown(state):
    shown = view(None, allocation(device("0000:3b:00.0", state)))
    [(_node, one)] = shown.devices
    assert one.state == "unknown" and one.holder.startswith("unknown")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("field", ["name", "namespace", "machine"])
def test_a_tenants_text_controls_nothing(text, field):
    shown = view(None, allocation(device("0000:5e:00.0", HELD, pods=[{**POD, field: text}], resource=text, model=text)))
    for render in (text_output.render, html.render, prometheus.render):
        written = render(shown)
        assert not FORBIDDEN.search(written.replace("\t", " "))
        assert "</failure><x" not in written or render is not html.render
