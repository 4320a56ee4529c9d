# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks V1 to V4 of cards for virtual machines. No I/O."""

from __future__ import annotations

import re

from .._contracts import hami
from .grants import gpu_requests
from .model import BootImage, Device, DividedCard, Node, Snapshot, Virtual
from .parse import join, shorten
from .result import CheckResult

# As device plugins name what they give to virtual machines: by an IOMMU group, or by a mediated device. Cards and
# parts of cards for pods have other IDs (GPU-…, MIG-…).
MACHINES_ID = re.compile(r"\d{1,9}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Of the kernel's answers about a group: a machine that has it is the best proof, and nobody may ask beside it.
HELD, NOT_VIABLE, VIABLE = "held", "not_viable", "viable"


def _of(node: Node, result: CheckResult) -> Virtual:
    """Return what the node's machine has for virtual machines, and report what of it is unknown."""
    virtual = node.virtual or Virtual("", (), None)
    if virtual.problem:
        result.unknown("unreadable", why=virtual.problem, proc=shorten(virtual.problem, 300))
    return virtual


def functions_are_bound(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V1: each recorded function has a VFIO driver, and a viable group by the kernel's word."""
    for function in _of(node, result).functions:
        result.count()
        place = {"key": function.address, "uuid": function.uuid, "address": function.address}
        asked = f", {shorten(function.state)}" if function.state else ""
        shown = f"driver {function.driver or 'none'}, group {function.group or 'none'}{asked}"
        if not function.present:
            result.fail("gone", proc=shown, **place)
        elif not function.group:
            result.fail("no_group", proc=shown, **place)
        elif "vfio" not in function.driver:
            driver = f"driver {shorten(function.driver)}" if function.driver else "no driver"
            result.fail("not_bound", proc=shown, driver=driver, **place)
        elif function.state == NOT_VIABLE:
            others = join(function.others) if function.others else "no function that is seen here"
            result.fail("not_viable", proc=shown, number=function.group, others=others, **place)
        elif function.state not in (VIABLE, HELD):
            result.unknown("not_asked", proc=shown, number=function.group, **place)


def binding_survives_a_boot(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V2: the files that bind at boot are there with each recorded function, and in the initramfs."""
    virtual = _of(node, result)
    result.count(len(virtual.functions) + len(virtual.images))
    for path in virtual.missing:
        result.fail("file_missing", key=path, path=shorten(path, 200), proc=f"{shorten(path, 200)}: none")
    for function in () if virtual.missing else virtual.functions:
        if not function.ruled:
            shown = f"no line of the rule has {function.address}"
            result.fail("not_ruled", key=function.address, address=function.address, proc=shown)
    if virtual.functions and not virtual.images:
        result.unknown("no_image", proc="/boot: no initramfs of the running or the newest kernel")
    for image in virtual.images:
        _image(image, result)


def _image(image: BootImage, result: CheckResult) -> None:
    path = shorten(image.path, 200)
    place = {"key": image.path, "path": path}
    if image.rule is None:
        result.unknown("image_unreadable", proc=f"{path}: can't be listed", **place)
    elif not image.rule:
        result.fail("not_in_image", proc=f"{path}: without the rule", **place)
    elif image.lacking:
        modules = join(image.lacking)
        result.fail("module_not_in_image", proc=f"{path}: without {modules}", modules=modules, **place)
    elif not image.newer:
        result.fail("image_older", proc=f"{path}: older than the files", **place)


def nobody_shares_them(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V3: no device plugin, driver or register has a card that is a virtual machine's."""
    virtual = _of(node, result)
    result.count(len(virtual.functions))
    given = {function.uuid.lower(): function.uuid for function in virtual.functions if function.uuid}
    for source, uuids in _announced(node).items():
        for uuid in sorted(given.keys() & {uuid.lower() for uuid in uuids}):
            plane = {"kubelet": "kubelet", "NVML": "nvml"}.get(source, "api")
            shown = {plane: f"{source}: {given[uuid]}"}
            result.fail("announced", key=f"{source} {uuid}", uuid=given[uuid], source=source, **shown)
    left = sorted(gpu_requests(node.allocatable))
    if virtual.has_all and left:
        result.fail("nothing_left", resources=join(left), api=f"allocatable: {join(left)}")


def _announced(node: Node) -> dict[str, list[str]]:
    """Return the UUIDs of the cards that are for pods, by who says so."""
    try:
        register = [gpu.uuid for gpu in hami.registered(node.annotations.get(hami.NODE_REGISTER, ""))]
    except hami.HamiError:
        # H1 reports it.
        register = []
    return {
        "the node's annotation": [card.uuid for card in node.cards],
        "a ResourceSlice": [device.uuid for device in node.devices],
        "HAMi's register": register,
        "kubelet": [id.partition("::")[0] for ids in node.kubelet.registered.values() for id in ids],
        "NVML": [gpu.uuid for gpu in node.nvml.gpus],
    }


def vgpus_are_as_recorded(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V4: each card has the recorded vGPUs, type by type, and kubelet's devices for machines exist."""
    virtual = _of(node, result)
    for card in virtual.cards:
        _divided(card, result)
    _announced_devices(node, virtual, result)


def _divided(card: DividedCard, result: CheckResult) -> None:
    """Report where a card's vGPUs aren't the recorded ones."""
    result.count()
    shown = join(f"{number} {kind}" for kind, number in sorted(card.vgpus.items())) or "none"
    proc = f"vGPUs of {card.address}: {shown}" + (f", {card.unnamed} of an unknown type" if card.unnamed else "")
    if not card.present:
        result.fail("card_gone", key=card.address, address=card.address, proc=proc)
        return
    numbers = {kind: (card.wanted.get(kind, 0), card.vgpus.get(kind, 0)) for kind in {*card.wanted, *card.vgpus}}
    lacking = sum(max(wanted - there, 0) for wanted, there in numbers.values())
    surplus = sum(max(there - wanted, 0) for wanted, there in numbers.values())
    if card.unnamed and not surplus and card.unnamed == lacking:
        # A card whose vGPUs were made before its names were seen in this boot.
        fields = {"number": card.unnamed, "address": card.address}
        result.unknown("type_unknown", key=card.address, proc=proc, **fields)
        return
    for kind, (wanted, there) in sorted(numbers.items()):
        if wanted != there:
            fields = {"address": card.address, "type": shorten(kind), "wanted": wanted, "there": there}
            result.fail("vgpus_differ", key=f"{card.address} {kind}", proc=proc, **fields)
    if card.unnamed and not lacking and not surplus:
        fields = {"address": card.address, "type": "an unknown type", "wanted": 0, "there": card.unnamed}
        result.fail("vgpus_differ", key=card.address, proc=proc, **fields)


def _announced_devices(node: Node, virtual: Virtual, result: CheckResult) -> None:
    """Report what kubelet has for virtual machines and isn't there, or isn't what the others of its resource are."""
    by_id = {id: device for device in virtual.devices for id in device.ids}
    types: dict[str, str] = {}
    announced: set[Device] = set()
    for resource, ids in sorted(node.kubelet.registered.items()):
        seen = {id: by_id.get(id) for id in ids if MACHINES_ID.fullmatch(id)}
        result.count(len(seen))
        for id, device in sorted(seen.items()):
            if device is None:
                fields = {"resource": shorten(resource), "id": id}
                result.fail("announced_gone", key=f"{resource} {id}", kubelet=f"{resource}: {id}", **fields)
        known = {device for device in seen.values() if device is not None}
        announced |= known
        kinds = sorted({device.type for device in known})
        if len(kinds) > 1:
            shown = join(kind or "whole cards" for kind in kinds)
            fields = {"resource": shorten(resource), "types": shown}
            result.fail("announced_types", key=resource, kubelet=f"{resource}: {shown}", **fields)
        types.update({kind: resource for kind in kinds if kind})
    for device in virtual.devices:
        if device.type in types and device not in announced:
            fields = {"id": device.name, "type": device.type, "resource": shorten(types[device.type])}
            shown = f"{types[device.type]}: without {device.name}"
            result.fail("not_announced", key=device.name, kubelet=shown, **fields)
