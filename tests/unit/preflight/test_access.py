# SPDX-License-Identifier: GPL-3.0-or-later
"""Machines that can't be reached, or not as root, are findings among the others, by real ansible-playbook."""

from __future__ import annotations

import re
import shutil
import sys
import typing as t
from pathlib import Path
from unittest.mock import Mock

import action_plugins
import pytest
import yaml
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible_collections.kubegpu.share.plugins.action import gpu_node_info
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import naming_user, user
from verify_kit import ROOT, run_playbook

# Of sudo's arguments only the user counts; "nobody" is what a machine makes of a user that may not become root.
SUDO = """\
#!/bin/sh
case "$*" in
*"-u wheel "*) echo "sudo: a password is required" >&2; exit 1;;
esac
while [ "$1" != -u ]; do shift; done
shift 2
exec setpriv --reuid=65534 --clear-groups "$@"
"""
LOCAL = {"ansible_connection": "local"}


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
# Ansible takes much from the first machine, so that a silent one is the harder case there.
@pytest.mark.parametrize("first", ["away", pytest.param("healthy", marks=pytest.mark.long)])
def test_the_list_comes_though_machines_are_silent(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sudo").write_text(SUDO)
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin")
    hosts: dict[str, dict[str, t.Any]] = {
        "away": {"ansible_host": "127.0.0.9", "ansible_port": 1, "ansible_user": "kube"},
        "wheel": {**LOCAL, "ansible_become": True, "ansible_become_user": "wheel"},
        # Any user can read this one, and pipelining needs no files.
        "nobody": {**LOCAL, "ansible_become": True, "ansible_become_user": "nobody"}
        | {"ansible_python_interpreter": "/usr/bin/python3", "ansible_pipelining": True},
        "healthy": LOCAL,
    }
    ordered = dict(sorted(hosts.items(), key=lambda one: one[0] != first))
    variables = {"ansible_python_interpreter": sys.executable, "driver_state": "external", "toolkit_state": "external"}
    inventory = {"all": {"vars": variables}, "gpu_nodes": {"hosts": ordered}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    rc, text = run_playbook(tmp_path, ROOT / "playbooks" / "nodes.yml", "-i", "hosts.yml")
    entries = dict(re.findall(r"(?m)^problem  ([\w-]+)  (?:away|wheel|nobody|healthy)\n +(.*)$", text))
    assert entries["unreachable"].startswith("can't be reached as kube: Failed to connect to the host via ssh"), text
    assert "sudo: a password is required" in text and entries["no-escalation"].startswith("is reached as root, who"), (
        text
    )
    assert entries["not-root"] == "runs modules as nobody, and the roles need root there", text
    # The machine that runs the tests has no card, but is examined.
    assert "no-gpu" in entries, text
    assert rc == 2 and re.search(r"Problems, listed above: \d+\. Nothing was changed", text), text
    assert "PLAY [Install the NVIDIA driver" not in text and not re.search("changed=[1-9]", text)


def act(
    result: dict[str, t.Any] | AnsibleError, answers: t.Sequence[str | AnsibleError], monkeypatch: pytest.MonkeyPatch
) -> dict[str, t.Any]:
    """Run the action, whose module has ``result``, over a connection that gives these answers to commands."""
    action = action_plugins.load(gpu_node_info, {"report_trouble": True}, connection=Mock(become=Mock()))
    monkeypatch.setattr(action, "_execute_module", Mock(side_effect=[result]))
    said = [
        answer if isinstance(answer, AnsibleError) else {"stdout": answer, "stderr": "", "rc": 0} for answer in answers
    ]
    monkeypatch.setattr(action, "_low_level_execute_command", Mock(side_effect=said))
    monkeypatch.setattr(action, "_get_remote_user", lambda: "kube")
    done: dict[str, t.Any] = action.run(task_vars={"inventory_hostname": "gpu7"})
    return done


ROOT_USER, KUBE = {"uid": 0, "name": "root"}, {"uid": 1000, "name": "kube"}
AWAY = AnsibleConnectionFailure("no route")


@pytest.mark.parametrize(
    ("result", "answers", "trouble"),
    [
        ({"user": ROOT_USER, "gpu_node": {}}, [], None),
        ({"user": KUBE, "gpu_node": {}}, [], ("not-root", "kube", "")),
        # What a run wrote before, only root reads.
        ({"failed": True, "msg": "record.json can't be read", "user": KUBE}, [], ("not-root", "kube", "")),
        (AWAY, [AWAY], ("unreachable", "kube", "no route")),
        (AnsibleError("Incorrect sudo password"), ["kube\n", AnsibleError("Incorrect\nsudo password")],
         ("no-escalation", "kube", "Incorrect sudo password")),
        # The module fails, since it was never root.
        ({"failed": True, "msg": "MODULE FAILURE"}, ["kube\n", "1000\n"], ("no-escalation", "kube", "not root")),
        ({"failed": True, "msg": "dpkg's list can't be read"}, ["root\n", "0\n"],
         ("no-facts", "root", "dpkg's list can't be read")),
    ],
)  # fmt: skip
def test_the_machine_is_asked_why_there_are_no_facts(
    result: t.Any, answers: list[t.Any], trouble: tuple[str, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = act(result, answers, monkeypatch)
    assert not done.get("failed")
    if trouble is None:
        assert "gpu_node" in done and "trouble" not in done
    else:
        assert done["trouble"] == dict(zip(("id", "user", "reason"), trouble, strict=True))
        assert "gpu_node" not in done


def test_an_error_names_the_user_of_the_module() -> None:
    with pytest.raises(ShareError) as error, naming_user():
        raise ShareError("record.json can't be read")
    assert error.value.details["user"] == user()


def test_without_the_option_a_failure_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    action = action_plugins.load(gpu_node_info, {})
    monkeypatch.setattr(action, "_execute_module", Mock(side_effect=AWAY))
    with pytest.raises(AnsibleConnectionFailure):
        action.run(task_vars={})
