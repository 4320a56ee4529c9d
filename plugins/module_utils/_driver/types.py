# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes of the sections of ``gpu_node`` about the driver and its kernel modules."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .._host.types import Distribution, Excluded, Folder, Kernel, MachineOwnerKey, NvSwitch, Package, PciGpu
from .._packages.types import AptState, PackageLists, RpmState

# NVML's return code where the loaded module and the library have different versions.
MISMATCH = 18
# What manages NVSwitches of NVLink 5: their InfiniBand devices, and the programs' access to them.
FABRIC_MODULES = ("mlx5_ib", "ib_umad")


class Card(t.TypedDict):
    """A card as nvidia-smi lists it. ``minor`` is N of /dev/nvidiaN; modes are None where the card has none.

    ``unified``: the driver has no memory of its own to report, since the card uses the machine's; ``fabric`` is the
    state of its registration with the NVSwitches, None where it has none or the driver doesn't report it.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    unified: bool
    address: str
    minor: int | None
    persistence: bool | None
    mig: bool | None
    fabric: str | None


class SmiAnswer(t.TypedDict):
    """``code`` is NVML's return code; None where nvidia-smi is missing or its message is unknown."""

    version: str | None
    cards: list[Card]
    code: int | None
    error: str | None


class ModuleFile(t.TypedDict):
    """The module file that modprobe would load: it differs from the loaded one between an upgrade and the reboot."""

    file_version: str
    signer: str
    license: str


class PersistenceDaemon(t.TypedDict):
    """Whether it enables persistence mode (None where it doesn't run), and the files that role driver wrote for it."""

    enables: bool | None
    masked: bool
    files: list[str]


class Fabric(t.TypedDict):
    """The fabric manager's version, and whether the machine's cards need it.

    ``nvlink5``: the NVSwitches aren't on PCI and are managed by NVLSM through modules of InfiniBand: those that aren't
    loaded, and those of them that the running kernel doesn't have. ``at_boot``: role driver has them loaded at boot.
    """

    version: str
    needed: bool
    nvlink5: bool
    unloaded: list[str]
    missing: list[str]
    at_boot: bool


class Licence(t.TypedDict):
    """The licence of a vGPU, in the driver's words; empty where it reports none."""

    address: str
    product: str
    status: str


class InstalledDriver(SmiAnswer):
    """The driver without its fabric manager, with ``ModuleFile``'s fields.

    ``others`` are all that installed one, a provider first; ``root`` is the root of its files; ``runfile`` is what
    ``runfile.record`` returned.
    """

    file_version: str
    signer: str
    license: str
    loaded: bool
    module_version: str | None
    module_open: bool | None
    library_version: str
    persistence: bool | None
    persistence_daemon: PersistenceDaemon
    runfile: JsonObject | None
    others: list[str]
    root: Folder
    excluded: Excluded
    licences: list[Licence]


class Driver(InstalledDriver):
    """The section ``driver``."""

    fabric: Fabric


class InitramfsImage(t.TypedDict):
    """``nouveau`` (or nova) and ``blacklist`` are None where it can't be read; ``kept``: an older one is kept."""

    path: str
    release: str
    bytes: int
    newer: bool
    nouveau: bool | None
    blacklist: bool | None
    kept: bool


class NouveauModule(t.TypedDict):
    """The loaded module and its users; ``refcnt`` is None where it isn't loaded."""

    loaded: bool
    refcnt: int | None
    holders: list[str]
    users: list[str]
    consoles: list[str]
    framebuffers: list[str]


class Nova(t.TypedDict):
    """nouveau's successor: its loaded ``modules`` in the order of unloading, and whether something else uses them.

    ``built_in``: the running kernel has it in itself.
    """

    modules: list[str]
    in_use: bool
    built_in: bool


class Nouveau(NouveauModule):
    """The section ``nouveau``; ``files`` are the texts by path, ``boot_free`` is in bytes."""

    nova: Nova
    blacklisted: bool
    files: dict[str, str]
    tool: str | None
    dracut: str | None
    images: list[InitramfsImage]
    leftovers: list[str]
    boot_free: int | None
    boot_read_only: bool


class DkmsModule(t.TypedDict):
    """``state`` is added, built, installed or installed-weak."""

    module: str
    version: str
    kernel: str
    state: str


class Xid(t.TypedDict):
    address: str
    code: int


class KernelLog(t.TypedDict):
    """Errors of cards and of the driver's modules in the kernel's log since boot."""

    xids: list[Xid]
    key_rejected: bool
    unsupported_by_open: bool
    requires_open: bool


class Maintenance(t.TypedDict):
    """``unfinished``: an interrupted run left services stopped."""

    unfinished: bool


class NodeFacts(t.TypedDict, total=False):
    """The sections of ``gpu_node`` that decide on the driver; one that wasn't collected is missing."""

    distribution: Distribution
    kernel: Kernel
    gpus: list[PciGpu]
    nvswitches: list[NvSwitch]
    driver: Driver
    nouveau: Nouveau
    packages: t.Mapping[str, Package]
    package_lists: PackageLists | None
    apt: AptState | None
    rpm: RpmState | None
    secure_boot: bool | None
    mok: MachineOwnerKey


class Headers(t.TypedDict):
    """The packages of one kernel's headers."""

    kernel: str
    packages: list[str]


class Prerequisite(t.TypedDict):
    """A repository that has to be enabled first, with the commands that enable it."""

    id: str
    what: str
    commands: list[list[str]]


class StreamOption(t.TypedDict):
    """An entry of the option ``streams`` of ``pinned_packages``."""

    module: str
    stream: str
    switch: bool


class Conflict(t.TypedDict):
    """``found`` is a clause that begins with "has"; ``remedy`` is what resolves it."""

    id: str
    found: str
    remedy: str


class ListFinding(Conflict):
    """What the node's package lists show; ``severity`` is problem, warning or note, ``versions`` are those there."""

    severity: str
    packages: list[str]
    versions: list[str]
    kernels: list[str]


class Choice(t.TypedDict):
    """What the filter ``driver_choice`` returns; its documentation describes the fields."""

    refusals: list[str]
    notes: list[str]
    conflicts: list[Conflict]
    lists: list[ListFinding]
    provided: str
    manager: str
    flavour: str
    branch: int
    maintenance: str
    repositories: list[JsonObject]
    streams: list[StreamOption]
    pins: list[JsonObject]
    headers: list[Headers]
    prerequisites: list[Prerequisite]
    build: list[str]
    packages: list[str]
    follows: list[str]
    replaced: list[str]
    replaces: list[str]
    hold_also: list[str]
    never_upgrade: list[str]
    hold: bool
    source_dir: str
    services: list[str]
    modules: list[str]
    persistence_override: str
