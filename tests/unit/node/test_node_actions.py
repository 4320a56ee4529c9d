# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugins execute nothing on a node without drift."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from action_plugins import act, load
from ansible_collections.kubegpu.share.plugins.action import gpu_node_info, nouveau, pinned_packages
from ansible_collections.kubegpu.share.plugins.module_utils._driver import nouveau_plan as driver_nouveau
from node_fakes import AptMachine
from package_sets import KEY, apply, package_set, reconciler

URL = "http://repo.example.org/"
SET = {"name": "toolkit", "repositories": [{"name": "tk", "url": URL, "key_text": KEY}], "packages": ["a1=1"]}


def node():
    machine = AptMachine({URL: {"a1": ["1"]}})
    machine.fetched.add(URL)
    return machine


def converged():
    machine = node()
    apply(package_set(**SET), machine, "debian")
    return machine


def observation(machine):
    return reconciler(Mock(repositories=()), machine, "debian").observe()


def test_apt_without_drift_executes_nothing(monkeypatch):
    result, executed = act(pinned_packages, {**SET, "observed": observation(converged())}, monkeypatch)
    assert executed == [] and result["changed"] is False and result["diff"] == []


def test_apt_with_drift_executes_the_module_without_the_observation(monkeypatch):
    result, executed = act(pinned_packages, {**SET, "observed": observation(node())}, monkeypatch)
    assert executed == [SET] and result["changed"] is True


@pytest.mark.parametrize("observed", [None, {}, {"packages": {}}])
def test_without_all_sections_the_module_runs(observed, monkeypatch):
    args = SET if observed is None else {**SET, "observed": observed}
    assert act(pinned_packages, args, monkeypatch)[1] == [SET]


def test_refusal_of_the_plan_fails_the_task_before_the_node_is_touched(monkeypatch):
    machine = node()
    machine.files["/etc/apt/sources.list.d/mine.list"] = f"deb {URL} /\n"
    result, executed = act(pinned_packages, {**SET, "observed": observation(machine)}, monkeypatch)
    assert executed == [] and result["failed"] and result["msg"].startswith("/etc/apt/sources.list.d/mine.list names")
    result, executed = act(pinned_packages, {**SET, "packages": ["a b"], "observed": observation(node())}, monkeypatch)
    assert executed == [] and result["failed"] and result["msg"].startswith("packages: ")


def facts_of_nouveau(loaded, files):
    return {
        "distribution": {"family": "debian"},
        "kernel": {"installed": ["6.1"]},
        "nouveau": {
            **{"loaded": loaded, "refcnt": 3 if loaded else None, "files": files, "images": [], "boot_free": None},
            "nova": {"modules": [], "in_use": False},
        },
    }


def test_nouveau_without_drift_still_reports_a_needed_reboot(monkeypatch):
    files = {driver_nouveau.PATH: "".join(f"{line}\n" for line in driver_nouveau.DIRECTIVES)}
    for loaded in (True, False):
        result, executed = act(nouveau, {"observed": facts_of_nouveau(loaded, files)}, monkeypatch)
        assert executed == [] and result["changed"] is False and result["reboot_required"] is loaded
    assert act(nouveau, {"observed": facts_of_nouveau(False, {})}, monkeypatch)[1] == [{}]


def test_a_control_plane_has_both_kinds_of_facts_by_one_execution(monkeypatch):
    asked = {"images": ["a"], "packages": [], "report_trouble": False, "patches_dir": "/p"}
    results = []

    def execute(**given):
        results.append((given["module_name"], given["module_args"]))
        return {"changed": False}

    for control_plane in (True, False):
        action = load(gpu_node_info, {**asked, "control_plane": control_plane})
        monkeypatch.setattr(action, "_execute_module", execute)
        action.run(task_vars={})
    assert results == [
        ("kubegpu.share.control_plane_info", {"patches_dir": "/p", "node": {"images": ["a"], "packages": []}}),
        ("kubegpu.share.gpu_node_info", {"images": ["a"], "packages": []}),
    ]
