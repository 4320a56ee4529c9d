# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the checks V1 to V4 ask a machine about its cards for virtual machines. Changes nothing.

It asks as the roles' own proofs do: the kernel about each IOMMU group, and the initramfs by its tool's lister.
"""

from __future__ import annotations

import collections
import typing as t

from .._core.errors import ShareError
from .._driver.nouveau import tool_of
from .._host.cached_reader import Lenient, whole
from .._host.facts import distribution, installed_kernels, running
from .._host.kernels import booted
from .._host.system import System
from .._passthrough import files
from .._passthrough.functions import functions
from .._passthrough.images import observed
from .._passthrough.kernel import GroupState, Kernel
from .._passthrough.model import RECORD, Before, Function, Image, parse_record
from .._vgpu import restore, sysfs


class RecordedFunction(t.TypedDict):
    """A function that role passthrough has given to VFIO.

    ``present``: PCI has it, with the recorded ids. ``state``: the kernel's answer about its group, as
    ``kernel.GroupState``; empty where no VFIO driver has the function. ``others``: functions of its group that another
    driver has, with that driver. ``ruled``: the udev rule has it.
    """

    address: str
    uuid: str
    present: bool
    driver: str
    group: str
    state: str
    others: list[str]
    ruled: bool


class BootImage(t.TypedDict):
    """An initramfs that may boot next: of the running or of the newest kernel.

    ``rule``: it contains the udev rule; None where it can't be read. ``lacking``: VFIO's modules that it needs and
    doesn't contain. ``newer``: it is as new as the files that it is made from.
    """

    path: str
    release: str
    rule: bool | None
    lacking: list[str]
    newer: bool


class Device(t.TypedDict):
    """What a virtual machine can be given: a vGPU, or a function that VFIO has.

    ``uuid`` is a mediated device's, ``type`` a vGPU's as far as it is known; both are empty for others. ``group`` is
    its IOMMU group, ``number`` N of /dev/vfio/devices/vfioN; empty without.
    """

    address: str
    uuid: str
    type: str
    group: str
    number: str


class RecordedCard(t.TypedDict):
    """A card that role vgpu has divided: ``wanted`` and ``vgpus`` are numbers of vGPUs by their type.

    ``present``: PCI has it, with the recorded ids. ``unnamed``: number of vGPUs whose type's name isn't known.
    """

    address: str
    present: bool
    wanted: dict[str, int]
    vgpus: dict[str, int]
    unnamed: int


class Evidence(t.TypedDict):
    """``others``: number of NVIDIA's cards that no VFIO driver has. ``missing``: files that bind at boot.

    ``images`` are only listed where functions are recorded. ``devices`` are those of the whole machine.
    """

    problem: str
    functions: list[RecordedFunction]
    missing: list[str]
    images: list[BootImage]
    others: int
    cards: list[RecordedCard]
    devices: list[Device]


def recorded(system: System) -> bool:
    """Return whether role passthrough or vgpu has recorded something on this machine."""
    return system.exists(RECORD) or system.exists(sysfs.RECORD)


def evidence(system: System, kernel: Kernel) -> Evidence | None:
    """Return the evidence; None where neither role has recorded anything.

    :param kernel: answers about IOMMU groups.
    """
    if not recorded(system):
        return None
    problems = []
    bound: tuple[Before, ...] = ()
    rows: list[restore.Row] = []
    if system.exists(RECORD):
        try:
            bound = parse_record(whole(system, RECORD) or "").functions
        except ShareError as error:
            problems.append(str(error))
    if system.exists(sysfs.RECORD):
        try:
            rows = restore.recorded(whole(system, sysfs.RECORD) or "")
        except ValueError as error:
            problems.append(f"{sysfs.RECORD} can't be read: {error}")
    texts = {path: whole(system, path) for path in files.PATHS}
    seen = functions(system, ())
    reader = Lenient(system)
    divided = {address: sysfs.card(reader, address) for address in sysfs.cards(reader)}
    return {
        "problem": "; ".join(problems),
        "functions": [_function(before, seen, texts[files.RULE] or "", kernel) for before in bound],
        "missing": _missing(texts) if bound else [],
        "images": [_image(image) for image in _images(system, texts[files.RULE] or "")] if bound else [],
        "others": sum(function.card and not function.vfio for function in seen.values()),
        "cards": [_card(row, divided.get(row["address"])) for row in rows],
        "devices": [
            *(_given(function) for function in seen.values() if function.vfio),
            *(_vgpu(system, vgpu) for card in divided.values() for vgpu in card.vgpus),
        ],
    }


def _function(before: Before, seen: t.Mapping[str, Function], rule: str, kernel: Kernel) -> RecordedFunction:
    function = seen.get(before.address)
    group = function.group if function else ""
    vfio = function is not None and function.vfio and bool(group)
    state: GroupState | t.Literal[""] = kernel.group_state(group) if vfio else ""
    members = [member for member in seen.values() if member.group == group and not member.bridge] if group else []
    return {
        "address": before.address,
        "uuid": before.uuid,
        "present": function is not None and (function.vendor, function.device) == (before.vendor, before.device),
        "driver": function.driver if function else "",
        "group": group,
        "state": state,
        "others": [f"{member.address} ({member.driver})" for member in members if member.driver and not member.vfio],
        "ruled": f'KERNEL=="{before.address}"' in rule,
    }


def _missing(texts: t.Mapping[str, str | None]) -> list[str]:
    missing = [path for path in (files.RULE, files.MODPROBE) if texts[path] is None]
    ways = (files.HOOK, files.DRACUT)
    return [*missing, *([] if any(texts[path] is not None for path in ways) else [" or ".join(ways)])]


def _images(system: System, rule: str) -> list[Image]:
    family = distribution(system)["family"]
    kernels = booted({"release": running(system), "installed": installed_kernels(system)})
    return observed(system, family, tool_of(family, system.exists), kernels, rule, True)


def _image(image: Image) -> BootImage:
    return {
        "path": image.path,
        "release": image.release,
        "rule": image.inside,
        "lacking": list(image.lacking),
        "newer": image.newer,
    }


def _card(row: restore.Row, card: sysfs.Card | None) -> RecordedCard:
    present = card is not None and card.device == row["device"]
    vgpus = card.vgpus if card is not None and present else ()
    return {
        "address": row["address"],
        "present": present,
        "wanted": restore.named(card, row["wanted"]) if card else dict(row["wanted"]),
        "vgpus": dict(collections.Counter(vgpu.name for vgpu in vgpus if vgpu.named)),
        "unnamed": sum(not vgpu.named for vgpu in vgpus),
    }


def _given(function: Function) -> Device:
    numbers = [path.rpartition("/vfio")[2] for path in function.nodes if "/devices/" in path]
    number = numbers[0] if numbers else ""
    return {"address": function.address, "uuid": "", "type": "", "group": function.group, "number": number}


def _vgpu(system: System, vgpu: sysfs.VGpu) -> Device:
    numbers = system.names(f"{vgpu.folder}/vfio-dev")
    return {
        "address": vgpu.function,
        "uuid": "" if vgpu.key == vgpu.function else vgpu.key,
        "type": vgpu.name if vgpu.named else "",
        "group": (system.link(f"{vgpu.folder}/iommu_group") or "").rpartition("/")[2],
        "number": numbers[0].removeprefix("vfio") if numbers else "",
    }
