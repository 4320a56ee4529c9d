#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: backend_files
short_description: Remove what HAMi or NVIDIA's device plugin left on a machine
version_added: 1.0.0
description:
  - "For the roles of this collection only: roles P(kubegpu.share.hami#role) and P(kubegpu.share.nvidia_device_plugin#role) use it."
  - Of V(hami), removes the folder of its library with the containers' caches, the locks of its library and of its device plugin in C(/tmp), and, unless
    a device plugin runs, the CDI specification and the socket that it has in common with NVIDIA's. Refuses while a container has a part of the
    library's folder mounted, which couldn't be restarted without it.
  - Of V(nvidia), removes the folder of MPS with the tmpfs in it, the CDI specification, and the sockets of a plugin that was killed. Cards get the
    compute mode C(DEFAULT) back where a killed MPS daemon left C(EXCLUSIVE_PROCESS); only a machine with the folder of MPS has had such a daemon
    since it booted, and on others a compute mode isn't changed. Fails without any change while a device plugin or an MPS daemon runs.
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  backend:
    description: The back end that has left the node.
    type: str
    choices: [hami, nvidia]
    required: true
  library_folder:
    description: Of V(hami), the folder in which it installed its folder C(vgpu), the chart's C(global.gpuHookPath).
    type: path
    default: /usr/local
  mps_root:
    description: Of V(nvidia), the folder of MPS, which is C(mps.root) of the plugin's chart.
    type: path
    default: /run/nvidia/mps
  kubelet_root:
    description: kubelet's root directory.
    type: path
    default: /var/lib/kubelet
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Remove HAMi's files
  kubegpu.share.backend_files:
    backend: hami
"""

RETURN = r"""
code:
  description: Of V(hami), why it refuses, V(preloaded), with the process, command and pod of each container in C(containers).
  type: str
  returned: when it refuses
running:
  description: Of V(nvidia), the programs because of which nothing was changed, with C(pid) and C(program).
  type: list
  elements: dict
  returned: failure
  sample:
    - {pid: 4711, program: nvidia-device-p}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._backends.machine import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: ensure(system, module.params, module.check_mode))


if __name__ == "__main__":
    main()
