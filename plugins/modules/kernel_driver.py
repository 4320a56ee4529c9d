#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_driver
short_description: Swap NVIDIA's loaded kernel modules for the installed ones without a reboot
version_added: 1.0.0
description:
  - Compares the module that runs with the one that the running kernel would load. Where they differ, the services that hold the
    cards are stopped, the module and all that stand on it are taken out, the installed ones are loaded, and the services start again.
  - A process that holds a card is never ended, unless it is a pod's and O(end_pods) allows it. Where one is left, nothing is touched,
    RV(reboot_required) is true and RV(reason) names it.
  - Which services were stopped is written down before the first one stops, so that a run that was killed is finished by the next one.
  - A container has its host's modules, which are left alone. There only O(services) are restarted, and only when the library's version
    isn't the module's.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description:
      - V(reloaded) makes the installed modules run. Where no module is installed, nothing is done.
      - V(unloaded) takes them out, and leaves the services that it stopped until V(reloaded) is asked for.
    type: str
    choices: [reloaded, unloaded]
    default: reloaded
  services:
    description: Further systemd services that hold the cards, beside NVIDIA's own. What isn't active isn't touched.
    type: list
    elements: str
    default: []
  end_pods:
    description:
      - Whether processes of pods that hold a card, or the old driver's library, may be ended; kubelet is stopped before and started after,
        and then starts their containers anew.
      - It is meant for a node that has been drained, where the pods of DaemonSets are left.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Make the driver run that was just installed
  kubegpu.share.kernel_driver:
    end_pods: true
  register: swapped

- name: Say what is in the way
  ansible.builtin.debug:
    var: swapped.reason
  when: swapped.reboot_required
"""

RETURN = r"""
reboot_required:
  description: Whether the modules can't be taken out, so that only a reboot swaps them.
  returned: success
  type: bool
  sample: false
reason:
  description: Why, in a few words; empty where RV(reboot_required) is false.
  returned: success
  type: str
  sample: "the cards are held by python3 (process 4711)"
users:
  description: The processes that are in the way.
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
from ansible_collections.kubegpu.share.plugins.module_utils._kernel_driver import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._kernel_driver_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(module.params, module.check_mode, RealSystem(run_command=module.run_command)))


if __name__ == "__main__":
    main()
