# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: node_names
short_description: The names that the cluster has for hosts
version_added: 1.0.0
description:
  - "For the roles of this collection only."
  - A host's node has the name in its variable C(gpu_node_name), or else the host's own.
positional: hostvars
options:
  _input:
    description: Hosts of the inventory.
    type: list
    elements: str
    required: true
  hostvars:
    description: The variable C(hostvars).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the nodes of the group
  ansible.builtin.debug:
    msg: "{{ groups['gpu_nodes'] | kubegpu.share.node_names(hostvars) }}"
"""

RETURN = r"""
_value:
  description: The names, in the order of the hosts.
  type: list
  elements: str
"""

import typing as t


def node_names(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.node_names(hosts, hostvars)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"node_names": node_names}
