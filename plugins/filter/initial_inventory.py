# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: initial_inventory
short_description: Groups of a new inventory
version_added: 1.0.0
description:
  - Returns the machines of a new inventory, as they are named or as the cluster has them.
  - In a cluster, nodes with GPUs are those that labels of NVIDIA or of the Node Feature Discovery show, or resources.
    Where no node has any of these, all but the control plane's nodes are taken.
  - Nodes whose system must not be changed over SSH, as OpenShift's CoreOS, are named in C(gpushare_nodes) instead.
  - A node may announce any text as its address. Machines whose name or address is none, or would lead to another
    machine, are left out.
options:
  _input:
    description: Nodes of the cluster, from M(kubegpu.share.cluster_info). Not read if O(gpu_nodes) isn't empty.
    type: list
    elements: dict
    required: true
  gpu_nodes:
    description: The machines with GPUs, each as C(NAME) or C(NAME=ADDRESS), in a list or separated by commas.
    type: list
    elements: str
    default: []
  control_plane:
    description: The machines of the control plane, in the same form.
    type: list
    elements: str
    default: []
  ssh:
    description: Whether the machines are reached over SSH.
    type: bool
    default: true
  server:
    description: URL of the API server; a node that isn't of the control plane and announces its address is left out.
    type: str
    default: ""
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the groups of two machines
  ansible.builtin.debug:
    msg: "{{ [] | kubegpu.share.initial_inventory(gpu_nodes=['gpu1=192.0.2.11'], control_plane=['cp1']) }}"
"""

RETURN = r"""
_value:
  description:
    - C(gpu_nodes) and C(control_plane), the address of each machine by its name, empty if its name is to be resolved.
    - C(gpushare_nodes), names of nodes that aren't reached over SSH.
    - C(left_out), the machines that are left out, each with C(node), C(field), C(code) and C(text).
    - C(assumed), whether nothing showed which nodes have GPUs.
  type: dict
"""

import typing as t


def initial_inventory(
    nodes: t.Sequence[t.Mapping[str, t.Any]],
    gpu_nodes: str | t.Sequence[str] = (),
    control_plane: str | t.Sequence[str] = (),
    ssh: bool = True,
    server: str = "",
) -> dict[str, t.Any]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import initial_inventory as preflight

    return preflight.initial_inventory(nodes, gpu_nodes, control_plane, ssh, server)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"initial_inventory": initial_inventory}
