# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Machines that nobody may change over SSH: CoreOS, whose files belong to a Machine Config Operator. No I/O."""

from __future__ import annotations

import re
import typing as t

# ID is rhcos up to OpenShift 4.18 and rhel after that, scos and fedora in OKD; the name says CoreOS in all of them.
_IDS = ("rhcos", "scos", "fcos")
_NAME = re.compile(r"\bCoreOS\b")


def is_coreos(distribution: t.Mapping[str, t.Any]) -> bool:
    """Whether this is CoreOS.

    :param distribution: as ``gpu_node`` has it: ``id`` and ``name`` of /etc/os-release.
    """
    return distribution.get("id") in _IDS or bool(_NAME.search(str(distribution.get("name") or "")))


def refusal(host: str, distribution: t.Mapping[str, t.Any]) -> str:
    """Why no role may change this machine; empty for any other."""
    if not is_coreos(distribution):
        return ""
    name = distribution.get("name") or distribution.get("id")
    return (
        f"host {host} runs {name}, whose files belong to OpenShift's Machine Config Operator: what is changed there "
        "over SSH is reverted or makes the node's pool Degraded. Take it out of the group, and let the GPU Operator "
        "and the module machine_config do it"
    )
