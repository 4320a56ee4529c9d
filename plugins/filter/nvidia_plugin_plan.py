# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: nvidia_plugin_plan
short_description: Configurations, values and labels of NVIDIA's device plugin
version_added: 1.0.0
description:
  - Checks the configurations and the MIG layouts of the role C(nvidia_device_plugin), and returns the values of the
    plugin's chart, the labels of the nodes, and the resources that they announce then.
options:
  _input:
    description:
      - The role's variables without their prefix, C(nodes), C(configurations), C(default), C(node_configurations),
        C(mig_layouts), C(operator), C(injection), C(runtime_class), C(image), C(gfd) and C(values), and
        C(facts), the fact C(gpu_node) by the node's name.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the chart's values for cards that four pods share
  vars:
    options:
      nodes: [gpu1]
      configurations:
        shared: {sharing: time-slicing, replicas: 4}
      default: shared
      node_configurations: {}
      mig_layouts: {}
      operator: false
      injection: auto
      runtime_class: ""
      image: ""
      gfd: false
      values: {}
      facts: {}
  ansible.builtin.debug:
    msg: "{{ (options | kubegpu.share.nvidia_plugin_plan)['values'] }}"
"""

RETURN = r"""
_value:
  description:
    - C(problems), each with C(code), C(where) and C(message); empty where the plan holds.
    - C(values), the chart's. C(groups), the nodes by the resources that they announce, with the definitions of their
      labels. C(operator_groups), the same for nodes of the GPU Operator. C(config_maps), name and data of what the
      operator's components read. C(nodes), C(mig_strategy), C(default) and C(runtime_class).
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import Options, Result


def nvidia_plugin_plan(options: Options) -> Result:
    from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import plan

    return plan(options)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"nvidia_plugin_plan": nvidia_plugin_plan}
