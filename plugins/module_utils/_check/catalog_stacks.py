# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of the checks of HAMi and of NVIDIA's device plugin. No I/O."""

from __future__ import annotations

from .invariant import Invariant

LOCK_SECONDS = 300
BIND_SECONDS = 60
# HAMi's accounting differs from NVML's by at most so much, and by a context outside of it.
PERCENT, CONTEXT_MIB = 5, 600

STACK_CHECKS = {
    "H1": Invariant(
        "The register lists NVML's GPUs",
        "the node's register in either format (UUID, devmem, count, health) with NVML's GPUs",
        "FAIL; WARN unhealthy, or not registered",
        "restart HAMi's device plugin on the node, and read its log",
        {
            "no_data": "the node's register can't be compared with NVML: {why}",
            "unidentified": "whether {uuid} exists is unknown: {why}",
            "not_on_machine": "the register lists {uuid}, and the machine doesn't have it",
            "unhealthy": "{uuid} is registered as unhealthy",
            "size_unknown": "the size of {uuid} can't be compared: {why}",
            "memory_too_small": "the register lists {registered} MiB for {uuid}, which has {mib}",
            "scaled_differently": "the register scales the GPUs' memory by different factors",
            "split_differently": "the register splits the GPUs into different numbers of slots",
            "not_registered": "{gpu} isn't in the register",
        },
        {
            "no_data": "restart HAMi's device plugin on the node, and read its log",
            "unhealthy": "repair or replace the GPU",
            "not_registered": "right if the node's configuration filters it out; otherwise restart HAMi's device "
            "plugin",
        },
    ),
    "H2": Invariant(
        "kubelet has as many slots as the register",
        "capacity and allocatable of nvidia.com/gpu with the register's counts",
        "FAIL",
        "restart HAMi's device plugin on the node, and read its log",
        {
            "no_data": "the announced slots can't be compared with the register: {why}",
            "count_differs": "kubelet can allocate {left} of {capacity} slots, and the register lists {healthy} of "
            "{total}",
        },
        {"no_data": "restart HAMi's device plugin on the node, and read its log"},
    ),
    "H3": Invariant(
        "Every bound pod has the GPUs that its containers request",
        "vgpu-node, number of containers and GPUs in vgpu-devices-allocated, with the pod and the register",
        "FAIL; UNKNOWN where it can't be read",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "unreadable": "the GPUs of the pod are unknown: {why}",
            "not_scheduled": "the pod requests a GPU, and HAMi's scheduler didn't place it (scheduler {scheduler})",
            "other_node": "HAMi chose node {chosen} for the pod, and it runs on {node}",
            "other_containers": "the annotation lists {number}, which aren't the pod's",
            "count_differs": "container {container} requests {requested}, and {allocated} were allocated",
            "duplicate_gpu": "one GPU was allocated twice to container {container}",
            "unknown_gpu": "{uuids} was allocated to the pod, and the node's register doesn't list it",
        },
        {"unreadable": "delete the pod, so that a new one is scheduled and admitted"},
    ),
    "H4": Invariant(
        "Every bound pod soon gets its GPUs",
        f"bind-phase, and what is left to allocate, {BIND_SECONDS} s after bind-time",
        "FAIL",
        "read the log of HAMi's device plugin on the node; delete the pod",
        {
            "allocation_failed": "HAMi's device plugin failed to allocate the pod's GPUs",
            "not_allocated": "the pod was bound {age} s ago, and its GPUs aren't allocated yet",
        },
    ),
    "H5": Invariant(
        "The pods' parts of a GPU fit on it",
        "sums of MiB, cores and slots by HAMi's rule with the register, and MiB with NVML's",
        "FAIL; WARN oversubscribed",
        "delete a pod that uses this GPU; restart HAMi's scheduler",
        {
            "no_data": "whether the pods' parts fit is unknown: {why}",
            "unreadable": "the pod's parts are unknown, so the sums of this node's GPUs are incomplete: {why}",
            "memory_overcommitted": "pods hold {held} MiB of GPU {uuid}, which has {limit}",
            "cores_overcommitted": "pods hold {held} % of the cores of GPU {uuid}, which has {limit}",
            "slots_overcommitted": "{held} containers share GPU {uuid}, which has {limit} slots",
            "not_exclusive": "a pod holds all cores of GPU {uuid} exclusively, and other pods hold parts of it",
            "oversubscribed": "pods hold {held} MiB of GPU {uuid}, which physically has {limit}: memory is "
            "oversubscribed",
        },
        {
            "no_data": "restart HAMi's device plugin on the node, and read its log",
            "unreadable": "see check H3",
            "oversubscribed": "set deviceMemoryScaling to 1 unless that is intended",
        },
    ),
    "H6": Invariant(
        "kubelet allocated what HAMi chose to every container",
        "NVIDIA_VISIBLE_DEVICES, CUDA_DEVICE_MEMORY_LIMIT_i and CUDA_DEVICE_SM_LIMIT in kubelet's checkpoint with the "
        "annotation",
        "FAIL; WARN where kubelet's preference decided",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "no_data": "the GPUs that kubelet allocated to {pods} are unknown: {why}",
            "no_data_container": "container {container} can't be compared: {why}",
            "kubelet_preference": "container {container} has access to {visible}, and HAMi chose others: kubelet's "
            "preferred allocation decided",
            "other_gpu": "container {container} has access to {visible}, and HAMi chose others",
            "memory_limit_differs": "container {container} is limited to {limit} of GPU {position}, and {mib} MiB "
            "were allocated",
            "core_limit_differs": "container {container} is limited to {limit} % of the cores, and {cores} were "
            "allocated",
        },
        {"kubelet_preference": "disable preferred allocation"},
    ),
    "H7": Invariant(
        "No node stays locked",
        f"the annotation's age ({LOCK_SECONDS} s at most) and its pod",
        "FAIL",
        "remove the annotation hami.io/mutex.lock from the node: no GPU pod can be bound to it",
        {
            "time_unreadable": "the node's lock has no readable time: {value}",
            "lock_expired": "the node has been locked for {age} s",
            "lock_without_pod": "the node is locked for pod {owner}, which doesn't exist",
        },
        {"time_unreadable": "remove the annotation hami.io/mutex.lock from the node: no GPU pod can be bound to it"},
    ),
    "H8": Invariant(
        "HAMi's library is loaded in every process on a GPU",
        "memory maps of the pods' processes; CUDA_DISABLE_CONTROL",
        "FAIL; WARN disabled by the pod",
        "reject this variable by an admission policy",
        {
            "no_data": "whether the processes of {pods} have HAMi's library is unknown: {why}",
            "disabled": "container {containers} disables HAMi's limits (CUDA_DISABLE_CONTROL)",
            "unknown": "whether HAMi's library is loaded in {process} is unknown",
            "not_loaded": "{process} runs without HAMi's library, so its limits aren't enforced",
        },
        {
            "not_loaded": "check that /etc/ld.so.preload is in the container and that libvgpu.so isn't empty on the "
            "node; statically linked programs and those started over ssh or sudo don't load it"
        },
    ),
    "H9": Invariant(
        "No pod uses more than its part",
        f"memory of the pod's processes with its part, plus {PERCENT} % and {CONTEXT_MIB} MiB for each context",
        "FAIL; WARN where memory is scaled",
        "see check H8; delete the pod",
        {
            "no_data": "the memory that {pods} use is unknown: {why}",
            "usage_unknown": "the memory that the pod uses of {gpu} is unknown: NVML reports N/A",
            "over_part": "the pod uses {used} MiB of {gpu}, and its part is {mib} MiB",
        },
    ),
    "H10": Invariant(
        "Pods with HAMi's resources have its scheduler",
        "schedulerName with the option hami_schedulers, also of pods that kubelet refused on a node of HAMi",
        "FAIL",
        "check the endpoints and the certificate of the webhook's Service; delete the pod, so that it is created again",
        {
            "other_scheduler": "the pod's scheduler is {scheduler}, and not HAMi's: HAMi's webhook didn't change "
            "the pod",
            "refused": "kubelet refused the pod: scheduler {scheduler} placed it, and not HAMi's, because HAMi's "
            "webhook didn't change the pod",
        },
    ),
    "H11": Invariant(
        "The MIG devices that HAMi chose exist, each for one pod",
        "vgpu-mig-allocations (UUID, GI, CI) with NVML",
        "FAIL",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "unreadable": "the MIG devices of the pod are unknown: {why}",
            "no_data": "whether the pod's MIG device exists is unknown: {why}",
            "device_missing": "NVML doesn't list the MIG device that was allocated to the pod",
            "shared": "the pod's GPU instance was also allocated to {other}",
        },
        {"unreadable": "delete the pod, so that a new one is scheduled and admitted"},
    ),
    "N1": Invariant(
        "The node announces its GPUs, times replicas",
        "capacity with NVML's GPUs and MIG devices and the labels of GPU feature discovery",
        "FAIL",
        "restart NVIDIA's device plugin on the node, and read its log",
        {
            "no_data": "the announced resources ({announced}) can't be compared: {why}",
            "capacity_differs": "the node announces {announced}, and has {gpus} and {devices}, each for {replicas}",
        },
    ),
    "N2": Invariant(
        "Each slot is allocated to one container",
        "device IDs in kubelet's checkpoint, of all pods of the node",
        "FAIL",
        "delete the pod, so that kubelet admits a new one",
        {
            "no_data": "the devices of {pods} are unknown: {why}",
            "ids_unknown": "the devices of container {container} are unknown",
            "allocated_twice": "{device} is allocated to the pod and to {other}",
            "no_such_slot": "{device} is allocated to the pod, and a GPU has {slots}",
        },
        {"no_such_slot": "restart NVIDIA's device plugin on the node, and read its log"},
    ),
    "N3": Invariant(
        "Every container has access to the devices that kubelet allocated to it",
        "NVIDIA_VISIBLE_DEVICES or CDI devices in the device plugin's answer with kubelet's device IDs",
        "FAIL",
        "delete the pod, so that kubelet admits a new one",
        {
            "no_data": "the devices that container {container} has access to are unknown: {why}",
            "other_device": "container {container} has access to {visible}, and kubelet allocated {allocated} to it",
        },
    ),
    "N4": Invariant(
        "No container holds several slots of shared GPUs",
        "number of device IDs where GPUs are shared",
        "WARN",
        "have the container request one",
        {
            "several_slots_of_mps": "container {container} holds {number} slots of shared GPUs, and its programs "
            "have one slot's memory each",
            "several_slots": "container {container} holds {number} slots of shared GPUs, which give it no more time "
            "than one does",
        },
        {
            code: "set failRequestsGreaterThanOne in the device plugin's configuration"
            for code in ("several_slots", "several_slots_of_mps")
        },
    ),
    "N5": Invariant(
        "With time-slicing, pods use a fair share at most",
        "memory of the pod's processes with the GPU's by its replicas",
        "WARN",
        "use MPS, MIG or gpushare's memory limits where memory must be limited",
        {
            "no_data": "the memory that pods use of the shared GPUs is unknown: {why}",
            "usage_unknown": "the memory that the pod uses of {gpu} is unknown: NVML reports N/A",
            "over_fair_share": "the pod uses {used} MiB of {gpu}, and its fair share is {fair}; time-slicing doesn't "
            "limit memory",
        },
    ),
    "N6": Invariant(
        "The pods' processes use MPS",
        "compute mode, nvidia-cuda-mps-server, types and memory of the processes, CUDA_MPS_PIPE_DIRECTORY in "
        "kubelet's answer",
        "FAIL",
        "restart the MPS control daemon on the node",
        {
            "no_data": "whether MPS is in use is unknown: {why}",
            "pipe_missing": "container {container} has no CUDA_MPS_PIPE_DIRECTORY, so it can't use MPS",
            "compute_mode": "{gpu} is in compute mode {mode}, so programs can use it without MPS",
            "compute_mode_unknown": "the compute mode of {gpu} is unknown",
            "processes_unknown": "the MPS clients of {gpu} are unknown: NVML doesn't list its processes",
            "server_missing": "programs use {gpu}, and nvidia-cuda-mps-server doesn't run on it",
            "type_unknown": "whether {process} uses {gpu} by MPS is unknown",
            "without_mps": "{process} uses {gpu} without MPS",
            "usage_unknown": "the memory that {process} uses is unknown: NVML reports N/A",
            "over_limit": "{process} uses {used} MiB, and MPS allows it {most_mib}",
        },
        {
            "pipe_missing": "restart NVIDIA's device plugin on the node, and read its log",
            "compute_mode_unknown": "restart the MPS control daemon on the node",
            "without_mps": "delete the pod, so that kubelet admits a new one",
            "over_limit": "delete the pod, so that kubelet admits a new one",
        },
    ),
    "N7": Invariant(
        "MIG is as requested, and every process uses its pod's device",
        "nvidia.com/mig.config.state, and the processes' instances with kubelet's allocation",
        "FAIL; WARN while it changes",
        "read the MIG manager's log",
        {
            "layout_pending": "the requested MIG layout isn't applied yet (nvidia.com/mig.config.state={state})",
            "layout_failed": "the requested MIG layout isn't applied (nvidia.com/mig.config.state={state})",
            "no_data": "the processes of the MIG devices are unknown: {why}",
            "device_unknown": "the MIG device of {process} is unknown",
            "other_device": "{process} uses {device}, and {granted} was allocated to its pod",
        },
        {"other_device": "delete the pod, so that kubelet admits a new one"},
    ),
}
