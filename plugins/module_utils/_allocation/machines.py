# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cards for virtual machines by a machine's own facts, and what its kubelet has allocated of them. No I/O.

The facts are those of ``gpu_node_info`` and ``kubelet_devices_info``. kubelet's device plugins name a card by its IOMMU
group or by VFIO's own device, and a mediated device by its UUID or its group.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import typing as t

from .._contracts.claims import MALFORMED
from .._core.types import JsonObject
from .._core.untrusted import line

CARD, VGPU = "card", "vgpu"
OK = "ok"


@dataclasses.dataclass(frozen=True)
class Function:
    """A card or a vGPU that a virtual machine can have; see ``pods.DeviceEntry``.

    :param bound: a VFIO driver has it, or it is a vGPU.
    :param keys: by which kubelet may know it.
    """

    kind: str
    card: str
    address: str
    device: str
    driver: str
    group: int | None
    bound: bool
    keys: frozenset[str]
    uuid: str = ""
    type: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A node's machine.

    :param problem: why nothing else is known of it; empty where it is.
    :param silent: why kubelet's allocations aren't known; empty where they are.
    :param registered: healthy devices: resources by key.
    :param entries: UIDs of the pods that have a device by kubelet's checkpoint, also of ended ones, by key.
    :param listed: names of the pods that have one by PodResources, by key; None where it isn't known.
    """

    problem: str = ""
    functions: tuple[Function, ...] = ()
    silent: str = ""
    registered: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    entries: t.Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    listed: t.Mapping[str, frozenset[tuple[str, str]]] | None = None


UNOBSERVED = Machine("its machine wasn't observed")


def machine_of(given: t.Any) -> Machine:
    """Return a machine by what role inspect has collected of it.

    :param given: an object with ``gpus``, ``functions``, ``kubelet`` and ``problem``, or its JSON text.
    """
    try:
        facts = json.loads(given) if isinstance(given, str) else given
        if facts.get("problem"):
            return Machine(line(facts["problem"]))
        functions = {row["address"]: row for row in facts.get("functions") or ()}
        found = [_checked(each) for gpu in facts["gpus"] for each in _functions(gpu, functions)]
        return Machine(functions=tuple(found), **_kubelet(facts.get("kubelet")))
    except MALFORMED:
        return Machine("what its machine answered is malformed")


def _checked(function: Function) -> Function:
    """Return a function whose fields are what they are said to be.

    :raises TypeError: one isn't.
    """
    texts = (function.card, function.address, function.driver, function.uuid, function.type)
    if not all(isinstance(text, str) for text in texts) or type(function.group) not in (int, type(None)):
        raise TypeError("a field of a card has another type")
    return function


def _functions(gpu: JsonObject, functions: t.Mapping[str, JsonObject]) -> t.Iterator[Function]:
    """Yield what virtual machines can have of a card: its vGPUs, its virtual functions, or itself."""
    host = gpu["vgpu_host"]
    types = {str(row["id"]): str(row["name"]) for row in host["types"]}
    device = f"{_id(gpu['vendor'])}:{_id(gpu['device'])}"
    virtual = {row["address"]: row for row in gpu["virtual_functions"]["enabled"]}
    taken = set()
    for row in host["vgpus"]:
        address = str(row["address"])
        taken.add(address)
        driver = virtual.get(address, gpu)["driver"] or ""
        uuid, group = str(row["uuid"] or ""), row["iommu_group"]
        kind = types.get(str(row["type"]), str(row["type"]))
        keys = _keys(group, uuid, {} if uuid else functions.get(address, {}))
        yield Function(VGPU, gpu["address"], address, device, driver, group, True, keys, uuid, _short(kind))
    for address, row in virtual.items():
        if address not in taken and _is_vfio(row["driver"]):
            keys = _keys(row["iommu_group"], "", functions.get(address, {}))
            yield Function(VGPU, gpu["address"], address, device, row["driver"], row["iommu_group"], True, keys)
    seen = functions.get(gpu["address"], {})
    driver = str(seen.get("driver") or gpu["driver"] or "")
    bound = _is_vfio(driver)
    # One that waits for a reboot is given away, too.
    if bound or (not taken and _is_vfio(gpu["driver_override"])):
        group = gpu["iommu_group"]
        keys = _keys(group, "", seen)
        yield Function(CARD, gpu["address"], gpu["address"], device, driver, group, bound, keys)


def _keys(group: int | None, uuid: str, seen: JsonObject) -> frozenset[str]:
    files = [posixpath.basename(str(path)) for path in seen.get("nodes") or ()]
    return frozenset([*([] if group is None else [str(int(group))]), *([uuid] if uuid else []), *files])


def _id(text: t.Any) -> str:
    return str(text).removeprefix("0x")


def _is_vfio(driver: t.Any) -> bool:
    return "vfio" in str(driver or "")


def _short(kind: str) -> str:
    """Return a type without the maker's name, as NVIDIA's tools take it: NVIDIA A10-4Q and GRID T4-1Q."""
    return kind.rpartition(" ")[2]


def _kubelet(given: JsonObject | None) -> JsonObject:
    """Return the fields of a machine that kubelet's answer has."""
    if given is None:
        return {"silent": "kubelet wasn't asked"}
    checkpoint, listing = given["checkpoint"], given["pod_resources"]
    if checkpoint["state"] != OK:
        # PodResources has no device that nobody holds, so that none would be known as free.
        return {"silent": line(checkpoint["problem"]) or "kubelet's checkpoint can't be read"}
    entries: dict[str, set[str]] = {}
    for row in checkpoint["entries"]:
        for key in row["ids"]:
            entries.setdefault(str(key), set()).add(str(row["pod_uid"]))
    listed: dict[str, set[tuple[str, str]]] = {}
    for pod in listing["pods"]:
        for container in pod["containers"]:
            for held in container["devices"]:
                for key in held["ids"]:
                    listed.setdefault(str(key), set()).add((str(pod["namespace"]), str(pod["name"])))
    return {
        "registered": {str(key): str(name) for name, keys in checkpoint["registered"].items() for key in keys},
        "entries": {key: frozenset(uids) for key, uids in entries.items()},
        "listed": {key: frozenset(pods) for key, pods in listed.items()} if listing["state"] == OK else None,
    }
