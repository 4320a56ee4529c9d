# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugin: what it prints, what it writes and how, and that it refuses in one sentence."""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible_collections.kubegpu.share.plugins.action import gpu_report
from ansible_collections.kubegpu.share.plugins.plugin_utils import _report_files as files
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_outcome import ARGUMENTS
from report_samples import ALLOCATION, HEALTHY, TROUBLE

ROOT = Path(__file__).resolve().parents[4]
FILES = ("html", "json", "junit", "prometheus")


def act(check=False, **arguments):
    task = SimpleNamespace(args=arguments, check_mode=check, async_val=0, action="x", diff=False)
    action = gpu_report.ActionModule(task, MagicMock(), MagicMock(), DataLoader(), MagicMock(), MagicMock())
    action._display = MagicMock()
    result = action.run(task_vars={})
    return result, [call.args[0] for call in action._display.display.call_args_list]


def all_files(folder):
    return {name: str(folder / f"report.{name}") for name in FILES}


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_it_prints_the_text_and_tells_the_result():
    result, said = act(report=TROUBLE)
    assert said == [result["text"].rstrip("\n")]
    assert (result["result"], result["changed"], result["files"]) == ("FAIL", False, [])
    assert not result.get("failed"), "whoever has to fail looks at the result"


def test_quiet_prints_nothing():
    result, said = act(report=HEALTHY, quiet=True)
    assert said == [] and result["result"] == "PASS" and "PASS" in result["text"]


def test_an_allocation_alone_has_no_result():
    assert act(allocation=ALLOCATION)[0]["result"] == ""


def test_every_file_is_written(tmp_path):
    result, _said = act(report=TROUBLE, allocation=ALLOCATION, **all_files(tmp_path))
    assert result["changed"] and [one["argument"] for one in result["files"]] == list(FILES)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>\n")
    assert json.loads((tmp_path / "report.json").read_text()) == {**TROUBLE, "allocation": ALLOCATION}
    assert ElementTree.parse(tmp_path / "report.junit").getroot().tag == "testsuites"
    assert "kubegpu_report_result" in (tmp_path / "report.prometheus").read_text()
    assert [mode(tmp_path / f"report.{name}") for name in FILES] == [0o600, 0o600, 0o600, 0o644]
    assert sorted(os.listdir(tmp_path)) == sorted(f"report.{name}" for name in FILES), "nothing is left behind"


def test_a_second_run_changes_nothing(tmp_path):
    act(report=TROUBLE, **all_files(tmp_path))
    before = {one.name: one.stat().st_ino for one in tmp_path.iterdir()}
    result, _said = act(report=TROUBLE, **all_files(tmp_path))
    assert not result["changed"] and result["diff"] == []
    assert {one.name: one.stat().st_ino for one in tmp_path.iterdir()} == before, "not even written again"
    assert act(report=HEALTHY, **all_files(tmp_path))[0]["changed"]


def test_the_diff_is_what_changes(tmp_path):
    page = str(tmp_path / "page.prom")
    first, _said = act(report=HEALTHY, prometheus=page)
    assert [(one["before"], one["before_header"]) for one in first["diff"]] == [("", page)]
    text = Path(page).read_text()
    second, _said = act(report=TROUBLE, prometheus=page)
    assert (second["diff"][0]["before"], second["diff"][0]["after"]) == (text, Path(page).read_text())


def test_large_files_are_not_shown(tmp_path):
    target = files.Target("html", str(tmp_path / "page.html"), "x" * 200_000)
    (first,) = files.look([target])
    assert first.diff()["src_larger"] and first.diff()["after"] == ""
    files.write([first])
    (second,) = files.look([files.Target("html", target.path, "y")])
    assert second.diff()["dst_larger"] and second.diff()["before"] == ""


def test_check_mode_writes_nothing_and_says_so(tmp_path):
    result, said = act(check=True, report=TROUBLE, **all_files(tmp_path))
    assert os.listdir(tmp_path) == []
    assert result["changed"] and result["msg"] == "Check mode: no file was written."
    assert len(result["diff"]) == 4 and said
    act(report=TROUBLE, **all_files(tmp_path))
    again, _said = act(check=True, report=TROUBLE, **all_files(tmp_path))
    assert not again["changed"] and "msg" not in again


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none/file", "the folder {}/none doesn't exist"),
        ("file/below", "the folder {}/file doesn't exist"),
        ("folder", "{}/folder is there and is no file"),
        ("folder/", "names no file"),
        ("folder/..", "names no file"),
        ("pipe", "{}/pipe is there and is no file"),
    ],
    ids=["no folder", "below a file", "a folder", "slash", "dots", "a pipe"],
)
def test_bad_paths_name_the_argument(tmp_path, name, path, words, check):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    good = str(tmp_path / "good")
    other = "json" if name != "json" else "html"
    result, _said = act(check=check, report=HEALTHY, **{name: f"{tmp_path}/{path}", other: good})
    assert result["failed"] and result["msg"].startswith(f"{name}: ")
    assert words.format(tmp_path) in result["msg"] and "\n" not in result["msg"]
    assert not os.path.exists(good), "nothing is written where not all can be"


def test_a_file_that_nobody_may_write(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    result, _said = act(report=HEALTHY, html=str(tmp_path / "page"))
    assert result["msg"] == f"html: the folder {tmp_path} on the controller can't be written to"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path, step):
    path = tmp_path / "page.html"
    path.write_text("old")

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    result, _said = act(report=HEALTHY, html=str(path))
    assert result["failed"] and result["msg"] == f"html: {path} can't be written: No space left on device"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]


def test_a_file_is_whole_and_safe_before_it_has_its_name(monkeypatch, tmp_path):
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append((os.path.dirname(source), Path(source).read_text()[-8:], mode(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    act(report=HEALTHY, html=str(tmp_path / "page.html"))
    assert seen == [(str(tmp_path), "</html>\n", 0o600)]


def test_a_link_is_replaced_and_never_followed(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    link = tmp_path / "page.html"
    link.symlink_to(theirs)
    result, _said = act(report=HEALTHY, html=str(link))
    assert result["changed"] and theirs.read_text() == "theirs"
    assert not link.is_symlink() and "<html" in link.read_text()
    assert "theirs" not in result["diff"][0]["before"]


def test_two_files_of_one_path_are_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "again").symlink_to(tmp_path / "sub")
    result, _said = act(report=HEALTHY, html=str(tmp_path / "sub/x"), json=str(tmp_path / "again/x"))
    assert result["failed"] and "is the file of html too" in result["msg"]


def test_junit_needs_a_report(tmp_path):
    result, _said = act(allocation=ALLOCATION, junit=str(tmp_path / "x"))
    assert result["failed"] and result["msg"].startswith("junit: ")


def test_one_of_both_is_needed():
    with pytest.raises(AnsibleError, match="report, allocation"):
        act(quiet=True)


@pytest.mark.parametrize(("given", "wanted"), [("0640", 0o640), ("600", 0o600), (0o644, 0o644)], ids=str)
def test_permissions_for_node_exporter(tmp_path, given, wanted):
    path = tmp_path / "x.prom"
    act(report=HEALTHY, prometheus=str(path), prometheus_mode=given)
    assert mode(path) == wanted


@pytest.mark.parametrize("given", ["rw", "9999", "", "u=rw", True, -1, 0o7777, "0000", ["0644"]], ids=str)
def test_strange_permissions_are_refused(tmp_path, given):
    path = tmp_path / "x.prom"
    result, _said = act(report=HEALTHY, prometheus=str(path), prometheus_mode=given)
    assert result["failed"] and result["msg"].startswith("prometheus_mode: ") and not path.exists()


def test_values_that_only_yaml_knows(tmp_path):
    moment = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
    result, _said = act(report={**HEALTHY, "time": moment}, **all_files(tmp_path))
    assert result["result"] == "PASS"
    assert "kubegpu_report_timestamp_seconds 1795348800" in (tmp_path / "report.prometheus").read_text()


def test_what_no_json_holds_is_refused_in_one_sentence():
    endless: dict = {}
    endless["report"] = endless
    result, _said = act(report={"result": "PASS", "checks": [endless]})
    assert result["failed"] and result["msg"].startswith("report, allocation: ")


def test_numbers_that_are_none_are_null_in_the_file(tmp_path):
    act(report={**HEALTHY, "samples": float("nan")}, json=str(tmp_path / "x"))
    assert json.loads((tmp_path / "x").read_text(), parse_constant=pytest.fail)["samples"] is None


def test_the_module_documents_exactly_its_arguments():
    source = (ROOT / "plugins/modules/gpu_report.py").read_text()
    documented = yaml.safe_load(source.split('DOCUMENTATION = r"""')[1].split('"""')[0])["options"]
    assert {name: (one["type"], one.get("default")) for name, one in documented.items()} == {
        name: (one["type"], one.get("default")) for name, one in ARGUMENTS.items()
    }


def test_in_a_real_play(tmp_path):
    """Ansible's values carry tags and come through templates; --check and --diff are its own."""
    (tmp_path / "in.json").write_text(json.dumps(TROUBLE))
    tasks = [
        {
            "kubegpu.share.gpu_report": {
                "report": "{{ lookup('file', 'in.json') | from_json }}",
                "html": "page.html",
                "prometheus": "x.prom",
            },
            "register": "shown",
        },
        {"ansible.builtin.assert": {"that": ["shown.result == 'FAIL'", "shown is changed"]}},
    ]
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", "play.yml"]
    for options, written in ((["--check", "--diff"], False), ([], True)):
        done = subprocess.run(
            [*command, *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "A process uses the card outside any pod." in done.stdout
        assert (tmp_path / "page.html").exists() is written
        assert ("+# TYPE kubegpu_report_result gauge" in done.stdout) is not written
