# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks V1 to V4 of cards for virtual machines. No I/O."""

from __future__ import annotations

from .._contracts import hami
from .grants import gpu_requests
from .model import Node, Snapshot, Virtual
from .parse import join, shorten
from .result import CheckResult


def _of(node: Node, result: CheckResult) -> Virtual:
    """Return what the node's machine has for virtual machines, and report what of it is unknown."""
    virtual = node.virtual or Virtual("", (), None)
    if virtual.problem:
        result.unknown("unreadable", why=virtual.problem, proc=shorten(virtual.problem, 300))
    return virtual


def functions_are_bound(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V1: each recorded function has a VFIO driver, and a viable group."""
    for one in _of(node, result).functions:
        result.count()
        place = {"key": one.address, "uuid": one.uuid, "address": one.address}
        shown = f"driver {one.driver or 'none'}, group {one.group or 'none'}"
        if not one.present:
            result.fail("gone", proc=shown, **place)
        elif not one.group:
            result.fail("no_group", proc=shown, **place)
        elif "vfio" not in one.driver:
            driver = f"driver {shorten(one.driver)}" if one.driver else "no driver"
            result.fail("not_bound", proc=shown, driver=driver, **place)
        elif one.foreign:
            result.fail("not_viable", proc=shown, number=one.group, foreign=join(one.foreign), **place)


def binding_survives_a_boot(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V2: the files that bind at boot are there, with each recorded function."""
    virtual = _of(node, result)
    result.count(len(virtual.functions))
    for path in virtual.missing:
        result.fail("file_missing", key=path, path=shorten(path, 200), proc=f"{shorten(path, 200)}: none")
    for one in () if virtual.missing else virtual.functions:
        if not one.ruled:
            result.fail(
                "not_ruled", key=one.address, address=one.address, proc=f"no line of the rule has {one.address}"
            )


def nobody_shares_them(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check V3: no device plugin, driver or register has a card that is a virtual machine's."""
    virtual = _of(node, result)
    result.count(len(virtual.functions))
    given = {one.uuid.lower(): one.uuid for one in virtual.functions if one.uuid}
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
    """Check V4: each card has the recorded number of vGPUs."""
    for one in _of(node, result).vgpus:
        result.count()
        if one.wanted != one.found:
            numbers = {"wanted": one.wanted, "found": one.found}
            result.fail("count_differs", key=one.address, address=one.address, proc=f"vGPUs: {one.found}", **numbers)
