#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_allocation_info
short_description: Who holds how much of which GPU
version_added: 1.0.0
description:
  - Computes the allocation of shared GPU memory per node, card and pod from the Kubernetes API alone, in two requests (more where there are
    more than 500 pods).
  - The numbers are those of C(kubectl inspect gpushare -d) for nodes with equal, healthy cards. Where cards differ, each has its own size.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Who holds how much of which GPU
  kubegpu.share.gpu_allocation_info:
  register: allocation

- name: Print it as a table
  kubegpu.share.report:
    text: "{{ allocation.table }}"
"""

RETURN = r"""
unit:
  description: The memory unit of the shares, V(GiB) or V(MiB); null where nodes differ or don't tell.
  type: str
  returned: success
total:
  description: Units on all cards.
  type: int
  returned: success
used:
  description: Units that pods hold.
  type: int
  returned: success
nodes:
  description: Nodes that announce shared GPU memory, or whose pods hold some, in natural order of their names.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: Its name.
      type: str
    address:
      description: Its internal address.
      type: str
    unit:
      description: Its memory unit.
      type: str
    memory_limit:
      description: >-
        Whether NVIDIA's driver holds its pods to their shares, in its device plugin's words (V(enforced), V(off), or C(unenforced) with the
        reason); empty where the plugin says nothing of it.
      type: str
    total:
      description: Units on its cards.
      type: int
    used:
      description: Units that its pods hold.
      type: int
    capacity:
      description: Units that the node announces.
      type: int
    allocatable:
      description: Units of them that kubelet has to give; those of unhealthy cards are missing.
      type: int
    cards:
      description: >-
        Its cards (index, uuid, model, memory_mib, healthy, why it isn't, total, used and pods). A pod of several cards is on each of them,
        with its share.
      type: list
      elements: dict
    pending:
      description: Pods that hold units of a card which the API doesn't tell, or doesn't tell yet.
      type: list
      elements: dict
  sample:
    - name: gpu1
      address: 192.0.2.11
      unit: GiB
      memory_limit: enforced
      total: 32
      used: 2
      capacity: 32
      allocatable: 32
      pending: []
      cards:
        - index: 0
          uuid: GPU-5a4d7f2e-0000-4000-8000-000000000001
          model: NVIDIA T4
          memory_mib: 16384
          healthy: true
          reason: ''
          total: 16
          used: 2
          pods:
            - namespace: default
              name: binpack-0
              units: 2
              phase: Running
              assigned: true
              terminating: false
waiting:
  description: Pods that ask for a share and are on no node (namespace, name, units and the scheduler's reason).
  type: list
  elements: dict
  returned: success
table:
  description: The same as a table for people.
  type: str
  returned: success
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_table import look
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=auth_arguments(), supports_check_mode=True)
    finish(module, lambda: look(RealKube.of_module(module)))


if __name__ == "__main__":
    main()
