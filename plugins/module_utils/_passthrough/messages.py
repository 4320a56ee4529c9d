# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sentences about what refuses, holds or lacks something, by code. Nothing reads them."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject

TEXTS: t.Mapping[str, str] = {
    # Which cards.
    "container": "this is a container, whose PCI devices are its host's: run the role on the host",
    # Where a boot wouldn't bind them, with what to do there.
    "boot_unified": (
        "this machine boots unified kernel images, which contain their initramfs and are signed: put a udev rule with "
        "driver_override for {cards} and the module {modules} into the image by its own tool (dracut --uefi, ukify), "
        "and set passthrough_state to external"
    ),
    "boot_sdbootutil": (
        "sdbootutil makes this machine's initramfs, and may have sealed disk keys to it: write a udev rule with "
        "driver_override for {cards} and a file of /etc/dracut.conf.d with add_drivers {modules} and install_items, "
        "run sdbootutil mkinitrd, and set passthrough_state to external"
    ),
    "boot_transactional": (
        "this machine's root is read-only, and its initramfs is a part of a snapshot: write a udev rule with "
        "driver_override for {cards} and a file of /etc/dracut.conf.d with add_drivers {modules} and install_items, "
        "run transactional-update initrd, reboot, and set passthrough_state to external"
    ),
    "boot_ostree": (
        "this machine's initramfs is a part of its ostree deployment: write a udev rule with driver_override for "
        "{cards}, run rpm-ostree initramfs-etc --track=PATH for it and rpm-ostree initramfs --enable "
        "--arg=--add-drivers={modules}, reboot, and set passthrough_state to external"
    ),
    "boot_machine-config": (
        "OpenShift's Machine Config Operator owns this machine's files: bind {cards} by a MachineConfig or by the GPU "
        "Operator's vfio-manager (label nvidia.com/gpu.workload.config=vm-passthrough), and set passthrough_state to "
        "external"
    ),
    "boot_image": (
        "this machine's system is an image with an initramfs of its own: have the image bind {cards} to {modules}, "
        "and set passthrough_state to external"
    ),
    "no_cards": "this machine has no NVIDIA card that could be given to virtual machines",
    "unknown_card": "{address} in passthrough_cards is no NVIDIA card of this machine",
    "unknown_uuid": (
        "no card here is known by {uuid}: name it by its PCI address, or run this while NVIDIA's driver has it"
    ),
    "virtual_function": "{address} is a virtual function of the card {physical}: name a whole card",
    "excluded": "{address} is named in gpu_exclude by {entry}, and is left alone",
    "moved": (
        "{address} was {recorded} when it was recorded and is {found} now: a card was moved or replaced; run it with "
        "passthrough_state: absent first, which forgets it"
    ),
    "elsewhere": (
        "the card {uuid} was at {recorded} when it was recorded and is at {address} now: run it with "
        "passthrough_state: absent first, which forgets it"
    ),
    # What the machine lacks.
    "no_iommu": (
        "{address} has no IOMMU group: switch on VT-d or AMD-Vi in the firmware, and Intel's IOMMU by the kernel "
        "argument intel_iommu=on"
    ),
    "foreign_endpoint": (
        "{address} shares its IOMMU group {group} with {foreign} ({ids}, driver {driver}): name that card too, or use "
        "a slot whose bridges have ACS"
    ),
    "display": "{address} is the machine's display: leave it out, or set passthrough_allow_display",
    "usb_devices": (
        "{address} belongs to {card}, and this machine uses the USB devices behind it ({devices}): unplug them, or "
        "leave the card out"
    ),
    "virtual_functions": "{address} has {count} virtual functions: remove them first (sriov_numvfs)",
    "mdevs": "{address} has mediated devices ({uuids}): remove them first",
    "nvswitch_partial": "{address} isn't in passthrough_cards: with its NVSwitches all cards of a board go together",
    "nvswitch_mode": (
        "{address} is connected by NVSwitches that stay on this machine, whose fabric manager has FABRIC_MODE={mode}: "
        "it has to be 1 (shared NVSwitch), or passthrough_nvswitch with-cards, with all cards"
    ),
    "owned": "the GPU Operator's vfio-manager binds this node's cards ({path}): set passthrough_state to external",
    # What holds a card.
    "held_by_pod": "pod {pod} has {address}",
    "pods_unknown": "it can't be found out which pods have {address}: {problem}",
    "held_by_process": "process {pid} ({command}) has {address} open",
    "held_by_dcgm": "DCGM ({command}, process {pid}) has {address} open: stop it",
    "held_by_persistenced": "nvidia-persistenced (process {pid}) has {address} open: stop it",
    "persistence_mode": (
        "{address} has persistence mode, which keeps it in use without a process: nvidia-smi -i {address} -pm 0"
    ),
    "persistence_unknown": (
        "nvidia-smi doesn't tell whether {address} has persistence mode, which keeps it in use without a process"
    ),
    "held_by_vm": "process {pid} ({command}) has {address} by VFIO: it is a virtual machine's",
    "console": "{address} shows the kernel's framebuffer console",
    # What was tried.
    "unbind_timeout": (
        "driver {driver} didn't give {address} up within {seconds} s: process {pid} waits for it in the kernel, until "
        "whatever uses it ends"
    ),
    "write_refused": "the kernel refused to write {value} to {path} (error {errno})",
    "no_module": "module {module} can't be loaded: {reason}",
    # What the proof says.
    "not_bound": "{address} has the driver {found} and not {wanted}",
    "override": "{address} may be taken by another driver: its driver_override is {found} and not {wanted}",
    "no_node": "there is no device file of VFIO for {address}",
    "not_viable": "IOMMU group {group} of {address} isn't viable: another driver uses a part of it",
    "viable_unknown": "the kernel doesn't tell whether IOMMU group {group} of {address} is viable",
}


def sentence(row: JsonObject) -> str:
    """Return the sentence of one code with its fields."""
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in row.items()}
    return TEXTS[row["code"]].format(**{name: "none" if value == "" else value for name, value in shown.items()})


def sentences(rows: t.Sequence[JsonObject]) -> str:
    """Return the sentences of several, as one text."""
    return "; ".join(sentence(row) for row in rows)
