# SPDX-License-Identifier: GPL-3.0-or-later
"""Role maintenance, run by ansible-playbook; cluster, machine and the roles beside it are made up and keep a log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = "580.82.07", "580.95.05"

# Plays every module, on the controller, which is quick: writes down what it was asked for, and answers with the next of
# the host's scripted answers.
STUB = """
import json, pathlib
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        params, folder = dict(self._task.args), pathlib.Path({folder!r})
        host, what = task_vars["inventory_hostname"], ":".join([{name!r}, *filter(None, [params.get("state")])])
        with open(folder / "log", "a") as log:
            log.write(json.dumps([host, what, params]) + chr(10))
        script = folder / (host + ".json")
        answers = json.loads(script.read_text())
        given = answers.get(what, [{{}}])
        answer = given.pop(0) if len(given) > 1 else given[0]
        script.write_text(json.dumps(answers))
        return {{"changed": False, **answer, "failed": "msg" in answer}}
"""
MODULES = {"kubernetes.core": ("k8s_info", "k8s_drain"), "kubegpu.share": ("cluster_objects", "kernel_driver")}
ROLES = {
    "observe": [{"name": "Look", "ansible.builtin.set_fact": {"gpu_node": "{{ after }}"}, "when": "observe_again"}],
    "nouveau": [
        {"name": "Nouveau", "ansible.builtin.set_fact": {"nouveau_reboot_required": "{{ gpu_node.nouveau.loaded }}"}}
    ],
    "driver": [
        {
            "name": "Install",
            "ansible.builtin.fail": {"msg": "apt-get failed: no room"},
            "when": ["driver_in_maintenance | default(false)", "driver_breaks | default(false)"],
        }
    ],
}


def node(version=OLD, library=NEW, nouveau=False, error=None):
    return {
        "kernel": {"installed": ["6.1"]},
        "nouveau": {"loaded": nouveau},
        "gpus": [{"driver": "nouveau" if nouveau else "nvidia"}],
        "driver": {"module_version": version, "library_version": library, "error": error},
    }


def seen(unschedulable=False, ours=False):
    annotations = {"kubegpu.share/maintenance": "cordoned"} if ours else {"a": "b"}
    return {
        "resources": [{"metadata": {"name": "x", "annotations": annotations}, "spec": {"unschedulable": unschedulable}}]
    }


HELD = {"reboot_required": True, "reason": "the cards are held by python3 (process 77)"}
FREE = {"reboot_required": False, "reason": "", "changed": True}
UNLOAD, LOAD, DRAIN = "kernel_driver:unloaded", "kernel_driver", "k8s_drain:drain"
ALL = {UNLOAD: [FREE], LOAD: [FREE], DRAIN: [{"result": "node x already marked unschedulable."}]}
LOADED = node(version=NEW)

# Host, what is asked of it, and how its world answers.
HOSTS = {
    # The last one is asked by the play after, for all of them.
    "good": ({}, {"k8s_info": [seen(), seen(), seen(ours=True)]}),
    "slow": (
        {},
        {
            "k8s_info": [seen()],
            DRAIN: [
                {"msg": "Failed to delete pod a/b: Cannot evict pod as it would violate the pod's disruption budget."},
                {"result": "node x already marked unschedulable. 2 Pod(s) deleted from node."},
                {"result": "node x already marked unschedulable."},
            ],
        },
    ),
    "theirs": (
        {"after": {**LOADED, "maintenance": {"unfinished": True}}},
        {"k8s_info": [seen(unschedulable=True)]},
    ),
    "resumed": ({"maintenance_node_name": "x"}, {"k8s_info": [seen(unschedulable=True, ours=True)]}),
    "unmanaged": (
        {},
        {"k8s_info": [seen()], DRAIN: [{"msg": "Pod deletion errors: cannot delete Pods not managed by: a/b."}]},
    ),
    "endless": (
        {"maintenance_drain_timeout": 2},
        {"k8s_info": [seen()], DRAIN: [{"result": "1 Pod(s) deleted from node."}]},
    ),
    "unknown": ({}, {"k8s_info": [{"resources": []}]}),
    "forbidden": ({"maintenance_allowed": "never"}, {}),
    "held": ({}, {"k8s_info": [seen()], UNLOAD: [HELD]}),
    "broken": ({"driver_breaks": True}, {"k8s_info": [seen()]}),
    "rebooted": ({"maintenance_allowed": "reboot"}, {"k8s_info": [seen()], UNLOAD: [HELD], LOAD: [HELD]}),
    "nouveau": ({"gpu_node": node(None, "", True), "after": node(None, "", True)}, {"k8s_info": [seen()]}),
    "unchanged": ({"after": node()}, {"k8s_info": [seen()]}),
    "alone": ({"maintenance_cluster": False}, {}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """All hosts' maintenance in one run of a playbook; what was asked of whom, and what it printed."""
    folder = tmp_path_factory.mktemp("maintenance")
    collections = folder / "collections" / "ansible_collections"
    for collection, modules in MODULES.items():
        path = collections / collection.replace(".", "/")
        (path / "plugins/action").mkdir(parents=True)
        (path / "plugins/modules").mkdir()
        for name in modules:
            (path / "plugins/action" / f"{name}.py").write_text(STUB.format(name=name, folder=str(folder)))
            (path / "plugins/modules" / f"{name}.py").write_text("")
    roles = collections / "kubegpu/share/roles"
    roles.mkdir()
    (roles / "maintenance").symlink_to(ROOT / "roles/maintenance")
    for name, tasks in ROLES.items():
        (roles / name / "tasks").mkdir(parents=True)
        (roles / name / "tasks/main.yml").write_text(yaml.safe_dump(tasks))
    hosts = {}
    for name, (variables, answers) in HOSTS.items():
        (folder / f"{name}.json").write_text(json.dumps({**ALL, **answers}))
        hosts[name] = {"gpu_node": node(), "after": LOADED, **variables}
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gpu_maintenance": "drain",
        "gpu_kubeconfig": "/somewhere",
        "maintenance_services": ["{{ inventory_hostname }}"],
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": common}}, sort_keys=False))
    play = {"hosts": "all", "gather_facts": False, "roles": ["kubegpu.share.maintenance"]}
    later = [
        {
            "name": "Finish",
            "ansible.builtin.include_role": {"name": "kubegpu.share.maintenance", "tasks_from": "unfinished"},
            "vars": {"gpu_kubeconfig": LATER},
        },
        {
            "name": "Show",
            "ansible.builtin.debug": {"msg": "unfinished: {{ groups['kubegpu_maintenance'] | sort | join(' ') }}."},
            "run_once": True,
        },
    ]
    plays = [play, {"hosts": "all", "gather_facts": False, "tasks": later}]
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml"),
            *("-e", '{"__maintenance_drain_pause": 1}'),
        ],
        cwd=folder,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    log = {name: [(what, params) for host, what, params in rows if host == name] for name in HOSTS}
    return log, done.stdout + done.stderr


def steps(world, host):
    """What maintenance asked for, without what the look afterwards did."""
    return [what for what, params in world[0][host] if params.get("kubeconfig") != LATER]


def failed(world, host):
    """What the host's run ended with, or nothing."""
    lines = [line for line in world[1].splitlines() if line.startswith("fatal: ") or "msg" in line]
    text = world[1]
    recap = next(line for line in text.split("PLAY RECAP")[1].splitlines() if line.startswith(f"{host} "))
    if "failed=0" in recap:
        return ""
    last = text.split("TASK [kubegpu.share.maintenance : Fail with what went wrong]")[-1]
    found = [line for line in last.splitlines() if line.startswith(f"fatal: [{host}]")]
    return found[-1] if found else "\n".join(lines)


LATER = "/somewhere/later"
SWAP = ["k8s_info", "cluster_objects", "k8s_drain:cordon", DRAIN, UNLOAD, LOAD, "k8s_info"]
BACK = ["k8s_drain:uncordon", "cluster_objects:absent"]


def test_node_is_emptied_changed_and_given_back(world):
    assert failed(world, "good") == ""
    assert steps(world, "good") == SWAP + BACK
    calls = dict(world[0]["good"])
    assert calls["cluster_objects"]["field_manager"] == calls["cluster_objects:absent"]["field_manager"]
    assert calls["cluster_objects"]["definitions"]["metadata"] == {
        "name": "good",
        "annotations": {"kubegpu.share/maintenance": "cordoned"},
    }
    assert calls[DRAIN]["delete_options"] == {"ignore_daemonsets": True, "force": False, "delete_emptydir_data": False}
    assert calls[UNLOAD]["end_pods"] is True and calls[LOAD]["end_pods"] is True
    assert {params["kubeconfig"] for what, params in world[0]["good"] if "kernel" not in what} == {"/somewhere", LATER}


def test_drain_waits_for_disruption_budgets_and_until_the_pods_are_gone(world):
    assert failed(world, "slow") == ""
    assert steps(world, "slow").count(DRAIN) == 3
    assert steps(world, "slow")[-2:] == BACK


def test_node_that_was_cordoned_before_stays_so(world):
    assert failed(world, "theirs") == ""
    assert steps(world, "theirs") == ["k8s_info", "k8s_drain:cordon", DRAIN, UNLOAD, LOAD, "k8s_info"]


def test_node_that_a_killed_run_cordoned_is_given_back(world):
    assert failed(world, "resumed") == "" and steps(world, "resumed")[-2:] == BACK


@pytest.mark.parametrize(
    ("host", "words", "last"),
    [
        ("unmanaged", "Pod deletion errors: cannot delete Pods not managed by: a/b. (at: Drain the node)", DRAIN),
        ("endless", "The node was not empty after 2 s: 1 Pod(s) deleted from node. (at: Drain the node)", DRAIN),
        ("held", "can't be unloaded: the cards are held by python3 (process 77). Nothing of it was changed", LOAD),
        # What was stopped for it runs again.
        ("broken", "apt-get failed: no room (at: Install)", LOAD),
        ("rebooted", "would reboot the control node", LOAD),
        ("nouveau", "has to be rebooted, since nouveau is in use: set gpu_maintenance to reboot", DRAIN),
        ("unchanged", f"has kernel module {OLD} loaded and libraries of {NEW}", LOAD),
    ],
)
def test_failure_leaves_the_node_cordoned_and_says_how_to_go_on(world, host, words, last):
    said = failed(world, host)
    assert words in said
    assert f"Node {host} stays cordoned" in said and f"kubectl uncordon {host}" in said
    assert steps(world, host)[-1] == last and not set(steps(world, host)) & set(BACK)


def test_what_a_killed_run_left_is_found(world):
    """A node that carries our word, and a machine on which services are still stopped."""
    assert "unfinished: resumed theirs." in world[1]


def test_nothing_is_cordoned_where_nothing_can_be_done(world):
    assert "The cluster has no node unknown" in failed(world, "unknown")
    assert "stays cordoned" not in failed(world, "unknown")
    assert steps(world, "unknown") == ["k8s_info"]
    assert steps(world, "forbidden") == []
    assert "Host forbidden has to be emptied first, and gpu_maintenance is never" in world[1]


def test_machine_of_no_cluster_is_changed_and_no_pod_is_ended(world):
    assert failed(world, "alone") == ""
    assert steps(world, "alone") == [UNLOAD, LOAD]
    assert [params["end_pods"] for _what, params in world[0]["alone"]] == [False, False]


PLAN = """
- hosts: all
  gather_facts: false
  roles: [kubegpu.share.nouveau]
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "left to maintenance: {{ groups['kubegpu_maintenance'] | default([]) | sort | join(' ') }}."
      run_once: true
"""


def test_nouveau_that_needs_a_reboot_is_left_to_maintenance_where_that_is_allowed(tmp_path):
    """And the role executes nothing: the hosts can't even be reached."""
    image = {"path": "/boot/initrd.img-6.1", "release": "6.1", "bytes": 1, "newer": True, "blacklist": True}
    files = {"/etc/modprobe.d/blacklist-nouveau.conf": "blacklist nouveau\noptions nouveau modeset=0\n"}

    def host(maintenance, loaded=True):
        state = {"loaded": loaded, "refcnt": 3 if loaded else None, "files": files, "images": [image], "boot_free": 9}
        gpu_node = {
            "distribution": {"family": "debian", "id": "debian", "version": "12"},
            "kernel": {"installed": ["6.1"]},
            "nouveau": {"tool": "initramfs-tools", **state},
        }
        return {"gpu_node": gpu_node, "gpu_maintenance": maintenance, "ansible_host": "192.0.2.1"}

    hosts = {name: host(name.partition("-")[0]) for name in ("never-1", "drain-1", "reboot-1")}
    hosts["reboot-2"] = host("reboot", loaded=False)
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (tmp_path / "play.yml").write_text(PLAN)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "left to maintenance: reboot-1." in done.stdout
    assert "changed=1" not in done.stdout
    assert done.stdout.count("has nouveau loaded and in use") == 3
    assert done.stdout.count("It will be emptied and rebooted.") == 1
