#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kata_handler
short_description: Add Kata's runtime to a node's containerd by a drop-in, or remove it
version_added: 1.1.0
description:
  - Adds a runtime with Kata's shim to containerd 2.0 and newer, by the drop-in C(conf.d/99-kubegpu-kata.toml) beside that of
    M(kubegpu.share.container_runtime). No setting of another file changes but one import, and neither module changes what the other wrote.
  - containerd validates the files, no other setting may change, the restarted daemon has to become healthy and to have the runtime. Otherwise the
    old files are restored and verified.
  - A runtime of this name that somebody else added, such as kata-deploy, is left to him where it is the same, and refused where it differs.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  name:
    description: Name of the runtime, which a RuntimeClass has as its handler.
    type: str
    required: true
  state:
    description: Whether containerd has the runtime. V(absent) removes the drop-in of this module and nothing else.
    type: str
    choices: [present, absent]
    default: present
  shim:
    description: Path of Kata's shim on the node.
    type: path
    default: /opt/kata/bin/containerd-shim-kata-v2
  config:
    description: Path of the shim's configuration on the node.
    type: path
    default: ""
  timeout:
    description: Seconds that containerd has to become healthy.
    type: int
    default: 120
  observed:
    description: The node as M(kubegpu.share.gpu_node_info) returned it. Required.
    type: dict
  plan:
    description: Set by the action plugin. Not for users.
    type: dict
"""

EXAMPLES = r"""
- name: Add the runtime of Kata for NVIDIA's cards
  kubegpu.share.kata_handler:
    name: kata-qemu-nvidia-gpu
    config: /opt/kata/share/defaults/kata-containers/runtimes/qemu-nvidia-gpu/configuration-qemu-nvidia-gpu.toml
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
effective:
  description: containerd's effective configuration after the change, with credentials masked.
  returned: changed
  type: str
restarted:
  description: Whether containerd was restarted.
  returned: changed
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.handler import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(module.params, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
