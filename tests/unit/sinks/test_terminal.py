# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-playbook prints on a terminal of what a taken node and the API say: the real one, on a pty."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import hostile
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import node_results
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.results import FILES, clean_answer, clean_result
from ansible_runs import BIN, ROOT

# Modules whose result a taken node chooses, or that repeat the API's words.
MODULES = ("kernel_driver", "kubelet_devices_info", "backend_files", "nvml_info", "gpu_node_info")
# Ansible refuses a lone surrogate itself.
WORDS = [text for text in hostile.TEXTS if len(text) < 1000 and "\ud800" not in text]
OPTIONS = {
    "kernel_driver": {"version": "580.95.05"},
    "backend_files": {"backend": "hami", "path": "/nowhere"},
    "gpu_node_info": {"report_trouble": True},
}


def on_a_terminal(folder: Path, *words: str | Path, **variables: str) -> str:
    """Run ansible-playbook on a pty and return what a terminal would get."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
        **{"PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "1", "TERM": "xterm-256color"},
        **{"ANSIBLE_LOCALHOST_WARNING": "0", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
        **{"ANSIBLE_LOCAL_TEMP": str(folder / "tmp"), "ANSIBLE_HOME": str(folder / "home"), "PYTHONUTF8": "1"},
        **variables,
    }
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [BIN / "ansible-playbook", *words],
        cwd=folder,
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        found = bytearray()
        while process.poll() is None or select.select([leader], [], [], 0)[0]:
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    found += os.read(leader, 1 << 16)
                except OSError:
                    break
    os.close(leader)
    return found.decode(errors="surrogateescape").replace("\r\n", "\n")


def clean(shown: str) -> None:
    match = hostile.FORBIDDEN.search(shown)
    assert not match, ascii(shown[max(0, match.start() - 200) : match.end() + 40]) if match else ""


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """An inventory whose host answers each module with hostile texts."""
    answer = {
        **{
            "failed": True,
            "msg": " | ".join(WORDS),
            "warnings": WORDS,
            "diff": [{"before": WORDS[0], "after": WORDS[1]}],
        },
        **{"reason": WORDS[5], "notes": WORDS, "ok: [forged]\x1b[31m": WORDS},
    }
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/answer.json\n")
    python.chmod(0o755)
    host = {"ansible_connection": "local", "ansible_python_interpreter": str(python)}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"taken": host}}}))
    return tmp_path


def test_a_taken_node_controls_no_terminal(taken: Path) -> None:
    tasks = [
        {f"kubegpu.share.{name}": OPTIONS.get(name, {}), "ignore_errors": True, "register": f"of_{name}"}
        for name in MODULES
    ]
    # As roles put a node's words into their own messages.
    tasks += [
        {"ansible.builtin.fail": {"msg": "why: {{ of_kernel_driver.reason }}"}, "ignore_errors": True},
        {"ansible.builtin.debug": {"msg": ["{{ of_kernel_driver.msg }}"]}},
        {"ansible.builtin.debug": {"msg": "x"}, "loop": "{{ of_kernel_driver.notes }}"},
    ]
    (taken / "play.yml").write_text(yaml.safe_dump([{"hosts": "taken", "gather_facts": False, "tasks": tasks}]))
    shown = on_a_terminal(taken, "-i", "hosts.yml", "--diff", "play.yml")
    assert shown.count("fatal: [taken]") == len(MODULES) - 1 + 1, shown
    assert "cleared" in shown and "forged" in shown
    clean(shown)
    assert not [line for line in shown.splitlines() if line.startswith("ok: [forged]")]


def test_a_machine_without_a_result_controls_no_terminal(taken: Path) -> None:
    """Then ansible-core shows what was printed, of both streams, without -v."""
    (taken / "words").write_text("\n".join(WORDS))
    (taken / "python3").write_text(f"#!/bin/sh\ncat {taken}/words\ncat {taken}/words >&2\nexit 1\n")
    tasks = [{f"kubegpu.share.{name}": OPTIONS.get(name, {}), "ignore_errors": True} for name in MODULES]
    (taken / "play.yml").write_text(yaml.safe_dump([{"hosts": "taken", "gather_facts": False, "tasks": tasks}]))
    shown = on_a_terminal(taken, "-i", "hosts.yml", "play.yml")
    assert shown.count("fatal: [taken]") == len(MODULES) - 1 and "module_stderr" in shown, shown
    clean(shown)


@pytest.mark.parametrize("escaped", ["\\u00ad", "\\u061c", "\\u180e", "\\u202e", "\\u009b", "\\u001b", "\\ufeff"])
def test_an_escape_of_json_hides_no_character(escaped: str) -> None:
    shown = json.loads(clean_answer(f'{{"reason": "a{escaped}b"}}', clean_result))["reason"]
    assert json.loads(f'"{escaped}"') not in shown


def test_a_report_controls_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text(json.dumps({"words": WORDS, "honest": hostile.HONEST, "linebreak": "\n"}))
    tasks = [{"kubegpu.share.gpu_report": {"text": "{{ (words + honest) | join(linebreak) }}"}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    shown = on_a_terminal(tmp_path, "-e", "@words.json", "play.yml", PYTHONIOENCODING="utf-8")
    clean(shown)
    for text in hostile.HONEST:
        assert text in shown


@pytest.mark.parametrize(
    ("action", "collection", "kept"),
    [
        ("ansible.builtin.command", "kubegpu.share", {"msg": False, "content": True}),
        ("kubegpu.share.kernel_driver", None, {"msg": False, "content": False}),
        ("ansible.builtin.command", "somebody.else", {"msg": True, "content": True}),
    ],
)
def test_other_modules_in_roles_have_printable_messages(action: str, collection: str, kept: dict[str, bool]) -> None:
    words = {"msg": "a\x1b[2J\nok: [forged]", "content": "raw \x0c\n"}
    task = SimpleNamespace(action=action, _role=SimpleNamespace(_role_collection=collection))
    parsed = node_results._printable(lambda _self, answer: json.loads(answer["stdout"]))
    found = parsed(SimpleNamespace(_task=task), {"stdout": json.dumps(words)})
    assert {key: found[key] == words[key] for key in words} == kept


def test_only_one_function_prints() -> None:
    plugins = ROOT / "plugins"
    printing = {
        path.name
        for path in plugins.rglob("*.py")
        for line in path.read_text().splitlines()
        if "display.display(" in line or "display.warning(" in line
    }
    assert printing == {"terminal.py"}


def test_texts_of_files_stay_as_they_are() -> None:
    raw = "caf\udce9 \x0c \u200e\n"
    given = {
        "gpu_node": {"runtimes": {"docker": {"text": raw, "version": "1\x1b[2J"}}},
        "msg": "a\nb",
        "diff": [{"before": raw}],
    }
    found = clean_result(given)
    docker = found["gpu_node"]["runtimes"]["docker"]
    assert docker == {"text": raw, "version": "1\N{REPLACEMENT CHARACTER}[2J"} and "text" in FILES
    assert found["msg"] == "a b" and not hostile.FORBIDDEN.search(found["diff"][0]["before"])
    honest = {"gpu_node": {"name": list(hostile.HONEST)}}
    assert clean_result(honest)["gpu_node"] is honest["gpu_node"]


def test_cleaning_costs_little() -> None:
    """Of the facts of a machine, some thousand values, under a thousandth of what the task costs that collects them."""
    facts = {"gpu_node": [{"name": f"package-{n}", "version": "1.2.3-4", "text": "x\ny"} for n in range(3000)]}
    began = time.process_time()
    for _round in range(10):
        clean_result(facts)
    assert time.process_time() - began < 1.0
