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
        "the functions that role passthrough recorded with sysfs: their ids, drivers, and those of their groups",
        "FAIL; UNKNOWN where the record can't be read",
        AGAIN,
        {
            **UNREADABLE,
            "gone": "{address} is to be a virtual machine's, and another device or none is there",
            "not_bound": "{address} is to be a virtual machine's, and has {driver}",
            "no_group": "{address} has no IOMMU group, so that no virtual machine can have it",
            "not_viable": "IOMMU group {number} of {address} isn't viable: {foreign} have drivers of the host",
        },
        {
            **BACK,
            "gone": "put the card back, or run passthrough.yml with passthrough_state: absent, which forgets it",
            "not_bound": "run passthrough.yml again, which says what has it; where it waits for a reboot, drain and "
            "reboot the node",
            "no_group": "look for what has turned the IOMMU off: the firmware, or the kernel's arguments",
        },
    ),
    "V2": Invariant(
        "Each card for virtual machines is bound at the next boot, too",
        "the recorded functions with the udev rule, and the files that put it into the initramfs",
        "FAIL; UNKNOWN where the record can't be read",
        AGAIN,
        {
            **UNREADABLE,
            "file_missing": "{path} isn't there, and another driver may have the cards at the next boot",
            "not_ruled": "the udev rule lacks {address}, and another driver may have it at the next boot",
        },
        BACK,
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
        "Each card has as many vGPUs as role vgpu recorded",
        "the record's number with mediated devices, and virtual functions that have a type; which types isn't compared",
        "FAIL; UNKNOWN where the record can't be read",
        "run role vgpu again for the node",
        {**UNREADABLE, "count_differs": "{address} has {found} vGPUs, and {wanted} are recorded"},
        BACK,
    ),
}
