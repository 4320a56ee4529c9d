# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's step judge by real ansible-playbook, on a machine without a kube-scheduler: this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp

ROOT = Path(__file__).resolve().parents[3]
HOSTS = ("cp1", "cp2")
LOOK = "kubegpu.share.scheduler : Look at kube-scheduler"
TELL = "kubegpu.share.scheduler : Tell kube-scheduler of the extender, or take it out"

pytestmark = pytest.mark.skipif(Path(cp.MANIFEST).exists(), reason="this machine has a kube-scheduler")


def role(step: str, **variables: t.Any) -> dict[str, t.Any]:
    return {"role": "kubegpu.share.scheduler", "scheduler_step": step, **variables}


def play(hosts: str, *roles: dict[str, t.Any]) -> dict[str, t.Any]:
    return {"hosts": hosts, "connection": "local", "gather_facts": False, "any_errors_fatal": True, "roles": [*roles]}


def run(folder: Path, *plays: dict[str, t.Any]) -> tuple[int, dict[str, str]]:
    """What each task said, by its name."""
    hosts = {name: {"ansible_python_interpreter": sys.executable} for name in (*HOSTS, "localhost")}
    groups = {"kubegpu_schedulers": {"hosts": {name: {} for name in HOSTS}}}
    (folder / "inventory.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "children": groups}}))
    (folder / "play.yml").write_text(yaml.safe_dump(list(plays), sort_keys=False))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "inventory.yml", "play.yml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(folder),
            "ANSIBLE_NOCOLOR": "1",
        },
    )
    said: dict[str, str] = {}
    for name, text in re.findall(r"(?ms)^TASK \[(.*?)\] \**\n(.*?)(?=^TASK |^PLAY |\Z)", done.stdout):
        said[name] = said.get(name, "") + text
    assert said, done.stdout + done.stderr
    return done.returncode, said


def test_where_nothing_is_to_be_done_the_machine_isnt_looked_at_again(tmp_path: Path) -> None:
    kinds = {"scheduler_state": "absent", "scheduler_chosen": {"mode": "static_pod"}}
    judged, machine = (
        play("kubegpu_schedulers", role("judge", **kinds)),
        play("kubegpu_schedulers", role("machine", **kinds)),
    )
    code, said = run(tmp_path, judged, {**machine, "serial": 1})
    assert code == 0
    assert sorted(re.findall(r"(?m)^(\w+): \[(\w+)\]", said[LOOK])) == [
        *[("ok", host) for host in HOSTS],
        *[("skipping", host) for host in HOSTS],
    ]
    assert "ok:" not in said[TELL] and "changed:" not in said[TELL]


def test_what_was_asked_otherwise_is_looked_at(tmp_path: Path) -> None:
    """As when one run of Ansible takes the extender out and puts it in again."""
    chosen = {"mode": "static_pod"}
    first = play("cp1", role("judge", scheduler_state="absent", scheduler_chosen=chosen))
    code, said = run(tmp_path, first, play("cp1", role("machine", scheduler_chosen=chosen)))
    assert code == 2 and said[LOOK].count("ok: [cp1]") == 2
    assert f"static_pod needs {cp.MANIFEST}, and this machine has none" in said[TELL]


@pytest.mark.parametrize("option", ["scheduler_extender_timeout", "scheduler_extender_preemption"])
def test_what_is_asked_of_the_extender_is_part_of_it(tmp_path: Path, option: str) -> None:
    kinds = {"scheduler_state": "absent", "scheduler_chosen": {"mode": "static_pod"}}
    first, again = play("cp1", role("judge", **kinds, **{option: 1})), play("cp1", role("machine", **kinds))
    code, said = run(tmp_path, first, again)
    assert code == 0 and said[LOOK].count("ok: [cp1]") == 2


def test_both_steps_ask_the_same() -> None:
    def asked(step: str) -> dict[str, t.Any]:
        tasks = yaml.safe_load((ROOT / "roles" / "scheduler" / "tasks" / f"{step}.yml").read_text())
        [options] = [task["kubegpu.share.kube_scheduler"] for task in tasks if "kubegpu.share.kube_scheduler" in task]
        return t.cast("dict[str, t.Any]", options)

    # Only who changes something waits for it.
    assert asked("judge") == {
        key: value for key, value in asked("machine").items() if key not in ("timeout", "kubeconfig")
    }


def test_what_can_t_be_is_refused_before_anything_changes(tmp_path: Path) -> None:
    chosen = {"mode": "static_pod"}
    judged = play("kubegpu_schedulers", role("judge", scheduler_chosen=chosen))
    code, said = run(tmp_path, judged, play("kubegpu_schedulers", role("machine", scheduler_chosen=chosen)))
    assert code == 2 and TELL not in said
    [refusal] = [text for name, text in said.items() if "change nothing" in name]
    for host in HOSTS:
        assert re.search(rf"\[{host}\]: FAILED!.*static_pod needs {cp.MANIFEST}", refusal), refusal


@pytest.mark.parametrize(
    ("seen", "words"),
    [({"x": 1}, "machines: this isn't what control_plane_info returned"), (None, "kubeconfig")],
    ids=["handed on", "nobody looked"],
)
def test_what_was_seen_gets_to_kubeadms_configuration(seen: t.Any, words: str, tmp_path: Path) -> None:
    looked = {"control_plane": seen, "asked": "", "settled": False}
    facts = [{"ansible.builtin.set_fact": {"scheduler_seen": looked}, "when": seen is not None}]
    first = {"hosts": "cp2", "connection": "local", "gather_facts": False, "tasks": facts}
    kinds = {"scheduler_chosen": {"mode": "static_pod"}, "scheduler_kubeconfig": "/nowhere/kubeconfig"}
    code, said = run(tmp_path, first, play("localhost", role("cluster", **kinds)))
    [told] = [text for name, text in said.items() if "Have kubeadm keep" in name]
    assert code == 2 and words in told, told
