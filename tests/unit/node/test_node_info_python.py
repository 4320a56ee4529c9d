# SPDX-License-Identifier: GPL-3.0-or-later
"""A node whose Python is too old for ansible-core: one sentence says which to install, over a scripted connection."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import node_trees
import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.playbook.task import Task
from ansible.plugins.loader import get_shell_plugin
from ansible.template import Templar
from ansible_collections.kubegpu.share.plugins.action import gpu_node_info
from ansible_collections.kubegpu.share.plugins.plugin_utils import _old_python

ROOT = Path(__file__).resolve().parents[3]
TOO_OLD = {
    "failed": True,
    "msg": "Ansible requires Python 3.9 or newer on the target. Current version: 3.8.18 (default)",
}
OLDER_WORDS = {"failed": True, "msg": "ansible-core requires a minimum of Python version 3.8. Current version: 3.7.9"}
SYNTAX_3_6 = {
    "failed": True,
    "msg": "Module result deserialization failed: No start of json char found",
    "module_stderr": "SyntaxError: future feature annotations is not defined\n",
    "rc": 1,
}
SYNTAX_2_7 = {**SYNTAX_3_6, "module_stderr": '  File "x", line 40\n    zip_data: str,\nSyntaxError: invalid syntax\n'}
NONE = {
    "failed": True,
    "msg": "The module interpreter '/usr/bin/python3' was not found.",
    "module_stderr": "/bin/sh: 1: /usr/bin/python3: not found\n",
    "rc": 127,
}


def release(tree):
    return node_trees.load(tree)["release"]


def node(text, python="", newer=()):
    """What a node's shell answers to our question."""
    version = f"Python {python}\n" if python else "sh: 1: /usr/bin/python3: not found\n"
    return "VERSION\n" + version + "NEWER\n" + "".join(f"{one}\n" for one in newer) + "RELEASE\n" + text


def act(result, answer, monkeypatch, interpreter="/usr/bin/python3"):
    """Run the action over a connection that answers every command; the module's end is given."""
    loader = DataLoader()
    connection = Mock(allow_executable=False, has_pipelining=True)
    connection._shell = get_shell_plugin(shell_type="sh")
    connection.become = None
    connection.exec_command = Mock(side_effect=lambda command, **_more: (0, answer.encode(), b""))
    action = gpu_node_info.ActionModule(
        task=Task.load({"name": "x", "ansible.builtin.ping": {}}, loader=loader),
        connection=connection,
        play_context=PlayContext(),
        loader=loader,
        templar=Templar(loader=loader),
        shared_loader_obj=Mock(),
    )

    def execute(module_args, task_vars):
        action._used_interpreter = "#!" + interpreter
        return dict(result)

    monkeypatch.setattr(action, "_execute_module", execute)
    return action.run(task_vars={"inventory_hostname": "gpu7"}), connection.exec_command


def test_a_module_that_runs_is_left_alone(monkeypatch):
    found = {"changed": False, "gpu_node": {"gpus": []}}
    result, asked = act(found, "", monkeypatch)
    assert result == found and asked.call_count == 0


def test_a_module_that_fails_for_another_reason_is_left_alone(monkeypatch):
    result, asked = act({"failed": True, "msg": "dpkg's list of packages can't be read: 2"}, "", monkeypatch)
    assert result["msg"].startswith("dpkg's") and asked.call_count == 0


def test_a_syntax_error_under_a_python_that_is_new_enough_is_no_matter_of_interpreters(monkeypatch):
    result, _asked = act(SYNTAX_3_6, node(release("debian-12-bare"), "3.11.2"), monkeypatch)
    assert result["msg"] == SYNTAX_3_6["msg"] and result["rc"] == 1


SENTENCES = [
    (
        "rhel-8-stream",
        SYNTAX_3_6,
        "3.6.8",
        """Host gpu7 (Red Hat Enterprise Linux 8.10 (Ootpa)): /usr/bin/python3 is Python 3.6.8, and ansible-core
        CORE needs Python 3.9 or newer on the node; install python3.12 (before release 8.10 it is python39) there
        by 'dnf install python3.12' and set ansible_python_interpreter to /usr/bin/python3.12 for this host.""",
    ),
    (
        "centos-7",
        SYNTAX_2_7,
        "2.7.5",
        """Host gpu7 (CentOS Linux 7 (Core)): /usr/bin/python3 is Python 2.7.5, and ansible-core CORE needs Python
        3.9 or newer on the node; install rh-python38 (in the software collections of CentOS' vault) there by
        'yum install rh-python38' and set ansible_python_interpreter to /opt/rh/rh-python38/root/usr/bin/python3
        for this host, and run this with ansible-core 2.19, the last that can use it.""",
    ),
    (
        "opensuse-15",
        SYNTAX_3_6,
        "3.6.15",
        """Host gpu7 (openSUSE Leap 15.6): /usr/bin/python3 is Python 3.6.15, and ansible-core CORE needs Python 3.9
        or newer on the node; install python311 there by 'zypper install python311' and set
        ansible_python_interpreter to /usr/bin/python3.11 for this host.""",
    ),
    (
        "runfile",
        TOO_OLD,
        "3.8.10",
        """Host gpu7 (Ubuntu 20.04.6 LTS): /usr/bin/python3 is Python 3.8.10, and ansible-core CORE needs Python 3.9
        or newer on the node; install python3.9 (in universe) there by 'apt-get install python3.9' and set
        ansible_python_interpreter to /usr/bin/python3.9 for this host.""",
    ),
    (
        "debian-12-bare",
        NONE,
        "",
        """Host gpu7 (Debian GNU/Linux 12 (bookworm)): there is no /usr/bin/python3, and ansible-core CORE needs
        Python 3.9 or newer on the node; install python3 there by 'apt-get install python3' and set
        ansible_python_interpreter to /usr/bin/python3 for this host.""",
    ),
    ("rocky-9-rpmfusion", NONE, "", "install python3 there by 'dnf install python3'"),
    ("amazon-2023", NONE, "", "install python3 there by 'dnf install python3'"),
    ("centos-7", OLDER_WORDS, "3.7.9", "needs Python 3.8 or newer"),
]


@pytest.mark.parametrize(("tree", "result", "python", "sentence"), SENTENCES)
def test_the_sentence(tree, result, python, sentence, monkeypatch):
    seen, _asked = act(result, node(release(tree), python), monkeypatch)
    core = ".".join(gpu_node_info.core.split(".")[:2])
    assert seen["failed"] and " ".join(sentence.split()).replace("CORE", core) in seen["msg"]
    assert seen["msg"].count("\n") == 0 and set(seen) - {"failed", "msg"} <= {"invocation", "skipped"}


def test_one_that_is_there_already_is_named(monkeypatch):
    seen, _asked = act(SYNTAX_3_6, node(release("rhel-8-stream"), "3.6.8", ["/usr/bin/python3.11"]), monkeypatch)
    assert seen["msg"].endswith(
        "; /usr/bin/python3.11 is there already: set ansible_python_interpreter to it for this host."
    )


def test_a_node_that_says_nothing_still_gets_a_sentence(monkeypatch):
    seen, _asked = act(NONE, "", monkeypatch)
    assert seen["msg"].startswith("Host gpu7: there is no /usr/bin/python3, and ansible-core ")
    assert seen["msg"].endswith("install one and set ansible_python_interpreter to it for this host.")


@pytest.mark.parametrize("interpreter", ["/usr/bin/python3", "/usr/bin/env python3", "/no/such/python"])
def test_the_question_in_a_real_shell(interpreter):
    done = subprocess.run(
        [shutil.which("sh"), "-c", _old_python.question(interpreter)], capture_output=True, text=True, check=False
    )
    seen = _old_python.node(done.stdout)
    assert seen.id and (seen.version != "" or interpreter == "/no/such/python")


OLD = [Path.home() / ".pyenv/versions" / path for path in ("2.7.18/bin/python2.7", "3.6.15/bin/python3.6")]


@pytest.mark.parametrize("interpreter", OLD, ids=lambda path: path.name)
def test_the_sentence_of_a_real_interpreter(interpreter, tmp_path):
    if not interpreter.exists():
        pytest.skip(f"no {interpreter.name} on this machine")
    command = [Path(sys.executable).parent / "ansible", "localhost", "-i", "localhost,", "-c", "local"]
    environment = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_CONFIG": str(tmp_path / "none.cfg"),
    }
    done = subprocess.run(
        [*command, "-m", "kubegpu.share.gpu_node_info", "-e", f"ansible_python_interpreter={interpreter}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2, done.stderr
    result = json.loads(done.stdout.partition("=>")[2])
    version = interpreter.parents[1].name
    assert set(result) == {"changed", "msg"}
    assert result["msg"].startswith("Host localhost (") and f": {interpreter} is Python {version}, and" in result["msg"]
