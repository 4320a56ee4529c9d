# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe a machine's cards for virtual machines: functions, record, files, images, and what holds the cards."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._driver import nvidia_smi
from .._driver.library import card_information
from .._driver.nouveau import tool_of
from .._driver.types import Card
from .._host.cached_reader import text, whole
from .._host.facts import distribution, installed_kernels, running
from .._host.mounts import read_only
from .._host.system import System
from . import files
from .functions import ALIAS, DRIVERS, functions
from .images import observed
from .model import PENDING, RECORD, Function, Record, State, parse_record

# Of _boot/loaders.py: systems whose initramfs isn't an own file of /boot that its tool rebuilds there.
ELSEWHERE = frozenset(("unified", "sdbootutil", "transactional", "ostree", "machine-config", "image"))
# Written by the GPU Operator's validator where all cards of the node have a VFIO driver, and removed with it.
OPERATOR = "/run/nvidia/validations/vfio-pci-ready"
FABRIC = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"


def boot_code(boot: t.Mapping[str, t.Any]) -> str:
    """Return the code of a machine whose initramfs this role can't write; empty for any other.

    :param boot: the section of ``gpu_node``.
    """
    kind = "ostree" if boot["loader"] == "rpm-ostree" else boot["refused"]
    return f"boot_{kind}" if kind in ELSEWHERE else ""


@dataclasses.dataclass(frozen=True)
class Host:
    """What doesn't change during a run.

    :param installed: releases of the kernels that this machine boots; none in a container.
    :param variants: the modules of VFIO's variants by the functions that they know.
    """

    family: str
    installed: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]


def host(system: System) -> Host:
    """Return what doesn't change during a run."""
    variants = ALIAS.findall(whole(system, f"/lib/modules/{running(system)}/modules.alias") or "")
    return Host(distribution(system)["family"], tuple(installed_kernels(system)), tuple(variants))


def observe(system: System, about: Host, images: bool = True) -> State:
    """Return the machine's state, without what holds its cards and without VFIO's answers about groups.

    :param images: list the images also where nothing of this role is on the machine.
    :raises ShareError: the record can't be read.
    """
    seen = functions(system, about.variants)
    record_text = system.read(RECORD)
    record = parse_record(record_text) if record_text is not None else Record()
    cards = _listed(system, seen)
    uuids = {address: card_information(system, address).uuid for address in cards}
    uuids.update({address: card["uuid"].lower() for address, card in cards.items() if card is not None})
    tool = tool_of(about.family, system.exists)
    texts = {path: system.read(path) for path in files.PATHS}
    # Listing an image takes seconds: without our files there is nothing of ours in it.
    ours = record_text is not None or any(content is not None for content in texts.values())
    kernels = about.installed if ours or images else ()
    listed_images = observed(system, about.family, tool, kernels, texts[files.RULE] or "", ours)
    return State(
        family=about.family,
        container=not about.installed,
        functions=seen,
        uuids={address: uuid for address, uuid in uuids.items() if uuid},
        names={address: card["name"] for address, card in cards.items() if card is not None},
        persistence={address: card["persistence"] if card is not None else None for address, card in cards.items()},
        record=record,
        pending=system.exists(PENDING),
        files=texts,
        tool=tool,
        images=tuple(listed_images),
        boot_free=system.free_bytes("/boot") if listed_images else None,
        boot_read_only=read_only(system.read("/proc/self/mounts") or "", "/boot") if listed_images else False,
        owner=OPERATOR if system.exists(OPERATOR) else "",
        fabric_mode=_fabric_mode(system) if any(function.switch for function in seen.values()) else "",
        loadable=frozenset(
            before.driver for before in record.functions if _loadable(system, before.driver, before.module)
        ),
    )


def _listed(system: System, seen: t.Mapping[str, Function]) -> dict[str, Card | None]:
    """Return each card that NVIDIA's driver has, by address, as nvidia-smi lists it; None where it doesn't."""
    on_nvidia = [address for address, function in seen.items() if function.card and function.driver == "nvidia"]
    if not on_nvidia:
        return {}
    provider = nvidia_smi.find(system)
    command = (provider.smi, provider.program) if provider else ((nvidia_smi.SMI,), nvidia_smi.SMI)
    cards = {card["address"]: card for card in nvidia_smi.ask(system, *command)["cards"]}
    return {address: cards.get(address) for address in on_nvidia}


def _fabric_mode(system: System) -> str:
    match = re.search(r"^\s*FABRIC_MODE\s*=\s*(\d+)", text(system, FABRIC), re.MULTILINE)
    return match.group(1) if match else ""


def _loadable(system: System, driver: str, module: str) -> bool:
    if not driver or system.exists(f"{DRIVERS}/{driver}"):
        return True
    return bool(module) and system.run(["modprobe", "-n", "-q", module], timeout=30).rc == 0
