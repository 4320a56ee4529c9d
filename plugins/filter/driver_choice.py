# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: driver_choice
short_description: Which packages bring a node its NVIDIA driver
version_added: 1.0.0
description:
  - From what M(kubegpu.share.gpu_node_info) saw of a node, what its distribution calls things, and the user's wishes.
  - The role C(driver) does what this returns. Nothing is looked up or changed.
positional: catalog, options
options:
  _input:
    description: The node as M(kubegpu.share.gpu_node_info) returned it.
    type: dict
    required: true
  catalog:
    description: What the node's distribution calls things, as in the role's C(vars); empty where it isn't known.
    type: dict
    required: true
  options:
    description: The role's variables without their prefix, and C(host).
    type: dict
    required: true
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Show which packages a node would get
  ansible.builtin.debug:
    msg: "{{ (gpu_node | kubegpu.share.driver_choice(catalog, wishes)).packages }}"
  vars:
    wishes: {host: gpu1, version: 580.95.05}
"""

RETURN = r"""
_value:
  description:
    - C(refusals), sentences that say why it can't be; and C(conflicts), dicts of C(id), C(found) and C(do).
    - C(notes), sentences worth reading.
    - C(manager), which is V(apt), V(rpm), V(runfile) or V(none); C(flavour), C(branch).
    - C(maintenance), a sentence where the node has to be emptied first.
    - C(repositories), C(streams), C(pins), C(packages), C(replaces), C(hold), C(hold_also), C(never_upgrade) and
      C(source_dir), which are options of the package modules.
    - C(replaced), packages that must go before C(packages) come.
    - C(headers), a list of dicts of C(kernel) and C(packages); C(build), what a .run file needs.
    - C(prerequisites), dicts of C(id), C(what) and C(commands); C(services); C(persistence_override).
  type: dict
"""

from ansible_collections.kubegpu.share.plugins.module_utils._driver_choice import choose


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"driver_choice": choose}
