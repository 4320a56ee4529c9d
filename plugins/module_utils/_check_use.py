# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What pods use of cards, as NVML or the driver's limits tell it. No I/O."""

from __future__ import annotations

import dataclasses

from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Gpu, Pod, Process


@dataclasses.dataclass(frozen=True)
class Use:
    """A pod's use of a card.

    :param mib: None where nobody tells it.
    :param processes: how many NVML lists.
    :param hard_mib: the highest limit of its containers; None where the driver keeps none.
    :param limited: whether the driver tells of limits on this card at all.
    """

    mib: int | None
    processes: int
    hard_mib: int | None
    limited: bool


def processes(gpu: Gpu, pod: Pod) -> list[Process]:
    return [one for one in gpu.processes or () if one.pod_uid in pod.uids and one.pod_uid]


def use(gpu: Gpu, pod: Pod) -> Use:
    """The larger of what its processes hold and what its control groups are charged with."""
    mine = processes(gpu, pod)
    numbers = [one.used_mib for one in mine]
    known = [one for one in numbers if one is not None]
    by_process = sum(known) if gpu.processes is not None and len(known) == len(numbers) else None
    limits = [one for one in gpu.limits or () if one.pod_uid and one.pod_uid in pod.uids]
    charged = [one.used_mib for one in limits if one.used_mib is not None]
    both = [one for one in (by_process, sum(charged) if charged else None) if one is not None]
    hard = [one.hard_mib for one in limits if one.hard_mib is not None]
    return Use(max(both) if both else None, len(mine), max(hard) if hard else None, gpu.limits is not None)
