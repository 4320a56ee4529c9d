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


def run(folder: Path, *plays: dict[str, t.Any]) -> tuple[int, dict[str, str]]:
    """Run the plays; return the exit code and each task's output by its name."""
    done = run_playbook(folder, list(plays), groups={"kubegpu_schedulers": HOSTS})
    output: dict[str, str] = {}
    for name, text in re.findall(r"(?ms)^TASK \[(.*?)\] \**\n(.*?)(?=^TASK |^PLAY |\Z)", done.text):
        output[name] = output.get(name, "") + text
    assert output, done.text
    return done.rc, output


def test_unchanged_machine_is_not_observed_again(tmp_path: Path) -> None:
    kinds = {"scheduler_state": "absent", "scheduler_detection": {"mode": "static_pod"}}
    validated, machine = (
        play("kubegpu_schedulers", role("validate", **kinds)),
        play("kubegpu_schedulers", role("machine", **kinds)),
    )
    code, output = run(tmp_path, validated, {**machine, "serial": 1})
    assert code == 0
    assert sorted(re.findall(r"(?m)^(\w+): \[(\w+)\]", output[OBSERVE])) == [
        *[("ok", host) for host in HOSTS],
        *[("skipping", host) for host in HOSTS],
    ]
    assert "ok:" not in output[CONFIGURE] and "changed:" not in output[CONFIGURE]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"scheduler_state": "present"}, 2),
        ({"scheduler_extender_timeout": 1}, 0),
        pytest.param({"scheduler_extender_preemption": False}, 0, marks=pytest.mark.long),
    ],
)
def test_changed_options_observe_again(tmp_path: Path, changed: dict[str, t.Any], expected: int) -> None:
    kinds = {"scheduler_state": "absent", "scheduler_detection": {"mode": "static_pod"}}
    first, again = play("cp1", role("validate", **kinds)), play("cp1", role("machine", **{**kinds, **changed}))
    code, output = run(tmp_path, first, again)
    assert code == expected and output[OBSERVE].count("ok: [cp1]") == 2
    assert not code or f"static_pod needs {cp.MANIFEST}, and this machine has none" in output[CONFIGURE]


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


@pytest.mark.parametrize(
    ("seen", "words"),
    [({"x": 1}, "machines: this isn't a result of control_plane_info"), (None, "kubeconfig")],
    ids=["passed on", "not observed"],
)
def test_observation_reaches_kubeadm_config(seen: t.Any, words: str, tmp_path: Path) -> None:
    observation = {"control_plane": seen, "options": "", "unchanged": False}
    facts = [{"ansible.builtin.set_fact": {"scheduler_observed": observation}, "when": seen is not None}]
    first = {"hosts": "cp2", "gather_facts": False, "tasks": facts}
    kinds = {"scheduler_detection": {"mode": "static_pod"}, "scheduler_kubeconfig": "/nowhere/kubeconfig"}
    code, output = run(tmp_path, first, play("localhost", role("cluster", **kinds)))
    [text] = [one for name, one in output.items() if "so that upgrades keep it" in name]
    assert code == 2 and words in text, text
