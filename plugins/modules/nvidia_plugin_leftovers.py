#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_plugin_leftovers
short_description: Remove what NVIDIA's device plugin left on a machine
version_added: 1.0.0
description:
  - "Removes what neither the plugin nor its chart removes: the folder of MPS with the tmpfs in it, the CDI specification, and the sockets of a plugin
    that was killed."
  - Cards get the compute mode C(DEFAULT) back where a killed MPS daemon left C(EXCLUSIVE_PROCESS). Only a machine with the folder of MPS has had such a
    daemon since it booted; on others a compute mode isn't changed.
  - Fails without any change while a device plugin or an MPS daemon runs.
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  mps_root:
    description: The folder of MPS, which is C(mps.root) of the plugin's chart.
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
- name: Remove what the plugin left
  kubegpu.share.nvidia_plugin_leftovers:
"""

RETURN = r"""
running:
  description: The programs because of which nothing was changed, with C(pid) and C(program).
  type: list
  elements: dict
  returned: failure
  sample:
    - {pid: 4711, program: nvidia-device-p}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._driver.nvidia_plugin import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    run_module(module, lambda: work(system, module.params, module.check_mode))


if __name__ == "__main__":
    main()
