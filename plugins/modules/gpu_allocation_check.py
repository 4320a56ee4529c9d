#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_allocation_check
short_description: Whether scheduler, kubelet and GPU agree on who has which card
version_added: 1.0.0
description:
  - Checks the invariants of GPU sharing over what the API says, what kubelet has given out and what NVML sees, for gpushare (this collection's
    and upstream's), HAMi and NVIDIA's device plugin.
  - The evidence of the machines comes from M(kubegpu.share.nvml_info) and M(kubegpu.share.kubelet_devices_info); this module asks the API alone,
    for nodes and pods that aren't finished, and where a node has upstream's plugin for the ConfigMaps of C(kube-system).
  - What contradicts is a C(FAIL), what the backend allows and is risky a C(WARN). Evidence that is missing or can't be read is C(UNKNOWN) and
    never a C(PASS). Only with O(before), the report of a sample taken O(grace_seconds) earlier, is what was seen no race.
  - The invariants, with what each compares, are listed in C(docs/invariants.md).
extends_documentation_fragment:
  - kubegpu.share.attributes.info
  - kubernetes.core.k8s_auth_options
options:
  nodes:
    description:
      - The evidence by name of the node. V(nvml) and V(kubelet) are the return values RV(kubegpu.share.nvml_info#module:nvml) and
        RV(kubegpu.share.kubelet_devices_info#module:kubelet), null where there are none; V(problem) says in a sentence why the machine couldn't
        be looked at.
      - What is known of a node may also be one JSON text (C(to_json)). Of a thousand nodes, Ansible hands that on in a fraction of the time.
      - A node with cards that isn't in it is C(UNKNOWN).
    type: dict
    default: {}
  before:
    description:
      - The report of a first sample. C(FAIL) and C(WARN) then count only where both samples have them, at the same node, card, pod (by its UID)
        and container, and of sums only what the same pods or processes make too much; the others are counted as RV(report.transient).
      - Where the first sample couldn't tell, what the second finds is C(UNKNOWN). Of a warning and a failure, the milder counts.
    type: dict
  story:
    description: What M(kubegpu.share.verification_info) returned of servers and scheduler; without it they aren't judged.
    type: dict
  extender:
    description:
      - What gpushare's extenders answered to C(GET /gpushare-scheduler/inspect), by a name of each, for example that of its node. A text instead
        of an answer says why there is none.
      - Without it, whether they believe what is so is C(UNKNOWN).
    type: dict
  allowed_processes:
    description: Names of processes outside of pods that may use cards.
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
      - Pods that may use cards without asking for one, as patterns of C(namespace/name) with C(*) and C(?). Device plugins and exporters of the
        known stacks are told by their labels.
    type: list
    elements: str
    default: []
  schedulers:
    description: Names of schedulers that ask gpushare's extender.
    type: list
    elements: str
    default: [default-scheduler, gpushare-scheduler, secondary-scheduler]
  hami_schedulers:
    description: Names of schedulers that ask HAMi's extender.
    type: list
    elements: str
    default: [hami-scheduler]
  grace_seconds:
    description:
      - How many seconds lie between two samples. Pods younger than that aren't compared with what the extender believes.
    type: int
    default: 30
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
author:
  - The kubegpu.share authors (@kubegpu)
"""

EXAMPLES = r"""
- name: Look at the first time
  kubegpu.share.gpu_allocation_check:
    nodes: "{{ evidence }}"
  register: first

- name: Wait, so that what only comes or goes is gone
  ansible.builtin.pause:
    seconds: 30

- name: Look again, with evidence taken anew
  kubegpu.share.gpu_allocation_check:
    nodes: "{{ evidence_anew }}"
    before: "{{ first.report }}"
  register: second

- name: Stop where something contradicts
  ansible.builtin.assert:
    that: second.report.counts.FAIL == 0
"""

RETURN = r"""
report:
  description: What was found.
  type: dict
  returned: success
  contains:
    result:
      description: The worst of all findings, V(FAIL), V(WARN) or V(UNKNOWN); V(PASS) where there is none.
      type: str
    time:
      description: When the API was asked, in UTC.
      type: str
    cluster:
      description: The API server's address.
      type: str
    samples:
      description: V(2) with O(before), else V(1).
      type: int
    grace_seconds:
      description: As given.
      type: int
    counts:
      description: How many findings there are of V(FAIL), V(WARN) and V(UNKNOWN), and how many checks have none (V(PASS)).
      type: dict
    checks:
      description: >-
        Each invariant (id, backend, title), its worst finding as result, how many things it looked at (n, 0 for nothing), and its numbers of fail,
        warn and unknown.
      type: list
      elements: dict
    findings:
      description: >-
        What was found, the worst first (check, level, node, card, uuid, pod and its pod_uid, container, what, evidence by plane, what to do, and
        in how many samples it was seen). For O(before) there may be a key that tells it apart, and of a sum its parts and the most it may be.
      type: list
      elements: dict
    nodes:
      description: >-
        The nodes with cards (name, backend, unit, unit_mib), and of each card what its pods claim beside what they use, in MiB; null where nobody
        tells. foreign_mib is held by processes of none of its pods.
      type: list
      elements: dict
    transient:
      description: How many findings only one of two samples had.
      type: int
  sample:
    result: FAIL
    time: '2026-11-22T12:00:00Z'
    cluster: https://192.0.2.1:6443
    samples: 2
    grace_seconds: 30
    counts: {FAIL: 1, WARN: 0, UNKNOWN: 0, PASS: 39}
    transient: 0
    checks:
      - {id: C2, backend: common, title: Every process on a card belongs to a pod that asked for one, result: FAIL, n: 3, fail: 1, warn: 0, unknown: 0}
    findings:
      - check: C2
        level: FAIL
        node: gpu1
        card: 0
        uuid: GPU-5a4d7f2e-0000-4000-8000-000000000001
        pod: ''
        pod_uid: ''
        container: pid 4711
        what: process 4711 (python3) outside all pods uses card 0 without a grant
        evidence: {nvml: 'pid 4711: 512 MiB', proc: 'name python3; cgroup /user.slice'}
        do: end it, or name it in allowed_processes if it may
        seen: 2
    nodes: []
requests:
  description: How many requests of each verb the API server was sent.
  type: dict
  returned: success
  sample:
    GET: 2
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._check_cluster import ARGUMENTS, host_of, look
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec={**auth_arguments(), **ARGUMENTS}, supports_check_mode=True)

    def work() -> Json:
        kube = RealKube.of_module(module)
        return look(kube, module.params, cluster=host_of(kube))

    finish(module, work)


if __name__ == "__main__":
    main()
