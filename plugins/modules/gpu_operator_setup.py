#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_operator_setup
short_description: "Have OLM install NVIDIA's GPU Operator, wait for it, or remove what it leaves"
version_added: 1.1.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.cluster
options:
  state:
    description: >-
      V(present) has OLM install what O(subscription) and O(discovery) name, and creates O(instance) and O(policy). V(ready) waits until the operator is ready on
      O(nodes). V(absent) removes what V(present) made, and what the operator's programs have left on nodes.
    type: str
    choices: [present, ready, absent]
    default: present
  subscription: &catalog
    description: Where OLM finds the package. Without it OLM installs nothing.
    type: dict
    suboptions:
      namespace: {description: Namespace of its operator., type: str, required: true}
      channel: {description: Channel of the package., type: str, default: ""}
      source: {description: Catalog with the package., type: str, default: ""}
      source_namespace: {description: The catalog's namespace., type: str, default: ""}
      starting_csv: {description: The first version to install. Empty for the channel's newest., type: str, default: ""}
  discovery: *catalog
  instance: {description: Specification of the NodeFeatureDiscovery., type: dict, default: {}}
  policy: {description: Specification of the ClusterPolicy; empty where a chart makes it., type: dict, default: {}}
  nodes: {description: Names of the nodes that V(ready) waits for., type: list, elements: str, default: []}
  definitions: {description: Names of definitions that V(absent) deletes., type: list, elements: str, default: []}
  timeout: {description: "Seconds for each thing that is waited for.", type: int, default: 1200}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.operator_setup import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
