#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vgpu
short_description: Give a node's cards the vGPUs of a layout, and restore them at each boot
version_added: 1.1.0
description:
  - Reads vgpu-device-manager's configuration format, and makes each card's vGPUs equal to its entry of the layout. What is there already
    stays; only what differs is created or removed.
  - Whether a card has mediated devices or NVIDIA's vendor-specific VFIO framework (vGPU 17 and later, on virtual functions) is decided by
    what sysfs shows. Types are found by their names, because their ids differ between drivers.
  - Enables a card's virtual functions by NVIDIA's own C(sriov-manage) where it has none. Then it turns MIG on and creates GPU instances, where
    the layout has types of them (C(A100-1-5C)), or enables the mode for vGPUs of several sizes, where the layout has several on one card. Enabling
    the functions would make the card forget both.
  - A boot gives each function the type, and each mediated device the UUID, that it had, so that definitions of virtual machines keep them.
  - Refuses to remove a vGPU that a process has open, and to enable virtual functions or change GPU instances of a card that a process has open.
    Where a process opens it a moment later, the kernel waits; the module doesn't, and names the process.
  - Refuses a machine on which no boot would restore vGPUs, because it has no systemd, or a read-only file system where the unit is to be.
  - Installs a unit of systemd, C(kubegpu-share-vgpu.service), which creates at each boot what is missing, after NVIDIA's driver and MIG
    manager. It never removes anything.
  - O(state=absent) gives each card back what it had before, and removes the unit.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description: Whether the cards have the layout's vGPUs.
    type: str
    choices: [present, absent]
    default: present
  layouts:
    description: >-
      A document of vgpu-device-manager, with the keys C(version) and C(vgpu-configs). A vGPU's type is given without its maker, as
      C(A10-4Q). A vGPU of a GPU instance has one of its own, unless the entry has C(mig-devices) (C({1g.24gb: 2})), which only this module knows.
    type: dict
    default: {}
  layout:
    description: The name of this node's layout.
    type: str
    default: ""
  exclude:
    description: >-
      PCI addresses of cards that stay as they are, also where the layout has C(devices) C(all). The layout's numbers count them.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Divide the first card into four vGPUs, and leave the others as they are
  kubegpu.share.vgpu:
    layout: four
    layouts:
      version: v1
      vgpu-configs:
        four:
          - devices: [0]
            vgpu-devices: {A10-6Q: 4}
"""

RETURN = r"""
cards:
  description: >-
    NVIDIA's cards: address, framework (C(mdev), C(vendor) or empty), number of virtual functions, vGPUs, and the types that are there or
    can be created now.
  returned: success
  type: list
  elements: dict
"""

import sys

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.machine import RealMachine
from ansible_collections.kubegpu.share.plugins.module_utils._vgpu.vgpu import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    machine = RealMachine(run_command=module.run_command)
    run_module(module, lambda: work(machine, module.params, sys.executable, module.check_mode))


if __name__ == "__main__":
    main()
