# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The back ends of a node, and the label by which a node of another one than gpushare is this collection's."""

from __future__ import annotations

import typing as t

from .gpushare import NODE_LABEL, NODE_LABEL_VALUES, RESOURCE_COUNT, RESOURCE_MEMORY

# Values of gpu_backend, a node's variable.
GPUSHARE, HAMI, NVIDIA = "gpushare", "hami", "nvidia"
# Those that give a node's cards to virtual machines, and none to containers: whole, divided, or to Kata's.
PASSTHROUGH, VGPU, KATA = "passthrough", "vgpu", "kata"
VIRTUAL = (PASSTHROUGH, VGPU, KATA)
# On a node that a role has given to another back end than gpushare, and on the namespace of that: the value of
# gpu_backend. A node has one value, so that it never has two; their own labels may be set by others.
LABEL = "kubegpu.share/backend"
OPERATOR = "gpu_operator"  # On the namespace of one that this collection installed.
# With the value before, on a node that gets its software by that operator.
SOFTWARE = "kubegpu.share/node-software"
# On a node with cards that any GPU Operator leaves alone: false.
OPERANDS = "nvidia.com/gpu.deploy.operands"
# On a node of any back end, beside that one's own label: the allocator whose servers may run there. A kubelet may set
# the own labels on its own node, and would get the servers' accounts by their pods. This one it may not: the API
# server's admission plugin NodeRestriction keeps the prefix for administrators.
RESTRICTED = "node-restriction.kubernetes.io/kubegpu-share"


def given(labels: t.Any) -> str:
    """Return the back end that a node was given to, by its labels; empty for none."""
    known = labels if isinstance(labels, dict) else {}
    value = str(known.get(LABEL))
    if value in (HAMI, NVIDIA, *VIRTUAL):
        return value
    return GPUSHARE if str(known.get(NODE_LABEL)) in NODE_LABEL_VALUES else ""


def is_left(labels: t.Any, resource: str, allocatable: int) -> bool:
    """Return whether a GPU resource is only what kubelet still reports, for five minutes, of the back end before."""
    backend = given(labels)
    if allocatable or not backend:
        return False
    return backend in VIRTUAL or (backend == GPUSHARE) != (resource in (RESOURCE_MEMORY, RESOURCE_COUNT))
