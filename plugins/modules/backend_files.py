#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: backend_files
short_description: "Remove what HAMi or a device plugin of NVIDIA left on a machine"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  backend: {description: The back end that has left the node., type: str, choices: [hami, kata, nvidia], required: true}
  library_folder: {description: "Of V(hami), the chart's C(global.gpuHookPath).", type: path, default: /usr/local}
  mps_root: {description: "Of V(nvidia), the chart's C(mps.root).", type: path, default: /run/nvidia/mps}
  kubelet_root: {description: "kubelet's root directory.", type: path, default: /var/lib/kubelet}
"""

EXAMPLES = r"""
# For the roles of this collection only.
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
