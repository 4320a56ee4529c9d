# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards of virtual machines in the API: names of resources, KubeVirt's pods, Kata's handlers, NVIDIA's slices. No I/O.

Names are those of KubeVirt 1.9, of NVIDIA's kubevirt-gpu-device-plugin 1.6, sandbox-device-plugin 0.0.5 and DRA driver,
and of kata-deploy 4.1. The plugins name a card by the database of PCI ids, as nvidia.com/GA102GL_A10, or by its id, and
a vGPU by its type, as nvidia.com/NVIDIA_A10-12Q.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.types import JsonObject
from .card_exclusion import address_of

# The resource of sandbox-device-plugin, of whatever model a card is.
KATA_RESOURCE = "nvidia.com/pgpu"
# On KubeVirt's pod of a virtual machine, whose owner is a VirtualMachineInstance.
LAUNCHER = ("kubevirt.io", "virt-launcher")
INSTANCE, GROUP = "VirtualMachineInstance", "kubevirt.io/"
API = f"{GROUP}v1"
# API version and kind of RuntimeClasses.
CLASSES = ("node.k8s.io/v1", "RuntimeClass")
# On a node that KubeVirt's virtual machines can run on.
SCHEDULABLE = "kubevirt.io/schedulable"
# NVIDIA's DRA driver, and the type of a device that it gives to virtual machines.
DRIVER, VFIO = "gpu.nvidia.com", "vfio"
# Of a device in its slices; the second one in older releases.
ADDRESSES = ("resource.kubernetes.io/pciBusID", "pcieBusID")
# Who holds a card.
MACHINE, SANDBOX, CONTAINER, UNKNOWN = "virtual_machine", "kata", "container", "unknown"

# Network cards' plugins have names of small letters below nvidia.com, too.
_RESOURCE = re.compile(r"nvidia\.com/[A-Z0-9][A-Za-z0-9._-]*")


def is_resource(name: t.Any) -> bool:
    """Return whether a resource is a card or a vGPU for virtual machines, by its name."""
    if not isinstance(name, str):
        return False
    return name == KATA_RESOURCE or (bool(_RESOURCE.fullmatch(name)) and "NVSWITCH" not in name.upper())


def is_kata(handler: str) -> bool:
    """Return whether a RuntimeClass's handler is one of Kata's."""
    return handler == "kata" or handler.startswith("kata-")


def instance_of(metadata: JsonObject) -> str:
    """Return the name of KubeVirt's VirtualMachineInstance whose pod it is; empty for any other pod.

    :param metadata: of the pod. Its creator may write there what he likes.
    """
    labels = metadata.get("labels") or {}
    if labels.get(LAUNCHER[0]) != LAUNCHER[1]:
        return ""
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("kind") == INSTANCE and str(owner.get("apiVersion") or "").startswith(GROUP):
            return str(owner.get("name") or "")
    return ""


@dataclasses.dataclass(frozen=True)
class Device:
    """A card in a slice of NVIDIA's DRA driver, which has each twice: for containers and for virtual machines.

    :param address: on PCI; empty where the slice doesn't have it.
    :param model: as the driver names it.
    :param device: vendor and device, as 10de:2236.
    """

    name: str
    address: str
    vfio: bool
    model: str
    device: str


def device_of(raw: JsonObject) -> Device:
    """Parse a device of a slice."""
    attributes = raw.get("attributes") or {}

    def text(name: str) -> str:
        return str((attributes.get(name) or {}).get("string") or "")

    ids = [text(name).lower().removeprefix("0x") for name in ("vendorID", "deviceID")]
    return Device(
        str(raw["name"]),
        next((address for address in map(address_of, map(text, ADDRESSES)) if address), ""),
        text("type") == VFIO,
        text("productName"),
        ":".join(ids) if all(ids) else "",
    )
