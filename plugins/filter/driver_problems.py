# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: driver_problems
short_description: Report the problems of a node's NVIDIA driver
version_added: 1.0.0
description:
  - Compares the GPUs on PCI with those that the driver lists, and versions with each other.
positional: options
options:
  _input:
    description: The node as M(kubegpu.share.gpu_node_info) returned it.
    type: dict
    required: true
  options:
    description: C(host), C(state) and C(version), as the role C(driver) has them.
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show the problems of the driver
  ansible.builtin.debug:
    msg: "{{ gpu_node | kubegpu.share.driver_problems({'host': inventory_hostname, 'version': '580.95.05'}) }}"
"""

RETURN = r"""
_value:
  description: One message for each problem, a cause before its consequences.
  type: list
  elements: str
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.types import NodeFacts


def driver_problems(gpu_node: NodeFacts, options: JsonObject) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.select import verify

    return verify(gpu_node, options)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"driver_problems": driver_problems}
