# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect CoreOS, whose files belong to the Machine Config Operator and can't be changed over SSH. No I/O."""

from __future__ import annotations

import re
import typing as t

# ID is rhcos up to OpenShift 4.18 and rhel after that, scos and fedora in OKD; the name says CoreOS in all of them.
_IDS = ("rhcos", "scos", "fcos")
_NAME = re.compile(r"\bCoreOS\b")


def is_coreos(distribution: t.Mapping[str, t.Any]) -> bool:
    """Return whether this is CoreOS.

    :param distribution: as ``gpu_node`` has it: ``id`` and ``name`` of /etc/os-release.
    """
    return distribution.get("id") in _IDS or bool(_NAME.search(str(distribution.get("name") or "")))


def refusal(host: str, distribution: t.Mapping[str, t.Any]) -> str:
    """Return why no role may change this machine; empty where roles may."""
    if not is_coreos(distribution):
        return ""
    name = distribution.get("name") or distribution.get("id")
    return (
        f"host {host} runs {name}, whose files belong to OpenShift's Machine Config Operator: changes over SSH are "
        "reverted or degrade the node's pool. Remove it from the group and name its node in gpushare_nodes; the GPU "
        "Operator has its driver, and the module machine_config its settings"
    )
