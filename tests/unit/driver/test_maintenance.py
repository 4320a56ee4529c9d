# SPDX-License-Identifier: GPL-3.0-or-later
"""Role maintenance in ansible-playbook, with scripted modules and roles that log their calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau as modprobe
from ansible_runs import ansible

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = "580.82.07", "580.95.05"

# Replaces every module, on the controller, which is quick: records its arguments, and returns the host's next scripted
# answer.
STUB = """
import json, pathlib
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        params, folder = dict(self._task.args), pathlib.Path({folder!r})
        host, call = task_vars["inventory_hostname"], ":".join([{name!r}, *filter(None, [params.get("state")])])
        with open(folder / "log", "a") as log:
            log.write(json.dumps([host, call, params]) + chr(10))
        script = folder / (host + ".json")
        answers = json.loads(script.read_text())
        given = answers.get(call, [{{}}])
        answer = given.pop(0) if len(given) > 1 else given[0]
        script.write_text(json.dumps(answers))
        return {{"changed": False, **answer, "failed": "msg" in answer}}
"""
MODULES = {"kubernetes.core": ("k8s", "k8s_info", "k8s_drain"), "kubegpu.share": ("cluster_objects", "kernel_driver")}
ROLES = {
    "node_facts": [
        {"name": "Facts", "ansible.builtin.set_fact": {"gpu_node": "{{ after }}"}, "when": "node_facts_refresh"}
    ],
    "nouveau": [
        {"name": "Nouveau", "ansible.builtin.set_fact": {"nouveau_reboot_required": "{{ gpu_node.nouveau.loaded }}"}}
    ],
    "driver": [
        {
            "name": "Install",
            "ansible.builtin.fail": {"msg": "apt-get failed: no space left"},
            "when": ["driver_in_maintenance | default(false)", "driver_breaks | default(false)"],
        }
    ],
}


def node(version=OLD, library=NEW, nouveau=False, error=None):
    return {
        "kernel": {"installed": ["6.1"]},
        "nouveau": {"loaded": nouveau, "nova": {"modules": []}},
        "gpus": [{"driver": "nouveau" if nouveau else "nvidia"}],
        "driver": {"module_version": version, "library_version": library, "error": error},
    }


def kube_node(unschedulable=False, ours=False):
    metadata = {"name": "x", "annotations": {"kubegpu.share/maintenance": "cordoned"} if ours else {"a": "b"}}
    return {"resources": [{"metadata": metadata, "spec": {"unschedulable": unschedulable}}]}


HELD = {"reboot_required": True, "reason": "the GPUs are in use by python3 (process 77)"}
FREE = {"reboot_required": False, "reason": "", "changed": True}
UNLOAD, LOAD, DRAIN = "kernel_driver:unloaded", "kernel_driver", "k8s_drain:drain"
EMPTY = {"result": "node x already marked unschedulable."}
ALL = {"k8s_info": [kube_node()], UNLOAD: [FREE], LOAD: [FREE], DRAIN: [EMPTY]}
LOADED = node(version=NEW)

# Host: its variables, and the answers of its modules.
HOSTS = {
    # The last answer is for the second play, which queries every node.
    "good": ({}, {"k8s_info": [kube_node(), kube_node(), kube_node(ours=True)]}),
    "slow": (
        {},
        {
            DRAIN: [
                {"msg": "Failed to delete pod a/b: Cannot evict pod as it would violate the pod's disruption budget."},
                {"result": "2 evicted.", "changed": True},
                EMPTY,
            ]
        },
    ),
    "theirs": (
        {"after": {**LOADED, "maintenance": {"unfinished": True}}},
        {"k8s_info": [kube_node(unschedulable=True)]},
    ),
    "resumed": ({"maintenance_node_name": "x"}, {"k8s_info": [kube_node(unschedulable=True, ours=True)]}),
    "unmanaged": ({}, {DRAIN: [{"msg": "Pod deletion errors: cannot delete Pods not managed by: a/b."}]}),
    "endless": ({"maintenance_drain_timeout": 2}, {DRAIN: [{"result": "1 evicted.", "changed": True}]}),
    "unknown": ({}, {"k8s_info": [{"resources": []}]}),
    "forbidden": ({"maintenance_allowed": "never"}, {}),
    "held": ({}, {UNLOAD: [HELD]}),
    "broken": ({"driver_breaks": True}, {}),
    "rebooted": ({"maintenance_allowed": "reboot"}, {UNLOAD: [HELD], LOAD: [HELD]}),
    "nouveau": ({"gpu_node": node(None, "", True), "after": node(None, "", True)}, {}),
    "machines": (
        {
            "maintenance_allowed": "reboot",
            "passthrough_reboot_required": True,
            "passthrough_reboot_reason": "it has no IOMMU groups",
        },
        {},
    ),
    "unchanged": ({"after": node()}, {}),
    "alone": ({"maintenance_cluster": False}, {}),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """All hosts' maintenance in one run of a playbook: the calls by host, and the output."""
    folder = tmp_path_factory.mktemp("maintenance")
    collections = folder / "collections" / "ansible_collections"
    for collection, modules in MODULES.items():
        path = collections / collection.replace(".", "/")
        (path / "plugins/action").mkdir(parents=True)
        (path / "plugins/modules").mkdir()
        for name in modules:
            (path / "plugins/action" / f"{name}.py").write_text(STUB.format(name=name, folder=str(folder)))
            (path / "plugins/modules" / f"{name}.py").write_text("")
    # The roles set the kubeconfig for a group of modules.
    (collections / "kubegpu/share/meta").symlink_to(ROOT / "meta")
    for name in ("filter", "module_utils", "plugin_utils"):
        (collections / "kubegpu/share/plugins" / name).symlink_to(ROOT / "plugins" / name)
    group = {"requires_ansible": ">=2.19.0", "action_groups": {"k8s": list(MODULES["kubernetes.core"])}}
    (collections / "kubernetes/core/meta").mkdir()
    (collections / "kubernetes/core/meta/runtime.yml").write_text(yaml.safe_dump(group))
    roles = collections / "kubegpu/share/roles"
    roles.mkdir()
    for name in ("__init__.py", "maintenance"):
        (roles / name).symlink_to(ROOT / "roles" / name)
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
    words = ("-i", "hosts.yml", "play.yml", "-e", '{"__maintenance_drain_pause": 1}')
    done = ansible(folder, "ansible-playbook", *words, ANSIBLE_COLLECTIONS_PATH=str(folder / "collections"))
    rows = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    log = {name: [(call, params) for host, call, params in rows if host == name] for name in HOSTS}
    return log, done.text


def steps(played, host):
    """The calls of maintenance, without the collection of facts afterwards."""
    return [call for call, params in played[0][host] if params.get("kubeconfig") != LATER]


def failed(played, host):
    """The message that the host's run failed with; empty where it didn't."""
    lines = [line for line in played[1].splitlines() if line.startswith("fatal: ") or "msg" in line]
    recap = next(line for line in played[1].split("PLAY RECAP")[1].splitlines() if line.startswith(f"{host} "))
    if "failed=0" in recap:
        return ""
    last = played[1].split("TASK [kubegpu.share.maintenance : Fail with the first error and how to continue]")[-1]
    found = [line for line in last.splitlines() if line.startswith(f"fatal: [{host}]")]
    return found[-1] if found else "\n".join(lines)


LATER = "/somewhere/later"
SWAP = ["k8s_info", "cluster_objects", "k8s_drain:cordon", DRAIN, UNLOAD, LOAD, "k8s_info"]
BACK = ["k8s:patched"]


def test_node_is_drained_changed_and_uncordoned(played):
    assert failed(played, "good") == ""
    assert steps(played, "good") == SWAP + BACK
    calls = dict(played[0]["good"])
    # Both in one request, so that no kill leaves one of them.
    ended = calls["k8s:patched"]["definition"]
    assert ended["metadata"] == {"name": "good", "annotations": {"kubegpu.share/maintenance": None}}
    assert ended["spec"] == {"unschedulable": None}
    annotations = {"kubegpu.share/maintenance": "cordoned"}
    assert calls["cluster_objects"]["definitions"]["metadata"] == {"name": "good", "annotations": annotations}
    assert calls[DRAIN]["delete_options"] == {"ignore_daemonsets": True, "force": False, "delete_emptydir_data": False}
    assert calls[UNLOAD]["end_pods"] is True and calls[LOAD]["end_pods"] is True
    assert {params["kubeconfig"] for call, params in played[0]["good"] if "kernel" not in call} == {"/somewhere", LATER}


def test_drain_waits_for_disruption_budgets_and_remaining_pods(played):
    assert failed(played, "slow") == ""
    assert steps(played, "slow").count(DRAIN) == 3
    assert steps(played, "slow")[-1:] == BACK


def test_node_is_uncordoned_unless_another_cordoned_it(played):
    assert failed(played, "theirs") == ""
    assert steps(played, "theirs") == ["k8s_info", "k8s_drain:cordon", DRAIN, UNLOAD, LOAD, "k8s_info"]
    # A killed run cordoned this one.
    assert failed(played, "resumed") == "" and steps(played, "resumed")[-1:] == BACK


@pytest.mark.parametrize(
    ("host", "text", "last"),
    [
        ("unmanaged", "Pod deletion errors: cannot delete Pods not managed by: a/b. (at: Drain the node)", DRAIN),
        ("endless", "The node still had pods after 2 s: 1 evicted. (at: Drain the node)", DRAIN),
        ("held", "can't be unloaded: the GPUs are in use by python3 (process 77). It wasn't changed", LOAD),
        # The stopped services run again.
        ("broken", "apt-get failed: no space left (at: Install)", LOAD),
        ("rebooted", "would reboot the control node", LOAD),
        ("nouveau", "has to be rebooted, since nouveau is in use: set gpu_maintenance to reboot", DRAIN),
        # Its cards for virtual machines wait for a reboot.
        ("machines", "would reboot the control node", DRAIN),
        ("unchanged", f"has kernel module {OLD} loaded and libraries of version {NEW}", LOAD),
    ],
)
def test_failure_keeps_the_node_cordoned_and_reports_how_to_continue(played, host, text, last):
    message = failed(played, host)
    assert text in message
    assert f"Node {host} stays cordoned" in message and f"kubectl uncordon {host}" in message
    assert steps(played, host)[-1] == last and not set(steps(played, host)) & set(BACK)


def test_interrupted_maintenance_is_detected(played):
    """By our annotation of a node, and by services that are still stopped."""
    assert "unfinished: resumed theirs." in played[1]


def test_nothing_is_cordoned_where_maintenance_is_refused(played):
    assert "The cluster has no node unknown" in failed(played, "unknown")
    assert "stays cordoned" not in failed(played, "unknown")
    assert steps(played, "unknown") == ["k8s_info"]
    assert steps(played, "forbidden") == []
    assert "Host forbidden has to be drained first, and gpu_maintenance is never" in played[1]


def test_machine_without_cluster_is_changed_and_no_pod_is_ended(played):
    assert failed(played, "alone") == ""
    assert steps(played, "alone") == [UNLOAD, LOAD]
    assert [params["end_pods"] for _call, params in played[0]["alone"]] == [False, False]


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


def test_nouveau_that_needs_a_reboot_is_left_to_maintenance_where_reboots_are_allowed(tmp_path):
    """The role executes nothing: the hosts are unreachable."""
    image = {"path": "/boot/initrd.img-6.1", "release": "6.1", "bytes": 1, "newer": True, "blacklist": True}
    files = {modprobe.PATH: "".join(f"{line}\n" for line in modprobe.DIRECTIVES)}

    def host(name, loaded=True):
        state = {"loaded": loaded, "refcnt": 3 if loaded else None, "files": files, "images": [image], "boot_free": 9}
        nova = {"modules": ["nova_core"] if name == "drain-2" else [], "in_use": True}
        gpu_node = {
            "distribution": {"family": "debian", "id": "debian", "version": "12"},
            "kernel": {"installed": ["6.1"]},
            "nouveau": {"tool": "initramfs-tools", **state, "nova": nova},
        }
        return {"gpu_node": gpu_node, "gpu_maintenance": name.partition("-")[0], "ansible_host": "192.0.2.1"}

    hosts = {name: host(name) for name in ("never-1", "drain-1", "reboot-1")}
    hosts["reboot-2"] = host("reboot-2", loaded=False)
    hosts["drain-2"] = host("drain-2", loaded=False)
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (tmp_path / "play.yml").write_text(PLAN)
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml")
    assert done.rc == 0, done.text[-4000:]
    assert "left to maintenance: reboot-1." in done.text
    assert "changed=1" not in done.text
    assert done.text.count("has nouveau loaded and in use") == 3
    assert done.text.count("Host drain-2 has nova_core loaded and in use") == 1
    assert done.text.count("Role maintenance will drain and reboot it.") == 1
