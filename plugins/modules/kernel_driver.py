#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_driver
short_description: Replace NVIDIA's loaded kernel modules by the installed ones without a reboot
version_added: 1.0.0
description:
  - "For the roles of this collection only: compares the loaded module with the one that the running kernel would load. Where they differ, it
    stops the services that use the GPUs, unloads the module and its dependents, loads the installed ones, and starts the services again."
  - Never ends a process that uses a GPU, unless the process belongs to a pod and O(end_pods) allows it. Where one remains, nothing is changed,
    RV(reboot_required) is true and RV(reason) names the process.
  - Records the stopped services before the first one stops, so that the next run completes one that was killed.
  - A container has its host's modules, which stay. There only O(services) are restarted, where the library has another version than the
    module.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description:
      - V(reloaded) loads the installed modules. Where none is installed, nothing is done.
      - V(unloaded) unloads them; the services that it stopped start with the next V(reloaded).
    type: str
    choices: [reloaded, unloaded]
    default: reloaded
  services:
    description: Further systemd services that use the GPUs, beside NVIDIA's own. Inactive ones stay as they are.
    type: list
    elements: str
    default: []
  end_pods:
    description:
      - Whether processes of pods that use a GPU or the old driver's library may be ended. kubelet is stopped before and started afterwards,
        and then restarts their containers.
      - It is meant for a drained node, on which the pods of DaemonSets remain.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Load the driver that was just installed
  kubegpu.share.kernel_driver:
    end_pods: true
  register: swapped

- name: Show what uses the GPUs
  ansible.builtin.debug:
    var: swapped.reason
  when: swapped.reboot_required
"""

RETURN = r"""
reboot_required:
  description: Whether the modules can't be unloaded, so that only a reboot replaces them.
  returned: success
  type: bool
  sample: false
reason:
  description: The reason; empty where RV(reboot_required) is false.
  returned: success
  type: str
  sample: "the GPUs are in use by python3 (process 4711)"
users:
  description: The processes that use the GPUs.
  returned: success
  type: list
  elements: dict
  sample: [{"command": "python3", "devices": ["/dev/nvidia0"], "pid": 4711, "pod": "", "unit": ""}]
container:
  description: Whether the machine is a container, whose modules are its host's.
  returned: success
  type: bool
  sample: false
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
