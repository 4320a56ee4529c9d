# SPDX-License-Identifier: GPL-3.0-or-later
"""The callback progress: lines for tasks that take long, by the real ansible-playbook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.running_tasks import HOSTS_NAMED, RunningTasks

ROOT = Path(__file__).resolve().parents[3]


def test_a_task_is_printed_once_per_interval_until_it_ends():
    tasks = RunningTasks(10)
    tasks.start("gpu1", "1", "Install the driver", 100)
    tasks.start("gpu2", "1", "Install the driver", 103)
    tasks.start("gpu3", "2", "Short", 100)
    tasks.end("gpu3", "2")
    assert tasks.due(109) == []
    assert tasks.due(110) == ["still running after 10 s on gpu1, gpu2: Install the driver"]
    assert tasks.due(119) == []
    tasks.end("gpu1", "1")
    assert tasks.due(121) == ["still running after 18 s on gpu2: Install the driver"]
    tasks.end("gpu2", "1")
    assert tasks.due(200) == []


def test_of_many_hosts_a_few_are_named():
    tasks = RunningTasks(10)
    for number in range(HOSTS_NAMED + 2):
        tasks.start(f"h{number}", "1", "T", 0)
    assert tasks.due(10) == ["still running after 10 s on h0, h1, h2, h3, h4 and 2 more: T"]


def run(folder, tasks, **variables):
    play = [{"hosts": "a,b", "gather_facts": False, "tasks": tasks}]
    (folder / "play.yml").write_text(yaml.safe_dump(play))
    hosts = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"a": None, "b": None}, "vars": hosts}}))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_CALLBACKS_ENABLED": "kubegpu.share.progress",
        "KUBEGPU_PROGRESS_INTERVAL": "1",
        **variables,
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_silent_task_is_printed_and_a_short_one_is_not(tmp_path):
    tasks = [
        {"name": "Short", "ansible.builtin.command": "true"},
        {"name": "Import the image", "ansible.builtin.command": "sleep {{ 4 if inventory_hostname == 'a' else 0 }}"},
        {"name": "Wait", "ansible.builtin.wait_for": {"timeout": 3}},
    ]
    done = run(tmp_path, tasks, ANSIBLE_STDOUT_CALLBACK="ansible.posix.json")
    assert done.returncode == 0, done.stderr
    # Standard output stays what it is.
    assert json.loads(done.stdout)["stats"]["a"]["failures"] == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("still running")]
    imports = [line for line in lines if line.endswith("Import the image")]
    assert len(imports) >= 2 and re.fullmatch(r"still running after \d+ s on a: Import the image", imports[-1]), lines
    assert any(line.endswith(": Wait") for line in lines)
