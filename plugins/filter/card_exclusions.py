# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: card_exclusions
short_description: The cards that Kubernetes must not get, as the servers take them
version_added: 1.1.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.gpushare#role) uses it."
  - The cards of a node are those in its variable C(gpu_exclude).
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
    description: Nodes with gpushare, which may be no hosts.
    type: list
    elements: str
    default: []
  given:
    description: C(gpu_exclude) of nodes that are no hosts.
    type: list
    elements: str
    default: []
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Print the cards that are left alone
  ansible.builtin.debug:
    msg: "{{ hostvars | kubegpu.share.card_exclusions(groups['gpu_nodes']) }}"
"""

RETURN = r"""
_value:
  description: Values of the servers' option C(--exclude-cards).
  type: list
  elements: str
"""

import typing as t


def card_exclusions(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Sequence[str] = (),
    given: t.Sequence[str] = (),
) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight import inventory

    return inventory.card_exclusions(hostvars, hosts, nodes, given)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"card_exclusions": card_exclusions}
