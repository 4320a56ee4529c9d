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
  - "For the roles of this collection only: runs NVIDIA's installer unattended, with DKMS, unless it has installed exactly this version
    already."
  - The file is copied to a node only when it is needed there, into Ansible's temporary directory, and removed afterwards. It is
    executed only when its SHA-256 is O(sha256).
  - Needs the kernel's headers, gcc and make, which the role C(driver) installs first.
  - Refuses while packages of the driver are installed. A loaded kernel module is unloaded first; one that is in use is refused.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.observed
options:
  state:
    description: With V(absent) the driver that this module has installed is removed with its own uninstaller. One that somebody else installed stays.
    type: str
    choices: [present, absent]
    default: present
  file:
    description: The .run file on the controller, or a URL that the node downloads it from. Required with O(state=present).
    type: str
  sha256:
    description: SHA-256 of the file. Required with O(state=present).
    type: str
  version:
    description: The driver's version. Required with O(state=present).
    type: str
  flavour:
    description: The flavour of the kernel module.
    type: str
    choices: [open, proprietary]
    default: open
  remote_path:
    description: The file's path on the node. The action plugin sets it; don't set it yourself.
    type: path
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
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._driver.runfile import ARGUMENTS, RULES
from ansible_collections.kubegpu.share.plugins.module_utils._driver.runfile_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, **RULES)
    run_module(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
