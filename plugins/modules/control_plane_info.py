#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: control_plane_info
short_description: "Observe a control-plane machine's kube-scheduler"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
options:
  config_path: {description: "The file to read as kube-scheduler's configuration, if it isn't that of its C(--config).", type: path}
  policy_path: {description: "The file to read as kube-scheduler's Policy, if it isn't that of its C(--policy-config-file).", type: path}
  patches_dir: {description: "The folder that is passed to C(kubeadm upgrade --patches), if there is one.", type: path}
  node:
    description: Collect the node's facts, too, with these options of M(kubegpu.share.gpu_node_info).
    type: dict
    suboptions:
      images: {description: As there., type: list, elements: str, default: []}
      packages: {description: As there., type: list, elements: str, default: []}
      baseline: {description: As there., type: bool, default: false}
      driver_version: {description: As there., type: str, default: ""}
      exclude: {description: As there., type: list, elements: str, default: []}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem, naming_user, user
from ansible_collections.kubegpu.share.plugins.module_utils._node import facts
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.control_plane import ARGUMENTS, observe


def main() -> None:
    node: JsonObject = {"type": "dict", "options": facts.OPTIONS}
    module = AnsibleModule(argument_spec={**ARGUMENTS, "node": node}, supports_check_mode=True)
    system = RealSystem(run_command=module.run_command)
    options = {name: module.params[name] for name in ARGUMENTS}
    asked = module.params["node"]

    def collect() -> JsonObject:
        with naming_user():
            result: JsonObject = {"changed": False, "control_plane": observe(system, **options)}
            if asked:
                gpu_node = facts.observe(
                    system,
                    asked["images"],
                    asked["packages"],
                    asked["baseline"],
                    asked["driver_version"],
                    asked["exclude"],
                )
                result |= {"user": user(), "gpu_node": gpu_node}
        return result

    run_module(module, collect)


if __name__ == "__main__":
    main()
