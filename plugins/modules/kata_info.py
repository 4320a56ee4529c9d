#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kata_info
short_description: Collect what a node has for pods of Kata with NVIDIA's cards, and what it lacks
version_added: 1.1.0
description:
  - Reads containerd's effective configuration, the shim's, kubelet's, the CDI specifications of cards, and whether there is C(/dev/kvm).
  - No virtual machine is started. Nothing is changed.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
author:
  - The kubegpu.share authors (@kubegpu)
options:
  handler:
    description: Name of Kata's runtime in containerd.
    type: str
    required: true
  shim:
    description: Path of the shim, where containerd's configuration names none.
    type: path
    default: /opt/kata/bin/containerd-shim-kata-v2
  config:
    description: Path of the shim's configuration, where containerd's names none.
    type: path
    default: ""
  cards:
    description: How many cards the node has for virtual machines, each of which needs a port.
    type: int
    default: 0
"""

EXAMPLES = r"""
- name: Read what the node has for Kata
  kubegpu.share.kata_info:
    handler: kata-qemu-nvidia-gpu
  register: found
"""

RETURN = r"""
kata:
  description: What was observed.
  returned: success
  type: dict
problems:
  description: What the node lacks, each with C(code), its fields and C(text).
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._kata.node import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(RealSystem(run_command=module.run_command), module.params))


if __name__ == "__main__":
    main()
