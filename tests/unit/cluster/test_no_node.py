# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked for no node fails by real ansible-playbook, and requests nothing."""

from __future__ import annotations

import re

from own_cluster import run_playbook

STEPS = (
    (
        "gpushare",
        {"gpushare_component": "device_plugin", "gpushare_image_delivery": "registry"},
        "gpushare_component_nodes",
    ),
    ("gpushare", {"gpushare_component": "dra", "gpushare_image_delivery": "registry"}, "gpushare_component_nodes"),
    ("hami", {"hami_step": "nodes"}, "hami_nodes"),
)


def test_a_back_end_for_no_node_is_refused(tmp_path):
    tasks = []
    for role, variables, _variable in STEPS:
        include = {"ansible.builtin.include_role": {"name": f"kubegpu.share.{role}"}, "vars": variables}
        # Nothing answers there.
        include["vars"] = {**variables, "gpu_kubeconfig": "/nowhere/kubeconfig"}
        tasks.append(
            {"block": [include], "rescue": [{"ansible.builtin.debug": {"msg": "said {{ ansible_failed_result.msg }}"}}]}
        )
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}])
    said = re.findall(r"said (\w+): no node is named", done.text)
    assert said == [variable for _role, _variables, variable in STEPS], done.text
