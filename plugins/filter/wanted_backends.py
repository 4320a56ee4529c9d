# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: wanted_backends
short_description: What the variables ask for on each node
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.preflight#role) uses it."
  - C(gpu_backend) and C(gpushare_allocation) are variables of a node. A node that isn't in the group gpu_nodes has them
    from the host of its name, in any group of the inventory.
positional: hosts, nodes, given
options:
  _input:
    description: The variable C(hostvars).
    type: dict
    required: true
  hosts:
    description: The hosts of the group gpu_nodes.
    type: list
    elements: str
    required: true
  nodes:
    description: The variable C(gpushare_nodes). Where it is set, no other node has gpushare.
    type: list
    elements: str
    default: []
  given:
    description: C(gpu_backend) and C(gpushare_allocation) of nodes that have none of their own.
    type: dict
    default: {}
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print what the nodes are to have
  ansible.builtin.debug:
    msg: "{{ hostvars | kubegpu.share.wanted_backends(groups['gpu_nodes']) }}"
"""

RETURN = r"""
_value:
  description: Of each node C(node), C(backend) and C(allocation), as M(kubegpu.share.cluster_info) takes them.
  type: list
  elements: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import Wanted


def wanted_backends(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Mapping[str, str] | None = None,
) -> list[Wanted]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.wanted_backends(hostvars, hosts, nodes, given)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"wanted_backends": wanted_backends}
