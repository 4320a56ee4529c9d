#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_canary
short_description: Prove with pods of known size that GPU memory is shared as it should be
version_added: 1.0.0
author: The kubegpu.share authors (@kubegpu)
description:
  - Runs pods of known size through the real scheduler on one node, asks for more than fits, removes everything and looks whether all is free
    again. What M(kubegpu.share.gpu_allocation_info) reads of running pods is shown here by doing.
  - >-
    The steps are Y1, a namespace of its own. Y2, so many pods that no card of the node takes one more are placed on cards with room, with all
    annotations of the contract, and run. Y3, one pod more stays Pending, for the scheduler extender's reason and not for kube-scheduler's own.
    Y4, a pod that fits what the node has free, but no single card, stays Pending. Y5, only with O(allocate_command), a container tries to hold
    more than its share. Y6, what was held can be given away again. Y7, nothing is left.
  - Sizes are computed from what is free now, and of all nodes one is taken on which most can be shown for least. Where one card has more free
    than every other, all pods together take no more than that card has; where cards are equal, each gets some. Running pods aren't touched, but
    new ones may have to wait while the canary runs, which is some seconds per step.
  - kube-scheduler may evict pods with a lower priority for a pod that finds no room. So nodes whose pods with a share have a priority below 0
    aren't used, and Y3 and Y4 are skipped where the canary's own priority is higher than that of such a pod and its
    O(priority_class) may preempt.
  - Others may come and go meanwhile. A step that they made impossible is tried again, and is V(UNKNOWN) in the end, never V(FAIL).
  - The namespace is removed whatever happens, also when the module is told to end. What a killed run left is removed by the next one. So only
    one canary can be run in a namespace at a time.
  - Knows gpushare's contract, ours and upstream's. Where no node announces C(aliyun.com/gpu-mem), or none has a free share, the result is
    V(skipped) with the reason. Nodes on which HAMi's or NVIDIA's device plugin gives GPUs away too aren't used.
  - Needs the rights to list nodes and pods, and to get nodes; to get, create, patch and delete the namespace; in it to create, patch, list and
    delete pods and to list events; to list DaemonSets where O(image) is unset; and C(create) and C(get) of C(pods/exec) for
    O(allocate_command). A right that is missing is told as V(UNKNOWN).
  - A result of V(FAIL) doesn't make the module fail; that is for the play to decide.
extends_documentation_fragment:
  - kubernetes.core.k8s_auth_options
attributes:
  check_mode:
    support: full
    description: Makes nothing; says on which node it would run how many pods of which size.
  diff_mode:
    support: N/A
    description: What it creates it removes, so that there is no difference to show.
  platform:
    description: Target systems.
    platforms: posix
    support: full
requirements:
  - python >= 3.9
  - kubernetes >= 24.2.0
options:
  namespace:
    description:
      - Name of its namespace, which carries the label C(kubegpu.share/canary=true).
      - A namespace of this name without the label is somebody else's, and the module fails.
    type: str
    default: gpushare-canary
  image:
    description:
      - Image of the pods. It needs C(sleep), and what O(allocate_command) runs.
      - Unset, it is the image of the cluster's own gpushare device plugin, which is already on every GPU node.
    type: str
  image_pull_policy:
    description: When kubelet pulls it.
    type: str
    choices: [Always, IfNotPresent, Never]
    default: IfNotPresent
  node:
    description: The only node to use. Unset, one is chosen.
    type: str
  scheduler_name:
    description: The scheduler that places the pods, where that isn't the cluster's own.
    type: str
  runtime_class:
    description: RuntimeClass of the pods, for a cluster on which the nvidia runtime isn't the default one.
    type: str
  priority_class:
    description: PriorityClass of the pods. One whose C(preemptionPolicy) is V(Never) evicts nobody.
    type: str
  timeout:
    description: Seconds that each wait may take.
    type: int
    default: 120
  allocate_command:
    description:
      - A command, word by word, that tries to hold more GPU memory than the container's share and ends with 0 where it got it. It runs in the
        first pod, whose share in units is in the environment as C(ALIYUN_COM_GPU_MEM_CONTAINER), for at most 30 seconds.
      - On a node whose device plugin says that shares are enforced it must fail. On others success is a fact that is told, since gpushare only
        counts.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Prove that pods share cards as they should
  kubegpu.share.gpu_canary:
    kubeconfig: ~/.kube/config
  register: proof

- name: Fail where they don't
  ansible.builtin.assert:
    that: proof.canary.result in ['PASS', 'skipped']

- name: The same on one node, with an attempt to hold more than the share
  kubegpu.share.gpu_canary:
    node: gpu1
    image: registry.example.com/ai/pytorch:2.9
    allocate_command: [python3, -c, "import torch; torch.empty(64 << 30, dtype=torch.uint8, device='cuda')"]
"""

RETURN = r"""
canary:
  description: What was shown.
  returned: success
  type: dict
  contains:
    result:
      description: >-
        V(FAIL) where a step found the contract broken, else V(UNKNOWN) where one couldn't be judged, else V(PASS); V(skipped) where nothing could
        be tried, and in check mode.
      type: str
      sample: PASS
    steps:
      description: The steps in order (id, title, result, what was seen and what to do).
      type: list
      elements: dict
      sample:
        - id: Y3
          title: One pod more than fits stays Pending, for the extender's reason
          result: PASS
          what: '11 units more: 0/1 nodes are available: 1 largest free share on one card is 10 of 11 GiB.'
          do: ''
    node:
      description: The node that was used; empty where there is none.
      type: str
      sample: gpu1
    namespace:
      description: Its namespace.
      type: str
      sample: gpushare-canary
    units:
      description: Units of each of the pods of Y2.
      type: int
      sample: 11
    pods:
      description: Every pod that was made (pod, uid, units, node, card, phase and what was last said of it).
      type: list
      elements: dict
findings:
  description: What failed or couldn't be known, in the shape of a report's findings.
  returned: success
  type: list
  elements: dict
checks:
  description: One row per step, in the shape of a report's checks. A skipped step has nothing to check.
  returned: success
  type: list
  elements: dict
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._acceptance_cluster import ApiCluster
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import NAMESPACE, Wish
from ansible_collections.kubegpu.share.plugins.module_utils._canary_run import run
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._runner import finish


def main() -> None:
    own: dict[str, t.Any] = {
        "namespace": {"type": "str", "default": NAMESPACE},
        "image": {"type": "str"},
        "image_pull_policy": {
            "type": "str",
            "choices": ["Always", "IfNotPresent", "Never"],
            "default": "IfNotPresent",
        },
        "node": {"type": "str"},
        "scheduler_name": {"type": "str"},
        "runtime_class": {"type": "str"},
        "priority_class": {"type": "str"},
        "timeout": {"type": "int", "default": 120},
        "allocate_command": {"type": "list", "elements": "str", "default": []},
    }
    module = AnsibleModule(argument_spec={**auth_arguments(), **own}, supports_check_mode=True)

    def work() -> dict[str, t.Any]:
        wish = Wish(**{name: module.params[name] for name in own})
        kube = RealKube.of_module(module)
        return run(kube, ApiCluster(kube).execute, wish, module.check_mode)

    finish(module, work)


if __name__ == "__main__":
    main()
