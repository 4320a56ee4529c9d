#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_runfile
short_description: Install NVIDIA's driver from its .run file
version_added: 1.0.0
description:
  - Runs NVIDIA's installer without questions, with DKMS, unless this very version is installed by it already.
  - The file is brought to a node only when it is needed there, into Ansible's temporary folder, and removed afterwards. It is
    run only when it has O(sha256).
  - Needs the kernel's headers, gcc and make, which the role C(driver) installs first.
  - Refuses while packages of the driver are installed. A loaded module that nothing uses is unloaded first; one in use is refused.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description: With V(absent) the driver is removed with the uninstaller that it brought.
    type: str
    choices: [present, absent]
    default: present
  file:
    description: The .run file on the controller, or an address that the node fetches it from. Needed with O(state=present).
    type: str
  sha256:
    description: SHA-256 of the file. Needed with O(state=present).
    type: str
  version:
    description: The driver's version. Needed with O(state=present).
    type: str
  flavour:
    description: Which kernel module.
    type: str
    choices: [open, proprietary]
    default: open
  remote_path:
    description: Where the action plugin has put the file on the node. Not to be set.
    type: path
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Install the driver from a file on the controller
  kubegpu.share.driver_runfile:
    file: /srv/nvidia/NVIDIA-Linux-x86_64-580.95.05.run
    sha256: "{{ lookup('ansible.builtin.file', '/srv/nvidia/NVIDIA-Linux-x86_64-580.95.05.run.sha256sum').split() | first }}"
    version: 580.95.05
    observed: "{{ gpu_node }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._runfile import ARGUMENTS, RULES
from ansible_collections.kubegpu.share.plugins.module_utils._runfile_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, **RULES)
    finish(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
