# SPDX-License-Identifier: GPL-3.0-or-later
"""What init writes of a cluster in which somebody took nodes: kubelet writes its node's addresses itself."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import hostile
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.filter.inventory import initial_inventory
from ansible_runs import ansible
from real_apiserver import MERGE, ApiServer, own_api_server
from test_init import PLANE, init, node

GPU = ["nvidia.com/gpu.present"]
PIPE = "{{{{ lookup('pipe', 'touch {0}; echo 192.0.2.66') }}}}"


def codes(found) -> dict[str, str]:
    return {one["node"]: one["code"] for one in found["left_out"]}


def names(found) -> set[str]:
    return {*found["gpu_nodes"], *found["control_plane"], *found["gpushare_nodes"]}


@pytest.mark.parametrize("address", hostile.ADDRESSES, ids=ascii)
def test_a_node_whose_address_is_none_is_left_out(address: str) -> None:
    found = initial_inventory([PLANE, node("taken", address, GPU), node("gpu1", "192.0.2.2", GPU)])
    assert names(found) == {"cp1", "gpu1"} and codes(found) == {"taken": "not-an-address"}
    (text,) = (one["text"] for one in found["left_out"])
    assert text.startswith("taken: ") and "InternalIP" in text and not hostile.FORBIDDEN.search(text)
    assert "\n" not in text


@pytest.mark.parametrize("address", hostile.NOT_OTHERS)
def test_a_node_can_not_lead_to_another_machine(address: str) -> None:
    found = initial_inventory([PLANE, node("taken", address, GPU)])
    assert names(found) == {"cp1"} and codes(found)["taken"] in ("own-machine", "no-machine")


@pytest.mark.parametrize("name", hostile.NAMES, ids=ascii)
def test_a_name_that_no_node_has_is_left_out(name: str) -> None:
    found = initial_inventory([PLANE, node(name, "192.0.2.2", GPU)])
    assert names(found) == {"cp1"} and [one["code"] for one in found["left_out"]] == ["not-a-node-name"]
    assert not hostile.FORBIDDEN.search(found["left_out"][0]["text"])


@pytest.mark.parametrize("name", hostile.RESERVED)
def test_a_name_with_a_meaning_of_its_own_is_left_out(name: str) -> None:
    for options in ({}, {"ssh": False}):
        found = initial_inventory([PLANE, node(name, "192.0.2.2", GPU)], **options)
        assert name not in names(found) and codes(found) == {name: "reserved-name"}


def test_two_nodes_of_one_address_are_left_out() -> None:
    nodes = [PLANE, node("gpu1", "192.0.2.2", GPU), node("taken", "::ffff:192.0.2.2", GPU)]
    found = initial_inventory(nodes)
    assert names(found) == {"cp1"} and codes(found) == {"gpu1": "same-address", "taken": "same-address"}
    # Also where the other one has no GPU, or is reached by a name that is an address.
    found = initial_inventory([PLANE, node("worker", "192.0.2.2"), node("taken", "192.0.2.2", GPU)])
    assert names(found) == {"cp1"} and codes(found) == {"taken": "same-address"}
    found = initial_inventory([PLANE, node("192.0.2.3"), node("taken", "192.0.2.3", GPU)])
    assert names(found) == {"cp1"} and codes(found) == {"taken": "same-address"}


def test_a_node_can_not_be_the_api_server_or_a_control_plane() -> None:
    found = initial_inventory([node("taken", "192.0.2.9", GPU), PLANE], server="https://192.0.2.9:6443")
    assert names(found) == {"cp1"} and codes(found) == {"taken": "api-server"}
    found = initial_inventory([node("taken", PLANE["address"], GPU), PLANE], server="https://192.0.2.1:6443")
    assert names(found) == set() and codes(found) == {"taken": "same-address", "cp1": "same-address"}
    # Of a cluster of one machine, both are the same.
    whole = {**PLANE, "labels": {**PLANE["labels"], "nvidia.com/gpu.present": "true"}}
    found = initial_inventory([whole], server="https://192.0.2.1:6443")
    assert found["gpu_nodes"] == found["control_plane"] == {"cp1": "192.0.2.1"} and not found["left_out"]


def test_honest_addresses_are_written_in_one_form() -> None:
    given = {"a1": "2001:DB8::1", "a2": "192.0.2.2", "a3": "Gpu-3.Example.org", "a4": ""}
    found = initial_inventory([node(name, address, GPU) for name, address in given.items()])
    wanted = {"a1": "2001:db8::1", "a2": "192.0.2.2", "a3": "gpu-3.example.org", "a4": ""}
    assert found["gpu_nodes"] == wanted and not found["left_out"]


def test_nodes_that_are_not_reached_by_their_address_need_none() -> None:
    found = initial_inventory([PLANE, node("gpu1", hostile.ADDRESSES[0], GPU)], ssh=False)
    assert found["gpushare_nodes"] == ["gpu1"] and not found["left_out"]


@pytest.fixture(scope="module")
def api() -> t.Iterator[ApiServer]:
    with own_api_server() as started:
        yield started


def test_a_server_of_k3s_that_is_a_worker_gets_into_the_inventory(api: ApiServer, tmp_path: Path) -> None:
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    label = {"node-role.kubernetes.io/control-plane": "true"}
    api.request("POST", "/api/v1/nodes", {"metadata": {"name": "s1", "labels": label}, "spec": {"taints": [taint]}})
    rc, text = init(tmp_path, f"init_kubeconfig={api.kubeconfig}", "init_folder=tainted")
    assert rc == 0 and "add those with GPUs to the group gpu_nodes" in " ".join(text.split()), text
    api.request("PATCH", "/api/v1/nodes/s1", {"spec": {"taints": None}}, MERGE)
    rc, text = init(tmp_path, f"init_kubeconfig={api.kubeconfig}", "init_folder=worker")
    assert rc == 0 and "remove those without from the inventory" in " ".join(text.split()), text
    hosts = yaml.safe_load((tmp_path / "worker/hosts.yml").read_text())
    assert list(hosts["gpu_nodes"]["hosts"]) == list(hosts["control_plane"]["hosts"]) == ["s1"]
    api.request("DELETE", "/api/v1/nodes/s1")


def test_the_written_inventory_evaluates_nothing(api: ApiServer, tmp_path: Path) -> None:
    """By real ansible-inventory and ansible, from a real API server, with the default configuration."""
    marker = tmp_path / "marker"
    for name, address, labels in (
        ("cp1", "192.0.2.1", {"node-role.kubernetes.io/control-plane": ""}),
        ("gpu1", "192.0.2.11", {GPU[0]: "true"}),
        ("taken1", PIPE.format(marker), {GPU[0]: "true"}),
        ("taken2", "192.0.2.12\n      ansible_connection: local", {GPU[0]: "true"}),
        ("localhost", "192.0.2.13", {GPU[0]: "true"}),
    ):
        api.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        status = {"status": {"addresses": [{"type": "InternalIP", "address": address}]}}
        api.request("PATCH", f"/api/v1/nodes/{name}/status", status, MERGE)
    # The second wall: a user's value that looks like a template is the same text when the inventory is read.
    words = {"init_user": PIPE.format(marker), "init_ssh_key": f"k\n{PIPE.format(marker)}"}
    unsafe = {name: {"__ansible_unsafe": value} for name, value in words.items()}
    rc, text = init(tmp_path, json.dumps({"init_kubeconfig": str(api.kubeconfig), **unsafe}))
    assert rc == 0, text
    variables = "ansible_host ~ '|' ~ ansible_user ~ '|' ~ ansible_ssh_private_key_file"
    asked = ansible(
        *(tmp_path, "ansible", "-i", "inventory", "all", "-c", "local", "-m", "debug"),
        *("-a", f"msg={{{{ {variables} }}}}"),
    )
    assert not marker.exists(), "a node's address ran as a template on the controller"
    assert asked.rc == 0 and "192.0.2.11|{{ lookup('pipe'" in asked.text, asked.text
    hosts = yaml.safe_load((tmp_path / "inventory/hosts.yml").read_text())
    assert hosts["gpu_nodes"]["hosts"] == {"gpu1": {"ansible_host": "192.0.2.11"}}
    assert hosts["control_plane"]["hosts"] == {"cp1": {"ansible_host": "192.0.2.1"}}
    told = " ".join(text.split())
    for name in ("taken1", "taken2", "localhost"):
        assert f"Left out: {name}: " in told, text


def test_machines_that_the_user_names_are_checked(tmp_path: Path) -> None:
    for given, code in (
        ("gpu1={{ 1 }}", "not-an-address"),
        ("a[1:3]", "not-a-node-name"),
        ("-x=192.0.2.1", "not-a-node-name"),
        ("localhost", "reserved-name"),
        ("gpu1=", "not-an-address"),
        ("12", "not-an-address"),
        ("a=192.0.2.1,a=192.0.2.2", "named-twice"),
    ):
        found = initial_inventory([], given.split(","))
        assert [one["code"] for one in found["left_out"]] == [code], given
    found = initial_inventory([], "gpu1=192.0.2.1", "cp1=192.0.2.1")
    assert codes(found) == {"cp1": "same-address"}
    rc, text = init(tmp_path, json.dumps({"init_gpu_nodes": ["gpu1=a b"]}))
    assert rc != 0 and "gpu1: init_gpu_nodes 'a b' is neither an IP address nor a DNS name" in " ".join(text.split()), (
        text
    )
    assert not (tmp_path / "inventory").exists()
