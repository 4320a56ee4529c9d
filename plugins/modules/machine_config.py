#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: machine_config
short_description: Configure OpenShift's GPU nodes by a MachineConfig
version_added: 1.0.0
description:
  - Creates a C(MachineConfig) and a C(MachineConfigPool) of its own and labels the nodes, so OpenShift's Machine Config Operator writes the files and
    kernel arguments. The operator B(drains and reboots) these nodes, one after the other, and no others.
  - Disables nouveau and, with O(runtime_path), makes NVIDIA's runtime the default of CRI-O, which C(ContainerRuntimeConfig) doesn't support.
  - Waits until every node of the pool is updated. If the pool becomes Degraded or isn't updated in time, the module rolls MachineConfig and labels back
    and fails with the operator's message.
  - V(absent) returns the nodes to the workers' pool before it removes anything. A pool that existed before stays, with its nodes.
  - Refuses OpenShift's own pools, nodes of the control plane, nodes of a third pool, and a pool that is paused or degraded or selects other nodes.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  state:
    description: Whether the nodes are configured.
    type: str
    choices: [present, absent]
    default: present
  pool:
    description:
      - Name of the pool and of the nodes' role. Its nodes also get the MachineConfigs of workers.
      - An existing pool of this name is used if it selects nodes by the label of this role, and MachineConfigs of this role and of workers.
    type: str
    default: gpu
  name:
    description: Name of the MachineConfig.
    type: str
    default: 99-gpushare
  nodes:
    description: Names of the nodes with GPUs. With O(state=absent), by default all nodes that the module added to the pool, or all of its own pool.
    type: list
    elements: str
    default: []
  nouveau:
    description: Whether to disable nouveau, the kernel's own driver for NVIDIA cards. With the GPU Operator's driver that is usually not necessary.
    type: bool
    default: true
  runtime_path:
    description:
      - Path of NVIDIA's runtime on the nodes, to make it CRI-O's default.
      - Leave it empty where the GPU Operator manages the toolkit, because it sets the default itself.
    type: str
    default: ""
  kernel_arguments:
    description: Further kernel arguments, such as V(intel_iommu=on).
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that all nodes of the pool together have to drain, reboot and become ready.
    type: int
    default: 3600
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Disable nouveau on two nodes
  kubegpu.share.machine_config:
    nodes: [worker-1, worker-2]
"""

RETURN = r"""
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.machine_config import ARGUMENTS, work


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    run_module(module, lambda: work(connect(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
