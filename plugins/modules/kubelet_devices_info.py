#!/usr/bin/python

# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubelet_devices_info
short_description: Which GPU devices a node's kubelet gave to which container
version_added: 1.0.0
description:
  - Reads what the kubelet itself says of the devices that it gave away, from its checkpoint of devices, and from its
    PodResources interface where the node's Python has C(grpc). Runs on the node, as root, and changes nothing.
  - The checkpoint also holds what the device plugin answered for each container, which is the witness of the card that the
    container really got. Its entries of pods that ended stay until the next allocation.
  - What isn't there or can't be read has a C(state) and a C(problem) and is no failure. A checkpoint that is cut short,
    damaged, of a form that isn't known, larger than 64 MiB or no regular file is never taken for a good one.
  - Nothing of other resources leaves the node, and of the variables of environment that a device plugin sets only those that
    say which GPU, and how much of it, a container has.
author:
  - The kubegpu.share authors (@kubegpu)
extends_documentation_fragment:
  - kubegpu.share.attributes
  - kubegpu.share.attributes.info
options:
  root:
    description:
      - The kubelet's folder.
      - Where it isn't given, it is the C(--root-dir) of the running kubelet (also of those within k3s, RKE2 and microk8s), and
        V(/var/lib/kubelet) where the kubelet was told none.
    type: path
  resources:
    description: Beginnings of the names of the resources that are of interest.
    type: list
    elements: str
    default: [aliyun.com/gpu-, nvidia.com/]
requirements:
  - python >= 3.8
  - grpcio, for C(pod_resources) alone (C(python3-grpcio) on Debian and Ubuntu, and in EPEL)
"""

EXAMPLES = r"""
- name: Ask the kubelet who has which device
  kubegpu.share.kubelet_devices_info:
  become: true
  register: found

- name: Say what each container was given
  ansible.builtin.debug:
    msg: "{{ item.pod_uid }} {{ item.container }}: {{ item.count }} of {{ item.resource }}, {{ item.envs }}"
  loop: "{{ found.kubelet.checkpoint.entries }}"
"""

RETURN = r"""
kubelet:
  description: What the kubelet says. Every key is always there.
  type: dict
  returned: success
  contains:
    root:
      description: The kubelet's folder.
      type: str
    checkpoint:
      description: The kubelet's checkpoint of devices.
      type: dict
      contains:
        state:
          description: >-
            V(ok); V(missing); V(unreadable), also where it isn't whole JSON; V(unknown), where it has a form that isn't known. Unless it
            is V(ok), that there are no entries means nothing.
          type: str
        problem:
          description: Why it isn't V(ok), in one sentence.
          type: str
        entries:
          description: >-
            One for each container and resource (pod_uid, container, resource, ids, count, and of the device plugin's answer envs,
            cdi_devices, devices as paths of the host, and annotations). Where the answer can't be decoded, envs is null and problem
            says why.
          type: list
          elements: dict
        registered:
          description: IDs of the healthy devices of each resource.
          type: dict
    pod_resources:
      description: The answer of the kubelet's PodResources interface, version 1.
      type: dict
      contains:
        state:
          description: >-
            V(ok); V(missing), where there is no socket, or the node's Python lacks C(grpc); V(unreadable), where the kubelet didn't answer
            in 10 seconds, or with an error; V(unknown), where it isn't the message that was expected.
          type: str
        problem:
          description: Why it isn't V(ok), in one sentence.
          type: str
        pods:
          description: Pods that have such a device (namespace, name, and containers with their devices by resource).
          type: list
          elements: dict
    sockets:
      description: Names of the sockets in the folder of the device plugins.
      type: list
      elements: str
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
    sockets: [aliyungpushare.sock, kubelet.sock]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_devices import ARGUMENTS, look
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_door import RealKubelet
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    asked = module.params
    finish(
        module,
        lambda: {"changed": False, "kubelet": look(RealKubelet(), asked["root"], asked["resources"])},
    )


if __name__ == "__main__":
    main()
