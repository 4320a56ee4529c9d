# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugins with templated variables, and the role expressions for node names."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import role_templates
from allocation_snapshots import row
from ansible.parsing.dataloader import DataLoader
from ansible_collections.kubegpu.share.plugins.action import preflight
from gpu_nodes import gpu_node
from runtime_kit import containerd_state
from test_images import archive

CLUSTER = {
    "version": "v1.36.3",
    "nodes": [],
    "sharing_pods": None,
    "claiming_pods": None,
    "slices": None,
    "operators_refused": [],
    "plugins": [],
    "operators": [],
}
GPU_NODE = gpu_node(
    driver__cards=[],
    driver__module_version=None,
    nvswitches=[],
    runtimes__containerd=containerd_state({}, dump=""),
    cgroup__version=2,
)


def act(task_vars=None, **arguments):
    task = SimpleNamespace(args=arguments, check_mode=True, async_val=0, action="x", diff=False, _parent=None)
    action = preflight.ActionModule(task, MagicMock(), MagicMock(), DataLoader(), MagicMock(), MagicMock())
    action._display = MagicMock(columns=100, _final_q=None)
    # What the roles refuse of a machine is in the tests of the plan, which evaluate the roles' tasks.
    nothing = {
        "driver_choice": {"refusals": [], "lists": [], "provided": "", "manager": "none"},
        "toolkit_refused": [],
        "runtime_refused": [],
        "runtime_warnings": [],
    }
    with patch.object(preflight, "Planner", return_value=MagicMock(validate=lambda _name: nothing)):
        return run(action, task_vars)


def run(action, task_vars):
    return action.run(task_vars=task_vars or {}), [call.args[0] for call in action._display.display.call_args_list]


def node(name):
    return row(name, runtime="containerd://2.2.9")


HOSTVARS = {"one": {"gpu_node": GPU_NODE, "gpu_node_name": "gpu1", "driver_version": "615.71.09"}, "cp1": {}}


def test_hosts_are_matched_by_node_name(tmp_path):
    image = "localhost/kubegpu/gpushare:1.1.0"
    result, printed = act(
        {"hostvars": HOSTVARS},
        cluster={**CLUSTER, "nodes": [node("gpu1"), node("cp1")]},
        gpu_nodes=["one"],
        control_plane=["cp1"],
        image=image,
        image_archive=archive(tmp_path / "image.tar", manifest_json=[{"RepoTags": [image]}]),
    )
    assert result["problems"] == 0 and not result.get("failed")
    [finding] = result["findings"]
    assert finding["id"] == "unknown-cards" and "host one lists no card" in finding["found"]
    head, text = printed[0].splitlines()[:2]
    assert (head, text[:29]) == ("note     unknown-cards  one", "         lists no card before")


def test_nodes_outside_the_inventory_are_validated_on_the_controller():
    arguments = {"gpu_nodes": [], "image_delivery": "registry", "cluster": {**CLUSTER, "nodes": [node("worker-1")]}}
    fine, _printed = act({"hostvars": {}}, nodes=["worker-1"], **arguments)
    assert fine["problems"] == 0 and not fine["findings"]
    wrong, _printed = act({"hostvars": {}}, nodes=["worker-2"], **arguments)
    assert wrong["problems"] == 1
    assert wrong["findings"][0]["found"].startswith("gpushare_nodes: worker-2 isn't a node of the cluster")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "gpushare_image_archive: importing x/y:1 needs an archive"),
        ("nowhere.tar", "nowhere.tar is no file"),
        ("other.tar", "contains docker.io/x/z:1, not x/y:1"),
        ("text.tar", "isn't an image archive"),
    ],
)
def test_an_invalid_archive_is_reported_with_other_problems(tmp_path, given, message):
    archive(tmp_path / "other.tar", manifest_json=[{"RepoTags": ["x/z:1"]}])
    (tmp_path / "text.tar").write_text("no tar")
    arguments = {"image_archive": str(tmp_path / given)} if given else {}
    result, _printed = act({"hostvars": HOSTVARS}, cluster=CLUSTER, gpu_nodes=["one"], image="x/y:1", **arguments)
    assert result["problems"] == 2 and not result["changed"]
    [found] = [finding for finding in result["findings"] if finding["id"] == "image-archive"]
    assert found["found"].startswith("gpushare_image_archive: ") and message in found["found"] and found["do"]
    registry = act({"hostvars": HOSTVARS}, cluster=CLUSTER, gpu_nodes=["one"], image_delivery="registry")
    assert registry[0]["problems"] == 1


def test_options_of_a_host_come_from_its_variables():
    gpu = {**GPU_NODE, "driver": {**GPU_NODE["driver"], "others": ["runfile"]}}
    hostvars = {"one": {"gpu_node": gpu}, "two": {"gpu_node": gpu, "driver_state": "external"}}
    result, _printed = act({"hostvars": hostvars}, gpu_nodes=["one", "two"])
    assert [
        (finding["found"], finding["do"]) for finding in result["findings"] if finding["severity"] == "problem"
    ] == [
        (
            "host one has its driver from a .run file",
            "run '/usr/bin/nvidia-uninstall --silent', or set driver_state to external",
        )
    ]
    ignored, _printed = act({"hostvars": hostvars}, gpu_nodes=["one", "two"], ignore=["driver-runfile@one"])
    assert ignored["problems"] == 0
    wrong, _printed = act({"hostvars": hostvars}, gpu_nodes=["one"], ignore=["nonsense"])
    assert wrong["failed"] and wrong["msg"].startswith("preflight_ignore: 'nonsense'")


def evaluated(role, name, **variables):
    cards = {"driver": {"cards": [{"uuid": "A"}, {"uuid": "B"}]}}
    given = {
        "groups": {"gpu_nodes": ["one", "gpu2"], "control_plane": ["cp1"]},
        "hostvars": {"one": {"gpu_node_name": "gpu1", "gpu_node": cards}, "gpu2": {}, "cp1": {}},
        **variables,
    }
    own = {**role_templates.defaults(role), **role_templates.variables_of(role, "vars")}
    return role_templates.value(role, name, **own, **given)


def test_node_names_come_from_the_inventory():
    assert evaluated("gpushare", "gpushare_nodes") == ["gpu1", "gpu2"]
    assert evaluated("verify", "__verify_node_uuids") == {"gpu1": ["A", "B"], "gpu2": []}
    assert evaluated("verify", "__verify_control_plane_names") == ["cp1"]
    assert evaluated("gpushare", "gpushare_nodes", groups={}) == []
