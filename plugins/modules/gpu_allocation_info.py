#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_allocation_info
short_description: Read which pod holds how much of which GPU
version_added: 1.0.0
description:
  - Computes each pod's share of each node's cards from the Kubernetes API only, for gpushare (this collection's and upstream's), for claims on
    cards of this collection's DRA driver (C(gpushare_allocation=dra)), for HAMi and for NVIDIA's own device plugin, as far as the API has their
    data.
  - Where cards are divided by claims, a card and its size are those in the node's ResourceSlices, and a pod holds what its ResourceClaims are
    allocated. Of several pods that use one claim, the first is listed with its memory. A claim that no pod uses is listed in its place.
  - The numbers of gpushare's nodes are those of C(kubectl inspect gpushare -d) for nodes with equal, healthy cards. Otherwise each card
    has its own size.
  - For HAMi's nodes they are those of its scheduler, in MiB, times the node's C(deviceMemoryScaling). A pod holds the GPUs that its
    scheduler selected before it is bound.
  - With NVIDIA's device plugin the API has the number of a pod's GPUs (or replicas, or MIG devices), but not which. Its nodes are counted in
    GPUs and have no cards here.
  - Lists the nodes and the pods that haven't ended with one request each, and one more for each further 10,000. Responses are parsed as a
    stream, so that memory grows only with the pods that use GPUs. ResourceSlices and ResourceClaims are two requests more, which are sent only
    where a pod has a claim, or a node is labelled for sharing and no device plugin announces its cards.
  - Cards and vGPUs for virtual machines are listed with who has them (a virtual machine of KubeVirt, a pod of Kata, another pod) by what
    O(machines) and NVIDIA's DRA driver show. What nobody shows is V(unknown), never V(free).
  - A malformed node or pod is returned with a C(problem), and doesn't affect the others.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  tables:
    description:
      - Tables to return. V(table) is narrow; V(wide) includes UUIDs, states and containers, and truncates no name.
    type: list
    elements: str
    choices: [table, wide]
    default: [table]
  machines:
    description:
      - By the name of a node, what its machine shows of cards for virtual machines, as an object or its JSON text, with C(gpus) (RV(kubegpu.share.gpu_node_info#module:gpu_node)),
        C(functions) (those of its C(passthrough)), C(kubelet) (RV(kubegpu.share.kubelet_devices_info#module:kubelet)), or a C(problem).
      - Role inspect collects it with C(inspect_machines). Without it the API has the number of a virtual machine's cards, but not which.
    type: dict
    default: {}
notes:
  - A kubeconfig whose user has a token or a certificate is read without the Kubernetes client, whose start takes longer than the lists of a
    small cluster. The client is used for everything else, such as exec plugins, passwords, proxies and impersonation.
  - Large clusters are read faster if C(orjson) is installed for the Python that runs the module.
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Read the allocation of all GPUs
  kubegpu.share.gpu_allocation_info:
  register: allocation

- name: Print it as a table
  kubegpu.share.gpu_report:
    text: "{{ allocation.table }}"

- name: Print the pods that have no assigned card
  ansible.builtin.debug:
    msg: >-
      {{ allocation.nodes | map(attribute='pending') | flatten | selectattr('state', 'eq', 'unassigned') | map(attribute='name') }}
"""

RETURN = r"""
unit:
  description: >-
    Unit of RV(total) and RV(used), V(GiB), V(MiB) or V(count); null if nodes differ or it is unknown.
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
  description: The totals of each back end in the cluster, gpushare first; units of different back ends can't be added.
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
    Nodes that advertise GPUs of a back end, or whose pods hold some, or that have a problem, in natural order of their names.
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
        V(gpushare), V(gpushare-upstream) (its cards are known by C(aliyun.com/gpu-mem) and C(aliyun.com/gpu-count) only), V(dra) (claims), V(hami),
        V(nvidia), V(passthrough), V(vgpu), V(kata), or V(virtual) for cards of virtual machines on another node; V(mixed) with several back ends, V(none) if its pods hold what no back end advertises.
      type: str
    backends:
      description: All back ends of the node. The node's own numbers are those of the first one.
      type: list
      elements: str
    problem:
      description: Which of its data is malformed or implausible; empty without a problem.
      type: str
    unit:
      description: Its memory unit, or V(count).
      type: str
    memory_limit:
      description: >-
        Whether NVIDIA's driver enforces its pods' shares, as its device plugin or DRA driver announces it (V(enforced), V(off), or C(unenforced)
        with the reason); empty if that announces nothing.
      type: str
    total:
      description: Units on its cards.
      type: int
    used:
      description: Units that its pods hold.
      type: int
    capacity:
      description: Units that the node advertises.
      type: int
    allocatable:
      description: Units of them that kubelet can allocate, without those of unhealthy cards.
      type: int
    cards:
      description: >-
        Its cards (index, uuid, model, memory_mib, healthy, reason, total, used and pods). A pod of several cards is listed on each of them,
        with its share. memory_mib is 0 where the API doesn't have the card's whole size. HAMi's also have slots, slots_used, cores, cores_used
        and mode, and their pods slots and cores.
      type: list
      elements: dict
    pending:
      description: >-
        Pods whose card isn't in the API (yet); with NVIDIA's plugin, all of its pods. Pods with cards for virtual machines also have C(kind)
        (V(virtual_machine), V(kata), V(container), or V(unknown) where RuntimeClasses can't be read), C(machine), the VirtualMachineInstance that the pod
        says it is, and C(runtime_class).
      type: list
      elements: dict
    slots:
      description: HAMi's slots on its GPUs (C(nvidia.com/gpu)), as capacity and allocatable.
      type: dict
      returned: for nodes of HAMi
    gpus:
      description: Its cards by the node's labels (product, memory_mib, count, replicas, sharing, mig_strategy); null without a label.
      type: dict
      returned: for nodes of NVIDIA's plugin
    resources:
      description: Each resource of the plugin with its name, capacity, allocatable and used.
      type: list
      elements: dict
      returned: for nodes of NVIDIA's plugin, and with cards for virtual machines
    devices:
      description: >-
        Cards and vGPUs for virtual machines: kind (V(card) or V(vgpu)), card (its PCI address), address (that of the function that a machine
        gets), uuid (of a mediated device), type (of a vGPU), device (vendor and device), model, driver, iommu_group, resource, state (V(held),
        V(free) or V(unknown)), reason (code of the reason why it is unknown), and pods.
      type: list
      elements: dict
      returned: with cards for virtual machines
    also:
      description: The other back ends on it (backend, unit, total, used, capacity, allocatable, cards, pending).
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
    Pending pods that request a share (as other pods, with the back end and the scheduler's reason). A pod for which HAMi selected GPUs is
    also listed on these.
  type: list
  elements: dict
  returned: success
  contains:
    state:
      description: >-
        State of any pod, here or on a card. V(pending), without a node; V(unassigned), bound, but its card is unknown or kubelet hasn't
        allocated it yet; V(assigned), it has its devices; V(terminating), it holds its units until it ends. Pods that have ended aren't listed.
      type: str
    containers:
      description: The containers of any pod that request units, with their units.
      type: list
      elements: dict
    problem:
      description: Which data of any pod is malformed or implausible; empty without a problem.
      type: str
cluster:
  description: URL of the API server.
  type: str
  returned: success
  sample: https://192.0.2.1:6443
time:
  description: When the allocation was read, in UTC.
  type: str
  returned: success
  sample: '2026-11-22T12:00:00Z'
table:
  description: The allocation as a table.
  type: str
  returned: if O(tables) includes it
wide:
  description: The allocation as a wide table.
  type: str
  returned: if O(tables) includes it
requests:
  description: Number of requests to the API server, by verb.
  type: dict
  returned: success
  sample:
    GET: 2
"""

import datetime

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.table import TABLES, LargeResult, report
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments


def main() -> None:
    own = {
        "tables": {"type": "list", "elements": "str", "choices": list(TABLES), "default": ["table"]},
        "machines": {"type": "dict", "default": {}},
    }
    module = AnsibleModule(argument_spec={**auth_arguments(), **own}, supports_check_mode=True)
    now, machines = datetime.datetime.now(datetime.timezone.utc), module.params["machines"]
    run_module(LargeResult(module), lambda: report(connect(module), module.params["tables"], now, machines))


if __name__ == "__main__":
    main()
