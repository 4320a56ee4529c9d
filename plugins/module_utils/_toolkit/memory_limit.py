# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether NVIDIA's driver can hold a container to a share of a card's memory, and which conditions are unmet. Pure."""

from __future__ import annotations

import re
import typing as t

# Since these a limit per cgroup exists and is applied when a container starts.
DRIVER = 615
TOOLKIT = (1, 20, 1)


class MemoryLimit(t.TypedDict):
    """The section ``memory_limit``; ``why`` are the unmet conditions, as clauses."""

    possible: bool
    why: list[str]


def conditions(driver: str, toolkit: str, cgroup: int, mig: t.Mapping[int, bool]) -> MemoryLimit:
    """Compare a machine with the conditions of memory limits.

    :param driver: version of the loaded driver; empty without one.
    :param toolkit: version of NVIDIA's container toolkit; empty without one.
    :param cgroup: version of control groups; 0 without any.
    :param mig: whether MIG is on, by the card's index. Such a card isn't shared; the others are limited nevertheless.
    """
    why = []
    if not driver:
        why.append("no driver is loaded")
    elif numbers(driver) < (DRIVER,):
        why.append(f"the driver is {driver}, and limits need {DRIVER} or newer")
    needed = ".".join(str(number) for number in TOOLKIT)
    if not toolkit:
        why.append(f"NVIDIA's container toolkit isn't installed, and limits need {needed} or newer")
    elif numbers(toolkit) < TOOLKIT:
        why.append(f"NVIDIA's container toolkit is {toolkit}, and limits need {needed} or newer")
    if cgroup != 2:
        why.append("the node doesn't run with cgroup version 2")
    if mig and all(mig.values()):
        why.append(f"MIG is on for card {', '.join(map(str, mig))}, and MIG devices can't be limited")
    return {"possible": not why, "why": why}


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers; a release candidate counts as its release."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
