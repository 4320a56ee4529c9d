# SPDX-License-Identifier: GPL-3.0-or-later
"""inspect.yml by the real ansible-playbook, in each of its formats."""

from __future__ import annotations

import json
import re
import sys

import pytest
import virtual_machines
from allocation_snapshots import asks, booked, hami_node, ours, pod
from kube_api import Api, kubeconfig
from verify_kit import ROOT, run_playbook


@pytest.fixture
def play(tmp_path):
    api = Api()
    api.lists = {
        "/api/v1/nodes": [ours(), hami_node(name="n2")],
        "/api/v1/pods": [pod("a", [asks(mem=10)], annotations=booked(1, 10)), pod("w", [asks(mem=99)], on=None)],
    }
    (tmp_path / "config").write_text(json.dumps(kubeconfig(api.url)))

    def run(*words):
        # Relative to where the user stands.
        given = ["-e", "gpu_kubeconfig=config", "-e", f"ansible_python_interpreter={sys.executable}"]
        return run_playbook(tmp_path, ROOT / "playbooks" / "inspect.yml", *given, *words)

    run.api = api
    yield run
    api.close()


def test_tables(play):
    rc, text = play()
    assert rc == 0 and "changed=0" in text, text
    assert "GPU1 [######....] 10/16  NVIDIA T4\n" in text
    assert "uid-a" not in text
    assert ["team", "a", "Running", "0", "10"] in [line.split() for line in text.splitlines()]
    assert "Allocated/Total GPU memory of the cluster (GiB): 10/32 (31%)" in text
    rc, text = play("-e", "inspect_format=wide")
    assert rc == 0 and "uid-a" in text, text


def test_json(play):
    rc, text = play("-e", "inspect_format=json")
    assert rc == 0, text
    shown, _end = json.JSONDecoder().raw_decode(text[text.index("\n{") + 1 :])
    assert [(node["name"], node["backend"], node["used"]) for node in shown["nodes"]] == [
        ("n1", "gpushare", 10),
        ("n2", "hami", 0),
    ]
    assert [each["name"] for each in shown["waiting"]] == ["w"]
    assert set(shown) == {"cluster", "time", "unit", "total", "used", "totals", "nodes", "waiting"}


def test_html(play, tmp_path):
    rc, text = play("-e", "inspect_format=html", "-e", "inspect_output=page.html")
    assert rc == 0, text
    page = (tmp_path / "page.html").read_text()
    assert "NVIDIA T4" in page and "n2" in page
    # Which cluster, and when.
    assert re.search(r"<dt>Cluster</dt><dd>http://127\.0\.0\.1:[0-9]+</dd>", page)
    assert re.search(r"<dt>Time</dt><dd>20[0-9-]+T[0-9:]+Z</dd>", page)
    assert f"The page is {tmp_path}/page.html." in text


INVENTORY = """
all:
  hosts:
    n1: {ansible_connection: local, ansible_become: false}
    away: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_ssh_common_args: -o BatchMode=yes}
  children:
    gpu_nodes: {hosts: {n1: {}, away: {}}}
"""


@pytest.mark.parametrize("asked", [True, False])
def test_machines_are_asked_only_where_that_is_wanted(play, tmp_path, asked):
    api = play.api
    api.lists["/api/v1/nodes"] = [virtual_machines.node(name=name) for name in ("n1", "away")]
    api.lists["/api/v1/pods"] = [virtual_machines.pod("virt-launcher-desktop", machine="desktop")]
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    options = ["-i", "hosts.yml", "-e", "inspect_format=json", *(["-e", "inspect_machines=true"] if asked else [])]
    rc, text = play(*options)
    assert rc == 0, text
    shown, _end = json.JSONDecoder().raw_decode(text[text.index("\n{") + 1 :])
    found = {node["name"]: node for node in shown["nodes"]}
    assert found["n1"]["backend"] == "passthrough"
    assert [each["machine"] for each in found["n1"]["pending"]] == ["desktop"]
    # This machine has no NVIDIA card.
    assert [node["devices"] for node in found.values()] == [[], []]
    assert found["n1"]["problem"] == "", text
    assert ("its machine is unreachable" in found["away"]["problem"]) is asked
    assert ("Collect the cards on PCI" in text) is asked
