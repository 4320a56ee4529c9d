# SPDX-License-Identifier: GPL-3.0-or-later
"""The action plugin: its output, its files, and its errors."""

from __future__ import annotations

import datetime
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from xml.etree import ElementTree

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible_collections.kubegpu.share.plugins.action import gpu_report
from ansible_collections.kubegpu.share.plugins.module_utils._report import outcome as files
from ansible_collections.kubegpu.share.plugins.module_utils._report.outcome import ARGUMENTS
from report_samples import ALLOCATION, HEALTHY, TROUBLE
from verify_kit import ROOT, run_playbook

FILES = ("html", "json", "junit", "prometheus")


def act(check=False, **arguments):
    task = SimpleNamespace(args=arguments, check_mode=check, async_val=0, action="x", diff=False)
    action = gpu_report.ActionModule(task, MagicMock(), MagicMock(), DataLoader(), MagicMock(), MagicMock())
    action._display = MagicMock(_final_q=None)
    result = action.run(task_vars={})
    return result, [call.args[0] for call in action._display.display.call_args_list]


def all_files(folder):
    return {name: str(folder / f"report.{name}") for name in FILES}


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_prints_the_text_and_returns_the_result():
    result, printed = act(report=TROUBLE)
    assert printed == [result["text"].rstrip("\n")]
    assert (result["result"], result["changed"], result["files"]) == ("FAIL", False, [])
    assert not result.get("failed"), "the play decides by the result"


def test_a_text_is_printed_as_it_is():
    result, printed = act(text="a  b\n c\n")
    assert printed == ["a  b\n c"] and (result["text"], result["changed"]) == ("a  b\n c\n", False)
    assert act(text="")[1] == []
    with pytest.raises(AnsibleError, match="mutually exclusive"):
        act(text="a", report=HEALTHY)


def test_quiet_prints_nothing():
    result, printed = act(report=HEALTHY, quiet=True)
    assert printed == [] and result["result"] == "PASS" and "PASS" in result["text"]
    assert act(allocation=ALLOCATION, quiet=True)[0]["result"] == "", "an allocation alone has no result"


def test_every_file_is_written(tmp_path):
    result, _printed = act(report=TROUBLE, allocation=ALLOCATION, **all_files(tmp_path))
    assert result["changed"] and [file["argument"] for file in result["files"]] == list(FILES)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>\n")
    assert json.loads((tmp_path / "report.json").read_text()) == {**TROUBLE, "allocation": ALLOCATION}
    assert ElementTree.parse(tmp_path / "report.junit").getroot().tag == "testsuites"
    assert "kubegpu_report_result" in (tmp_path / "report.prometheus").read_text()
    assert [mode(tmp_path / f"report.{name}") for name in FILES] == [0o600, 0o600, 0o600, 0o644]
    assert sorted(os.listdir(tmp_path)) == sorted(f"report.{name}" for name in FILES), "no temporary file remains"


def test_a_second_run_changes_nothing(tmp_path):
    act(report=TROUBLE, **all_files(tmp_path))
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    result, _printed = act(report=TROUBLE, **all_files(tmp_path))
    assert not result["changed"] and result["diff"] == []
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before, "not written again"
    assert act(report=HEALTHY, **all_files(tmp_path))[0]["changed"]


def test_the_diff_has_the_old_and_the_new_text(tmp_path):
    page = str(tmp_path / "page.prom")
    first, _printed = act(report=HEALTHY, prometheus=page)
    assert [(one["before"], one["before_header"]) for one in first["diff"]] == [("", page)]
    text = Path(page).read_text()
    second, _printed = act(report=TROUBLE, prometheus=page)
    assert (second["diff"][0]["before"], second["diff"][0]["after"]) == (text, Path(page).read_text())


def test_large_files_are_not_shown(tmp_path):
    target = files.Target("html", str(tmp_path / "page.html"), "x" * 200_000)
    (first,) = files.plan([target])
    assert first.diff()["src_larger"] and first.diff()["after"] == ""
    files.write([first])
    (second,) = files.plan([files.Target("html", target.path, "y")])
    assert second.diff()["dst_larger"] and second.diff()["before"] == ""


def test_check_mode_writes_nothing_and_reports_it(tmp_path):
    result, printed = act(check=True, report=TROUBLE, **all_files(tmp_path))
    assert os.listdir(tmp_path) == []
    assert result["changed"] and result["msg"] == "Check mode: no file was written."
    assert len(result["diff"]) == 4 and printed
    act(report=TROUBLE, **all_files(tmp_path))
    again, _printed = act(check=True, report=TROUBLE, **all_files(tmp_path))
    assert not again["changed"] and "msg" not in again


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none/file", "the directory {}/none doesn't exist"),
        ("file/below", "the directory {}/file doesn't exist"),
        ("folder", "{}/folder exists and isn't a regular file"),
        ("folder/", "isn't a file name"),
        ("folder/..", "isn't a file name"),
        ("pipe", "{}/pipe exists and isn't a regular file"),
    ],
    ids=["no folder", "below a file", "a folder", "slash", "dots", "a pipe"],
)
def test_bad_paths_name_the_argument(tmp_path, name, path, message, check):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    good = str(tmp_path / "good")
    other = "json" if name != "json" else "html"
    result, _printed = act(check=check, report=HEALTHY, **{name: f"{tmp_path}/{path}", other: good})
    assert result["failed"] and result["msg"].startswith(f"{name}: ")
    assert message.format(tmp_path) in result["msg"] and "\n" not in result["msg"]
    assert not os.path.exists(good), "no file is written unless all can be"


def test_a_directory_that_isnt_writable(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    result, _printed = act(report=HEALTHY, html=str(tmp_path / "page"))
    assert result["msg"] == f"html: the directory {tmp_path} on the controller isn't writable"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path, step):
    path = tmp_path / "page.html"
    path.write_text("old")

    monkeypatch.setattr(os, step, Mock(side_effect=OSError(28, "No space left on device")))
    result, _printed = act(report=HEALTHY, html=str(path))
    assert result["failed"] and result["msg"] == f"html: {path} can't be written: No space left on device"
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]


def test_a_file_is_complete_before_it_is_renamed(monkeypatch, tmp_path):
    seen = []
    replace = os.replace

    def record(source, target):
        seen.append((os.path.dirname(source), Path(source).read_text()[-8:], mode(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", record)
    act(report=HEALTHY, html=str(tmp_path / "page.html"))
    assert seen == [(str(tmp_path), "</html>\n", 0o600)]


def test_a_symbolic_link_is_replaced(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    link = tmp_path / "page.html"
    link.symlink_to(theirs)
    result, _printed = act(report=HEALTHY, html=str(link))
    assert result["changed"] and theirs.read_text() == "theirs"
    assert not link.is_symlink() and "<html" in link.read_text()
    assert "theirs" not in result["diff"][0]["before"]


def test_two_files_of_one_path_are_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "again").symlink_to(tmp_path / "sub")
    result, _printed = act(report=HEALTHY, html=str(tmp_path / "sub/x"), json=str(tmp_path / "again/x"))
    assert result["failed"] and "is also the path of html" in result["msg"]


def test_junit_needs_a_report(tmp_path):
    result, _printed = act(allocation=ALLOCATION, junit=str(tmp_path / "x"))
    assert result["failed"] and result["msg"].startswith("junit: ")


def test_one_of_both_is_needed():
    with pytest.raises(AnsibleError, match="report, allocation, text"):
        act(quiet=True)


@pytest.mark.parametrize(("given", "wanted"), [("0640", 0o640), ("600", 0o600), (0o644, 0o644)], ids=str)
def test_permissions_for_node_exporter(tmp_path, given, wanted):
    path = tmp_path / "x.prom"
    act(report=HEALTHY, prometheus=str(path), prometheus_mode=given)
    assert mode(path) == wanted


@pytest.mark.parametrize("given", ["rw", "9999", "", "u=rw", True, -1, 0o7777, "0000", ["0644"]], ids=str)
def test_invalid_permissions_are_refused(tmp_path, given):
    path = tmp_path / "x.prom"
    result, _printed = act(report=HEALTHY, prometheus=str(path), prometheus_mode=given)
    assert result["failed"] and result["msg"].startswith("prometheus_mode: ") and not path.exists()


def test_yamls_timestamps_are_accepted(tmp_path):
    moment = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
    result, _printed = act(report={**HEALTHY, "time": moment}, **all_files(tmp_path))
    assert result["result"] == "PASS"
    assert "kubegpu_report_timestamp_seconds 1795348800" in (tmp_path / "report.prometheus").read_text()


def test_data_that_json_cant_hold_is_refused():
    endless: dict = {}
    endless["report"] = endless
    result, _printed = act(report={"result": "PASS", "checks": [endless]})
    assert result["failed"] and result["msg"].startswith("report, allocation: ")


def test_nan_is_null_in_the_file(tmp_path):
    act(report={**HEALTHY, "samples": float("nan")}, json=str(tmp_path / "x"))
    assert json.loads((tmp_path / "x").read_text(), parse_constant=pytest.fail)["samples"] is None


def test_the_module_documents_exactly_its_arguments():
    source = (ROOT / "plugins/modules/gpu_report.py").read_text()
    documented = yaml.safe_load(source.split('DOCUMENTATION = r"""')[1].split('"""')[0])["options"]
    assert {name: (one["type"], one.get("default")) for name, one in documented.items()} == {
        name: (argument["type"], argument.get("default")) for name, argument in ARGUMENTS.items()
    }


def test_in_a_real_play(tmp_path):
    """Ansible's values carry tags and come through templates; --check and --diff are its own."""
    (tmp_path / "in.json").write_text(json.dumps(TROUBLE))
    given = {"report": "{{ lookup('file', 'in.json') | from_json }}", "html": "page.html", "prometheus": "x.prom"}
    tasks = [
        {"kubegpu.share.gpu_report": given, "register": "shown"},
        {"ansible.builtin.assert": {"that": ["shown.result == 'FAIL'", "shown is changed"]}},
    ]
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    for options, written in ((["--check", "--diff"], False), ([], True)):
        rc, text = run_playbook(tmp_path, "play.yml", "-i", "localhost,", "-c", "local", *options)
        assert rc == 0, text
        assert "A process uses the card outside any pod." in text
        assert (tmp_path / "page.html").exists() is written
        assert ("+# TYPE kubegpu_report_result gauge" in text) is not written
