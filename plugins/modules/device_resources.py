#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_resources
short_description: Remove the resources of a device plugin that no longer runs from the status of nodes
version_added: 1.0.0
description:
  - kubelet announces the resource of a vanished device plugin with 0 allocatable. Its C(capacity) keeps the former number for five minutes, and is 0
    from then on. Nothing removes it.
  - Waits until the nodes have nothing of the resources allocatable, which proves that no device plugin announces them, then until kubelet has given up
    their capacity, and removes them.
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.cluster
options:
  nodes:
    description: Names of the nodes. Nodes that aren't in the cluster are skipped.
    type: list
    elements: str
    required: true
  resources:
    description: Names of the resources. C(*) stands for any characters.
    type: list
    elements: str
    required: true
  plugin_timeout:
    description: Seconds until the resources must have nothing allocatable. After that the module fails.
    type: int
    default: 120
  kubelet_timeout:
    description:
      - Seconds that the module waits for kubelet to give up the capacity. What it still has then is left as it is, and returned in RV(left).
      - kubelet restores a resource that is removed before. With V(0) only resources are removed that it has given up already.
    type: int
    default: 420
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Remove what NVIDIA's device plugin announced
  kubegpu.share.device_resources:
    nodes: [gpu1, gpu2]
    resources: [nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-*]
"""

RETURN = r"""
left:
  description: By node, the resources whose capacity kubelet still had at the end, with their numbers.
  type: dict
  returned: success
  sample: {}
announced:
  description: By node, the resources that a device plugin still announces.
  type: dict
  returned: failure
  sample:
    gpu1:
      nvidia.com/gpu: 2
requests:
  description: Number of requests to the API server by HTTP method.
  type: dict
  returned: success
  sample:
    GET: 4
    PATCH: 1
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.device_resources import ARGUMENTS, remove
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube, auth_arguments


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)
    run_module(module, lambda: remove(RealKube.of_module(module), module.params, module.check_mode))


if __name__ == "__main__":
    main()
