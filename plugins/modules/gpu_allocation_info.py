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
  - Computes what each pod holds of each node's cards from the Kubernetes API alone, for gpushare (this collection's and upstream's), HAMi and
    NVIDIA's own device plugin, each as far as it tells the API.
  - The numbers of gpushare's nodes are those of C(kubectl inspect gpushare -d) for nodes with equal, healthy cards. Where cards differ, each
    has its own size.
  - For HAMi's nodes they are those of its scheduler, in MiB, times the node's C(deviceMemoryScaling). A pod that its scheduler has chosen GPUs
    for holds them before it is bound.
  - NVIDIA's device plugin tells the API how many GPUs (or replicas, or MIG devices) a pod has, and not which. Its nodes are counted in GPUs
    and have no cards here.
  - Asks for nodes and for the pods that haven't ended in one request each, and in one more for each further 10,000. What isn't needed is
    dropped while an answer comes in, so that memory grows only with the pods that have to do with GPUs.
  - One node or pod with nonsense in it is told with a C(problem), and the others are told as ever.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
options:
  tables:
    description:
      - Which tables for people to make. V(table) is narrow; V(wide) tells UUIDs, states and containers, and cuts no name.
    type: list
    elements: str
    choices: [table, wide]
    default: [table]
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
notes:
  - With C(orjson) installed for the Python that runs it, large clusters are read faster; without it all is the same, and takes longer.
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

- name: Pods whose card nobody has told kubelet of
  ansible.builtin.debug:
    msg: >-
      {{ allocation.nodes | map(attribute='pending') | flatten | selectattr('state', 'eq', 'unassigned') | map(attribute='name') }}
"""

RETURN = r"""
unit:
  description: >-
    What RV(total) and RV(used) are counted in, V(GiB), V(MiB) or V(count); null where nodes differ or don't tell.
  type: str
  returned: success
total:
  description: Units on all cards of the first backend in RV(totals).
  type: int
  returned: success
used:
  description: Units of them that pods hold.
  type: int
  returned: success
totals:
  description: The same for each backend that the cluster has, gpushare first; units of different backends can't be added.
  type: list
  elements: dict
  returned: success
  sample:
    - backend: gpushare
      unit: GiB
      total: 32
      used: 2
nodes:
  description: >-
    Nodes that announce GPUs in the way of a backend, or whose pods hold some, or that have a problem, in natural order of their names.
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
    backend:
      description: >-
        V(gpushare), V(gpushare-upstream) (only C(aliyun.com/gpu-mem) and C(aliyun.com/gpu-count) tell of its cards), V(hami), V(nvidia);
        V(mixed) where several announce something, V(none) where its pods hold what nobody announces.
      type: str
    backends:
      description: All that announce something. The node's own numbers are those of the first one.
      type: list
      elements: str
    problem:
      description: What of it can't be read or can't be true, in a sentence; empty where all is well.
      type: str
    unit:
      description: Its memory unit, or V(count).
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
        with its share. HAMi's also have slots, slots_used, cores, cores_used and mode, and their pods slots and cores.
      type: list
      elements: dict
    pending:
      description: Pods that hold units of a card which the API doesn't tell, or doesn't tell yet; with NVIDIA's plugin, all of them.
      type: list
      elements: dict
    slots:
      description: How many places on its GPUs the node announces (C(nvidia.com/gpu)), as capacity and allocatable.
      type: dict
      returned: for nodes of HAMi
    gpus:
      description: What labels tell of its cards (product, memory_mib, count, replicas, sharing, mig_strategy); null where they don't.
      type: dict
      returned: for nodes of NVIDIA's plugin
    resources:
      description: Each resource of the plugin with its name, capacity, allocatable and used.
      type: list
      elements: dict
      returned: for nodes of NVIDIA's plugin
    also:
      description: The same of the other backends on it (backend, unit, total, used, capacity, allocatable, cards, pending).
      type: list
      elements: dict
  sample:
    - name: gpu1
      address: 192.0.2.11
      backend: gpushare
      backends: [gpushare]
      problem: ''
      unit: GiB
      memory_limit: enforced
      total: 32
      used: 2
      capacity: 32
      allocatable: 32
      pending: []
      also: []
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
              uid: 0d3f6b0e-0000-4000-8000-000000000001
              units: 2
              containers:
                - name: main
                  units: 2
              phase: Running
              state: assigned
              assigned: true
              terminating: false
              problem: ''
waiting:
  description: >-
    Pods that ask for a share and are on no node yet (what is told of any pod, its backend, and the scheduler's reason). One that HAMi has
    chosen GPUs for is on those, too.
  type: list
  elements: dict
  returned: success
  contains:
    state:
      description: >-
        Of any pod here or on a card. V(pending), on no node; V(unassigned), bound, and its card isn't known or kubelet hasn't given it out yet;
        V(assigned), it has its devices; V(terminating), told to end, and holding what it held until it has. Pods that have ended hold nothing
        and aren't told.
      type: str
    containers:
      description: Of any pod, its containers that ask for any, with what each asks for in all.
      type: list
      elements: dict
    problem:
      description: Of any pod, what of it can't be read or can't be true, in a sentence; empty where all is well.
      type: str
table:
  description: The same as a table for people.
  type: str
  returned: where O(tables) has it
wide:
  description: The same as a wide table, with all there is.
  type: str
  returned: where O(tables) has it
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_output import LargeResult
from ansible_collections.kubegpu.share.plugins.module_utils._allocation_table import TABLES, look
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    tables = {"type": "list", "elements": "str", "choices": list(TABLES), "default": ["table"]}
    module = AnsibleModule(argument_spec={**auth_arguments(), "tables": tables}, supports_check_mode=True)
    finish(LargeResult(module), lambda: look(RealKube.of_module(module), module.params["tables"]))


if __name__ == "__main__":
    main()
