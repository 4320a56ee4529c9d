# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What NVIDIA's GPU Operator reads: nodes' labels, but for OPERANDS in backends, and a ClusterPolicy's parts.

As in release v26.7.0 of NVIDIA/gpu-operator: ``IsEnabled`` of each part in api/nvidia/v1/clusterpolicy_types.go, and
``isStateEnabled`` and ``getWorkloadConfig`` in controllers/state_manager.go. So have releases since v24.9.0.
"""

from __future__ import annotations

import typing as t

# In front of each part's name.
PREFIX = "nvidia.com/gpu.deploy."
DRIVER = f"{PREFIX}driver"
TOOLKIT = f"{PREFIX}container-toolkit"
DEVICE_PLUGIN = f"{PREFIX}device-plugin"
VALIDATOR = f"{PREFIX}operator-validator"
# Whether it runs containers (also without the label) or virtual machines.
WORKLOAD, CONTAINER = "nvidia.com/gpu.workload.config", "container"
WHOLE, DIVIDED = "vm-passthrough", "vm-vgpu"
# Of the parts that are asked for here, those that run where a ClusterPolicy doesn't say it. The chart says it of all.
USUAL = frozenset(("driver", "toolkit"))


def runs(spec: t.Mapping[str, t.Any], part: str) -> bool:
    """Return whether a ClusterPolicy has a part enabled, one of containers or ``sandboxWorkloads`` and what needs that.

    :param spec: the ClusterPolicy's.
    """
    given = (spec.get(part) or {}).get("enabled")
    return part in USUAL if given is None else given is True


def workload_of(labels: t.Mapping[str, t.Any], spec: t.Mapping[str, t.Any]) -> str:
    """Return what a node's cards are for by its labels: ``CONTAINER``, ``WHOLE`` or ``DIVIDED``.

    Without ``sandboxWorkloads`` the label has no effect. A value that isn't known counts as none.

    :param spec: the ClusterPolicy's.
    """
    known, sandbox = (CONTAINER, WHOLE, DIVIDED), spec.get("sandboxWorkloads") or {}
    if not runs(spec, "sandboxWorkloads"):
        return CONTAINER
    return next((word for word in (labels.get(WORKLOAD), sandbox.get("defaultWorkload")) if word in known), CONTAINER)
