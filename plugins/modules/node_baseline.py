#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_baseline
short_description: "Record the state of a node before any change, and compare the node with it after an uninstall"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  state:
    description: Record it where there is none, compare the node with it and remove it where nothing differs, or remove it.
    type: str
    choices: [present, compared, absent]
    default: present
  accept:
    description: Ids of differences that are no failure, such as V(package:nvidia-container-toolkit).
    type: list
    elements: str
    default: []
  observed: {description: The node as M(kubegpu.share.gpu_node_info) returned it., type: dict}
"""

EXAMPLES = r"""
# For the roles of this collection only.
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
