#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_arguments
short_description: Add arguments to the kernel's command line by the node's boot loader, and remove them to the byte
version_added: 1.1.0
description:
  - Adds only what the entry that boots next lacks, wherever the node's boot loader has its arguments, and proves that entry afterwards. Where the
    proof fails, the old files are restored. It never reboots; RV(reboot_required) says that the running kernel has other arguments.
  - Knows GRUB with C(update-grub) (Debian, Ubuntu), GRUB with C(grub2-mkconfig) (SUSE), GRUB with loader entries (Fedora, Red Hat's family),
    systemd-boot, kernelstub (Pop!_OS), proxmox-boot-tool with systemd-boot, and rpm-ostree. With any other boot loader, or with two, it fails
    with the arguments to set, unless the running kernel has them.
  - What it changes is recorded in C(/var/lib/kubegpu-share/kernel-arguments.json). V(absent) restores the recorded bytes; from a file that was
    changed since, and from entries of kernels that were installed since, it removes its own arguments only.
  - An argument of the user that says the opposite, such as C(intel_iommu=off), is never overridden. The module fails with its file.
  - On OpenShift use M(kubegpu.share.machine_config).
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description: V(present) has exactly O(arguments), and those for O(iommu), added. V(absent) removes all that the module has added.
    type: str
    choices: [present, absent]
    default: present
  arguments:
    description: Arguments such as V(iommu=pt), each of letters, digits and C(_.,:=+/@%-). V(amd_iommu=on) is refused, since it means nothing.
    type: list
    elements: str
    default: []
  iommu:
    description:
      - Whether to add what the IOMMU needs. Nothing where the node has IOMMU groups, or where its kernel turns the IOMMU on by itself, as with AMD
        and with Debian's kernels; V(intel_iommu=on) otherwise.
      - Fails where no argument would help, because the firmware announces no IOMMU.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Turn the IOMMU on
  kubegpu.share.kernel_arguments:
    iommu: true
    observed: "{{ gpu_node }}"

- name: Remove what was added
  kubegpu.share.kernel_arguments:
    state: absent
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
loader:
  description: The boot loader, such as V(grub-drop-in); empty where it isn't known.
  returned: success
  type: str
  sample: grub-bls
arguments:
  description: What the module has added; an argument that the node had already isn't among them.
  returned: success
  type: list
  elements: str
  sample: [intel_iommu=on]
reboot_required:
  description: Whether the running kernel lacks what was added, or has what was removed.
  returned: success
  type: bool
  sample: true
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._boot.apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._boot.plan import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
