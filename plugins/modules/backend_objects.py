#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: backend_objects
short_description: "Wait for a back end in the cluster, or remove what its servers wrote and left there"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.cluster
options:
  backend: {description: The back end., type: str, choices: [gpushare, hami, nvidia], required: true}
  state:
    description: Create what is missing of a release, wait until it works, take it off the nodes, or remove what it left in the cluster.
    type: str
    choices: [complete, ready, off_nodes, absent]
    required: true
  nodes: {description: Names of the nodes., type: list, elements: str, default: []}
  resources: {description: "Of V(nvidia), names of the resources, as a shell matches them.", type: list, elements: str, default: []}
  release: {description: "The release of the back end's chart.", type: str, default: hami}
  rendered: {description: "Of V(complete), the objects of the release's chart, as C(helm template) prints them.", type: str, default: ""}
  namespace: {description: "The release's namespace.", type: str, default: hami-system}
  scheduler_name: {description: "Of V(hami), its scheduler's name.", type: str, default: hami-scheduler}
  overwrites: {description: "Of V(hami), whether the webhook takes pods that name no scheduler.", type: bool, default: true}
  proof_namespace: {description: "Of V(hami), a namespace whose pods the webhook sees; empty for no proof.", type: str, default: ""}
  wait_timeout: {description: Seconds that each wait for a server may take., type: int, default: 300}
  kubelet_timeout: {description: "Of V(nvidia), seconds that kubelet may take to give up the resources.", type: int, default: 420}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._backends.cluster import ARGUMENTS, ensure
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: ensure(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
