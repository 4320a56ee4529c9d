# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of the checks of gpushare: its nodes and pods, and this collection's servers. No I/O."""

from __future__ import annotations

from .invariant import Invariant

STALE_SECONDS = 60

GPUSHARE_CHECKS = {
    "G1": Invariant(
        "The node's GPUs are NVML's",
        "this collection's: each GPU in the node's annotation with NVML by UUID (minor, MiB, units); upstream's: "
        "NVML's index with /dev/nvidiaN, and all GPUs of one size",
        "FAIL; WARN where what the driver keeps of a GPU is announced too",
        "restart the device plugin on the node; it detects the GPUs again",
        {
            "no_data": "the node's GPUs can't be compared with NVML's: {why}",
            "not_in_annotation": "the machine has GPU {uuid}, and the node's annotation doesn't list it",
            "not_on_machine": "the node announces GPU {card} ({uuid}) as healthy, and the machine doesn't have it",
            "unidentified": "whether GPU {card} ({uuid}) exists is unknown: {why}",
            "minor_differs": "GPU {card} is /dev/nvidia{minor}, and the node announces /dev/nvidia{announced}",
            "size_unknown": "the size of GPU {card} can't be compared: {why}",
            "size_differs": "GPU {card} has {mib} MiB, and the node announces {units} units of {announced} MiB",
            "reserve_shared": "the driver keeps {mib} MiB of GPU {card}, and the node announces {units} units of it, "
            "the last of which no pod can allocate",
            "indices_unknown": "the GPUs' indices can't be compared: {why}",
            "index_is_not_minor": "NVML's indices aren't the numbers of /dev/nvidiaN, and upstream's device plugin "
            "takes them for the same: pods get other GPUs than those booked for them",
            "minor_unknown": "the /dev/nvidiaN of {gpu} is unknown",
            "sizes_differ": "the GPUs differ in size, and upstream's device plugin counts each as large as the first",
        },
        {
            "reserve_shared": "it is announced no more once the pods that hold the GPU's last units are gone",
            "index_is_not_minor": "don't use upstream's device plugin on this node",
            "sizes_differ": "don't use upstream's device plugin on this node",
        },
    ),
    "G2": Invariant(
        "The node announces what its GPUs hold",
        "gpu-mem and gpu-count with the sum of the annotation's GPUs, or number times first GPU (upstream's)",
        "FAIL",
        "restart the device plugin on the node; it detects the GPUs again",
        {
            "no_data": "the announced resources ({announced}) can't be compared: {why}",
            "annotation_unreadable": "the announced resources ({announced}) can't be compared: {why}",
            "capacity_differs": "the node announces {announced}, and its annotation lists {expected}",
            "allocatable_exceeds_healthy": "kubelet can allocate {left} units, and the node's healthy GPUs hold "
            "{healthy}",
            "capacity_is_not_nvmls": "the node announces {announced}, and NVML lists {expected}",
        },
        {
            "annotation_unreadable": "restart the device plugin on the node; it detects the GPUs again",
            "capacity_is_not_nvmls": "restart the device plugin; where it was removed, remove its resources from the "
            "node's status",
        },
    ),
    "G3": Invariant(
        "Every pod with units has annotations that name its GPU",
        "IDX (and card-indices), POD, DEV and ASSUME_TIME with the pod's requests and the node's GPUs",
        "FAIL",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "bypassed_extender": "the pod holds {units}, and no annotation names its GPU: it was bound without the "
            "extender (spec.nodeName was set, or scheduler {scheduler} doesn't call it)",
            "unknown_gpu": "{annotation}={value} is no GPU of the node, which has {gpus}",
            "indices_invalid": "{annotation}={value} contradicts the pod's other annotations",
            "value_missing": "{annotation} is missing, and should be {expected}",
            "value_differs": "{annotation} is {value}, and should be {expected}",
            "assume_time_invalid": "{annotation}={value} is not a time",
        },
    ),
    "G4": Invariant(
        "Every running pod is marked as assigned",
        "ASSIGNED of running pods; upstream's plugin needn't set it on a node of one GPU if kubelet has an entry",
        "FAIL",
        "read the device plugin's log: it may not update pods, or allocated to another pod of this size",
        {
            "no_data": "the pod runs and isn't marked as assigned, which is right if kubelet has an allocation: {why}",
            "not_assigned": "the pod runs, and {annotation} is {value}",
        },
    ),
    "G5": Invariant(
        "No pod waits for the GPU that was chosen for it",
        f"age of ASSUME_TIME of pods that are Pending and not assigned: {STALE_SECONDS} s at most",
        "FAIL",
        "read the logs of kubelet and of the device plugin on the node",
        {"stale_assumption": "a GPU was chosen for the pod {age} s ago, and kubelet hasn't allocated it"},
    ),
    "G6": Invariant(
        "No GPU is overcommitted",
        "units of all unfinished pods, terminating ones too, with the GPU's",
        "FAIL; WARN where only terminating pods exceed it",
        "delete a pod that uses this GPU; restart the extender, which placed them",
        {
            "gpus_unknown": "whether the units of {pods} fit is unknown: {why}",
            "unplaced": "the GPU of {pods} is unknown, so the sums of this node's GPUs are incomplete",
            "overcommitted": "pods hold {held} units of GPU {card}, which has {units}",
            "overcommitted_by_terminating": "pods hold {held} units of GPU {card}, which has {units}: upstream's "
            "extender counts the share of terminating pods as free",
        },
        {
            "gpus_unknown": "restart the device plugin on the node; it detects the GPUs again",
            "unplaced": "see check G3",
            "overcommitted_by_terminating": "wait until they are gone; their processes may still hold memory",
        },
    ),
    "G7": Invariant(
        "kubelet allocated the GPU in its pod's annotations to every container",
        "the answer in kubelet's checkpoint (IDX, NVIDIA_VISIBLE_DEVICES, CDI devices, CONTAINER; without upstream's "
        "the device IDs too) with the annotations and NVML's UUIDs",
        "FAIL; WARN for several containers with upstream's plugin",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "no_data": "the GPUs that kubelet allocated to {pods} are unknown: {why}",
            "several_containers": "several of the pod's containers request units, which upstream's device plugin "
            "can't match",
            "undecodable": "the device plugin's answer for container {container} is unknown: {why}",
            "no_gpu_found": "the device plugin found no GPU for container {container} ({value}): it can't start",
            "ids_unknown": "the device IDs of container {container} are unknown",
            "unknown_ids": "container {container} has device IDs of no GPU of the node ({ids})",
            "other_gpu_allocated": "kubelet allocated units of {held} to container {container}, and the pod's "
            "annotations name GPU {gpus}",
            "other_index": "container {container} got GPU {value}, and the pod's annotation names {expected}: another "
            "pod of this size got its GPU, or the annotation was edited",
            "index_unknown": "which GPU has index {index} is unknown: {why}",
            "unresolved": "the device plugin's answer for container {container} names no GPU: {value}",
            "no_uuid": "GPU {gpus} has no UUID to compare with",
            "other_gpu_visible": "container {container} has access to {visible}, and {expected} is booked for it",
            "other_units": "container {container} got {value} units and requests {expected}",
        },
        {
            "several_containers": "request all units in one container",
            "other_gpu_allocated": "don't edit these annotations; the device plugin corrects them when it reconciles "
            "the pod",
        },
    ),
    "G8": Invariant(
        "kubelet allocated as many units as containers request",
        "device IDs in the checkpoint and in PodResources with each container's request",
        "FAIL",
        "delete the pod, so that a new one is scheduled and admitted",
        {
            "no_data": "kubelet's allocations to {pods} are unknown: {why}",
            "count_differs": "container {container} requests {units} units, and kubelet has allocated another number",
        },
    ),
    "G9": Invariant(
        "No pod uses more than its share",
        "memory of the pod's processes and of its control groups with its units, per GPU; the driver's limits too",
        "WARN; FAIL where the node reports that limits are enforced",
        "reduce the program's memory or request more; enforced limits need driver 615 and cgroup v2",
        {
            "no_data": "the memory that {pods} use is unknown: {why}",
            "usage_unknown": "the memory that the pod uses of {gpu} is unknown: NVML reports N/A",
            "over_share": "the pod uses {used} MiB of {gpu}, and its share is {share} MiB; limits aren't enforced",
            "over_enforced_share": "the pod uses {used} MiB of {gpu}, and its share is {share} MiB, although limits "
            "are enforced here",
            "limit_raised": "the pod's limit on {gpu} is {limit} MiB, and its share {share} MiB",
            "limit_missing": "limits are enforced here, and the driver has none for the pod on {gpu}",
        },
        {
            "over_enforced_share": "delete the pod; read the device plugin's log",
            "limit_raised": "find out who raised it: the pod is privileged or has SYS_ADMIN; the device plugin "
            "restores the limit",
            "limit_missing": "read the device plugin's log",
        },
    ),
    "G10": Invariant(
        "The extender's cache matches the annotations",
        "its /inspect, pod by pod and GPU by GPU, with annotations and the node's GPUs; without pods that come or go",
        "FAIL; WARN where upstream's hasn't cached a node yet; UNKNOWN where no extender answered",
        "restart the extender: its cache is out of date",
        {
            "not_queried": "no extender was queried",
            "no_answer": "extender {extender_name} has no answer: {why}",
            "unreadable": "the answer of extender {extender_name} can't be read: {why}",
            "unreadable_answers": "the extenders' answers can't be read: {why}",
            "node_unknown": "extender {extender_name} doesn't know the node",
            "node_not_cached": "extender {extender_name} hasn't cached the node yet, which has {pods}",
            "size_differs": "extender {extender_name} counts {cached} units for GPU {card}, and the node announces "
            "{units}",
            "pod_differs": "extender {extender_name} counts {cached} for the pod, and its annotations name {actual}",
            "pod_gone": "extender {extender_name} counts {cached} for this pod, which holds nothing on the node",
        },
        {
            "not_queried": "pass the answers of /gpushare-scheduler/inspect as extender",
            "no_answer": "read the extender's log on its node",
            "unreadable": "restart the extender: its cache is out of date",
            "unreadable_answers": "read the extenders' logs on the control planes",
            "node_not_cached": "schedule a GPU pod: upstream's extender caches a node with the first request for it",
        },
    ),
    "G11": Invariant(
        "Unhealthy GPUs get no pods",
        "ConfigMap unhealthy-gpu-<node> and the annotation's unhealthy GPUs with the pods' GPUs",
        "FAIL unreadable, or placed later; WARN still held",
        "write the GPUs' numbers with commas and nothing else, or delete the ConfigMap",
        {
            "configmaps_unavailable": "the unhealthy GPUs in kube-system's ConfigMaps are unknown: {why}",
            "configmap_invalid": "ConfigMap {name} has gpus: {value}, which isn't a list of the node's GPUs; "
            "upstream's extender reads it as GPU 0",
            "placed_on_unhealthy": "GPU {card} was allocated to the pod after it was marked as unhealthy ({reason})",
            "holds_unhealthy": "the pod holds GPU {card}, which is unhealthy: {reason}",
        },
        {
            "configmaps_unavailable": "let this user list ConfigMaps of kube-system",
            "placed_on_unhealthy": "restart the extender: it doesn't read the ConfigMap",
            "holds_unhealthy": "delete the pod, so that a new one gets another GPU",
        },
    ),
    "G12": Invariant(
        "Pods with units have a scheduler that calls the extender",
        "schedulerName with the option schedulers; which client set nodeName",
        "FAIL; WARN without any scheduler",
        "set the pod's schedulerName, or add this scheduler to schedulers if it calls the extender",
        {
            "other_scheduler": "the pod's scheduler is {scheduler}, which isn't known to call the extender ({allowed} "
            "are)",
            "bypassed_scheduler": "the pod was created with spec.nodeName, so no extender checked whether a GPU has "
            "enough free units",
        },
        {"bypassed_scheduler": "create it without nodeName, and with a nodeSelector if it needs this node"},
    ),
    "S1": Invariant(
        "The extender and the device plugins are ready, or gpushare-dra-templates and the DRA drivers",
        "the servers' pods with the control plane's nodes and the labelled GPU nodes",
        "FAIL; WARN where a Deployment has fewer ready pods than it wants; UNKNOWN where the scheduler's set-up or "
        "its machines are unknown",
        "run site.yml again",
        {
            "not_checked": "gpushare's servers weren't checked, since how this cluster runs its scheduler is unknown: "
            "{why}",
            "no_control_plane": "no extender was checked: scheduler_mode is {mode}, and no machine of the control "
            "plane is known",
            "not_running": "{server} doesn't run on {node}",
            "not_ready": "{server} isn't ready on {node}: {why}",
            "kept_away": "{server} doesn't run on {node}, which has {why}, and its pods don't tolerate that",
            "not_running_anywhere": "{server} isn't ready: it has no pod",
            "not_ready_anywhere": "{server} isn't ready: {why}",
            "fewer_ready": "{server} has a pod that is ready, and lacks others: {why}",
            "wanted_unknown": "{server} has a pod that is ready, and how many it should have is unknown: {why}",
        },
        {
            "not_running": "read the Events of its DaemonSet, and see that the node has the labels by which that "
            "selects nodes; then run site.yml again",
            "kept_away": "leave gpushare_tolerations unset, which tolerates every taint, or add this one; then run "
            "site.yml again",
            "not_running_anywhere": "read the Events of its Deployment and of that one's ReplicaSet; then run site.yml "
            "again",
            "fewer_ready": "read the Events of its Deployment and pods: nodes may be full, cordoned or tainted, or a "
            "quota may refuse the pods",
            "wanted_unknown": "see that its Deployment exists, and that this account may get it",
            "not_checked": "add the control plane's machines to the inventory's group control_plane, or set "
            "scheduler_mode",
            "no_control_plane": "add the control plane's machines to the inventory's group control_plane",
            "not_ready": "read the pod's log and events; run site.yml again",
            "not_ready_anywhere": "read the pod's log and events; run site.yml again",
        },
    ),
    "S2": Invariant(
        "Every scheduler of GPU pods calls the extender",
        "what each kube-scheduler process has loaded, or where no machine was observed its arguments; on OpenShift the "
        "policy (up to 4.9) or the secondary scheduler's configuration",
        "FAIL; UNKNOWN where neither machine nor API shows it",
        "run site.yml again",
        {
            "no_control_plane": "no scheduler was checked: scheduler_mode is {mode}, and no machine of the control "
            "plane is known",
            "k3s_arguments": "k3s doesn't show its scheduler's arguments in the API",
            "no_scheduler": "no kube-scheduler runs on {node}",
            "own_configuration": "kube-scheduler on {node} has a configuration of its own, and the API doesn't show "
            "whether it has the extender",
            "configuration_lost": "kube-scheduler on {node} has lost the configuration with the extender (an upgrade "
            "may have replaced its manifest), and binds pods without a GPU",
            "older_than_configuration": "kube-scheduler on {node} started before {config} was changed, so it may run "
            "without the extender",
            "loaded_without_extender": "kube-scheduler on {node} runs with {config}, which has no extender for "
            "{resource}, and binds pods without a GPU",
            "openshift_unknown": "the set-up of OpenShift's scheduler is unknown: {why}",
            "policy_unknown": "whether kube-scheduler calls the extender is unknown: {why}",
            "no_policy": "Scheduler/cluster names no policy, so kube-scheduler calls no extender",
            "policy_missing": "Scheduler/cluster names policy {policy}, and {object} doesn't exist",
            "no_extender": "policy {policy} of Scheduler/cluster has no extender for {resource}",
            "run_interrupted": "whether policy {policy} is in effect is unknown: a run that changed it was interrupted",
            "policy_not_shown": "OpenShift {release} doesn't show the policy with which kube-scheduler was started",
            "policy_not_rolled_out": "OpenShift's operator hasn't rolled out policy {policy}: its copy ({object}) "
            "differs",
            "no_scheduler_in_namespace": "no kube-scheduler runs in {namespace}",
            "started_without_policy": "kube-scheduler on {node} was started without --policy-configmap",
            "no_extender_on_node": "no extender is ready on {node}, where kube-scheduler calls one",
            "policy_name_unknown": "the policy that Scheduler/cluster names is unknown: {why}",
            "policy_left": "Scheduler/cluster still names policy {policy}, which degrades OpenShift {release}",
            "secondary_unknown": "whether the secondary scheduler runs is unknown: {why}",
            "secondary_missing": "the secondary scheduler doesn't run: {object} doesn't exist",
            "secondary_not_ready": "the secondary scheduler isn't ready: {why}",
            "secondary_without_extender": "the secondary scheduler's configuration has no extender for {resource}",
        },
        {
            "no_control_plane": "add the control plane's machines to the inventory's group control_plane",
            "k3s_arguments": "compare them with site.yml --check",
            "no_scheduler": "read kubelet's log on {node}",
            "own_configuration": "compare it with site.yml --check",
            "openshift_unknown": "let this user read the object (playbooks/readonly_access.yml), or compare with "
            "site.yml --check",
            "policy_unknown": "let this user read the object (playbooks/readonly_access.yml), or compare with "
            "site.yml --check",
            "run_interrupted": "run site.yml again",
            "policy_not_shown": "compare it with site.yml --check",
            "policy_not_rolled_out": "read the status of ClusterOperator kube-scheduler",
            "no_scheduler_in_namespace": "read the status of ClusterOperator kube-scheduler",
            "started_without_policy": "read the status of ClusterOperator kube-scheduler",
            "policy_name_unknown": "let this user read the object (playbooks/readonly_access.yml), or compare with "
            "site.yml --check",
            "policy_left": "where the policy is this collection's, module openshift_scheduler with state absent "
            "removes it",
            "secondary_unknown": "let this user read the object (playbooks/readonly_access.yml), or compare with "
            "site.yml --check",
            "secondary_not_ready": "read the pod's log and events; run site.yml again",
        },
    ),
    "S3": Invariant(
        "An admission policy covers GPU pods for other schedulers",
        "ValidatingAdmissionPolicy and its binding, beside a scheduler of its own, where the API server has them",
        "FAIL; UNKNOWN where they can't be read",
        "run site.yml again",
        {
            "no_data": "whether an admission policy covers GPU pods is unknown: {why}",
            "missing": "{object} doesn't exist, so a GPU pod for another scheduler is bound without a GPU",
            "other_action": "{object} doesn't {action} what {policy} finds",
        },
        {"no_data": "let this user read the object (playbooks/readonly_access.yml), or compare with site.yml --check"},
    ),
    "S4": Invariant(
        "Every GPU node is in the cluster, has both labels and announces GPUs",
        "the machines with evidence and the labelled nodes with the API's nodes",
        "FAIL; UNKNOWN where no node is known; WARN for the restricted label alone",
        "join the machine to the cluster",
        {
            "not_in_cluster": "node {node} isn't in the cluster",
            "no_gpu_node": "no node was checked: none has a label of gpushare, and no machine of one is known",
            "no_label": "node {node} lacks the label {label}",
            "not_restricted": "node {node} has the label {label} and lacks {restricted}, so no server runs there",
            "restricted_alone": "node {node} has the label {restricted} without its back end's own, which its "
            "kubelet may set: then it gets the account of that one's server",
            "not_announced": "node {node} announces no {resource}",
            "not_offered": "node {node} has no card in a ResourceSlice of {driver}",
        },
        {
            "no_gpu_node": "add the machines to the inventory's group gpu_nodes, or name the nodes in gpushare_nodes",
            "no_label": "run site.yml again",
            "not_restricted": "run site.yml again if the node is in the inventory; the label of another one was set by "
            "somebody else, which its kubelet may: find out who, and remove it",
            "restricted_alone": "run site.yml again if the node is to share its cards, else remove the label",
            "not_announced": "read the device plugin's log on the node; run site.yml again",
            "not_offered": "read the log of gpushare-dra-driver on the node; run site.yml again",
        },
    ),
    "S5": Invariant(
        "NVIDIA's driver enforces the pods' shares",
        "the nodes' annotation on memory limits, or the attribute memoryLimit of the cards in ResourceSlices",
        "WARN",
        "upgrade what the reason names, or accept that pods can use more than their share",
        {
            "not_enforced": "the memory shares of pods on {nodes} aren't enforced: {why}",
            "violated": "a container holds memory of GPU {card} that others were promised ({code}): {why}",
            "unaccounted": "memory of GPU {card} is used beyond its pods' shares ({code}): {why}",
        },
        {
            "violated": "delete the pod, or set gpushare_memory_limit_violation to evict",
            "unaccounted": "end the process that nvidia-smi on the node shows",
        },
    ),
}
