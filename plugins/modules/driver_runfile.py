#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_runfile
short_description: "Install NVIDIA's driver from its .run file"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.observed
options:
  state:
    description: Whether it is installed. V(absent) leaves a driver that somebody else installed.
    type: str
    choices: [present, absent]
    default: present
  file: {description: "The .run file on the controller, or a URL that the node downloads it from.", type: str}
  sha256: {description: SHA-256 of the file., type: str}
  version: {description: "The driver's version.", type: str}
  flavour: {description: The flavour of the kernel module., type: str, choices: [open, proprietary], default: open}
  remote_path: {description: Set by the action plugin., type: path}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._driver.runfile import ARGUMENTS, RULES
from ansible_collections.kubegpu.share.plugins.module_utils._driver.runfile_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, **RULES)
    run_module(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
