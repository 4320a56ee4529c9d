#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: virtual_machines_info
short_description: Collect what virtual machines are to have of a node's cards, and what they can have
version_added: 1.1.0
description:
  - Compares the records of roles passthrough and vgpu with the machine. The kernel is asked whether each IOMMU group is viable
    (C(VFIO_GROUP_GET_STATUS)), and the initramfs of the running and of the newest kernel is listed by its own tool.
  - Runs on the node, as root, and changes nothing. Needs no running virtual machine, and disturbs none.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
requirements:
  - python >= 3.9
"""

EXAMPLES = r"""
- name: Collect what virtual machines are to have
  kubegpu.share.virtual_machines_info:
  become: true
  register: result
"""

RETURN = r"""
virtual_machines:
  description: What is recorded, and what is there; null where neither role has recorded anything.
  returned: success
  type: dict
  contains:
    problem:
      description: Why a record can't be read, or empty.
      type: str
    functions:
      description: >-
        Each recorded function, with its C(address), C(uuid) or empty, whether PCI has it (C(present)), its C(driver), its IOMMU C(group), the
        kernel's answer about that group (C(state); viable, not_viable, held by a virtual machine, absent, unknown, or empty without a VFIO
        driver), the functions of the group that other drivers have (C(others)), and whether the udev rule has it (C(ruled)).
      type: list
      elements: dict
    missing:
      description: The files that bind them at boot and aren't there.
      type: list
      elements: str
    images:
      description: >-
        The initramfs of the running and of the newest kernel, each with C(path), C(release), whether the udev rule is in it (C(rule); null where
        it can't be read), the modules that it lacks (C(lacking)), and whether it is as new as the files that it is made from (C(newer)).
      type: list
      elements: dict
    others:
      description: How many of NVIDIA's cards no VFIO driver has.
      type: int
    cards:
      description: >-
        Each card that role vgpu has divided, with its C(address), whether PCI has it (C(present)), and the number of its vGPUs by type as recorded
        (C(wanted)) and as they are (C(vgpus)), and how many more have a type whose name isn't known (C(unnamed)).
      type: list
      elements: dict
    devices:
      description: >-
        What virtual machines can be given here, recorded or not, each with its C(address), its C(uuid) where it is a mediated device, the C(type) of
        a vGPU, its IOMMU C(group), and C(number), N of C(/dev/vfio/devices/vfioN).
      type: list
      elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._check.virtual_node import evidence
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import RealKernel


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: {"changed": False, "virtual_machines": evidence(system, RealKernel())})


if __name__ == "__main__":
    main()
