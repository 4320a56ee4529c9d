#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubelet_devices_info
short_description: Collect the GPU devices that a node's kubelet allocated to containers
version_added: 1.0.0
description:
  - Reads kubelet's checkpoint of devices and, where the node's Python has C(grpc), its PodResources API.
  - Runs on the node, as root, and changes nothing.
  - The checkpoint also contains the device plugin's response for each container, which shows the GPU that the container was
    given. Entries of finished pods stay until the next allocation.
  - A source that is missing or can't be read has a C(state) and a C(problem) and doesn't fail the task. A checkpoint that is
    truncated, damaged, of an unknown form, larger than 64 MiB or no regular file is never reported as V(ok).
  - With C(gpushare_allocation=dra) it also reads the cards that containers have by ResourceClaims, from PodResources, and the DRA driver's records
    and CDI specifications of claims.
  - It also reads which C(/dev/nvidiaN) each container has, also one to which kubelet allocated none.
  - Other resources are not returned. Of the environment variables that a device plugin sets, only those that state the
    container's GPU and its share are returned.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  root:
    description:
      - Kubelet's directory.
      - Defaults to the C(--root-dir) of the running kubelet (also of the one within k3s, RKE2 and microk8s), or to
        V(/var/lib/kubelet).
    type: path
  resources:
    description: Prefixes of the resource names to return.
    type: list
    elements: str
    default: [aliyun.com/gpu-, nvidia.com/]
requirements:
  - python >= 3.9
  - grpcio, for C(pod_resources) only (C(python3-grpcio) on Debian and Ubuntu, and in EPEL)
"""

EXAMPLES = r"""
- name: Collect the devices of all containers
  kubegpu.share.kubelet_devices_info:
  become: true
  register: kubelet_devices

- name: Print each container's devices
  ansible.builtin.debug:
    msg: "{{ item.pod_uid }} {{ item.container }}: {{ item.count }} of {{ item.resource }}, {{ item.envs }}"
  loop: "{{ kubelet_devices.kubelet.checkpoint.entries }}"
"""

RETURN = r"""
kubelet:
  description: Kubelet's devices. Every key is always present.
  type: dict
  returned: success
  contains:
    root:
      description: Kubelet's directory.
      type: str
    checkpoint:
      description: Kubelet's checkpoint of devices.
      type: dict
      contains:
        state:
          description: >-
            V(ok); V(missing); V(unreadable), also if it isn't complete JSON; V(unknown), if it has an unknown form. An empty list of
            entries is conclusive only if this is V(ok).
          type: str
        problem:
          description: Why C(state) isn't V(ok).
          type: str
        entries:
          description: >-
            One for each container and resource (pod_uid, container, resource, ids, count, and from the device plugin's response envs,
            cdi_devices, devices as paths of the host, and annotations). If the response can't be decoded, envs is null and problem
            has the reason.
          type: list
          elements: dict
        registered:
          description: IDs of the healthy devices, by resource.
          type: dict
    pod_resources:
      description: The response of kubelet's PodResources API, version 1.
      type: dict
      contains:
        state:
          description: >-
            V(ok); V(missing), without a socket or without C(grpc) in the node's Python; V(unreadable), if kubelet didn't respond within
            10 seconds, or with an error; V(unknown), if the response isn't the expected message.
          type: str
        problem:
          description: Why C(state) isn't V(ok).
          type: str
        pods:
          description: Pods that have a device (namespace, name, and containers with their devices by resource).
          type: list
          elements: dict
    sockets:
      description: Names of the sockets in the device plugins' directory.
      type: list
      elements: str
    device_nodes:
      description: >-
        Containers that have nodes C(/dev/nvidiaN) in a C(/dev) of their own (pod_uid, container_id, and N of each as minors); null if
        they can't be read.
      type: list
      elements: dict
    prepared:
      description: Claims that the DRA driver has prepared on this node.
      type: dict
      contains:
        state:
          description: V(ok); V(missing), where the driver has never run; V(unreadable).
          type: str
        problem:
          description: Why C(state) isn't V(ok).
          type: str
        records:
          description: >-
            The driver's records, each with uid, namespace and name of the claim, its shares (request, device, share, mib), and the problem if it
            can't be read.
          type: list
          elements: dict
        specifications:
          description: >-
            The claims' CDI specifications, each with the uid of the claim, the variables of each of its devices (envs), whether the record has the
            same specification (recorded), and the problem if it can't be read.
          type: list
          elements: dict
  sample:
    root: /var/lib/kubelet
    checkpoint:
      state: ok
      problem: ''
      entries:
        - pod_uid: 3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10
          container: main
          resource: aliyun.com/gpu-mem
          ids: [5a4d7f2e-0, 5a4d7f2e-1]
          count: 2
          envs:
            NVIDIA_VISIBLE_DEVICES: GPU-5a4d7f2e-0000-4000-8000-000000000001
          cdi_devices: []
          devices: []
          annotations: {}
          problem: ''
      registered:
        aliyun.com/gpu-mem: [5a4d7f2e-0, 5a4d7f2e-1, 5a4d7f2e-2]
    pod_resources:
      state: ok
      problem: ''
      pods:
        - namespace: default
          name: binpack-0
          containers:
            - name: main
              devices:
                - resource: aliyun.com/gpu-mem
                  ids: [5a4d7f2e-0, 5a4d7f2e-1]
              claims: []
    sockets: [aliyungpushare.sock, kubelet.sock]
    device_nodes:
      - pod_uid: 3f0e2a54-8f5b-4f5c-9d62-0d8a3f4b7a10
        container_id: 9b2c1e0f6a7d4c3b8e5f9b2c1e0f6a7d4c3b8e5f9b2c1e0f6a7d4c3b8e5f0a1b
        minors: [0]
    prepared:
      state: missing
      problem: "/var/lib/kubelet/plugins/gpu.kubegpu.share/claims doesn't exist"
      records: []
      specifications: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.devices import RESOURCES, collect
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.root import running_root
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import NodeKubelet


def main() -> None:
    arguments = {"root": {"type": "path"}, "resources": {"type": "list", "elements": "str", "default": RESOURCES}}
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)
    kubelet, root, resources = NodeKubelet(), module.params["root"], module.params["resources"]
    run_module(
        module,
        lambda: {"changed": False, "kubelet": collect(kubelet, root or running_root(kubelet), resources)},
    )


if __name__ == "__main__":
    main()
