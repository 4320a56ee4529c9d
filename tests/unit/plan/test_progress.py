# SPDX-License-Identifier: GPL-3.0-or-later
"""Lines for tasks that take long: by the callback progress, and about what a module waits for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube import apply_set
from ansible_collections.kubegpu.share.plugins.module_utils._kube.apply_set import status_writer
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.running_tasks import HOSTS_NAMED, RunningTasks
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.terminal import StatusLines
from fake_kube import FakeKube, apply_options

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


def test_what_a_module_waits_for_is_printed_while_it_waits():
    shown = []
    with StatusLines(shown.append, 0.2) as path:
        time.sleep(0.5)
        assert shown == []
        write = status_writer(path)
        write("DaemonSet a: 1 of 2 pods are ready")
        write("DaemonSet a: 1 of 2")
        time.sleep(0.5)
    assert shown and re.fullmatch(r"waiting for \d s: DaemonSet a: 1 of 2", shown[-1])
    printed = len(shown)
    write("later")
    time.sleep(0.3)
    assert len(shown) == printed and not os.path.exists(path)


def test_a_wait_reports_what_is_pending():
    seen = []
    kube = FakeKube()
    definition = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d", "namespace": "n"}}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}}
    params = apply_options([space, {**definition, "spec": {}}], wait=True, wait_timeout=2)
    with pytest.raises(NotInEffect):
        apply_set.ensure(kube, params, False, Waiting(0.01, 0.01, status=seen.append))
    assert seen and seen[0].startswith("DaemonSet n/d")
    predicted = apply_set.ensure(kube, params, True)
    assert predicted["changed"] is False and predicted["unready"] == seen[:1]
    # What would be created isn't waited for before.
    assert apply_set.ensure(FakeKube(), params, True)["unready"] == []
