# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shape of ``gpu_node``: all that the roles decide on, observed once per machine."""

from __future__ import annotations

import typing as t

from .._driver.types import DkmsModule, Driver, KernelLog, Maintenance, Nouveau
from .._host.types import (
    Cgroup,
    DeviceFiles,
    Distribution,
    Kernel,
    MachineOwnerKey,
    NvSwitch,
    PciGpu,
    PythonInterpreter,
    Security,
    Service,
)
from .._packages.types import AptState, InstalledPackage, PackageLists, RpmState
from .._runtime.types import Kubelet, Runtimes
from .._toolkit.memory_limit import MemoryLimit
from .._toolkit.types import Cdi, LegacyRecord, StaleSource, Toolkit
from .baseline_record import Snapshot


class _BaselineHeader(t.TypedDict):
    path: str
    taken: str
    own_files: list[str]
    error: str


class BaselineSection(_BaselineHeader, total=False):
    """The section ``baseline``; ``error`` is set where it can't be read, ``snapshot`` is there only on request."""

    snapshot: Snapshot | None


class GpuNode(t.TypedDict):
    """One machine as ``gpu_node_info`` returns it; ``secure_boot`` is None without UEFI."""

    distribution: Distribution
    python: PythonInterpreter
    kernel: Kernel
    secure_boot: bool | None
    security: Security
    mok: MachineOwnerKey
    reboot_required: bool
    services: dict[str, Service]
    gpus: list[PciGpu]
    nvswitches: list[NvSwitch]
    integrated: str
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
