#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_operator
short_description: Configure NVIDIA's GPU Operator for nodes whose cards gpushare allocates
version_added: 1.0.0
description:
  - Changes the C(ClusterPolicy) of NVIDIA's GPU Operator, or labels nodes for it. The operator still manages driver and toolkit.
  - Where gpushare uses all nodes with GPUs, the operator's device plugin is disabled. Otherwise labels disable it on gpushare's nodes alone, and the
    operator's validator no longer checks the device plugin (C(spec.validator.plugin.env)), on no node, as it would wait for it on gpushare's nodes.
  - From release 25.10 on CDI is disabled (C(spec.cdi.enabled)), unless the operator doesn't manage the toolkit. With CDI, the environment variable by
    which a pod of gpushare selects its card is ignored, and the pod gets no card; so it is for pods with claims, whose own CDI specification sets
    that variable. On nodes with CRI-O the validator is
    paused until the DaemonSet of the toolkit has rolled out the change.
  - Refuses a change that would take the cards of pods away, such as those that hold C(nvidia.com/gpu) on these nodes.
  - Later changes of O(nodes) and new nodes with GPUs are supported. A node that is removed from O(nodes) gets its former labels, which is refused while
    it has gpushare's label or pods with a share of its cards.
  - Waits until the operator is ready. If it isn't in time, the module rolls this run's changes back, and no earlier ones. V(absent) restores the settings
    before gpushare.
  - Does nothing in a cluster without a ClusterPolicy.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  state:
    description: Whether gpushare allocates the cards of the nodes, or the operator as before.
    type: str
    choices: [present, absent]
    default: present
  nodes:
    description: Names of the nodes whose cards gpushare allocates.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that the operator has to become ready.
    type: int
    default: 900
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Let gpushare allocate the cards of two nodes
  kubegpu.share.gpu_operator:
    nodes: [worker-1, worker-2]
"""

RETURN = r"""
policy:
  description: Name of the ClusterPolicy; empty where there is none.
  returned: success
  type: str
  sample: gpu-cluster-policy
reasons:
  description: The reason of each change.
  returned: success
  type: list
  elements: str
  sample: ["the operator's device plugin would allocate the cards that gpushare's allocates"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.gpu_operator import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
