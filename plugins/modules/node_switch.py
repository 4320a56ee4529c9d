#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_switch
short_description: "Evict a node's pods that have cards, or prove that nothing of another back end is left on it"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.cluster
options:
  node: {description: Name of the node., type: str, required: true}
  state:
    description: Evict the pods that have a card, or wait until nothing of another allocator is left.
    type: str
    choices: [drained, clean]
    required: true
  allocator:
    description: Of V(clean), the one that is to give away the node's cards.
    type: str
    choices: [extender, dra, hami, nvidia, passthrough, vgpu, kata]
  force: {description: Whether pods without a controller are evicted too; nothing recreates them., type: bool, default: false}
  delete_emptydir_data:
    description: Whether pods with emptyDir volumes are evicted too; the volumes are deleted with their content.
    type: bool
    default: false
  grace_period: {description: Seconds that a pod gets to end., type: int}
  timeout: {description: Time limit in seconds., type: int, default: 600}
  resources: {description: "What KubeVirt's virtual machines request for cards, beside resources of C(nvidia.com).", type: list, elements: str, default: []}
  namespaces: {description: "Of V(clean), the namespace of each allocator's servers. Pods of other ones are nobody's server.", type: dict, default: {}}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_switch import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
