# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Ansible wants imports behind the documentation.
# ruff: noqa: E402

from __future__ import annotations

DOCUMENTATION = r"""
name: driver_choice
short_description: Choose the packages and the kernel module of a node's NVIDIA driver
version_added: 1.0.0
description:
  - By the node's facts from M(kubegpu.share.gpu_node_info), the catalogue of its distribution, the collection's tables
    C(meta/repositories.yml) and C(meta/pins.yml), and the user's options.
  - The role C(driver) does what this returns. The filter itself changes nothing.
positional: catalog, options
options:
  _input:
    description: The node as M(kubegpu.share.gpu_node_info) returned it.
    type: dict
    required: true
  catalog:
    description: The catalogue of the node's distribution, as in the role's C(vars); empty where there is none.
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
    msg: "{{ (gpu_node | kubegpu.share.driver_choice(catalog, options)).packages }}"
  vars:
    options: {host: gpu1, version: 580.95.05}
"""

RETURN = r"""
_value:
  description:
    - C(refusals), messages of why the node can't have it; and C(conflicts), dicts of C(id), C(found) and C(remedy).
    - C(lists), what the node's package lists lack, where they were asked; dicts as C(conflicts), with C(severity),
      C(packages), C(versions) and C(kernels).
    - C(notes), messages of warnings.
    - C(manager), which is V(apt), V(rpm), V(runfile) or V(none); C(flavour), C(branch).
    - C(maintenance), a message where the node has to be drained first.
    - C(repositories), C(streams), C(pins), C(packages), C(replaces), C(hold), C(hold_also), C(never_upgrade) and
      C(source_dir), which are options of M(kubegpu.share.pinned_packages).
    - C(follows), those of C(packages) that are of one kernel each, and metapackages that bring those of the next
      kernel; they aren't held.
    - C(replaced), packages to remove before C(packages) are installed.
    - C(headers), a list of dicts of C(kernel) and C(packages); C(build), packages that a .run file needs.
    - C(prerequisites), dicts of C(id), C(what) and C(commands); C(services); C(persistence_override).
    - C(modules), those of the kernel that manage NVSwitches of NVLink 5.
  type: dict
"""

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.types import Choice, NodeFacts


def driver_choice(gpu_node: NodeFacts, catalog: JsonObject | None, options: JsonObject) -> Choice:
    from ansible_collections.kubegpu.share.plugins.module_utils._driver.select import choose
    from ansible_collections.kubegpu.share.plugins.plugin_utils._pins.table import driver_tables

    return choose(gpu_node, catalog, {**options, "tables": driver_tables()})


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"driver_choice": driver_choice}
