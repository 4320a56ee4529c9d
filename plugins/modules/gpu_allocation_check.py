#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_allocation_check
short_description: Check that scheduler, kubelet and NVML agree on the allocation of GPUs
version_added: 1.0.0
description:
  - Compares the API's nodes and pods with kubelet's allocations and NVML, for gpushare (this collection's and upstream's), claims on
    cards of this collection's DRA driver (C(gpushare_allocation=dra)), HAMi and NVIDIA's device plugin; and checks this collection's gpushare
    servers.
  - The evidence of the machines comes from M(kubegpu.share.nvml_info) and M(kubegpu.share.kubelet_devices_info). This module itself queries the
    API only, for nodes and unfinished pods. Where there may be claims it also lists ResourceSlices, ResourceClaims and this collection's
    ResourceClaimTemplates. Where a node has upstream's plugin it lists the ConfigMaps of C(kube-system), and with O(servers) it reads the
    admission policy or OpenShift's scheduler where there are any; where a node has claims, the DeviceClass and six admission
    policies with their bindings.
  - A contradiction is a C(FAIL); what the back end allows although it is a risk is a C(WARN). Evidence that is missing or can't be read is
    C(UNKNOWN), and never counts as C(PASS). One sample may have caught a change in progress. Only findings of two samples are certain; see
    O(before).
  - The checks, and what each compares, are listed in C(docs/invariants.md).
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubegpu.share.attributes.cluster
options:
  scope:
    description:
      - Which checks run. V(servers) runs the checks of O(servers), and those of gpushare's nodes that need the API and the GPUs' UUIDs only
        (C6, D1, D2, D3, G1, G2, G6), and D10.
    type: str
    choices: [all, servers]
    default: all
  nodes:
    description:
      - The evidence by node name. V(nvml) and V(kubelet) are the return values RV(kubegpu.share.nvml_info#module:nvml) and
        RV(kubegpu.share.kubelet_devices_info#module:kubelet), null where there are none; V(problem) says why the machine couldn't be observed.
      - Where only the UUIDs of the machine's GPUs are known, the evidence is a list of them.
      - The evidence of a node may also be its JSON text (C(to_json)). With a thousand nodes, Ansible passes that on in a fraction of the time.
      - A node with GPUs that isn't listed is C(UNKNOWN).
    type: dict
    default: {}
  pods:
    description:
      - Where nobody logs in to a node's machine (it isn't in O(nodes), or its evidence there has nothing but a C(problem)), its pod of this
        collection's device plugin or DRA driver is asked for the same evidence, by C(kubectl exec) of C(gpushare-node-facts). Only pods of these
        DaemonSets, under their accounts, are asked.
      - Whose processes use a GPU, and which device nodes containers have, such a pod knows with C(gpushare_host_pid) only; otherwise what needs it
        is C(UNKNOWN). Findings by a pod's answer have it as C(source).
      - Needs the right to C(get) and C(create) C(pods/exec) in O(pods.namespace), and to C(get) the two DaemonSets. Without this option no pod
        is asked. It has no effect with O(scope=servers).
    type: dict
    suboptions:
      namespace:
        description: Namespace of the servers. Pods of another namespace are none of them, whatever their labels are.
        type: str
        default: gpushare-system
      dedicated_namespace:
        description: Namespace of the dedicated scheduler.
        type: str
        default: gpushare-scheduler
      nodes:
        description: Names of the nodes whose pods may be asked; an empty list means all.
        type: list
        elements: str
        default: []
      timeout:
        description: Seconds that NVML has on each node, from 1 to 600. 16 nodes are asked at a time.
        type: int
        default: 30
  servers:
    description:
      - This collection's gpushare servers, and where they must run. Without it they aren't checked.
      - Which of them a node needs is decided by its label C(gpushare), V(true) for the extender or V(dra) for claims, and without it by the cards that it
        announces. Where all nodes have claims, neither extender nor scheduler is checked; where there are both, both are.
    type: dict
    suboptions:
      control_plane:
        description: Names of the nodes on which a scheduler runs.
        type: list
        elements: str
        default: []
      namespace:
        description: Namespace of the servers.
        type: str
        default: gpushare-system
      scheduler:
        description:
          - How the cluster runs its scheduler, as M(kubegpu.share.cluster_info) reports it. It decides where the extender must run, and how each
            scheduler's configuration is checked.
        type: str
        choices: [static_pod, k3s, rke2, dedicated, openshift]
        default: static_pod
      admission:
        description:
          - What the admission policy does with a GPU pod for another scheduler, in mode V(dedicated) and on OpenShift from 4.10 on. With V(none)
            it isn't checked.
        type: str
        choices: [deny, warn, none]
        default: deny
      reserved_mib:
        description: The variable C(gpushare_reserved_memory), by which a card in a ResourceSlice is smaller than what NVML reports.
        type: int
        default: 0
      running:
        description:
          - By node, the kube-scheduler processes of the control plane's machines, as C(control_plane.running) of
            M(kubegpu.share.control_plane_info) has them. Without a node's, the API's pods show with which arguments its kube-scheduler was started.
        type: dict
        default: {}
      problem:
        description: Why the servers can't be checked, for example since O(servers.scheduler) is unknown. They are C(UNKNOWN) then.
        type: str
        default: ''
  before:
    description:
      - The report of a first sample. C(FAIL) and C(WARN) then count only where both samples have them, for the same check, node, GPU, pod (by
        UID) and container. A total fails only if the entries present in both samples exceed the limit. The others are counted as
        RV(report.transient).
      - Where the first sample had no data, a finding of the second is C(UNKNOWN). Of a warning and a failure, the milder counts.
    type: dict
  extender:
    description:
      - The answers of gpushare's extenders to C(GET /gpushare-scheduler/inspect), by a name for each, for example that of its node. Text instead
        of an answer says why there is none.
      - Without it, whether the extender's cache matches the annotations is C(UNKNOWN).
    type: dict
  allowed_processes:
    description: Names of processes outside of pods that may use GPUs.
    type: list
    elements: str
    default:
      - nvidia-persistenced
      - nv-hostengine
      - dcgm
      - nvidia-cuda-mps-server
      - nvidia-cuda-mps-control
      - Xorg
      - gnome-shell
  allowed_pods:
    description:
      - Pods that may use GPUs without requesting one, as patterns of C(namespace/name) with C(*) and C(?). Device plugins and exporters of the
        known stacks are recognized by their labels, in the namespaces of O(exempt_namespaces) and O(stack_namespaces) only.
    type: list
    elements: str
    default: []
  exempt_namespaces:
    description:
      - Namespaces of nodes' own components, whose privileged pods aren't reported, and where device plugins and exporters of the known stacks need no
        GPU of their own. Name none in which tenants create pods. A pod with the labels of such a component in any other namespace is reported (C1).
    type: list
    elements: str
    default: [kube-system, gpu-operator, nvidia-gpu-operator, gpushare-system]
  stack_namespaces:
    description: Further such namespaces, those in which the stacks' components are deployed.
    type: list
    elements: str
    default: []
  schedulers:
    description: Names of schedulers that call gpushare's extender.
    type: list
    elements: str
    default: [default-scheduler, gpushare-scheduler, secondary-scheduler]
  hami_schedulers:
    description: Names of schedulers that call HAMi's extender.
    type: list
    elements: str
    default: [hami-scheduler]
  grace_seconds:
    description:
      - Seconds between two samples. Younger pods aren't compared with the extender's cache.
    type: int
    default: 30
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Take the first sample
  kubegpu.share.gpu_allocation_check:
    nodes: "{{ evidence }}"
  register: first

- name: Wait until transient states have passed
  ansible.builtin.pause:
    seconds: 30

- name: Take the second sample, with evidence that was collected again
  kubegpu.share.gpu_allocation_check:
    nodes: "{{ second_evidence }}"
    before: "{{ first.report }}"
  register: second

- name: Fail if a check failed
  ansible.builtin.assert:
    that: second.report.counts.FAIL == 0

- name: Check this collection's servers only
  kubegpu.share.gpu_allocation_check:
    scope: servers
    nodes:
      gpu1: [GPU-5a4d7f2e-0000-4000-8000-000000000001]
    servers:
      control_plane: [cp1]
"""

RETURN = r"""
report:
  description: The result of the checks.
  type: dict
  returned: success
  contains:
    result:
      description: The worst level of all findings, V(FAIL), V(WARN) or V(UNKNOWN); V(PASS) where there is none.
      type: str
    time:
      description: When the API was queried, in UTC.
      type: str
    cluster:
      description: The API server's address.
      type: str
    samples:
      description: V(2) with O(before), else V(1).
      type: int
    grace_seconds:
      description: The option's value.
      type: int
    counts:
      description: Number of findings of V(FAIL), V(WARN) and V(UNKNOWN), and of checks without any (V(PASS)).
      type: dict
    checks:
      description: >-
        Each check (id, backend, title), its worst level as result, how many things it compared (n, 0 for nothing), and its numbers of fail, warn
        and unknown.
      type: list
      elements: dict
    findings:
      description: >-
        The findings, the worst first (check, code of the cause, level, node, card, uuid, pod and its pod_uid, container, what, evidence by source,
        what to do, and in how many samples it was seen). For O(before) there may be a key that distinguishes it, and of a total its parts and
        the most it may be.
      type: list
      elements: dict
    nodes:
      description: >-
        The nodes with GPUs (name, backend, unit, unit_mib, and memory_limit as the device plugin announces it), and of each GPU what its pods
        claim and what they use, in MiB; null where it is unknown. foreign_mib is held by processes of none of its pods. C(source) is the pod that
        answered for the node's machine, and empty where the machine itself did. C(virtual_machines) has each function that a virtual machine is to
        have (address, IOMMU group, and state as in M(kubegpu.share.virtual_machines_info)).
      type: list
      elements: dict
    transient:
      description: Number of findings that only one of two samples had.
      type: int
  sample:
    result: FAIL
    time: '2026-11-22T12:00:00Z'
    cluster: https://192.0.2.1:6443
    samples: 2
    grace_seconds: 30
    counts: {FAIL: 1, WARN: 0, UNKNOWN: 0, PASS: 43}
    transient: 0
    checks:
      - {id: C2, backend: common, title: Every process on a GPU belongs to a pod that requested one, result: FAIL, n: 3, fail: 1, warn: 0, unknown: 0}
    findings:
      - check: C2
        cause: outside_pods
        level: FAIL
        node: gpu1
        card: 0
        uuid: GPU-5a4d7f2e-0000-4000-8000-000000000001
        pod: ''
        pod_uid: ''
        container: pid 4711
        what: process 4711 (python3) outside all pods uses GPU 0 (GPU-5a4d7f2e-0000-4000-8000-000000000001); cgroup /user.slice
        evidence: {nvml: 'pid 4711: 512 MiB', proc: 'name python3; cgroup /user.slice'}
        do: end it, or add its name to allowed_processes if it may use GPUs
        seen: 2
    nodes: []
requests:
  description: Number of requests to the API server by verb.
  type: dict
  returned: success
  sample:
    GET: 2
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._check.collect import ARGUMENTS, check
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import connect
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import Execute


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)

    def executor(seconds: float) -> Execute:
        # Imported here, because the import is what takes long.
        from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
        from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import PodExec

        return PodExec(RealKube.of_module(module), seconds)

    def work() -> JsonObject:
        kube = connect(module)
        return check(kube, module.params, cluster=kube.server, executor=executor)

    run_module(module, work)


if __name__ == "__main__":
    main()
