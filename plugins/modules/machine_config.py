#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: machine_config
short_description: Configure OpenShift's nodes with GPUs, which nobody may configure over SSH
version_added: 1.0.0
description:
  - Brings a C(MachineConfig), a C(MachineConfigPool) of its own and the nodes' label, so that OpenShift's Machine Config Operator writes the files and
    kernel arguments. It B(drains and reboots) these nodes, one after the other, and no others.
  - Keeps nouveau out and, where O(runtime_path) is set, makes NVIDIA's runtime CRI-O's default, which C(ContainerRuntimeConfig) can't.
  - Waits until every node of the pool is updated. Where the pool becomes Degraded or the time is over, MachineConfig and labels are put back, and
    the module fails with the operator's own words.
  - V(absent) lets the nodes go back to the workers' pool before it takes anything away. A pool that was there before stays, with the nodes that it had.
  - Refuses OpenShift's own pools, nodes of the control plane, nodes of a third pool, and a pool that is paused or degraded or takes other nodes.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubernetes.core.k8s_auth_options
options:
  state:
    description: Whether the nodes are configured.
    type: str
    choices: [present, absent]
    default: present
  pool:
    description:
      - Name of the pool and of the nodes' role. What workers have, its nodes have too.
      - A pool of this name that is there already is used, where it takes nodes by the label of this role, and MachineConfigs of this role and of workers.
    type: str
    default: gpu
  name:
    description: Name of the MachineConfig.
    type: str
    default: 99-gpushare
  nodes:
    description: Names of the nodes with GPUs. With O(state=absent) all nodes that the module brought into the pool, or all of its own pool.
    type: list
    elements: str
    default: []
  nouveau:
    description: Whether the kernel's own driver for NVIDIA's cards is kept out. With the GPU Operator's driver that is usually not necessary.
    type: bool
    default: true
  runtime_path:
    description:
      - Path of NVIDIA's runtime on the nodes, to be CRI-O's default.
      - Leave it empty where the GPU Operator manages the toolkit, which writes this very setting by itself.
    type: str
    default: ""
  kernel_arguments:
    description: Further arguments of the kernel, such as V(intel_iommu=on).
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that all nodes of the pool together have to be drained, rebooted and back.
    type: int
    default: 3600
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Keep nouveau out of two nodes
  kubegpu.share.machine_config:
    nodes: [worker-1, worker-2]
"""

RETURN = r"""
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._machine_config import ARGUMENTS, work
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: work(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
