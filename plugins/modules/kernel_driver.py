#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_driver
short_description: "Replace NVIDIA's loaded kernel modules by the installed ones without a reboot"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  state: {description: "Load the modules that are installed, or unload them.", type: str, choices: [reloaded, unloaded], default: reloaded}
  services: {description: "Further systemd services that use the GPUs, beside NVIDIA's own.", type: list, elements: str, default: []}
  end_pods: {description: Whether processes of pods may be ended. It is meant for a drained node., type: bool, default: false}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._driver.kernel_modules import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
