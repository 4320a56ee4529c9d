# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shape of ``gpu_node``, observed once per machine, and of the baseline file that is kept on a node. Pure."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._boot.types import BootFacts
from .._core.errors import ShareError
from .._driver.types import DkmsModule, Driver, KernelLog, Maintenance, Nouveau
from .._host.iommu import GroupMember, Iommu
from .._host.types import (
    Cgroup,
    DeviceFiles,
    Distribution,
    Kernel,
    MachineOwnerKey,
    NvSwitch,
    PciAddress,
    PciGpu,
    PythonInterpreter,
    Security,
    Service,
)
from .._packages.types import AptState, InstalledPackage, PackageLists, RpmState
from .._passthrough.facts import PassthroughFacts
from .._runtime.types import Kubelet, Runtimes
from .._toolkit.facts import Cdi, LegacyRecord, StaleSource, Toolkit
from .._toolkit.memory_limit import MemoryLimit
from .._vgpu.facts import VgpuFacts

PATH = "/var/lib/kubegpu-share/baseline.json"
SCHEMA = 1


class PackageState(t.TypedDict):
    version: str
    held: bool


class FileState(t.TypedDict):
    """``nvidia``: the file's path or text names NVIDIA or nouveau."""

    sha256: str
    nvidia: bool


class ImageState(t.TypedDict):
    """None where the image couldn't be read."""

    nouveau: bool | None
    blacklist: bool | None


class NouveauState(t.TypedDict):
    blacklisted: bool
    images: dict[str, ImageState]


class Snapshot(t.TypedDict):
    """The parts of a node that the comparison needs; ``runtimes`` are default runtimes, empty where unknown."""

    packages: dict[str, PackageState]
    files: dict[str, FileState]
    services: dict[str, Service]
    runtimes: dict[str, str]
    nouveau: NouveauState


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The state of a node before this collection changed it.

    :param taken: time, in UTC.
    :param own_files: files of this collection that were there already: then the snapshot came too late.
    """

    taken: str
    snapshot: Snapshot
    own_files: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the file's contents."""
        fields = {"schema": SCHEMA, "taken": self.taken, "own_files": list(self.own_files), "snapshot": self.snapshot}
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def parse(text: str) -> Baseline:
    """Parse the file.

    :raises ShareError: it has another schema, or isn't a baseline.
    """
    try:
        fields = json.loads(text)
        if fields["schema"] == SCHEMA:
            return Baseline(
                str(fields["taken"]), t.cast("Snapshot", dict(fields["snapshot"])), tuple(fields["own_files"])
            )
        reason = f"it has schema {fields['schema']!r}, and this version of the collection supports {SCHEMA}"
    except (ValueError, KeyError, TypeError):
        reason = "it is no baseline of this collection"
    raise ShareError(f"{PATH} can't be read: {reason}; move the file away to go on without a comparison")


class _BaselineHeader(t.TypedDict):
    path: str
    taken: str
    own_files: list[str]
    error: str


class BaselineSection(_BaselineHeader, total=False):
    """The section ``baseline``; ``error`` is set where it can't be read, ``snapshot`` is there only on request."""

    snapshot: Snapshot | None


# Of a mediated device, and of a type of vGPUs: nvidia-590 or 590.
Uuid = t.Annotated[str, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"]
VgpuTypeId = t.Annotated[str, r"[A-Za-z0-9_-]+"]


class Display(t.TypedDict):
    """``boot``: the firmware's; ``framebuffers`` and ``connectors`` (with a screen): those that a driver has made."""

    boot: bool
    framebuffers: list[str]
    connectors: list[str]


class VirtualFunction(t.TypedDict):
    address: PciAddress
    driver: str | None
    iommu_group: int | None


class VirtualFunctions(t.TypedDict):
    """``total`` is how many the card can have."""

    total: int
    enabled: list[VirtualFunction]


class VgpuType(t.TypedDict):
    """``available``: how many more the kernel offers; on virtual functions, how many of these offer it."""

    id: VgpuTypeId
    name: str
    available: int


class Vgpu(t.TypedDict):
    """A vGPU that exists; ``address`` is the function that it is on, ``uuid`` None unless it is a mediated device.

    ``iommu_group`` is that of the mediated device, or of the function.
    """

    address: PciAddress
    uuid: Uuid | None
    type: VgpuTypeId
    iommu_group: int | None


class VgpuHost(t.TypedDict):
    """vGPUs that a card can have and has; ``framework`` is mdev, vendor, or none."""

    framework: t.Annotated[str, "mdev|vendor|none"]
    types: list[VgpuType]
    vgpus: list[Vgpu]


class NodeGpu(PciGpu):
    """A card, with what decides whether a virtual machine can have it; ``group``: the others of its IOMMU group."""

    driver_override: str
    iommu_group: int | None
    group: list[GroupMember]
    display: Display
    numa_node: int | None
    reset_methods: list[str]
    virtual_functions: VirtualFunctions
    vgpu_host: VgpuHost


class GpuNode(t.TypedDict):
    """One machine as ``gpu_node_info`` returns it; ``secure_boot`` is None without UEFI."""

    distribution: Distribution
    python: PythonInterpreter
    kernel: Kernel
    boot: BootFacts
    secure_boot: bool | None
    security: Security
    mok: MachineOwnerKey
    reboot_required: bool
    services: dict[str, Service]
    iommu: Iommu
    gpus: list[NodeGpu]
    nvswitches: list[NvSwitch]
    integrated: str
    passthrough: PassthroughFacts | None
    vgpu: VgpuFacts
    nouveau: Nouveau
    driver: Driver
    memory_limit: MemoryLimit
    toolkit: Toolkit
    cdi: Cdi
    cgroup: Cgroup
    devices: DeviceFiles
    dkms: list[DkmsModule]
    log: KernelLog
    apt: AptState | None
    rpm: RpmState | None
    packages: t.Mapping[str, InstalledPackage]
    package_lists: PackageLists | None
    sources_stale: list[StaleSource]
    toolkit_legacy: LegacyRecord
    runtimes: Runtimes
    kubelet: Kubelet | None
    baseline: BaselineSection | None
    maintenance: Maintenance
    images: dict[str, str]
