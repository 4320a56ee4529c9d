#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_baseline
short_description: Record the state of a node before any change, and compare the node with it after an uninstall
version_added: 1.0.0
description:
  - "For the roles of this collection only: role P(kubegpu.share.node_baseline#role) uses it."
  - Records the state of a node in C(/var/lib/kubegpu-share/baseline.json) (mode 0600) before anything is changed. The file holds the names,
    versions and holds of all packages, digests of the files in the directories that the roles change, which services run and start at boot,
    each container runtime's default runtime, and nouveau. It holds no text of any file.
  - A baseline is never overwritten. On a node that has files of this collection already, the baseline records that, and nothing is compared
    with it.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
options:
  state:
    description:
      - V(present) records the baseline where there is none.
      - V(compared) compares the node with its baseline. Where this collection has added and removed nothing, the baseline is removed;
        otherwise the task fails with every difference and keeps it. In check mode nothing is compared, and the task reports that the baseline
        would be removed.
      - V(absent) removes it without a comparison.
    type: str
    choices: [present, compared, absent]
    default: present
  accept:
    description:
      - Ids of differences that are no failure, such as V(package:nvidia-container-toolkit) or V(file:/etc/docker/daemon.json).
    type: list
    elements: str
    default: []
  observed:
    description:
      - The node's facts as M(kubegpu.share.gpu_node_info) returned them.
      - With them the plan is made on the controller, and when it is empty nothing is executed on the node.
    type: dict
"""

EXAMPLES = r"""
- name: Record the node's baseline
  kubegpu.share.node_baseline:
    observed: "{{ gpu_node }}"

- name: Compare the node with its baseline
  kubegpu.share.node_baseline:
    state: compared
    observed: "{{ gpu_node }}"
"""

RETURN = r"""
notes:
  description: With O(state=compared), differences that others made or that are accepted, or why nothing could be compared.
  returned: success
  type: list
  elements: str
  sample: ["package:htop: not installed before, 3.2.2-2 now"]
problems:
  description: With O(state=compared), differences that this collection made.
  returned: failure
  type: list
  elements: str
  sample: ["file:/etc/apt/sources.list.d/kubegpu-cuda.sources: absent before, present now"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._node.baseline import ARGUMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._node.baseline_apply import ensure


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    params = module.params
    run_module(module, lambda: ensure(params["state"], params["accept"], module.check_mode, system))


if __name__ == "__main__":
    main()
