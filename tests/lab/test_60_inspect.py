# SPDX-License-Identifier: GPL-3.0-or-later
"""``inspect.yml`` shows the same numbers as the API's pods and nodes, and as the extender."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from _lab import JsonObject, Lab, until

NAMESPACE = "lab-inspect"
PLAYBOOK = "playbooks/inspect.yml"
SIZES = {"three": [3], "five": [4, 1]}


@pytest.fixture(scope="module")
def pods(lab: Lab) -> Iterator[list[JsonObject]]:
    with lab.api.namespace(NAMESPACE) as name:
        for pod, units in SIZES.items():
            lab.api.create_pod(name, pod, units, lab.image(), lab.gpu_nodes[0])
        lab.api.create_pod(name, "waits", [100000], lab.image())
        lab.api.wait_running(name, list(SIZES))
        until(
            lambda: all(
                lab.api.pod(name, pod)["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"
                for pod in SIZES
            ),
            "pods assigned",
        )
        yield lab.api.pods(name)


def test_table(lab: Lab, pods: list[JsonObject]) -> None:
    done = lab.playbook(PLAYBOOK)
    assert done.rc == 0, done.out[-4000:]
    done.assert_unchanged()
    lines = done.out.splitlines()
    card = next(pod for pod in pods if pod["metadata"]["name"] == "three")["metadata"]["annotations"]
    for name, units in SIZES.items():
        row = next(line.split() for line in lines if line.split()[:2] == [NAMESPACE, name])
        assert str(sum(units)) in row[3:], row
    total = sum(one["units"] for node in lab.gpu_nodes for one in lab.cards(node))
    assert any(f"8/{total}" in line for line in lines), done.out[-4000:]
    assert any(NAMESPACE in line and "waits" in line and "100000" in line for line in lines), done.out[-4000:]
    # Binpack: both on one card.
    assert {
        pod["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"] for pod in pods if "annotations" in pod["metadata"]
    } == {card["ALIYUN_COM_GPU_MEM_IDX"]}


def test_json_and_the_extender_agree(lab: Lab, pods: list[JsonObject]) -> None:
    done = lab.playbook(PLAYBOOK, "-e", "inspect_format=json")
    assert done.rc == 0, done.out[-4000:]
    start = done.out.index("\n{") + 1
    shown, _end = json.JSONDecoder().raw_decode(done.out[start:])
    ours = {node["name"]: node["used"] for node in shown["nodes"]}
    assert ours == {lab.gpu_nodes[0]: 8, **dict.fromkeys(lab.gpu_nodes[1:], 0)}
    script = (
        "python3 -c 'import urllib.request as u;"
        'print(u.urlopen("http://127.0.0.1:12345/gpushare-scheduler/inspect").read().decode())\''
    )
    inspected = json.loads(lab.ssh(lab.control_planes[0], script))
    assert {node["name"]: node["usedGPU"] for node in inspected["nodes"] if node["name"] in ours} == ours
