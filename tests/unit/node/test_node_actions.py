# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugins: with nothing to do nothing is executed on the node."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.task import Task
from ansible.template import Templar
from ansible_collections.kubegpu.share.plugins.action import apt_packages, nouveau
from ansible_collections.kubegpu.share.plugins.module_utils import _apt, _nouveau, _repository_key
from ansible_collections.kubegpu.share.plugins.module_utils._apt_apply import AptConcern
from ansible_collections.kubegpu.share.plugins.module_utils._runner import run
from node_fakes import AptMachine

URL = "http://repo.example.org/"
KEY = f"{_repository_key.ARMOUR[0]}\n\nabc=\n{_repository_key.ARMOUR[1]}\n"
SET = {"name": "toolkit", "repositories": [{"name": "tk", "url": URL, "key_text": KEY}], "packages": ["a1=1"]}


def act(plugin, args, monkeypatch):
    """Run an action plugin; the module's executions are counted and answer ``changed``."""
    loader = DataLoader()
    task = Task.load({"name": "x", "ansible.builtin.ping": {}}, loader=loader)
    task.args = dict(args)
    connection = Mock()
    connection._shell.tmpdir = "/tmp"
    action = plugin.ActionModule(
        task=task,
        connection=connection,
        play_context=Mock(),
        loader=loader,
        templar=Templar(loader=loader),
        shared_loader_obj=Mock(),
    )
    executed = []
    monkeypatch.setattr(
        action, "_execute_module", lambda module_args, task_vars: executed.append(module_args) or {"changed": True}
    )
    monkeypatch.setattr(action, "_remove_tmp_path", lambda *_arguments: None)
    return action.run(task_vars={}), executed


def node():
    machine = AptMachine({URL: {"a1": ["1"]}})
    machine.fetched.add(URL)
    return machine


def converged():
    machine = node()
    params = ArgumentSpecValidator(_apt.ARGUMENTS).validate(SET).validated_parameters
    run(AptConcern(_apt.package_set(params), machine, "amd64"), check=False)
    return machine


def observation(machine):
    return AptConcern(Mock(), machine, "amd64").observe()


def test_apt_without_drift_executes_nothing(monkeypatch):
    result, executed = act(apt_packages, {**SET, "observed": observation(converged())}, monkeypatch)
    assert executed == [] and result["changed"] is False and result["diff"] == []


def test_apt_with_drift_executes_the_module_without_the_observation(monkeypatch):
    result, executed = act(apt_packages, {**SET, "observed": observation(node())}, monkeypatch)
    assert executed == [SET] and result["changed"] is True


@pytest.mark.parametrize("observed", [None, {}, {"packages": {}}])
def test_without_a_whole_observation_the_module_looks_itself(observed, monkeypatch):
    args = SET if observed is None else {**SET, "observed": observed}
    assert act(apt_packages, args, monkeypatch)[1] == [SET]


def test_refusal_of_the_plan_fails_the_task_before_the_node_is_touched(monkeypatch):
    machine = node()
    machine.files["/etc/apt/sources.list.d/mine.list"] = f"deb {URL} /\n"
    result, executed = act(apt_packages, {**SET, "observed": observation(machine)}, monkeypatch)
    assert executed == [] and result["failed"] and result["msg"].startswith("/etc/apt/sources.list.d/mine.list names")
    result, executed = act(apt_packages, {**SET, "packages": ["a b"], "observed": observation(node())}, monkeypatch)
    assert executed == [] and result["failed"] and result["msg"].startswith("packages: ")


def seen_nouveau(loaded, files, kernels=("6.1",)):
    return {
        "distribution": {"family": "debian"},
        "kernel": {"installed": list(kernels)},
        "nouveau": {"loaded": loaded, "refcnt": 3 if loaded else None, "files": files, "images": [], "boot_free": None},
    }


def test_nouveau_without_drift_still_says_that_a_reboot_is_needed(monkeypatch):
    files = {_nouveau.PATH: "blacklist nouveau\noptions nouveau modeset=0\n"}
    for loaded in (True, False):
        result, executed = act(nouveau, {"observed": seen_nouveau(loaded, files)}, monkeypatch)
        assert executed == [] and result["changed"] is False and result["reboot_required"] is loaded
    assert act(nouveau, {"observed": seen_nouveau(False, {})}, monkeypatch)[1] == [{}]
