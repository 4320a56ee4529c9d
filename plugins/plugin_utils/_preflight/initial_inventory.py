# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The groups of a new inventory, from the cluster's nodes."""

from __future__ import annotations

import typing as t

from ...module_utils._allocation import node_backends
from ...module_utils._allocation.server_nodes import CONTROL_PLANE_LABELS
from ...module_utils._contracts import gpushare, nvidia_plugin

# Labels of NVIDIA's GPU feature discovery and of the Node Feature Discovery, by the vendor's PCI id.
GPU_LABELS = (
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
    gpushare.NODE_LABEL,
)
GPU_RESOURCES = (nvidia_plugin.RESOURCE, gpushare.RESOURCE_MEMORY)
UNCHANGEABLE = ("CoreOS", "Bottlerocket", "Talos", "Flatcar", "Container-Optimized OS")


def _named(machines: str | t.Sequence[str]) -> dict[str, str]:
    # A variable of the command line is a text.
    words = machines.split(",") if isinstance(machines, str) else machines
    pairs = (one.partition("=") for one in words if one.strip())
    return {name.strip(): address.strip() for name, _equals, address in pairs}


def _has_gpu(node: t.Mapping[str, t.Any]) -> bool:
    labelled = any(node["labels"].get(label) in ("true", node_backends.DRA) for label in GPU_LABELS)
    return labelled or any(node["capacity"].get(resource, "0") != "0" for resource in GPU_RESOURCES)


def initial_inventory(
    nodes: t.Sequence[t.Mapping[str, t.Any]],
    gpu_nodes: str | t.Sequence[str] = (),
    control_plane: str | t.Sequence[str] = (),
    ssh: bool = True,
) -> dict[str, t.Any]:
    """Return the groups of a new inventory; see the documentation of the filter.

    :param nodes: as ``cluster_info`` returns them.
    :param gpu_nodes: ``NAME`` or ``NAME=ADDRESS`` of each; empty to take them from ``nodes``.
    :param control_plane: the same for the control plane.
    :param ssh: whether machines are reached over SSH.
    """
    assumed = False
    if gpu_nodes:
        gpus, planes, closed = _named(gpu_nodes), _named(control_plane), set[str]()
    else:
        masters = [node for node in nodes if any(label in node["labels"] for label in CONTROL_PLANE_LABELS)]
        found = [node for node in nodes if _has_gpu(node)]
        assumed = not found
        gpus = {node["name"]: node["address"] for node in found or [one for one in nodes if one not in masters]}
        planes = {node["name"]: node["address"] for node in masters}
        closed = {node["name"] for node in nodes if any(system in node["os"] for system in UNCHANGEABLE)}
    over_api = [name for name in gpus if name in closed or not ssh]
    return {
        "gpu_nodes": {name: address for name, address in gpus.items() if name not in over_api},
        "control_plane": {name: address for name, address in planes.items() if ssh and name not in closed},
        "gpushare_nodes": over_api,
        "assumed": assumed,
    }
