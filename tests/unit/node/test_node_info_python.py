# SPDX-License-Identifier: GPL-3.0-or-later
"""On a node whose Python is too old or missing the error names the one to install; the connection is scripted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import action_plugins
import node_trees
import pytest
from ansible.plugins.loader import get_shell_plugin
from ansible_collections.kubegpu.share.plugins.action import gpu_node_info
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import python_probe

ROOT = Path(__file__).resolve().parents[3]


def failure(msg, **more):
    return {"failed": True, "msg": msg, **more}


TOO_OLD = failure("Ansible requires Python 3.9 or newer on the target. Current version: 3.8.18 (default)")
OLDER_MESSAGE = failure("ansible-core requires a minimum of Python version 3.8. Current version: 3.7.9")
FUTURE = "SyntaxError: future feature annotations is not defined\n"
SYNTAX_3_6 = failure("Module result deserialization failed: No start of json char found", module_stderr=FUTURE, rc=1)
MISSING = "/bin/sh: 1: /usr/bin/python3: not found\n"
NONE = failure("The module interpreter '/usr/bin/python3' was not found.", module_stderr=MISSING, rc=127)


def release(tree):
    return node_trees.load(tree)["release"]


def node(text, python="", newer=()):
    """The output of a node's shell."""
    version = f"Python {python}\n" if python else "sh: 1: /usr/bin/python3: not found\n"
    return "VERSION\n" + version + "NEWER\n" + "".join(f"{one}\n" for one in newer) + "RELEASE\n" + text


def act(result, answer, monkeypatch, interpreter="/usr/bin/python3"):
    """Run the action, whose module has ``result``, over a connection that answers every command."""
    connection = Mock(allow_executable=False, has_pipelining=True)
    connection._shell = get_shell_plugin(shell_type="sh")
    connection.become = None
    connection.exec_command = Mock(side_effect=lambda command, **_more: (0, answer.encode(), b""))
    action = action_plugins.load(gpu_node_info, {}, connection=connection)

    def execute(module_name, module_args, task_vars):
        action._used_interpreter = "#!" + interpreter
        return dict(result)

    monkeypatch.setattr(action, "_execute_module", execute)
    return action.run(task_vars={"inventory_hostname": "gpu7"}), connection.exec_command


@pytest.mark.parametrize(
    "found", [{"changed": False, "gpu_node": {"gpus": []}}, failure("dpkg's list of packages can't be read: 2")]
)
def test_a_result_that_isnt_pythons_is_unchanged(found, monkeypatch):
    result, asked = act(found, "", monkeypatch)
    assert result == found and asked.call_count == 0


def test_a_syntax_error_on_a_new_python_is_unchanged(monkeypatch):
    result, _asked = act(SYNTAX_3_6, node(release("debian-12-bare"), "3.11.2"), monkeypatch)
    assert result["msg"] == SYNTAX_3_6["msg"] and result["rc"] == 1


EL_8 = ("python3.12 (before release 8.10 it is python39)", "dnf install python3.12", "/usr/bin/python3.12")
MESSAGES = [
    # tree, the module's result, the node's Python; package, command and interpreter of the message
    ("rhel-8-stream", SYNTAX_3_6, "3.6.8", *EL_8),
    ("rocky-8-elrepo", OLDER_MESSAGE, "3.7.9", *EL_8),
    ("opensuse-15", SYNTAX_3_6, "3.6.15", "python311", "zypper install python311", "/usr/bin/python3.11"),
    ("runfile", TOO_OLD, "3.8.10", "python3.9 (in universe)", "apt-get install python3.9", "/usr/bin/python3.9"),
    ("debian-12-bare", NONE, "", "python3", "apt-get install python3", "/usr/bin/python3"),
    ("rocky-9-rpmfusion", NONE, "", "python3", "dnf install python3", "/usr/bin/python3"),
    ("amazon-2023", NONE, "", "python3", "dnf install python3", "/usr/bin/python3"),
]


@pytest.mark.parametrize(("tree", "result", "python", "package", "command", "interpreter"), MESSAGES)
def test_message_names_the_python_to_install(tree, result, python, package, command, interpreter, monkeypatch):
    answer, _asked = act(result, node(release(tree), python), monkeypatch)
    name = re.search(r'PRETTY_NAME="(.*)"', release(tree)).group(1)
    problem = f"/usr/bin/python3 is Python {python}" if python else "there is no /usr/bin/python3"
    core = ".".join(gpu_node_info.core.split(".")[:2])
    assert answer["failed"] and answer["msg"] == (
        f"Host gpu7 ({name}): {problem}, and this collection with ansible-core {core} needs Python 3.9 or newer on the "
        f"node; install {package} there by '{command}' and set ansible_python_interpreter to {interpreter} for this "
        "host."
    )
    assert set(answer) - {"failed", "msg"} <= {"invocation", "skipped"}


def test_installed_new_interpreter_is_named(monkeypatch):
    result, _asked = act(SYNTAX_3_6, node(release("rhel-8-stream"), "3.6.8", ["/usr/bin/python3.11"]), monkeypatch)
    assert result["msg"].endswith(
        "; /usr/bin/python3.11 is there already: set ansible_python_interpreter to it for this host."
    )


def test_release_without_a_new_python_gets_a_message(monkeypatch):
    old = 'ID="amzn"\nVERSION_ID="2"\nPRETTY_NAME="Amazon Linux 2"\n'
    result, _asked = act(NONE, node(old, ""), monkeypatch)
    assert result["msg"].endswith(
        "which its distribution doesn't offer; install one and set ansible_python_interpreter to it for this host."
    )


def test_node_without_an_answer_still_gets_a_message(monkeypatch):
    result, _asked = act(NONE, "", monkeypatch)
    assert result["msg"].startswith("Host gpu7: there is no /usr/bin/python3, and this collection ")
    assert result["msg"].endswith("install one and set ansible_python_interpreter to it for this host.")


@pytest.mark.parametrize("interpreter", ["/usr/bin/python3", "/usr/bin/env python3", "/no/such/python"])
def test_command_in_a_real_shell_reports_the_release_and_the_version(interpreter):
    done = subprocess.run(
        [shutil.which("sh"), "-c", python_probe.question(interpreter)], capture_output=True, text=True, check=False
    )
    result = python_probe.node(done.stdout)
    assert result.id and (result.version != "" or interpreter == "/no/such/python")


OLD = [Path.home() / ".pyenv/versions" / path for path in ("2.7.18/bin/python2.7", "3.6.15/bin/python3.6")]


@pytest.mark.long  # Each starts ansible on a real old interpreter.
@pytest.mark.parametrize("interpreter", OLD, ids=lambda path: path.name)
def test_real_old_interpreter_is_named_in_the_message(interpreter, tmp_path):
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
