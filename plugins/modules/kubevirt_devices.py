#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubevirt_devices
short_description: Permit cards and vGPUs to KubeVirt's virtual machines
version_added: 1.1.0
description:
  - Adds entries to C(permittedHostDevices) of the cluster's KubeVirt, or of the HyperConverged object above it, whose operator reverts what is
    written into KubeVirt. Entries of others stay.
  - The object is written only as it was read, and an annotation of it, C(kubegpu.share/permitted-devices), records which entries are ours.
  - O(state=absent) removes these entries, unless somebody has changed them since, and O(create_mediated) is what it was before.
  - An entry of somebody else for the same cards is refused if it has another resource, and left to him if it has the same.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  state:
    description: Whether the devices are permitted.
    type: str
    choices: [present, absent]
    default: present
  pci:
    description: >-
      Whole cards. C(selector) is vendor and device of the PCI device, as C(10DE:2236), C(resource) the resource that a virtual machine
      requests, and C(external_provider), V(true) by default, whether a device plugin announces it, and not KubeVirt.
    type: list
    elements: dict
    default: []
  mediated:
    description: vGPUs that are mediated devices. C(selector) is the type's name as sysfs has it, as C(NVIDIA A10-12Q); the others as in O(pci).
    type: list
    elements: dict
    default: []
  create_mediated:
    description: >-
      Whether KubeVirt creates and removes mediated devices itself. With V(true), its default, it removes those that others have made, such as
      role vgpu. KubeVirt before 1.8 gets the feature gate C(DisableMDEVConfiguration) for V(false). Without a value it stays as it is.
    type: bool
  keep:
    description: Lists in which entries of this collection that aren't given stay, as where a run doesn't know the cards of all machines.
    type: list
    elements: str
    choices: [pci, mediated]
    default: []
  cards:
    description: >-
      By node, the number of its cards on VFIO by vendor and device, and of its vGPUs by their types' names. A node that has fewer allocatable of what KubeVirt itself announces gets
      virt-handler's pod replaced, which looks for cards when it starts; virtual machines run on.
    type: dict
    default: {}
  wait_timeout:
    description: How many seconds a node gets to announce its cards.
    type: int
    default: 180
"""

EXAMPLES = r"""
- name: Permit A10 cards and vGPUs that role vgpu makes
  kubegpu.share.kubevirt_devices:
    pci:
      - {selector: "10DE:2236", resource: nvidia.com/GA102GL_A10}
    mediated:
      - {selector: NVIDIA A10-12Q, resource: nvidia.com/NVIDIA_A10-12Q}
    create_mediated: false
"""

RETURN = r"""
replaced:
  description: Nodes whose pod of virt-handler was replaced, or would be.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kubevirt.devices import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
