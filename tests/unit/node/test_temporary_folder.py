# SPDX-License-Identifier: GPL-3.0-or-later
"""Temporary folders of an action on the node: one of a real ansible-playbook, without and with pipelining."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_runs import ansible, write_inventory

ACTION = """
from ansible_collections.kubegpu.share.plugins import action  # as the name of one of the collection's actions does
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction


class ActionModule(ShareAction):
    arguments = {"file": {"type": "str"}}

    def ensure(self, params, task_vars):
        first = self.execute_module({}, task_vars)
        paths = lambda folder, copies: {"copy": copies[0]}
        return {"first": first["folders"], **self.execute_with_files([params["file"]], paths, task_vars)}
"""
MODULE = """#!/usr/bin/python
import os
from ansible.module_utils.basic import AnsibleModule

module = AnsibleModule({"copy": {"type": "str"}})
copy = module.params["copy"]
content = open(copy).read() if copy else ""
module.exit_json(content=content, folders=os.listdir(os.environ["FOLDERS"]))
"""


@pytest.mark.parametrize("pipelining", [False, True], ids=["files", "pipelining"])
def test_no_folder_of_an_action_stays_on_the_node(tmp_path: Path, pipelining: bool) -> None:
    folders = tmp_path / "folders"
    for folder, text in (("action_plugins", ACTION), ("library", MODULE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice.py").write_text(text)
    folders.mkdir()
    (tmp_path / "sources").write_text("content")
    task = {"twice": {"file": str(tmp_path / "sources")}, "environment": {"FOLDERS": str(folders)}, "register": "done"}
    during = 1 - pipelining
    right = [f"done.first | length == {during}", "done.folders | length == 1", "done.content == 'content'"]
    tasks = [task, {"ansible.builtin.assert": {"that": right}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "node", "gather_facts": False, "tasks": tasks}]))
    write_inventory(tmp_path, {"nodes": ["node"]})
    variables = {"ANSIBLE_REMOTE_TEMP": str(folders), "ANSIBLE_PIPELINING": str(pipelining)}
    done = ansible(tmp_path, "ansible-playbook", "-i", "hosts.yml", "play.yml", **variables)
    assert done.rc == 0, done.text
    assert not list(folders.iterdir())
