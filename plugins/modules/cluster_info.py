#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_info
short_description: "Read a cluster's nodes and detect how it runs its scheduler"
version_added: 1.0.0
description: For the roles of this collection only.
author: The kubegpu.share authors (@kubegpu)
extends_documentation_fragment: kubegpu.share.attributes.cluster
options:
  memory_unit:
    description: The memory unit in which the nodes will count shares. With it, ResourceSlices are read, and pods where a node counts in another now.
    type: str
    choices: [GiB, MiB]
  sharing_pods: {description: Whether to read the pods that hold shares in any case., type: bool, default: false}
  nodes:
    description:
      - V(rows) returns nodes as data. V(none) reads none, for who needs the version alone.
      - V(text) returns all of them as one text, C(all_nodes), and as data only those of the nodes in O(backends.wanted), of the control plane, and of
        nodes with labels or annotations of this collection. The text is compressed JSON in base64. Ansible copies and evaluates data value by value in
        each task, which takes seconds for thousands of nodes.
    type: str
    choices: [rows, text, none]
    default: rows
  scheduler:
    description: Detect how the cluster runs its scheduler.
    type: dict
    suboptions:
      mode: {description: The requested mode., type: str, choices: [auto, static_pod, k3s, rke2, dedicated, openshift], default: auto}
      hosts: {description: "The inventory hosts on which schedulers run, each with the name of its node.", type: dict, default: {}}
      state:
        description: With V(absent), objects of another mode are reported and not refused.
        type: str
        choices: [present, absent]
        default: present
      namespace: {description: "Namespace of gpushare's servers.", type: str, default: gpushare-system}
      dedicated_namespace: {description: Namespace of a dedicated scheduler., type: str, default: gpushare-scheduler}
      operator_namespace: {description: Namespace in which this collection installs NVIDIA's GPU Operator., type: str, default: gpu-operator}
  backends:
    description: Decide the back end of each node.
    type: dict
    suboptions:
      wanted:
        description: The nodes whose cards are used. Without it, each has the back end that it has now.
        type: list
        elements: dict
        suboptions:
          node: {description: Its name in the cluster., type: str, required: true}
          backend:
            description: The variable C(gpu_backend) of the node.
            type: str
            choices: [gpushare, hami, nvidia, passthrough, vgpu, kata]
            default: gpushare
          allocation: {description: The variable C(gpushare_allocation) of the node., type: str, choices: [extender, dra, auto], default: extender}
          cards: {description: "Whether C(passthrough_cards) of the node names cards for virtual machines.", type: bool, default: false}
      values: {description: "The variables that not every allocation can serve, by name.", type: dict, default: {}}
      switch: {description: Names of the nodes that are switched in this run., type: list, elements: str, default: []}
      alone: {description: Names of the nodes that join in this run., type: list, elements: str, default: []}
      owner: {description: "Who this run is for. With it, the record of who owns the set-up is read.", type: str, default: ""}
"""

EXAMPLES = r"""
# For the roles of this collection only.
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.detect import ARGUMENTS, collect


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: collect(connect(module), module.params))


if __name__ == "__main__":
    main()
