# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries of KubeVirt for vGPUs, derived from the layouts and from what the nodes' drivers call their types."""

from __future__ import annotations

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._backends.permitted import permitted

NAME, RESOURCE = "NVIDIA A10-12Q", "nvidia.com/NVIDIA_A10-12Q"


def layout(*types):
    return {"version": "v1", "vgpu-configs": {"a": [{"devices": "all", "vgpu-devices": dict.fromkeys(types, 2)}]}}


def card(framework, *names, made=(), device="0x2236"):
    """A card as gpu_node has it.

    :param names: of the types that its driver shows.
    :param made: the types of its vGPUs.
    """
    types = [{"id": f"nvidia-{number}", "name": name, "available": 1} for number, name in enumerate(names)]
    ids = {row["name"]: row["id"] for row in types}
    vgpus = [{"address": "", "uuid": "", "type": ids.get(name, name), "iommu_group": 1} for name in made]
    host = {"framework": framework, "types": types, "vgpus": vgpus}
    return {"vendor": "0x10de", "device": device, "vgpu_host": host}


def of(*cards, types=("A10-12Q",), **variables):
    return {"gpu_node": {"gpus": list(cards)}, "vgpu_layouts": layout(*types), "vgpu_layout": "a", **variables}


def made(**hosts):
    return permitted(hosts, {name: f"node-{name}" for name in hosts}, (), list(hosts))


def entry(selector, resource):
    return {"selector": selector, "resource": resource, "external_provider": False}


def test_the_layouts_types_are_permitted_by_the_names_that_the_driver_gives_them():
    """A node that names further types permits nothing, so that nobody gets more than the layout by a taken node."""
    first = card("mdev", NAME, "NVIDIA A10-24Q", made=(NAME, NAME))
    seen = made(one=of(first, card("mdev", NAME, made=(NAME,))), two=of(card("mdev", "GRID T4-1Q"), types=("T4-1Q",)))
    assert seen["mediated"] == [entry("GRID T4-1Q", "nvidia.com/GRID_T4-1Q"), entry(NAME, RESOURCE)]
    assert seen["cards"] == {"node-one": {NAME: 3}, "node-two": {}}
    assert (seen["pci"], seen["unknown"], seen["refused"]) == ([], [], [])


@pytest.mark.parametrize("name", ["Evil A10-12Q", "NVIDIA a b A10-12Q", "A10-12Q NVIDIA", "NVIDIA\tA10-12Q", ""])
def test_a_name_of_another_form_is_no_type(name):
    seen = made(one=of(card("mdev", name)))
    assert (seen["mediated"], seen["unknown"]) == ([], ["one"])


def test_virtual_functions_are_permitted_by_their_cards_id_as_the_one_type_of_the_layouts():
    seen = made(one=of(card("vendor", made=("592", "592"))), two=of(card("vendor")))
    assert seen["pci"] == [entry("10DE:2236", RESOURCE)] and not seen["mediated"] and not seen["refused"]
    assert seen["cards"] == {"node-one": {"10DE:2236": 2}, "node-two": {"10DE:2236": 0}}


def test_types_that_kubevirt_cant_tell_from_each_other_are_refused():
    other = of(card("vendor"), types=("A10-24Q",))
    for hosts in ({"one": of(card("vendor"), types=("A10-12Q", "A10-24Q"))}, {"one": of(card("vendor")), "two": other}):
        [row] = made(**hosts)["refused"]
        assert (row["code"], row["id"], row["types"]) == ("mixed_functions", "10DE:2236", ["A10-12Q", "A10-24Q"])
        assert made(**hosts)["pci"] == []
    assert not made(one=of(card("vendor")), two=of(card("vendor", device="0x26b9"), types=("L40S-12Q",)))["refused"]


@pytest.mark.parametrize(
    "variables",
    [{"vgpu_layout": ""}, {"vgpu_layouts": {}}, {"gpu_node": None}, {"gpu_node": {"gpus": [card("none")]}}],
)
def test_a_host_without_a_layout_or_vgpus_is_unknown_and_its_entries_stay(variables):
    seen = made(one={**of(card("mdev", NAME)), **variables}, two=of(card("mdev", NAME)))
    assert seen["unknown"] == ["one"] and seen["mediated"] == [entry(NAME, RESOURCE)]
