# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record of a node's maintenance: services that are stopped while its kernel modules change."""

from __future__ import annotations

from .._host.system import System

# Which services to start again, written before the first one stops.
RECORD = "/var/lib/kubegpu-share/kernel-driver.json"


def unfinished(system: System) -> bool:
    """Return whether an interrupted run left services stopped."""
    return system.exists(RECORD)
