#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvml_info
short_description: What NVIDIA's management library says of a node's cards, and which process of which pod holds what
version_added: 1.0.0
description:
  - Asks NVML for the driver, for every card and for the processes on it, and finds the pod and the container of each process by its
    cgroup.
  - Nothing has to be installed on the node. The action plugin brings the controller's C(nvidia-ml-py) along; where the controller has
    none, the node's own is used.
  - NVML is asked by a process of its own, because a sick card keeps whoever asks about it, at times forever. A card that gives no answer
    is left out after a third of O(timeout), and the others are still asked. That process is killed when the time is over; if it hangs in the
    kernel, it stays, and the module ends all the same.
  - No error of NVML fails the task. What can't be had is null or empty, and RV(nvml.problem) or the card's C(problem) says why, with
    NVML's own words and code. What can't be true is null too.
  - Needs root to see processes of other users and the kernel's log.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
notes:
  - Meant for the node itself. Inside a container, NVML shows the processes of that container at most.
  - Drivers 535.43 to 535.86 write their lists of processes in a form that only one version of nvidia-ml-py understood. With them
    C(processes) is null.
requirements:
  - nvidia-ml-py on the controller (or on the node)
  - python >= 3.8 on the node
author:
  - The kubegpu.share authors (@kubegpu)
options:
  timeout:
    description: Seconds for all of it, from 1 to 600. Without persistence mode a driver may take some seconds for each card.
    type: int
    default: 30
  binding:
    description: Where the action plugin has put nvidia-ml-py on the node. Not to be set.
    type: path
"""

EXAMPLES = r"""
- name: Ask NVML
  kubegpu.share.nvml_info:
  register: found

- name: Stop where NVML can't be asked
  ansible.builtin.assert:
    that: found.nvml.available
    fail_msg: "{{ found.nvml.problem }}"

- name: Say which processes are on cards and in no pod
  ansible.builtin.debug:
    msg: "{{ found.nvml.cards | map(attribute='processes') | select | flatten | rejectattr('where', 'equalto', 'pod') }}"

- name: Take no longer than a few seconds
  kubegpu.share.nvml_info:
    timeout: 5
"""

RETURN = r"""
nvml:
  description: What NVML says. Every key is always there.
  returned: success
  type: dict
  contains:
    available:
      description: >-
        Whether all was asked that could be. V(false) where there is no library or driver, or where the time was over; cards that were read
        before are there nevertheless.
      type: bool
    problem:
      description: Why not, or what else is wrong, with NVML's own words; empty where nothing is.
      type: str
    driver:
      description: The driver's version, or empty.
      type: str
    nvml:
      description: The library's version, or empty.
      type: str
    cuda:
      description: The version of CUDA that the driver has, such as V(13.4), or empty.
      type: str
    cards:
      description: All cards that NVML counts, each at its place, also one that is lost or hangs.
      type: list
      elements: dict
      contains:
        index:
          description: NVML's.
          type: int
        minor:
          description: Of C(/dev/nvidia<minor>), or null.
          type: int
        uuid:
          description: Such as C(GPU-…), or empty.
          type: str
        pci:
          description: Such as V(00000000:3B:00.0), or empty.
          type: str
        name:
          description: The product, or empty.
          type: str
        problem:
          description: What went wrong with this card, or empty.
          type: str
        memory:
          description: >-
            C(total_mib), C(used_mib), C(free_mib), C(reserved_mib) (what driver and firmware keep for themselves), or null. Where
            C(reserved_mib) is null, the driver counts it as used.
          type: dict
        mig:
          description: >-
            C(mode) and C(pending), each V(enabled), V(disabled), V(unsupported) or V(unknown); C(devices) with C(uuid), C(index), C(gi),
            C(ci), C(total_mib), C(used_mib).
          type: dict
        compute_mode:
          description: V(default), V(exclusive_thread), V(prohibited), V(exclusive_process) or V(unknown).
          type: str
        health:
          description: What is known of the card's health; each is null where the card or the driver doesn't tell.
          type: dict
          contains:
            ecc_uncorrected_volatile:
              description: Since the driver was loaded.
              type: int
            ecc_uncorrected_aggregate:
              description: Since the card was made.
              type: int
            row_remap:
              description: C(correctable), C(uncorrectable), C(pending), C(failed).
              type: dict
            retired_pages_pending:
              description: Whether pages are retired at the next reboot.
              type: bool
            recovery_action:
              description: >-
                V(none), V(gpu_reset), V(node_reboot), V(drain_p2p), V(drain_and_reset), V(recover_imex_domain), V(bus_reset) or
                V(system_reboot); of a newer driver perhaps V(action_8).
              type: str
            xids:
              description: Codes of Xid that the kernel's log still has of this card, each once. NVML itself tells none of the past.
              type: list
              elements: int
        processes:
          description: Who holds memory of the card, or null where a list is missing.
          type: list
          elements: dict
          contains:
            pid:
              description: As the node itself numbers it.
              type: int
            types:
              description: V(compute), V(graphics), V(mps).
              type: list
              elements: str
            used_mib:
              description: What it holds; null where the driver doesn't tell.
              type: int
            gi:
              description: GPU instance of MIG, or null.
              type: int
            ci:
              description: Compute instance of MIG, or null.
              type: int
            mig_uuid:
              description: The MIG device, or empty.
              type: str
            name:
              description: The name that the process has given itself, at most 15 characters; not its command line.
              type: str
            start_time:
              description: Clock ticks since boot; with the PID it is one process for good. Null where it isn't known.
              type: str
            cgroup:
              description: The cgroup by which it was found out whose it is, or empty.
              type: str
            where:
              description: >-
                V(pod); V(container) (of no kubelet); V(host); V(gone) where it ended meanwhile; V(unknown).
              type: str
            pod_uid:
              description: The pod's UID; of a static pod the hash that its mirror pod has as annotation C(kubernetes.io/config.hash).
              type: str
            container_id:
              description: 64 hexadecimal digits, or empty.
              type: str
            runtime:
              description: V(containerd), V(cri-o), V(docker), or empty.
              type: str
            static:
              description: Whether C(pod_uid) is such a hash.
              type: bool
            libvgpu:
              description: Whether HAMi's C(libvgpu.so) is loaded into it; null where that can't be seen.
              type: bool
        limits:
          description: Limits that the driver enforces on containers' cgroups (branch 615 and newer); null where the driver has none.
          type: list
          elements: dict
          contains:
            cgroup:
              description: The container's cgroup.
              type: str
            pod_uid:
              description: As with processes.
              type: str
            container_id:
              description: As with processes.
              type: str
            hard_mib:
              description: More than this is refused; null for no limit.
              type: int
            soft_mib:
              description: Null for no limit.
              type: int
            used_mib:
              description: What the cgroup's processes hold.
              type: int
    pods_limited:
      description: How many pods have a hard limit; null where the driver has no limits.
      type: int
    seconds:
      description: How long it took.
      type: float
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._nvml import ARGUMENTS, facts, seconds_of
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_child import Forked
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_door import Library, load
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_proc import NodeHost
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_read import Request, Tell, read
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    asked, host = module.params, NodeHost()

    def work(request: Request, tell: Tell) -> None:
        read(lambda: Library(load(asked["binding"])), host, request, tell)

    def look() -> dict[str, t.Any]:
        return {"changed": False, "nvml": facts(Forked(work), time.monotonic, seconds_of(asked))}

    finish(module, look)


if __name__ == "__main__":
    main()
