# SPDX-License-Identifier: GPL-3.0-or-later
"""Compute which container may hold how much memory of which card. No I/O, no clock.

NVIDIA's driver (R615 and newer) keeps a hard limit per card and cgroup. It is set in two ways, and both are used:

* The container toolkit (1.20.1 and newer) sets it before the container's process starts, from two variables of the
  container's environment. An older toolkit ignores them silently; a newer one on a node whose driver can't do it
  keeps the container from starting. So they are set only where the driver has accepted and returned a limit before.
* The plugin reads every limit back and sets it where it differs: because of an older toolkit, of a pod that
  sets the variables itself, of a container that existed before.

A share is in units; a limit is in MiB, and in the driver's calls in bytes. The soft limit stays 0: on kernels with the
dmem controller the driver adds a soft limit to all parent cgroups and leaves it there when a cgroup is removed.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from gpushare.nvml.limits import MIB, Limit
from gpushare.shared._contracts import gpushare as contract

MODES = ("auto", "required", "off")
# What the container toolkit reads, in MiB.
LIMIT = "NVIDIA_GPU_MEMORY_LIMIT"
REQUEST = "NVIDIA_GPU_MEMORY_REQUEST"
# The first driver branch with limits per cgroup.
DRIVER = 615


@dataclasses.dataclass(frozen=True)
class Target:
    """A running container and its limits.

    :param pod: its pod, ``namespace/name``.
    :param uid: the pod's.
    :param container: its name in the pod.
    :param container_id: the runtime's, 64 hexadecimal digits.
    :param mib: MiB by card (UUID); it may hold nothing of any other card of the node. None if its cards aren't known.
    :param exempt: whether it isn't limited on any card.
    """

    pod: str
    uid: str
    container: str
    container_id: str
    mib: t.Mapping[str, int] | None
    exempt: bool = False

    @property
    def name(self) -> str:
        return f"container {self.container} of pod {self.pod}"


@dataclasses.dataclass(frozen=True)
class Usage:
    """Limits and used memory of the limited containers on one card, in MiB.

    :param containers: their number.
    """

    containers: int = 0
    limited_mib: int = 0
    used_mib: int = 0


@dataclasses.dataclass(frozen=True)
class Violation:
    """A container that isn't held to its memory of a card, or a card with used memory of no such container.

    :param pod: its pod's UID; empty without a container.
    :param container: the runtime's ID; empty without a container.
    :param card: the UUID.
    """

    code: contract.Reason
    text: str
    pod: str
    container: str
    card: str

    @property
    def holds(self) -> bool:
        """Return whether it holds memory that others were promised."""
        return self.code in contract.LIMIT_VIOLATIONS

    @property
    def event(self) -> str:
        if self.code is contract.Reason.UNACCOUNTED_MEMORY_HELD:
            return "GpuMemoryUnaccounted"
        return "GpuMemoryExceeded" if self.holds else "GpuMemoryUnlimited"


def wanted(mib: int) -> Limit:
    """Return the limit of a share of so many MiB."""
    return Limit(0, mib * MIB)


def environment(mib: t.Mapping[str, int]) -> dict[str, str]:
    """Return the variables by which the container toolkit limits a container before it starts.

    The toolkit sets the same limit on each card. Shares are equal; otherwise it is the largest one, and the enforcer
    lowers the others.

    :param mib: MiB by card (UUID); empty for a container without cards.
    """
    if not mib:
        return {}
    return {LIMIT: str(max(mib.values())), REQUEST: "0"}


def driver_problem(version: str) -> str | None:
    """Return why a driver of this version has no limits; None if it has."""
    match = re.match(r"(\d+)\.", version)
    if match and int(match.group(1)) >= DRIVER:
        return None
    return f"NVIDIA's driver is {version or 'unknown'}, and limits need {DRIVER} or newer"


def cgroup_problem(version: int, root: str) -> str | None:
    """Return why the node's cgroups can't be limited; None if they can."""
    if version == 2:
        return None
    if version == 1:
        return "the node runs with cgroup version 1, and limits need version 2"
    return f"the node's cgroups aren't mounted at {root}"


def state(mode: str, problems: t.Sequence[str]) -> str:
    """Return the value of the node's annotation ``contract.NODE_LIMIT``.

    :param mode: one of ``MODES``.
    :param problems: why the node, a card or a container isn't limited.
    """
    if mode == "off":
        return contract.LIMIT_OFF
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{contract.LIMIT_UNENFORCED}{problems[0]}{more}"
    return contract.LIMIT_ENFORCED
