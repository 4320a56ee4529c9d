# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of the checks of pods of Kata. No I/O."""

from __future__ import annotations

from .invariant import Invariant

UNKNOWN = {"unreadable": "what the node has for pods of Kata is unknown: {why}"}
KATA_CHECKS = {
    "K1": Invariant(
        "containerd runs with Kata's runtime, and NVIDIA's isn't its default",
        "containerd's effective configuration, and whether the daemon was started after its files, with the handler",
        "FAIL; UNKNOWN where the machine can't be read",
        "run role kata for the node, which says what it lacks",
        {
            **UNKNOWN,
            "no_handler": "containerd has no runtime {handler}, and no pod of Kata starts; it has {known}",
            "not_loaded": "containerd was started before its files had the runtime {handler}",
            "default_nvidia": "containerd's default runtime is nvidia, and the node has no driver of NVIDIA for pods",
        },
        {"not_loaded": "restart containerd; running pods keep running"},
    ),
    "K2": Invariant(
        "A node announces exactly the cards by whose CDI devices Kata takes them, and VFIO has them",
        "allocatable nvidia.com resources with the devices of the CDI specifications, and these with the IOMMU groups "
        "of the recorded functions; not where the kernel has IOMMUFD, whose names are others",
        "FAIL; UNKNOWN where the machine can't be read",
        "delete the sandbox device plugin's pod on the node, which then looks for cards and writes them again",
        {
            **UNKNOWN,
            "count_differs": "{resource}: {allocatable} are allocatable, and the CDI specification has {devices}",
            "twice": "the CDI specifications have {device} twice, so that none of its file is used",
            "not_bound": "the CDI device {device} is for IOMMU group {group}, of which no recorded card is",
        },
        {"not_bound": "run role passthrough for the node, then role sandbox_device_plugin with step nodes"},
    ),
    "K3": Invariant(
        "Pods of the RuntimeClass can be scheduled on the node",
        "the RuntimeClass's handler and nodeSelector with the node's handler and labels",
        "FAIL; UNKNOWN where the API doesn't tell",
        "run role kata with step nodes, which says which label nobody sets",
        {
            **UNKNOWN,
            "not_read": "RuntimeClasses can't be read: {why}",
            "no_class": "the cluster has no RuntimeClass {name}",
            "class_handler": "RuntimeClass {name} has the handler {found}, and the node has {handler}",
            "not_selected": "RuntimeClass {name} selects nodes with {label}={wanted}, and the node has {found}: "
            "its pods stay Pending",
        },
    ),
}
