#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvml_info
short_description: Collect a node's driver, cards and GPU processes from NVIDIA's management library
version_added: 1.0.0
description:
  - Reads the driver, every card and its processes from NVML, and finds the pod and the container of each process by its cgroup.
  - Nothing has to be installed on the node. The action plugin copies the controller's C(nvidia-ml-py); if the controller has none, the node's
    own is used.
  - A child process calls NVML, because a faulty card may block its caller forever. A card that doesn't respond is skipped after a third of
    O(timeout), and the others are still read. The child is killed at the time limit; if it hangs in the kernel, it stays, and the module ends
    nevertheless.
  - No error of NVML fails the task. Unavailable values are null or empty, and RV(nvml.problem) or the card's C(problem) has the reason, with
    NVML's text and code. Implausible values are null too.
  - Needs root for C(xids), from the kernel's log, and for C(libvgpu) of other users' processes. Everything else is shown to every user.
extends_documentation_fragment:
  - kubegpu.share.attributes.info
notes:
  - Run it on the node itself. Inside a container, NVML lists the processes of that container only.
  - Drivers 535.43 to 535.86 write their lists of processes in a form that only one version of nvidia-ml-py could parse. With them
    C(processes) is null.
requirements:
  - nvidia-ml-py on the controller (or on the node)
  - python >= 3.9 on the node
author:
  - The kubegpu.share authors (@kubegpu)
options:
  timeout:
    description: Time limit in seconds, from 1 to 600. Without persistence mode a driver may take some seconds for each card.
    type: int
    default: 30
  exclude:
    description: Cards that Kubernetes must not get, as in M(kubegpu.share.gpu_node_info). Of them only the identity is read, and returned in C(excluded).
    type: list
    elements: str
    default: []
  binding:
    description: Path of nvidia-ml-py on the node. The action plugin sets it; don't set it yourself.
    type: path
"""

EXAMPLES = r"""
- name: Collect NVML's facts
  kubegpu.share.nvml_info:
  register: found

- name: Fail if NVML isn't available
  ansible.builtin.assert:
    that: found.nvml.available
    fail_msg: "{{ found.nvml.problem }}"

- name: Print the processes that use cards outside pods
  ansible.builtin.debug:
    msg: "{{ found.nvml.cards | map(attribute='processes') | select | flatten | rejectattr('where', 'equalto', 'pod') }}"

- name: Limit the time to five seconds
  kubegpu.share.nvml_info:
    timeout: 5
"""

RETURN = r"""
nvml:
  description: NVML's facts. Every key is always present.
  returned: success
  type: dict
  contains:
    available:
      description: >-
        Whether all facts were collected. V(false) without a library or driver, or if the time was over; cards that were read before are
        included.
      type: bool
    problem:
      description: Why not, or other problems, with NVML's text; empty without problems.
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
      description: All cards that NVML counts, by index, also one that is lost or hangs.
      type: list
      elements: dict
      contains:
        index:
          description: NVML's index.
          type: int
        minor:
          description: N of C(/dev/nvidiaN), or null.
          type: int
        uuid:
          description: UUID such as C(GPU-…), or empty.
          type: str
        pci:
          description: PCI address such as V(00000000:3B:00.0), or empty.
          type: str
        name:
          description: Product name, or empty.
          type: str
        problem:
          description: The card's problems, or empty.
          type: str
        memory:
          description: >-
            C(total_mib), C(used_mib), C(free_mib), C(reserved_mib) (of driver and firmware, rounded up), or null. If C(reserved_mib) is
            null, C(used_mib) includes it.
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
          description: The card's health; a value is null if the card or the driver doesn't report it.
          type: dict
          contains:
            ecc_uncorrected_volatile:
              description: Count since the driver was loaded.
              type: int
            ecc_uncorrected_aggregate:
              description: Count since the card was manufactured.
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
                V(system_reboot); with a newer driver possibly V(action_8).
              type: str
            fabric:
              description: >-
                The card's registration with its NVSwitches, C(state), which is V(not_started), V(in_progress) or V(completed), and the C(status) of one that
                is completed, 0 for success; null for a card without NVSwitches. CUDA fails on a card that isn't registered.
              type: dict
            xids:
              description: Xid codes of this card in the kernel's log, each once; NVML itself doesn't record them.
              type: list
              elements: int
        processes:
          description: Processes that hold memory of the card, or null if a list is missing.
          type: list
          elements: dict
          contains:
            pid:
              description: PID in the node's own PID namespace.
              type: int
            types:
              description: V(compute), V(graphics), V(mps).
              type: list
              elements: str
            used_mib:
              description: Its memory on the card; null if the driver doesn't report it.
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
              description: The process name of at most 15 characters; not its command line.
              type: str
            start_time:
              description: Clock ticks since boot; with the PID it identifies a process uniquely. Null if unknown.
              type: str
            cgroup:
              description: The cgroup that determined the owner, or empty.
              type: str
            where:
              description: >-
                V(pod); V(container) (of no kubelet); V(host); V(gone) if it ended meanwhile; V(unknown).
              type: str
            pod_uid:
              description: The pod's UID; for a static pod the hash in its mirror pod's annotation C(kubernetes.io/config.hash).
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
              description: Whether it has loaded HAMi's C(libvgpu.so); null if unknown.
              type: bool
        limits:
          description: Limits that the driver enforces on containers' cgroups (branch 615 and newer); null if the driver has no such limits.
          type: list
          elements: dict
          contains:
            cgroup:
              description: The container's cgroup.
              type: str
            pod_uid:
              description: See C(processes).
              type: str
            container_id:
              description: See C(processes).
              type: str
            hard_mib:
              description: Hard limit, above which allocations fail; null without one.
              type: int
            soft_mib:
              description: Soft limit; null without one.
              type: int
            used_mib:
              description: Memory of the cgroup's processes.
              type: int
    excluded:
      description: What O(exclude) leaves out, each with C(uuid), C(pci), C(name) and the C(entry) that names it.
      type: list
      elements: dict
    pods_limited:
      description: Number of pods with a hard limit; null if the driver has no such limits.
      type: int
    seconds:
      description: Duration.
      type: float
virtual_machines:
  description: >-
    Whether virtual machines are to have cards of this node, which NVML doesn't see, by the records of roles passthrough and vgpu. Module
    M(kubegpu.share.virtual_machines_info) has them.
  returned: success
  type: bool
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.card_exclusion import parse
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._host import records
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.binding import Library, load
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.facts import (
    ARGUMENTS,
    Request,
    Send,
    facts,
    read,
    valid_timeout,
)
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.host import NodeHost
from ansible_collections.kubegpu.share.plugins.module_utils._nvml.worker import ForkedWorker


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    binding, host = module.params["binding"], NodeHost()

    def work(request: Request, send: Send) -> None:
        read(lambda: Library(load(binding)), host, request, send)

    def collect() -> JsonObject:
        timeout, exclude = valid_timeout(module.params["timeout"]), parse(module.params["exclude"])
        nvml = facts(ForkedWorker(work), time.monotonic, timeout, exclude)
        recorded = any(os.path.lexists(path) for path in (records.PASSTHROUGH, records.VGPU))
        return {"changed": False, "nvml": nvml, "virtual_machines": recorded}

    run_module(module, collect)


if __name__ == "__main__":
    main()
