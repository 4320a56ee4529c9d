# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Drivers that a container, a cloud's image or a vGPU guest's owner provides: role driver leaves them alone.

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

from .._core.types import JsonObject
from .._host.cached_reader import names
from .._host.system import System
from .nvidia_smi import SMI


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
            one
            for one in PROVIDERS
            if any(_there(system, mark) for mark in one.marks)
            or any(fnmatch.filter(packages, pattern) for pattern in one.packages)
        ),
        None,
    )


def is_vgpu(card: t.Mapping[str, t.Any]) -> bool:
    """Return whether a card of ``driver.cards`` is a vGPU, by its name."""
    return bool(VGPU_NAME.fullmatch(str(card["name"])))


def of(others: t.Collection[str]) -> Provider | None:
    """Return who provides the driver, by ``driver.others`` of ``gpu_node``."""
    return next((one for one in PROVIDERS if one.id in others), None)


def _there(system: System, mark: str) -> bool:
    return bool(names(system, mark)) if mark.endswith("/") else system.exists(mark)
