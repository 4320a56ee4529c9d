# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query nvidia-smi, and find drivers that somebody else provides: role driver leaves these alone.

https://github.com/NVIDIA/gpu-driver-container
https://github.com/GoogleCloudPlatform/container-engine-accelerators/tree/master/nvidia-driver-installer
https://github.com/Azure/aks-gpu
https://github.com/awslabs/amazon-eks-ami/tree/main/templates/al2023
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from .._contracts.card_exclusion import NOTHING, Exclusion
from .._core.types import JsonObject
from .._host.cached_reader import names
from .._host.system import Done, System
from .types import MISMATCH, Card, Licence, SmiAnswer

SMI = "/usr/bin/nvidia-smi"
SECONDS = 20
# The name is third: it may contain a comma, and no other field can.
FIELDS = ("index", "uuid", "name", "memory.total", "pci.bus_id", "driver_version")
# A driver that lacks a field rejects the whole query; it is repeated without the field.
NEWER_FIELDS = ("persistence_mode", "mig.mode.current", "fabric.state")
# What it prints where a card has none of something; a card that can't be read has its error in brackets.
NONE = ("[N/A]", "N/A", "[Not Supported]", "Not Supported")
# Lines of its report on vGPUs, one of each card that is one.
GPU_LINE = re.compile(r"^GPU ([0-9A-Fa-f:.]+)\s*$")
LICENCE_LINE = re.compile(r"^\s+(Product Name|License Status)\s*:\s*(.*\S)")
LICENSED_PRODUCT = "vGPU Software Licensed Product"
REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')

# nvidia-smi's messages by NVML's return codes, as nvmlErrorString has them (driver 580), and its own additions.
MESSAGES = (
    ("driver/library version mismatch", MISMATCH),
    ("nvml/rm version mismatch", MISMATCH),
    ("couldn't communicate with the nvidia driver", 9),
    ("driver not loaded", 9),
    ("couldn't find libnvidia-ml", 12),
    ("library not found", 12),
    ("function not found", 13),
    ("gpu is lost", 15),
    ("gpu requires reset", 16),
    ("insufficient permissions", 4),
    ("insufficient external power", 8),
    ("no devices were found", 6),
    ("not found", 6),
    ("corrupted", 14),
    ("operating system", 17),
    ("in use by another client", 19),
    ("insufficient memory", 20),
    ("timeout", 10),
    ("not supported", 3),
    ("uninitialized", 1),
    ("unknown error", 999),
)


def ask(
    system: System, command: t.Sequence[str] = (SMI,), program: str = SMI, exclude: Exclusion = NOTHING
) -> SmiAnswer:
    """Query nvidia-smi; all fields are empty where it isn't installed.

    :param command: runs it.
    :param program: its path.
    :param exclude: cards whose errors don't matter.
    """
    if not system.exists(program):
        return {"version": None, "cards": [], "code": None, "error": None}
    fields = [*FIELDS, *NEWER_FIELDS]
    for _newer in NEWER_FIELDS:
        done = _query(system, command, fields)
        refused = REFUSED.search(done.out + done.err)
        if refused is None or refused.group(1) not in NEWER_FIELDS or refused.group(1) not in fields:
            return parse_result(done, fields, exclude)
        fields.remove(refused.group(1))
    return parse_result(_query(system, command, fields), fields, exclude)


def licences(system: System, command: t.Sequence[str] = (SMI,)) -> list[Licence]:
    """Return the licence of each vGPU as nvidia-smi reports it; one that reports none is left out."""
    done = system.run(["timeout", "-k", "2", str(SECONDS), *command, "-q"], timeout=SECONDS + 5)
    return parse_licences(done.out)


def parse_licences(text: str) -> list[Licence]:
    """Parse the report of ``nvidia-smi -q``."""
    licences: list[Licence] = []
    address, inside = "", False
    for line in text.splitlines():
        card = GPU_LINE.match(line)
        if card:
            address, inside = pci_address(card.group(1)), False
        elif LICENSED_PRODUCT in line:
            inside = True
            licences.append({"address": address, "product": "", "status": ""})
        elif inside:
            field = LICENCE_LINE.match(line)
            if field is None:
                inside = False
            else:
                licences[-1]["product" if field.group(1) == "Product Name" else "status"] = field.group(2)
    return [licence for licence in licences if licence["status"]]


def _query(system: System, command: t.Sequence[str], fields: t.Sequence[str]) -> Done:
    # timeout(1) ends an nvidia-smi that hangs; one that can't be killed remains after the outer limit.
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return system.run(["timeout", "-k", "2", str(SECONDS), *command, *query], timeout=SECONDS + 5)


def parse_result(done: Done, fields: t.Sequence[str], exclude: Exclusion = NOTHING) -> SmiAnswer:
    """Parse the result of nvidia-smi, without the errors of cards that are excluded."""
    if done.rc in (124, 137):
        error = f"nvidia-smi didn't finish within {SECONDS} s"
        return {"version": None, "cards": [], "code": None, "error": error}
    cards, versions, other = parse(done.out, fields)
    # It names the card by its address, without its function or with it.
    places = [address.rpartition(".")[0] for address in exclude.addresses]
    others = [*other, *done.err.split("\n")]
    own = [line for line in others if not any(place in line.lower() for place in places)]
    muted = len(own) < len(others)
    message = " ".join(own).strip()
    if done.rc != 0 and not message and not muted:
        message = f"nvidia-smi ended with status {done.rc}"
    failed = bool(message) if muted else done.rc != 0 or bool(other)
    return {
        "version": versions[0] if versions else None,
        "cards": cards,
        "code": code_in(message) if failed else 0,
        "error": message if failed else None,
    }


def code_in(message: str) -> int | None:
    """Return NVML's return code of a message; None where it is unknown."""
    lower = message.lower()
    return next((code for part, code in MESSAGES if part in lower), None)


def parse(text: str, fields: t.Sequence[str]) -> tuple[list[Card], list[str], list[str]]:
    """Return the cards and their driver versions, and the lines of the output that aren't cards: error messages."""
    cards: list[Card] = []
    versions = []
    other = []
    behind = fields[3:]
    for line in filter(None, (line.strip() for line in text.splitlines())):
        values = [value.strip() for value in line.split(",")]
        if len(values) < len(fields) or not values[0].isdigit() or not values[1].startswith("GPU-"):
            other.append(line)
            continue
        last = dict(zip(behind, values[-len(behind) :]))
        memory = last["memory.total"]
        versions.append(last["driver_version"])
        cards.append(
            {
                "index": int(values[0]),
                "uuid": values[1],
                "name": ", ".join(values[2 : -len(behind)]),
                "memory_mib": int(memory) if memory.isdigit() else None,
                "unified": memory in NONE,
                "address": pci_address(last["pci.bus_id"]),
                # nvidia-smi has no field for it.
                "minor": None,
                "persistence": switched(last.get("persistence_mode")),
                "mig": switched(last.get("mig.mode.current")),
                "fabric": fabric_state(last.get("fabric.state")),
            }
        )
    return cards, versions, other


def fabric_state(state: str | None) -> str | None:
    """Return the state of a card's registration with the NVSwitches in lower case; None where it has none."""
    return None if state is None or state.startswith("[") or state in NONE else state.lower()


def switched(mode: str | None) -> bool | None:
    """Return a mode; None where the card has none or doesn't report it."""
    return {"Enabled": True, "Disabled": False}.get(mode or "")


def pci_address(bus: str) -> str:
    """Return a PCI address as the kernel writes it; nvidia-smi writes the domain with eight digits."""
    domain, _colon, rest = bus.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


@dataclasses.dataclass(frozen=True)
class Provider:
    """One that provides drivers.

    :param id: as ``driver.others`` has it.
    :param who: for messages.
    :param marks: what is there with its driver: folders that end with a slash and aren't empty, or files.
    :param packages: patterns of packages, one of which is installed with it.
    :param root: the root of the driver's files, in which they lie as on a machine.
    :param smi: the command that runs nvidia-smi.
    :param program: nvidia-smi's path on the machine.
    """

    id: str
    who: str
    marks: tuple[str, ...]
    root: str = "/"
    smi: tuple[str, ...] = (SMI,)
    program: str = SMI
    packages: tuple[str, ...] = ()


OPERATOR_ROOT = "/run/nvidia/driver"
GKE = "/home/kubernetes/bin/nvidia"
VGPU = "vgpu"
# The driver's name of a vGPU ends with its memory in GB and letters of its kind: A40-4Q, A100-1-5CME, T4-2B4.
VGPU_NAME = re.compile(r".*-\d+(?:-\d+)?(?:[ACQ](?:ME)?|B\d?)")

PROVIDERS = (
    # Its container mounts its root there; an empty folder may be left over.
    Provider(
        "gpu-operator",
        "the driver container of NVIDIA's GPU Operator",
        (f"{OPERATOR_ROOT}/",),
        OPERATOR_ROOT,
        ("chroot", OPERATOR_ROOT, "nvidia-smi"),
        f"{OPERATOR_ROOT}{SMI}",
    ),
    # Its libraries are in the machine's linker cache.
    Provider(
        "gke",
        "GKE's nvidia-driver-installer",
        (f"{GKE}/bin/nvidia-smi",),
        smi=("env", f"LD_LIBRARY_PATH={GKE}/lib64", f"{GKE}/bin/nvidia-smi"),
        program=f"{GKE}/bin/nvidia-smi",
    ),
    # Both install on the machine itself, AKS by a .run file and EKS by packages.
    Provider("aks", "AKS's driver installer (aks-gpu)", ("/opt/azure/aks-gpu/dkms-marker", "/usr/bin/lib64/lib64/")),
    Provider("eks", "the EKS-optimized AMI", ("/etc/eks/nvidia-kmod-load.sh",)),
    # vGPU's driver for guests, by packages or by a GRID .run file. Only it works with a hypervisor's vGPU, and its
    # version has to fit the hypervisor's: https://docs.nvidia.com/vgpu/latest/grid-licensing-user-guide/
    Provider(
        VGPU,
        "NVIDIA's vGPU software for guests",
        ("/usr/bin/nvidia-gridd",),
        packages=("nvidia-linux-grid-*", "nvidia-vgpu-guest*", "nvidia-vgpu-ubuntu*", "nvidia-vgpu-rhel*"),
    ),
)


def root_of(facts: JsonObject | None) -> str:
    """Return the root of a node's driver; the machine's own where it wasn't observed.

    :param facts: ``gpu_node``.
    """
    return str(((facts or {}).get("driver") or {}).get("root") or "/")


def find(system: System, packages: t.Collection[str] = ()) -> Provider | None:
    """Return who provides the machine's driver; None where nobody does.

    :param packages: names of all installed packages.
    """
    return next(
        (
            provider
            for provider in PROVIDERS
            if any(names(system, mark) if mark.endswith("/") else system.exists(mark) for mark in provider.marks)
            or any(fnmatch.filter(packages, pattern) for pattern in provider.packages)
        ),
        None,
    )


def is_vgpu(card: t.Mapping[str, t.Any]) -> bool:
    """Return whether a card of ``driver.cards`` is a vGPU, by its name."""
    return bool(VGPU_NAME.fullmatch(str(card["name"])))


def of(others: t.Collection[str]) -> Provider | None:
    """Return who provides the driver, by ``driver.others`` of ``gpu_node``."""
    return next((provider for provider in PROVIDERS if provider.id in others), None)
