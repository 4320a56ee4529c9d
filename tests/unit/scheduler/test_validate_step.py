# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's step validate by real ansible-playbook, on a machine without a kube-scheduler: this one."""

from __future__ import annotations

import re
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from own_cluster import ROOT, run_playbook

HOSTS = ("cp1", "cp2")
OBSERVE = "kubegpu.share.scheduler : Observe the control plane's kube-scheduler"
PLAN = "kubegpu.share.scheduler : Plan the kube-scheduler change"
CONFIGURE = "kubegpu.share.scheduler : Configure kube-scheduler with the extender, or remove the extender"

pytestmark = pytest.mark.skipif(Path(cp.MANIFEST).exists(), reason="this machine has a kube-scheduler")


def role(step: str, **variables: t.Any) -> dict[str, t.Any]:
    return {"role": "kubegpu.share.scheduler", "scheduler_step": step, **variables}


def play(hosts: str, *roles: dict[str, t.Any]) -> dict[str, t.Any]:
    return {"hosts": hosts, "gather_facts": False, "any_errors_fatal": True, "roles": [*roles]}


def run(folder: Path, *plays: dict[str, t.Any], hosts: t.Iterable[str] = HOSTS) -> tuple[int, dict[str, str]]:
    """Run the plays; return the exit code and each task's output by its name."""
    done = run_playbook(folder, list(plays), groups={"kubegpu_schedulers": list(hosts)})
    output: dict[str, str] = {}
    for name, text in re.findall(r"(?ms)^TASK \[(.*?)\] \**\n(.*?)(?=^TASK |^PLAY |\Z)", done.text):
        output[name] = output.get(name, "") + text
    assert output, done.text
    return done.rc, output


def test_a_machine_is_observed_again_only_for_other_options(tmp_path: Path) -> None:
    kinds = {"scheduler_state": "absent", "scheduler_detection": {"mode": "static_pod"}}
    # The options of the second step, by host.
    changed: dict[str, dict[str, t.Any]] = {
        "cp1": {},
        "cp2": {"scheduler_extender_timeout": 1},
        "cp3": {"scheduler_extender_preemption": False},
        "cp4": {"scheduler_state": "present"},
    }
    machines = [play(host, role("machine", **{**kinds, **options})) for host, options in changed.items()]
    code, output = run(tmp_path, play("kubegpu_schedulers", role("validate", **kinds)), *machines, hosts=changed)
    assert code == 2
    assert sorted(re.findall(r"(?m)^(\w+): \[(\w+)\]", output[OBSERVE])) == [
        *[("ok", host) for host in sorted([*changed, "cp2", "cp3", "cp4"])],
        ("skipping", "cp1"),
    ]
    done = re.findall(r"(?m)^(\w+): \[(\w+)\]", output[CONFIGURE])
    assert done == [("skipping", "cp1"), ("ok", "cp2"), ("ok", "cp3"), ("fatal", "cp4")]
    assert f"static_pod needs {cp.MANIFEST}, and this machine has none" in output[CONFIGURE]


def test_both_steps_pass_the_same_options() -> None:
    def asked(step: str) -> dict[str, t.Any]:
        tasks = yaml.safe_load((ROOT / "roles" / "scheduler" / "tasks" / f"{step}.yml").read_text())
        [options] = [task["kubegpu.share.kube_scheduler"] for task in tasks if "kubegpu.share.kube_scheduler" in task]
        return t.cast("dict[str, t.Any]", options)

    # Only the step that changes something waits.
    assert asked("validate") == {
        key: value for key, value in asked("machine").items() if key not in ("timeout", "kubeconfig")
    }


def test_refusal_comes_before_any_change(tmp_path: Path) -> None:
    chosen = {"mode": "static_pod"}
    validated = play("kubegpu_schedulers", role("validate", scheduler_detection=chosen))
    code, output = run(tmp_path, validated, play("kubegpu_schedulers", role("machine", scheduler_detection=chosen)))
    assert code == 2 and CONFIGURE not in output, output
    refusal = output.get(PLAN, "")
    for host in HOSTS:
        assert re.search(rf"\[{host}\]: FAILED!.*static_pod needs {cp.MANIFEST}", refusal), output


def test_observation_reaches_kubeadm_config(tmp_path: Path) -> None:
    """One that isn't control_plane_info's is refused; without any, the cluster is asked."""
    observation = {"control_plane": {"x": 1}, "options": "", "unchanged": False}
    kinds = {"scheduler_step": "cluster", "scheduler_detection": {"mode": "static_pod"}}
    kinds["scheduler_kubeconfig"] = "/nowhere/kubeconfig"
    include = {"ansible.builtin.include_role": {"name": "kubegpu.share.scheduler"}, "vars": kinds}
    shown = {"ansible.builtin.debug": {"msg": "said {{ ansible_failed_result.msg }}"}}
    tasks = [{"block": [include], "rescue": [shown]}]
    facts = [{"ansible.builtin.set_fact": {"scheduler_observed": observation}}]
    plays = [("localhost", tasks), ("cp2", facts), ("localhost", tasks)]
    plays = [{"hosts": hosts, "gather_facts": False, "tasks": made} for hosts, made in plays]
    done = run_playbook(tmp_path, plays, groups={"kubegpu_schedulers": HOSTS})
    first, second = re.findall(r"said (.*)", done.text)
    assert "kubeconfig" in first and "machines: this isn't a result of control_plane_info" in second, done.text
