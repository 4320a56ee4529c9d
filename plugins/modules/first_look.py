#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: first_look
short_description: Keep the first look at a node, and compare the node with it after an uninstall
version_added: 1.0.0
description:
  - Before anything is changed, writes down on the node how it is, in C(/var/lib/kubegpu-share/first-look.json) (mode 0600).
    It holds the names, versions and holds of all packages, digests of the files in the folders that the roles touch, which services
    run and start at boot, each container runtime's effective default, and nouveau. It holds no text of any file.
  - What was kept is never overwritten. On a node where this collection's own files were there already it says so, since nothing can be
    compared with a look that wasn't the first.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description:
      - V(present) keeps the look where there is none.
      - V(compared) looks again and compares. Where nothing that this collection added is left and nothing that was there is gone,
        the look is forgotten; otherwise this fails with every difference and keeps it. In check mode it only says that it would be forgotten.
      - V(absent) forgets it without a comparison.
    type: str
    choices: [present, compared, absent]
    default: present
  accept:
    description:
      - Differences that are no failure, by the id that they are told with, such as V(package:nvidia-container-toolkit) or
        V(file:/etc/docker/daemon.json).
    type: list
    elements: str
    default: []
  observed:
    description:
      - The node as M(kubegpu.share.gpu_node_info) returned it.
      - With it the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Keep the first look
  kubegpu.share.first_look:
    observed: "{{ gpu_node }}"

- name: Compare the node with it
  kubegpu.share.first_look:
    state: compared
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
notes:
  description: With O(state=compared), differences that others made or that were accepted, or why nothing could be compared.
  returned: success
  type: list
  elements: str
  sample: ["package:htop: 3.2.2-2 is installed and wasn't there"]
problems:
  description: With O(state=compared), differences that are this collection's.
  returned: failure
  type: list
  elements: str
  sample: ["file:/etc/apt/sources.list.d/kubegpu-cuda.sources: it is there and wasn't"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._first_look import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._first_look_apply import work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    params = module.params
    finish(module, lambda: work(params["state"], params["accept"], module.check_mode, system))


if __name__ == "__main__":
    main()
