# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find what holds a function: processes, pods, virtual machines, persistence mode, the console."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._driver.library import card_information
from .._host import open_devices
from .._host.cached_reader import names, whole
from .._host.iommu import PCI
from .._host.system import System
from .._kubelet.devices import RESOURCES, collect
from .._kubelet.root import running_root
from .._kubelet.source import KubeletSource
from .._kubelet.types import KubeletDevices
from .model import Function, Hold, State

DCGM = ("nv-hostengine", "dcgm-exporter", "dcgmi")
PERSISTENCED = "nvidia-persiste"
# A device that was taken from its group has no path of its own.
VFIO_DEVICE = "anon_inode:[vfio-device]"
WANTED = ("/dev/nvidia", "/dev/dri/", "/dev/fb", "/dev/snd/", "/dev/vfio/", VFIO_DEVICE)
# A card may be mapped by a process that has closed it.
MAPPED = r"/dev/(?:nvidia\d+|dri/\w+)"
# A UUID as a device's ID has it in front; the rest is a replica's or a share's number.
CARD_ID = re.compile(r"gpu-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def holds(system: System, kubelet: KubeletSource, state: State) -> list[Hold]:
    """Return all that holds functions that have a driver."""
    bound = [function for function in state.functions.values() if function.driver]
    if not bound:
        return []
    users = open_devices.users(system, lambda path: path.startswith(WANTED), MAPPED)
    held = [hold for function in bound for user in users for hold in _by_process(system, function, user)]
    on_nvidia = [function for function in bound if function.address in state.persistence]
    if on_nvidia:
        held += _by_pods(system, kubelet, on_nvidia, state.uuids)
    for address, mode in state.persistence.items():
        if mode is not False:
            held.append(Hold("persistence_mode" if mode else "persistence_unknown", address, {}))
    return held + [Hold("console", function.address, {}) for function in bound if function.console]


def _by_process(system: System, function: Function, user: JsonObject) -> t.Iterator[Hold]:
    """Yield the hold of a process on a function."""
    paths = {*user["devices"], *re.findall(MAPPED, whole(system, f"/proc/{user['pid']}/maps") or "")}
    mine = own_paths(system, function)
    group = next((path for path in function.nodes if path.count("/") == 3), "")
    used = {path for path in paths if mine.fullmatch(path)}
    # Its group was closed after the device was taken from it: it may be any.
    unknown = VFIO_DEVICE in paths and not any(
        path.startswith("/dev/vfio/") and path != "/dev/vfio/vfio" for path in paths
    )
    if function.vfio and (unknown or group in paths):
        used.add(group)
    if not used:
        return
    fields = {"pid": user["pid"], "command": user["command"], "unit": user["unit"]}
    if function.vfio:
        yield Hold("held_by_vm", function.address, {**fields, "pod": user["pod"]})
    elif user["pod"]:
        yield Hold("held_by_pod", function.address, {"pod": user["pod"]})
    elif user["command"] in DCGM or "dcgm" in user["unit"]:
        yield Hold("held_by_dcgm", function.address, fields)
    elif user["command"].startswith(PERSISTENCED):
        yield Hold("held_by_persistenced", function.address, fields)
    else:
        yield Hold("held_by_process", function.address, fields)


def own_paths(system: System, function: Function) -> t.Pattern[str]:
    """Return a regular expression of the device files of one function."""
    folder = f"{PCI}/{function.address}"
    paths = [f"/dev/dri/{name}" for name in names(system, f"{folder}/drm")]
    paths += [f"/dev/{name}" for name in names(system, f"{folder}/graphics")]
    sound = [name[len("card") :] for name in names(system, f"{folder}/sound") if name.startswith("card")]
    paths += list(function.nodes)
    patterns = [re.escape(path) for path in paths] + [rf"/dev/snd/\w+C{number}(?:D\d+\w)?" for number in sound]
    if function.driver == "nvidia" and function.card:
        number = card_information(system, function.address).minor
        # Where the driver doesn't tell which file is the card's, each may be.
        patterns.append(rf"/dev/nvidia{number}" if number is not None else r"/dev/nvidia\d+")
    if function.switch:
        patterns.append(r"/dev/nvidia-nvswitch.*")
    return re.compile("|".join(patterns) or "(?!)")


def _by_pods(
    system: System, kubelet: KubeletSource, cards: t.Sequence[Function], uuids: t.Mapping[str, str]
) -> t.Iterator[Hold]:
    """Yield pods that have a card by kubelet, or its device file in a container, whether they use it or not."""
    try:
        root = running_root(kubelet)
        seen = collect(kubelet, root, RESOURCES)
    except BadInput as error:
        yield from (Hold("pods_unknown", card.address, {"problem": str(error)}) for card in cards)
        return
    listed = seen["pod_resources"]
    problem = listed["problem"] if listed["state"] not in ("ok", "missing") else ""
    if seen["device_nodes"] is None:
        problem = "the containers' /dev can't be read"
    for card in cards:
        if problem:
            yield Hold("pods_unknown", card.address, {"problem": problem})
            continue
        number = card_information(system, card.address).minor
        pods = {*_listed(seen, uuids.get(card.address, "")), *_with_node(seen, number)}
        yield from (Hold("held_by_pod", card.address, {"pod": pod}) for pod in sorted(pods))


def _listed(seen: KubeletDevices, uuid: str) -> t.Iterator[str]:
    """Yield the pods to which kubelet gave a device whose ID is this card's UUID, or any card's where it is unknown."""
    for pod in seen["pod_resources"]["pods"]:
        given = [name for container in pod["containers"] for device in container["devices"] for name in device["ids"]]
        ids = [match.group() for match in (CARD_ID.match(name.lower()) for name in given) if match]
        if any(not uuid or name == uuid for name in ids):
            yield posixpath.join(pod["namespace"], pod["name"])


def _with_node(seen: KubeletDevices, number: int | None) -> t.Iterator[str]:
    """Yield the UIDs of pods with a container that has the card's device file; any card's where that is unknown.

    A privileged container, as virt-handler's, has those of all cards: it holds one only where it has it open.
    """
    for row in seen["device_nodes"] or ():
        if not row["privileged"] and (number is None or number in row["minors"]):
            yield row["pod_uid"]
