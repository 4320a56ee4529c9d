# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and messages of the checks of cards for virtual machines. No I/O."""

from __future__ import annotations

from .invariant import Invariant

AGAIN = "run passthrough.yml again for the node"
BACK = {"unreadable": "put the file back from a backup: it has the cards' state before, and the roles refuse it, too"}
UNREADABLE = {"unreadable": "what virtual machines are to have is unknown: {why}"}
VIRTUAL_CHECKS = {
    "V1": Invariant(
        "Each card for virtual machines is bound to a VFIO driver, and its IOMMU group is viable",
        "the functions that role passthrough recorded with sysfs (their ids and drivers), and the kernel's answer "
        "about each group (VFIO_GROUP_GET_STATUS); a group that a virtual machine has isn't asked about, and passes",
        "FAIL; UNKNOWN where the record can't be read, or the kernel doesn't answer",
        AGAIN,
        {
            **UNREADABLE,
            "gone": "{address} is to be a virtual machine's, and another device or none is there",
            "not_bound": "{address} is to be a virtual machine's, and has {driver}",
            "no_group": "{address} has no IOMMU group, so that no virtual machine can have it",
            "not_viable": "by the kernel IOMMU group {number} of {address} isn't viable; other drivers have {others}",
            "not_asked": "the kernel doesn't say whether IOMMU group {number} of {address} is viable",
        },
        {
            **BACK,
            "gone": "put the card back, or run passthrough.yml with passthrough_state: absent, which forgets it",
            "not_bound": "run passthrough.yml again, which says what has it; where it waits for a reboot, drain and "
            "reboot the node",
            "no_group": "look for what has turned the IOMMU off: the firmware, or the kernel's arguments",
            "not_asked": "look at /dev/vfio on the node: a kernel without files of groups can't be asked before a "
            "virtual machine starts",
        },
    ),
    "V2": Invariant(
        "Each card for virtual machines is bound at the next boot, too",
        "the recorded functions with the udev rule, and the rule and VFIO's modules with the content of the initramfs "
        "of the running and of the newest kernel, by lsinitramfs or lsinitrd",
        "FAIL; UNKNOWN where the record or an initramfs can't be read",
        AGAIN,
        {
            **UNREADABLE,
            "file_missing": "{path} isn't there, and another driver may have the cards at the next boot",
            "not_ruled": "the udev rule lacks {address}, and another driver may have it at the next boot",
            "not_in_image": "{path} lacks the udev rule, and another driver may have the cards at the next boot",
            "module_not_in_image": "{path} lacks {modules}, and another driver may have the cards at the next boot",
            "image_older": "{path} is older than the files that bind the cards, and may contain an older rule",
            "image_unreadable": "{path} can't be read, and what binds the cards at the next boot is unknown",
            "no_image": "no initramfs was seen, and what binds the cards at the next boot is unknown",
        },
        {
            **BACK,
            "image_unreadable": "list it on the node by lsinitramfs or lsinitrd, which says why",
            "no_image": "look whether /boot is mounted, and which initramfs the boot loader takes",
        },
    ),
    "V3": Invariant(
        "Nobody gives pods a card for virtual machines",
        "the recorded cards' UUIDs with the node's annotations and slices, HAMi's register, devices registered with "
        "kubelet, and NVML; allocatable resources where VFIO has all cards",
        "FAIL; UNKNOWN where the record can't be read",
        "restart the device plugin, which then no longer finds the card",
        {
            **UNREADABLE,
            "announced": "{source} has {uuid} for pods, and a virtual machine is to have it",
            "nothing_left": "VFIO has all cards of this node, and {resources} are allocatable",
        },
        {**BACK, "nothing_left": "leave the node out of gpushare_nodes and gpu_backend, or take the cards back"},
    ),
    "V4": Invariant(
        "Each card has the vGPUs that role vgpu recorded, and kubelet's devices for virtual machines exist",
        "the recorded number of each type with mediated devices, and virtual functions that have a type; the IDs that "
        "kubelet has from device plugins with IOMMU groups and mediated devices of the machine, and their types",
        "FAIL; UNKNOWN where the record can't be read, or the name of a type isn't known",
        "run role vgpu again for the node",
        {
            **UNREADABLE,
            "card_gone": "{address} is to have vGPUs, and another device or none is there",
            "vgpus_differ": "{address} has {there} vGPUs of {type}, and {wanted} are recorded",
            "type_unknown": "{address} has {number} vGPUs whose type's name this boot hasn't shown",
            "announced_gone": "kubelet has {id} of {resource} for virtual machines, and the machine has no such device",
            "announced_types": "{resource} has devices of several kinds: {types}",
            "not_announced": "{id} ({type}) is on the machine, and {resource} hasn't it",
        },
        {
            **BACK,
            "card_gone": "put the card back, or run role vgpu with vgpu_state: absent, which forgets it",
            "type_unknown": "compare what nvidia-smi vgpu shows with the layout; names are known again after a boot",
            "announced_gone": "restart the device plugin, or KubeVirt's virt-handler, on the node",
            "announced_types": "give each type a resource of its own in kubevirt_devices, or in the device plugin",
            "not_announced": "restart the device plugin, or KubeVirt's virt-handler, on the node",
        },
    ),
}
