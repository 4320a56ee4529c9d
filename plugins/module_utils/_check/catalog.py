# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of all checks, by check id. No I/O."""

from __future__ import annotations

from .catalog_claims import CLAIMS_CHECKS
from .catalog_gpushare import GPUSHARE_CHECKS
from .catalog_kata import KATA_CHECKS
from .catalog_stacks import STACK_CHECKS
from .catalog_virtual import VIRTUAL_CHECKS
from .invariant import OBSERVE, Invariant

COMMON_CHECKS = {
    "C1": Invariant(
        "One stack allocates a node's GPUs",
        "running device plugins, announced resources and the resources registered with kubelet: all of one stack",
        "FAIL; WARN where no known device plugin runs, or a pod looks like a component in a tenant's namespace",
        "keep one device plugin on the node, and remove the other's resources and annotations from the node",
        {
            "plugins_of_several_stacks": "device plugins of {stacks} run on this node and allocate the same GPUs",
            "several_plugins": "{number} device plugins of {stack} run on this node, and kubelet uses the last "
            "registered one only",
            "leftover_resource": "{resource} is left over from gpushare beside {stacks}",
            "several_stacks_announced": "several stacks announce the same GPUs: {stacks}",
            "several_stacks_registered": "resources of several stacks for the same GPUs are registered with kubelet: "
            "{resources}",
            "unknown_plugin": "GPUs are allocatable on this node, and none of its pods is a known device plugin",
            "nothing_announced": "the node has the label {label} and announces no GPU",
            "unconfirmed": "the pod looks like a device plugin or a helper of one, and nothing says that it is one: "
            "its namespace {namespace} may be a tenant's, so it is checked as any other pod",
        },
        {
            "unknown_plugin": "find the process that listens on the sockets of kubelet's device-plugins directory",
            "nothing_announced": "read the device plugin's log on the node: it doesn't run, or finds no GPU",
            "unconfirmed": "if it is a component of the node, and no tenant creates pods in its namespace, add that to "
            "verify_exempt_namespaces; else find out who created the pod",
        },
    ),
    "C2": Invariant(
        "Every process on a GPU belongs to a pod that requested one",
        "NVML's processes, by control group, with the API's pods; allowed_processes, allowed_pods",
        "FAIL",
        "have the pod request a share; deny privileged pods and NVIDIA_VISIBLE_DEVICES by an admission policy",
        {
            "no_data": "the GPUs' processes are unknown: {why}",
            "no_data_gpu": "the processes of {gpu} are unknown: {why}",
            "resource_claim": "{process} uses {gpu}; the pod has a resource claim (DRA) of another driver, which isn't "
            "checked here",
            "pod_finished": "{process} uses {gpu} although its {kind} has finished ({phase})",
            "pod_without_request": "{process} uses {gpu} although its {kind} requests no GPU",
            "unknown_pod": "{process} uses {gpu}, and its pod {uid} has finished or isn't in this cluster",
            "unattributed": "{process} uses {gpu}, and its pod or owner can't be determined",
            "outside_pods": "{process} outside all pods uses {gpu}; cgroup {cgroup}",
            "in_foreign_container": "{process} in a container outside all pods uses {gpu}; cgroup {cgroup}",
        },
        {
            "resource_claim": "compare the pod's ResourceClaims with the GPU",
            "unknown_pod": "identify the process on the node, and end it",
            "unattributed": "collect as root, with the host's PID and cgroup namespaces, so that /proc can be read",
            "outside_pods": "end it, or add its name to allowed_processes if it may use GPUs",
            "in_foreign_container": "end it, or add its name to allowed_processes if it may use GPUs",
        },
    ),
    "C3": Invariant(
        "Every process uses a GPU that was allocated to its pod",
        "the GPU on which NVML lists it with kubelet's allocation, or else the pod's annotations",
        "FAIL",
        "find out how it accesses that GPU (its environment, privileges), and delete the pod",
        {
            "no_data": "the GPUs of the pods' processes are unknown: {why}",
            "no_data_gpu": "the processes of {gpu} are unknown: {why}",
            "allocation_unknown": "{process} uses a GPU, and the pod's allocation is unknown",
            "other_gpu": "{process} uses {gpu}, and {granted} was allocated to the pod",
        },
    ),
    "C4": Invariant(
        "kubelet has allocated what every running container requests",
        "each container's requests with kubelet's checkpoint and PodResources",
        "FAIL",
        "delete the pod, so that kubelet admits a new one",
        {
            "no_data": "kubelet's allocations to {pods} are unknown: {why}",
            "not_allocated": "container {container} runs and requests {number} of {resource}, and {sources} has no "
            "allocation",
            "count_differs": "container {container} requests {number} of {resource}, and kubelet has allocated "
            "another number",
        },
    ),
    "C5": Invariant(
        "The GPUs allocated to pods exist",
        "UUIDs in kubelet's allocations with NVML's, those and the claims' with gpu_exclude",
        "FAIL",
        "delete the pod; if the machine's GPUs were changed, drain the node and remove kubelet's device checkpoint "
        "before the node is used again",
        {
            "no_data": "the allocated GPUs can't be compared with NVML's: {why}",
            "unidentified": "whether the GPU of container {container} exists is unknown: {why}",
            "gpu_missing": "{uuid} was allocated to the pod, and the machine no longer has it",
            "gpu_excluded": "{uuid} was allocated to the pod, and gpu_exclude keeps it from Kubernetes now",
        },
        {
            "gpu_excluded": "delete the pod, so that it gets another GPU, or take the card out of gpu_exclude and run "
            "site.yml",
        },
    ),
    "C6": Invariant(
        "All announced GPUs are allocatable",
        "allocatable with capacity",
        "FAIL; WARN while processes of a deleted pod run, or the plugin announces them by another name",
        "read the logs of the device plugin and of kubelet; restart the device plugin to register it again",
        {
            "unhealthy_gpu": "{left} of {number} {resource} are allocatable: GPU {card} ({uuid}) is {reason}",
            "unreleased": "{left} of {number} {resource} are allocatable: processes of a deleted pod still run, which "
            "had {units} units of GPU {card} ({uuid})",
            "not_allocatable": "{left} of {number} {resource} are allocatable",
            "plugin_stopped": "0 of {number} {resource} are allocatable: no device plugin is registered with kubelet",
            "resource_kept": "0 of {number} {resource} are allocatable: the plugin announces them by another name",
        },
        {
            "unhealthy_gpu": "repair or replace the GPU",
            "unreleased": "end the processes, or wait until the container runtime has; the node's Event names the pod",
            "resource_kept": "after a change of the plugin's configuration wait five minutes, for which kubelet "
            "keeps the number; else read the plugin's log",
        },
    ),
    "C7": Invariant(
        "NVML's numbers are consistent",
        "memory of processes, in use on the GPU, and the GPU's size",
        "UNKNOWN",
        OBSERVE,
        {
            "no_data": "the GPUs' memory is unknown: {why}",
            "no_data_gpu": "the memory of {gpu} is unknown: {why}",
            "used_exceeds_size": "NVML reports more memory in use on {gpu} than it has: {numbers}",
            "processes_exceed_used": "NVML reports more memory in processes on {gpu} than is in use: {numbers}",
        },
        {
            "used_exceeds_size": "check the driver (nvidia-smi, dmesg), and don't rely on NVML's numbers for this GPU",
            "processes_exceed_used": "check the driver (nvidia-smi, dmesg), and don't rely on NVML's numbers for this "
            "GPU",
        },
    ),
    "C8": Invariant(
        "No pod sees further GPUs than its own",
        "NVIDIA_VISIBLE_DEVICES, CUDA_VERSION and mounts in pods' specifications, and the containers' /dev/nvidiaN, "
        "with their allocations",
        "FAIL; WARN for privileged pods, and where NVIDIA's runtime or its configuration decides; UNKNOWN",
        "remove it from the pod; have the cluster reject it (gpushare_admission: deny)",
        {
            "no_data": "the GPUs that containers have are unknown: {why}",
            "set_from_source": "container {container} sets {variable} from a source that isn't read here, so its GPUs "
            "are unknown",
            "set_and_privileged": "container {container} sets {variable} to {value} and is privileged, so it has "
            "access to every GPU",
            "privileged": "container {container} is privileged, so it has access to every GPU of its node, whatever "
            "the pod requests",
            "overrides_allocation": "container {container} sets {variable} to {value}, so it has access to other GPUs "
            "than those allocated to it",
            "without_request": "container {container} sets {variable} to {value} and requests no GPU; runtime class "
            "{runtime_class} gives it access to GPUs",
            "default_runtime": "container {container} sets {variable} to {value} and requests no GPU; where NVIDIA's "
            "runtime is the default, it has access to GPUs",
            "device_mount": "container {container} mounts {paths}; where NVIDIA's toolkit accepts volume mounts, it "
            "has access to the GPUs that these name",
            "other_devices": "the pod has {others}, and was allocated {granted}",
            "allocation_unknown": "the pod has {devices}, and its allocation is unknown",
            "devices_unknown": "the pod has {devices}, and which GPUs these are is unknown: {why}",
            "resource_claim": "the pod has {devices} and a resource claim (DRA) of another driver, which isn't checked "
            "here",
        },
        {
            "no_data": OBSERVE,
            "privileged": "remove securityContext.privileged (Pod Security's baseline refuses it); add the namespace "
            "of nodes' own components to gpushare_admission_exempt_namespaces",
            "other_devices": "find what names them: its environment, its image's (NVIDIA_VISIBLE_DEVICES, "
            "CUDA_VERSION), a mount or an annotation; toolkit_accept_unprivileged: false stops environments and images",
            "resource_claim": "compare the pod's ResourceClaims with the GPUs",
        },
    ),
    "C9": Invariant(
        "Every node with GPUs is ready, its GPUs are registered with their NVSwitches, and its machine was observed",
        "the API's nodes, their condition Ready, the machines' evidence, and NVML's state of the fabric",
        "FAIL not ready; WARN for a GPU that doesn't register; UNKNOWN",
        "delete the pod, unless the node comes back",
        {
            "unknown_node": "there is evidence of this machine, and the API has no such node",
            "unreadable_api": "the API's answer can't be read: {why}",
            "unreadable_node": "the node's data can't be read: {why}",
            "orphaned_pod": "the pod holds GPUs of node {node}, which isn't in the API",
            "not_ready": "the node isn't ready (condition Ready: {ready}), so the state of its pods' GPUs is unknown",
            "not_observed": "the node's machine wasn't observed in this run",
            "unreachable": "the node's machine couldn't be observed: {why}",
            "unregistered": "GPU {card} ({uuid}) isn't registered with its NVSwitches ({state}): CUDA fails on it with "
            "error 802",
            "not_registering": "GPU {card} ({uuid}) hasn't begun to register with its NVSwitches: unless its NVLinks "
            "are off, CUDA fails on it with error 802",
        },
        {
            "unknown_node": "add the node to the cluster again",
            "unreadable_api": "find out which server answers",
            "not_ready": "find out why kubelet doesn't report to the API server",
            "unregistered": "run 'systemctl status nvidia-fabricmanager' on the node; where the NVSwitches are a "
            "hypervisor's or of other trays of a rack, look at the fabric manager there",
            "not_registering": "start the fabric manager, unless 'nvidia-smi nvlink --status' shows no active link",
        },
    ),
}

CATALOG: dict[str, Invariant] = {
    **COMMON_CHECKS,
    **GPUSHARE_CHECKS,
    **CLAIMS_CHECKS,
    **STACK_CHECKS,
    **KATA_CHECKS,
    **VIRTUAL_CHECKS,
}
