#!/usr/bin/python
# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_acceptance
short_description: Test with real pods that GPU memory is shared as it should be
version_added: 1.0.0
author: The kubegpu.share authors (@kubegpu)
description:
  - Runs small pods through the real scheduler on one node, in a namespace of their own, validates where they are placed, and removes them.
  - >-
    O(suite=workloads) tests that pods share cards. W1, it creates the namespace. W2, three pods run on one card, or with O(placement=spread)
    on the emptiest ones. W3, a pod that fits
    the node's free memory but no single card stays Pending, for the scheduler extender's reason. W4, a pod larger than the cluster stays
    Pending. W5, each container sees its own card's device node and no other. W6, both containers of a pod get the same card. W7, after deletion
    the memory can be allocated again. W8, the namespace is removed.
  - >-
    O(suite=canary) tests the contract of gpushare, with any placement. Y1, it creates the namespace. Y2, as many pods as fill the node's cards
    are placed on cards with enough free memory, with all annotations of the contract, and run. Y3, one pod more stays Pending, for the scheduler
    extender's reason and not by kube-scheduler's own count. Y4, a pod that fits the node's free memory but no single card stays Pending. Y5, only
    with O(allocate_command), a container tries to hold more than its share. Y6, after deletion the memory can be allocated again. Y7, the
    namespace is removed.
  - >-
    O(suite=hami) tests a node of HAMi, case by case, each in pods of its own. As many pods run as HAMi's rule allows for what is free (memory, cores,
    slots, cards), and those beyond wait; the annotations, the environment, nvidia-smi and the program of O(allocate_command) in the containers show the
    parts. Each step has what it C(proves), and C(by) which evidence. What only real cards can show, such as the speed with a part of the cores, is
    V(UNKNOWN). O(cases) adds cases.
  - >-
    O(suite=nvidia) does the same on a node of NVIDIA's device plugin. Which cases run follows from how the node announces its cards, by the plugin's
    configuration or else by the node's labels: exclusive, time-slicing, MPS, MIG with strategy single or mixed; shared cards with another name or the same,
    and whether a container may request two replicas.
  - >-
    O(suite=passthrough) and O(suite=vgpu) start a virtual machine of KubeVirt on a node of that back end, which requests what the node announces. M01, it
    runs with one device. M02, where one was free, a second one waits. M03, whether the driver in the guest sees the card, is V(UNKNOWN): only a guest with it
    can show that. Nothing is created, and the result is V(skipped), where KubeVirt or its control plane that is ready isn't there, or the node has no KVM.
  - >-
    O(suite=kata) runs cases as O(suite=nvidia) does, in pods of O(kata_runtime_class) on a node of that back end: a pod with a card runs, a second one waits
    where one card was free, the container's kernel isn't the node's, and it has the device node of one card, which nvidia-smi lists.
  - >-
    A step that is V(skipped) for what isn't there has a C(code): no_kubevirt, kubevirt_not_ready, not_schedulable, no_kvm, no_resource, no_second,
    no_runtime_class, or not_selected (the RuntimeClass isn't for the node).
  - >-
    O(suite=all) runs a suite for each kind of node that the cluster has, one after another: V(workloads) for the extender's and for those of claims,
    V(hami), V(nvidia) for each configuration, V(passthrough), V(vgpu) and V(kata). The steps have C(suite) and C(node) then, and C(suites) has the outcome of each.
  - Sizes are computed from what is free. A step that a cluster can't show, such as W3 where every node has one card, is V(skipped) with the
    reason. Running pods aren't touched, but new ones may have to wait while the suite runs, which takes some seconds for each step.
  - The canary selects the node that shows most with the least memory. If one card has more free memory than every other, all of its pods together
    take no more than that card has; if cards are equal, each of them gets a pod.
  - kube-scheduler may preempt pods with a lower priority for a pod that doesn't fit. So the canary doesn't use nodes that have pods with a share
    and a priority below 0, and W3, Y3 and Y4 are skipped if the suite's own priority is higher than that of such a pod and its
    O(priority_class) may preempt.
  - Other pods may come and go meanwhile. A step that they made impossible is retried; its result in the end is V(UNKNOWN), never V(FAIL).
  - The namespace is removed in any case, also after a signal. The next run removes what a killed run left. So only one run at a time is possible
    in a namespace.
  - Supports the contract of gpushare, ours and upstream's, and claims on this collection's cards. Which of them is tested follows from the label
    C(gpushare) of the node that is used. On a node with C(gpushare=dra) the pods ask for C(aliyun.com/gpu-mem) as ever, admission turns that into claims, and
    what these are allocated is compared with the cards in ResourceSlices. Every reason of the extender is kube-scheduler's own then. The pods have the label
    C(kubegpu.share/allocation), so that admission leaves them or turns them as the node needs it. Where a cluster has nodes of both, one run tests one of
    them, and the table names the others (C(untested)). A slice doesn't have the number of a card's device node, so W5 and W6 compare the
    containers with each other there. If no node advertises C(aliyun.com/gpu-mem), or none has free memory, the result is V(skipped) with the
    reason. Nodes on which HAMi's or NVIDIA's device plugin allocates GPUs too aren't used.
  - O(suite=passthrough) and O(suite=vgpu) also need the rights to get CustomResourceDefinitions, to list KubeVirts, and in the namespace to create, patch and
    get VirtualMachineInstances; their namespace has the Pod Security level C(privileged), which KubeVirt's pods need. O(suite=kata) has to list RuntimeClasses.
  - Needs the rights to list nodes and pods, and to get nodes; to get, create, patch and delete the namespace; in it to create, patch, list and
    delete pods and to list events; to list DaemonSets if O(image) isn't set; and C(create) and C(get) of C(pods/exec) for W5, W6 and
    O(allocate_command); where a node has claims, to list ResourceSlices and ResourceClaims. A missing right is reported as V(UNKNOWN).
  - A result of V(FAIL) doesn't fail the module; the play decides.
extends_documentation_fragment:
  - kubegpu.share.attributes.cluster
attributes:
  check_mode:
    support: full
    description: Creates nothing; reports on which node it would run which pods.
  diff_mode:
    support: N/A
    description: It removes what it creates, so that there is no difference to show.
  platform:
    description: Target systems.
    platforms: posix
    support: full
options:
  suite:
    description: The suite to run.
    type: str
    choices: [workloads, canary, hami, nvidia, all]
    default: workloads
  namespace:
    description:
      - Name of the suite's namespace, which carries the label C(kubegpu.share/acceptance) with the suite's name.
      - Defaults to V(kubegpu-acceptance) for O(suite=workloads), V(gpushare-canary) for O(suite=canary), V(hami-acceptance) for
        O(suite=hami), and V(nvidia-acceptance) for O(suite=nvidia).
      - If a namespace of this name without the label exists, the module fails.
    type: str
  image:
    description:
      - Image of the pods. It needs C(sleep), for O(suite=workloads) C(ls), and what O(allocate_command) runs.
      - Defaults to the image of the cluster's own gpushare device plugin, or of its DRA driver, which every GPU node already has.
    type: str
  image_pull_policy:
    description: When kubelet pulls the image.
    type: str
    choices: [Always, IfNotPresent, Never]
    default: IfNotPresent
  node:
    description: The only node to use. By default the module selects one.
    type: str
  node_selector:
    description: Only nodes with these labels are used.
    type: dict
    default: {}
  tolerations:
    description: Tolerations of the pods, as in a pod's C(spec.tolerations).
    type: list
    elements: dict
    default:
      - key: nvidia.com/gpu
        operator: Exists
  scheduler_name:
    description: The scheduler that places pods on nodes of the extender, if it isn't the cluster's own. Claims are allocated by the cluster's own.
    type: str
  placement:
    description: Which card of a node the cluster's pods get, as gpushare_placement. Of O(suite=workloads) W2, W3 and W6 follow it.
    type: str
    choices: [binpack, spread]
    default: binpack
  runtime_class:
    description: RuntimeClass of the pods, for a cluster whose default runtime isn't the nvidia runtime.
    type: str
  priority_class:
    description: PriorityClass of the pods. One whose C(preemptionPolicy) is V(Never) preempts no pods.
    type: str
  timeout:
    description: Seconds that each wait may take.
    type: int
    default: 120
  allocate_command:
    description:
      - A command, as a list of arguments, that allocates GPU memory. It ends with 0 if it got it, and with 102 if CUDA refused it
        (C(CUDA_ERROR_OUT_OF_MEMORY)). Any other status, as that of a crash or of a program that isn't there, shows nothing, and the step is V(UNKNOWN). It
        has 30 seconds.
      - For O(suite=nvidia) with MPS, more than a replica's part of the card's memory. It must be refused.
      - For O(suite=hami), 2000 MiB. They must be refused in a container of 1000 MiB and granted in one of 3000 MiB.
      - For O(suite=canary), more than the container's share. It runs in the first pod, whose share in units is in the environment variable
        C(ALIYUN_COM_GPU_MEM_CONTAINER).
      - On a node whose device plugin announces that it enforces shares it must be refused. On other nodes its success is reported and passes,
        since gpushare only counts there.
    type: list
    elements: str
    default: []
  program_command:
    description:
      - A program that computes, as a list of arguments, which ends with 0 if that worked; CUDA's sample vectorAdd for example. It runs in a container with a
        device or a share of each back end, for at most 30 seconds.
      - Without it the case is V(UNKNOWN), and O(suite=workloads) has no such step (W6a).
    type: list
    elements: str
    default: []
  program_image:
    description: The image that has O(program_command), and C(sleep). Defaults to O(image).
    type: str
  kata_runtime_class:
    description: >-
      RuntimeClass of the pods of O(suite=kata), which replaces O(runtime_class) there. By default the only one whose handler is Kata's with NVIDIA's cards; those
      for confidential computing are left out where there is another one.
    type: str
  machine_image:
    description: A container disk that the virtual machines of O(suite=passthrough) and O(suite=vgpu) boot. Without it they boot nothing, and run all the same.
    type: str
  cases:
    description:
      - More cases for O(suite=hami), O(suite=nvidia) and O(suite=kata), each with C(id), C(title), C(proves), C(evidence) (of scheduling, admission, annotation, environment,
        device nodes, NVML, exit code, silicon) and C(limits) of the pods. In C(limits) of O(suite=nvidia) and O(suite=kata) C(card) is the resource that the node announces.
      - C(more) pods than fit have to wait, for a reason that contains C(reason). C(at_most) limits the pods that are created; with C(beyond_cards) they are
        one more than the node has cards. With C(refused) kubelet has to end them, for a reason that contains it.
      - C(command) runs in the first pod and has to end with C(status), by default 0. Its output has to contain C(shows), and C(times) lines (by
        default 1) have to match the regular expression C(finds). With C(distinct) it runs in all pods, whose outputs all differ (V(true)) or aren't all
        different (V(false)).
      - C(suite) is V(hami), V(nvidia) or V(kata) for a case of one of them only. C(kinds) is what the node of O(suite=nvidia) has to be, of exclusive, shared,
        time-slicing, mps, mig, mig-single, mig-mixed, renamed, same-name, one-each and several-each.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Test that pods share cards
  kubegpu.share.gpu_acceptance:
    kubeconfig: ~/.kube/config
  register: acceptance

- name: Fail if they don't
  ansible.builtin.assert:
    that: acceptance.acceptance.result == 'PASS'
    fail_msg: "{{ acceptance.table }}"

- name: Run the canary on one node, with an attempt to hold more than the share
  kubegpu.share.gpu_acceptance:
    suite: canary
    node: gpu1
    image: registry.example.com/python:3.13
    allocate_command:
      - python3
      - -c
      - |
        import ctypes
        cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
        code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
        code = code or cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 30))
        raise SystemExit(102 if code == 2 else code and 1)
"""

RETURN = r"""
acceptance:
  description: The suite's outcome.
  returned: success
  type: dict
  contains:
    suite:
      description: The suite that ran.
      type: str
      sample: canary
    result:
      description: >-
        V(FAIL) if a step found the contract violated, else V(UNKNOWN) if a step has no result, else V(PASS); V(skipped) if nothing could be
        tested, and in check mode.
      type: str
      sample: PASS
    steps:
      description: >-
        The steps in order (id, title, result, what happened and what to do, C(unshown), whether only a real card or a program that nobody named could
        show it, and C(code), why nothing could be shown, where that has one).
      type: list
      elements: dict
      sample:
        - id: Y3
          title: One pod more than fits stays Pending, for the extender's reason
          result: PASS
          what: '11 units more: 0/1 nodes are available: 1 InsufficientGPUMemory: largest free share on one card is 10 of 11 GiB.'
          do: ''
    node:
      description: The node that was used; empty if none was.
      type: str
      sample: gpu1
    namespace:
      description: The suite's namespace.
      type: str
      sample: gpushare-canary
    units:
      description: Units of each of the first pods.
      type: int
      sample: 11
    pods:
      description: Every pod that was created (pod, uid, units, node, card, phase, and a summary of its last state).
      type: list
      elements: dict
    untested:
      description: Names of the nodes of the other allocation, where a cluster has nodes of both.
      type: list
      elements: str
    suites:
      description: With O(suite=all), the outcome of each suite in the same form.
      type: list
      elements: dict
table:
  description: The steps as text.
  returned: success
  type: str
findings:
  description: The failed and unknown steps, in the form of a report's findings.
  returned: success
  type: list
  elements: dict
checks:
  description: One row for each step, in the form of a report's checks. A skipped step has checked nothing.
  returned: success
  type: list
  elements: dict
"""


from ansible.module_utils.basic import AnsibleModule
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.gpushare import PLACEMENTS
from ansible_collections.kubegpu.share.plugins.module_utils._core.plan import run_module
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.nodes import ALL, TOLERATED, WORKLOADS, Options
from ansible_collections.kubegpu.share.plugins.module_utils._e2e.run import SUITES, run, run_all
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.options import auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._kube.pod_exec import PodExec


def main() -> None:
    arguments: JsonObject = {
        "suite": {"type": "str", "choices": [*SUITES, ALL], "default": WORKLOADS},
        "namespace": {"type": "str"},
        "image": {"type": "str"},
        "image_pull_policy": {
            "type": "str",
            "choices": ["Always", "IfNotPresent", "Never"],
            "default": "IfNotPresent",
        },
        "node": {"type": "str"},
        "node_selector": {"type": "dict", "default": {}},
        "tolerations": {"type": "list", "elements": "dict", "default": list(TOLERATED)},
        "scheduler_name": {"type": "str"},
        "placement": {"type": "str", "choices": [*PLACEMENTS], "default": PLACEMENTS[0]},
        "runtime_class": {"type": "str"},
        "priority_class": {"type": "str"},
        "timeout": {"type": "int", "default": 120},
        "allocate_command": {"type": "list", "elements": "str", "default": []},
        "program_command": {"type": "list", "elements": "str", "default": []},
        "program_image": {"type": "str"},
        "kata_runtime_class": {"type": "str"},
        "machine_image": {"type": "str"},
        "cases": {"type": "list", "elements": "dict", "default": []},
    }
    module = AnsibleModule(argument_spec={**auth_arguments(), **arguments}, supports_check_mode=True)

    def work() -> JsonObject:
        options = Options(**{name: module.params[name] for name in arguments if module.params[name] is not None})
        kube = RealKube.of_module(module)
        suite = run_all if options.suite == ALL else run
        return {**suite(kube, PodExec(kube), options, module.check_mode)}

    run_module(module, work)


if __name__ == "__main__":
    main()
