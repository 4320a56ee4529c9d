#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_operator
short_description: Let NVIDIA's GPU Operator and gpushare share nodes without giving a card away twice
version_added: 1.0.0
description:
  - Changes the C(ClusterPolicy) that NVIDIA's GPU Operator follows, or labels nodes for it. Driver and toolkit stay the operator's.
  - Where all nodes with GPUs are gpushare's, the operator's device plugin is turned off. Where others keep theirs, it goes from gpushare's nodes
    alone, by labels, and so does the operator's validator, which would wait for it.
  - From release 25.10 on CDI is turned off (C(spec.cdi.enabled)), unless the operator doesn't manage the toolkit. With it, nobody listens to the
    environment variable by which a pod of gpushare names its card, and the pod gets none. On nodes with CRI-O the validator pauses for that.
  - Refuses what would strand pods, such as those that hold C(nvidia.com/gpu) on these nodes.
  - Nodes that come to O(nodes) or leave it later, and other nodes with GPUs that come, are followed. A node that leaves gets back what it had, which is
    refused as long as gpushare's label or pods with a share of its cards are on it.
  - Waits until the operator says that it is ready. Where it isn't in time, what this run changed goes back to what it was before this run, and no
    further. V(absent) brings back what was there before gpushare.
  - Does nothing where there is no ClusterPolicy.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  state:
    description: Whether gpushare's nodes are gpushare's, or as they were before.
    type: str
    choices: [present, absent]
    default: present
  nodes:
    description: Names of the nodes whose cards gpushare shares.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that the operator has to become ready.
    type: int
    default: 900
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Leave the cards of two nodes to gpushare
  kubegpu.share.gpu_operator:
    nodes: [worker-1, worker-2]
"""

RETURN = r"""
policy:
  description: Name of the ClusterPolicy; empty where there is none.
  returned: success
  type: str
  sample: gpu-cluster-policy
why:
  description: Why what is asked for is, a sentence each.
  returned: success
  type: list
  elements: str
  sample: ["its device plugin would give away the cards that gpushare's gives away"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._gpu_operator import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
