#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pci_binding
short_description: Give NVIDIA cards to VFIO for virtual machines, or give them back
version_added: 1.1.0
description:
  - Binds cards to the kernel's VFIO driver by their PCI addresses, so that a virtual machine can have them. Of two cards of one model only the
    one that is named is taken.
  - A card goes with its own audio, USB and USB-C functions. Where its IOMMU group has anything else, the card is refused; bridges don't count.
  - Writes a udev rule per function, puts it into the initramfs of every installed kernel with initramfs-tools or dracut, and the modules with
    it, so that no other driver has the card at boot.
  - Refuses a card that a process or a pod has open, that is the machine's display, behind whose USB function this machine uses devices, that
    has virtual functions or mediated devices, or another card at a recorded address. DCGM, nvidia-persistenced, persistence mode and an allowed console leave it to the next boot
    (RV(reboot_required)).
  - Each unbind runs in a process of its own with a time limit, because a driver may wait for ever.
  - The proof is the driver that the kernel shows, VFIO's device file, and the kernel's own word on whether the IOMMU group is viable.
  - The state before is kept in C(/var/lib/kubegpu-share/passthrough.json). O(state=absent) restores the files to the byte, rebuilds the images,
    and gives each function the driver back that it had.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description: >-
      Whether the cards are bound, or given back. V(external) changes nothing, and fails unless they are bound: the GPU Operator's
      vfio-manager owns the binding.
    type: str
    choices: [present, absent, external]
    default: present
  cards:
    description: PCI addresses and UUIDs of cards, or V(all) alone. Cards that aren't listed any more are given back.
    type: list
    elements: str
    default: []
  driver:
    description: VFIO's driver; V(auto) is the most special one that the kernel has for the card, as C(nvgrace_gpu_vfio_pci) on Grace.
    type: str
    default: auto
  allow_display:
    description: Whether the machine's display may be taken.
    type: bool
    default: false
  nvswitch:
    description: >-
      V(with-cards) gives the NVSwitches away, too, with all cards of the board. With V(none) they stay, and the fabric manager has to run in
      its shared mode.
    type: str
    choices: [none, with-cards]
    default: none
  live:
    description: Whether cards change their driver now. Otherwise at the next boot.
    type: bool
    default: true
  exclude:
    description: Cards that are left alone, as in C(gpu_exclude).
    type: list
    elements: str
    default: []
  seconds:
    description: Seconds that one unbind may take.
    type: int
    default: 30
  stopping:
    description: >-
      In check mode only: pods, by UID or C(namespace/name), that are stopped before the cards are bound, so that what they have is no reason to refuse a
      card. Check mode then predicts the binding.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Give one card to virtual machines
  kubegpu.share.pci_binding:
    cards: ["0000:3b:00.0"]
"""

RETURN = r"""
reboot_required:
  description: Whether a card gets its driver, or its old one back, only at the next boot.
  returned: success
  type: bool
  sample: false
busy:
  description: What keeps cards from changing their driver now, each with C(code), C(address), the code's fields and C(text).
  returned: success
  type: list
  elements: dict
cards:
  description: The cards and NVSwitches that were chosen.
  returned: success
  type: list
  elements: dict
  contains:
    address: {description: Its PCI address., type: str}
    uuid: {description: The driver's UUID of it; empty where it was never known., type: str}
    device: {description: Its vendor and device ids., type: str}
    driver: {description: The driver that has it., type: str}
    wanted: {description: The driver that it gets., type: str}
    iommu_group: {description: Number of its IOMMU group., type: str}
    viable: {description: The kernel's word on that group; null where a virtual machine has it., type: bool}
    functions: {description: Addresses of all functions that go with it., type: list, elements: str}
refusals:
  description: Why cards were refused, each with C(code) and the code's fields.
  returned: when cards are refused
  type: list
  elements: dict
problems:
  description: What the proof lacks, each with C(code) and the code's fields.
  returned: when the cards aren't bound as they should be
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import NodeKubelet
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.kernel import RealKernel
from ansible_collections.kubegpu.share.plugins.module_utils._passthrough.model import ARGUMENTS, options_of


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: work(options_of(module.params), module.check_mode, system, RealKernel(), NodeKubelet()))


if __name__ == "__main__":
    main()
