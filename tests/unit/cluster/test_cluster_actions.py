# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugins with a real templar's variables, and the expressions by which roles find node names."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.action import preflight, report

ROLES = Path(__file__).resolve().parents[3] / "roles"
CLUSTER = {"version": "v1.36.3", "nodes": [], "sharing_pods": None}
SEEN = {"distribution": {"family": "debian", "arch": "amd64"}, "gpus": [{}], "driver": {"cards": []}}


def act(plugin, task_vars=None, **arguments):
    task = SimpleNamespace(args=arguments, check_mode=True, async_val=0, action="x", diff=False)
    action = plugin.ActionModule(task, MagicMock(), MagicMock(), DataLoader(), MagicMock(), MagicMock())
    action._display = MagicMock()
    return action.run(task_vars=task_vars or {}), [call.args[0] for call in action._display.display.call_args_list]


def node(name):
    return {
        "name": name,
        "ready": True,
        "capacity": {},
        "annotations": {},
        "runtime": "containerd://2.2.9",
    }


def archive(path, *tags):
    with tarfile.open(path, "w") as tar:
        text = json.dumps([{"RepoTags": list(tags)}]).encode()
        member = tarfile.TarInfo("manifest.json")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    return str(path)


def test_a_report_is_printed_as_it_is_and_an_empty_one_not_at_all():
    assert act(report, text="a  b\n  c\n") == ({"changed": False}, ["a  b\n  c"])
    assert act(report, text="") == ({"changed": False}, [])


HOSTVARS = {"one": {"gpu_node": SEEN, "gpu_node_name": "gpu1"}, "cp1": {}}


def test_hosts_are_known_by_their_node_names(tmp_path):
    image = "localhost/kubegpu/gpushare:1.0.0"
    result, said = act(
        preflight,
        {"hostvars": HOSTVARS},
        cluster={**CLUSTER, "nodes": [node("gpu1"), node("cp1")]},
        gpu_nodes=["one"],
        control_plane=["cp1"],
        image=image,
        image_archive=archive(tmp_path / "image.tar", image),
    )
    assert result["problems"] == [] and not result.get("failed")
    assert "host one shows no card" in result["notes"][0]
    assert (
        said[0].splitlines()[1].startswith("note     unknown-cards one  gpushare_memory_unit: host one shows no card")
    )
    assert [one["id"] for one in result["findings"]] == ["unknown-cards"]


def test_nodes_without_a_machine_are_judged_on_the_controller_alone():
    arguments = {"gpu_nodes": [], "image_delivery": "registry", "cluster": {**CLUSTER, "nodes": [node("worker-1")]}}
    fine, _said = act(preflight, {"hostvars": {}}, nodes=["worker-1"], **arguments)
    assert fine["problems"] == [] and not fine.get("failed")
    wrong, _said = act(preflight, {"hostvars": {}}, nodes=["worker-2"], **arguments)
    assert wrong["msg"].startswith("gpushare_nodes: worker-2 isn't a node of the cluster")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "gpushare_image_archive: importing x/y:1 needs an archive"),
        ("nowhere.tar", "nowhere.tar is no file"),
        ("other.tar", "holds docker.io/x/z:1 and not x/y:1"),
        ("text.tar", "isn't an image archive"),
    ],
)
def test_a_wrong_archive_is_named_and_two_problems_are_told_together(tmp_path, given, words):
    archive(tmp_path / "other.tar", "x/z:1")
    (tmp_path / "text.tar").write_text("no tar")
    arguments = {"image_archive": str(tmp_path / given)} if given else {}
    result, _said = act(
        preflight, {"hostvars": HOSTVARS}, cluster=CLUSTER, gpu_nodes=["one"], image="x/y:1", **arguments
    )
    assert result["failed"] and not result["changed"]
    assert len(result["problems"]) == 2
    assert result["problems"][1].startswith("gpushare_image_archive: ") and words in result["problems"][1]
    assert result["msg"].splitlines()[0] == "2 problems:"
    registry = act(preflight, {"hostvars": HOSTVARS}, cluster=CLUSTER, gpu_nodes=["one"], image_delivery="registry")
    assert registry[0]["msg"] == registry[0]["problems"][0]


def test_what_a_host_is_asked_for_comes_from_its_own_variables():
    gpu = {**SEEN, "driver": {"cards": [], "others": ["runfile"]}}
    hostvars = {"one": {"gpu_node": gpu}, "two": {"gpu_node": gpu, "driver_state": "external"}}
    result, _said = act(preflight, {"hostvars": hostvars}, gpu_nodes=["one", "two"])
    assert result["problems"] == [
        "host one has its driver from a .run file; run '/usr/bin/nvidia-uninstall --silent', "
        "or set driver_state to external"
    ]
    ignored, _said = act(preflight, {"hostvars": hostvars}, gpu_nodes=["one", "two"], ignore=["driver-runfile@one"])
    assert ignored["problems"] == [] and not ignored.get("failed")
    wrong, _said = act(preflight, {"hostvars": hostvars}, gpu_nodes=["one"], ignore=["nonsense"])
    assert wrong["failed"] and wrong["msg"].startswith("preflight_ignore: 'nonsense'")


def evaluated(role, file, name, **variables):
    given = {
        "groups": {"gpu_nodes": ["one", "gpu2"], "control_plane": ["cp1"]},
        "hostvars": {
            "one": {"gpu_node_name": "gpu1", "gpu_node": {"driver": {"cards": [{"uuid": "A"}, {"uuid": "B"}]}}},
            "gpu2": {},
            "cp1": {},
        },
        **variables,
    }
    for path in ("defaults/main.yml", file):
        described = yaml.safe_load((ROLES / role / path).read_text()) or {}
        for key, value in described.items():
            given[key] = trust_as_template(value) if isinstance(value, str) else value
    return Templar(loader=DataLoader(), variables=given).template(given[name])


def test_node_names_come_from_the_inventory():
    assert evaluated("gpushare", "defaults/main.yml", "gpushare_nodes") == ["gpu1", "gpu2"]
    assert evaluated("verify", "vars/main.yml", "__verify_cards") == {"gpu1": ["A", "B"], "gpu2": []}
    assert evaluated("verify", "vars/main.yml", "__verify_control_plane_names") == ["cp1"]
    assert evaluated("gpushare", "defaults/main.yml", "gpushare_nodes", groups={}) == []
