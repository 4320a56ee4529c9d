# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sentences about what a node or the cluster lacks for pods of Kata with cards, by code. Nothing reads them."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject

TEXTS: t.Mapping[str, str] = {
    # The machine.
    "no_kvm": "there is no /dev/kvm, and Kata's hypervisor needs it: switch on VT-x or AMD-V in the firmware",
    "no_shim": "Kata's shim isn't at {path}: install Kata, by its chart kata-deploy or as the distribution has it",
    "no_config": "the shim's configuration isn't at {path}: install Kata with its shim for NVIDIA's cards",
    "no_hypervisor": "the hypervisor that {path} names isn't at {hypervisor}",
    # The container runtime.
    "other_runtime": "kubelet uses {runtime}, and Kata with NVIDIA's cards is for containerd alone",
    "no_handler": "containerd's configuration has no runtime {handler}: {available}",
    "not_loaded": "containerd runs with older files, so it may not have the runtime {handler}: restart containerd",
    "not_kata": "containerd's runtime {handler} is of the type {type}, which isn't Kata's",
    "default_nvidia": (
        "containerd's default runtime is nvidia, by which each pod would get the host's driver: run role runtime with "
        "runtime_state: absent for this node"
    ),
    # kubelet.
    "kubelet_gate": (
        "kubelet {version} doesn't answer PodResources Get, by which the shim learns which cards a pod has: set its "
        "feature gate KubeletPodResourcesGet, or upgrade to 1.34"
    ),
    "kubelet_timeout": (
        "kubelet's runtimeRequestTimeout is {found}, and a virtual machine with cards may start for minutes: set it to "
        "20m at least"
    ),
    # The shim's configuration.
    "no_cold_plug": "{path} has cold_plug_vfio = {found}, so no virtual machine gets a card: set it to root-port",
    "root_ports": "{path} has pcie_root_port = {found}, and this node has {cards} cards for virtual machines",
    "no_pod_resources": (
        "{path} has no pod_resource_api_sock, so that the shim doesn't learn which cards a pod has: set it to {wanted}"
    ),
    "pod_resources_missing": "{path} has pod_resource_api_sock = {found}, and kubelet has no socket there",
    # The cluster.
    "no_class": "the cluster has no RuntimeClass {name}: let kata-deploy create it, or set kata_state: managed",
    "class_handler": "RuntimeClass {name} has the handler {found} and not {wanted}: set kata_handler, or correct it",
    "no_node": "the cluster has no node {node}",
    "label_missing": (
        "RuntimeClass {name} selects nodes with {label}={wanted}, and node {node} hasn't it: its pods stay Pending "
        "there; {who}"
    ),
    "label_differs": (
        "RuntimeClass {name} selects nodes with {label}={wanted}, and node {node} has {label}={found}: its pods stay "
        "Pending there, and whoever set the label decides"
    ),
}


def sentence(row: JsonObject) -> str:
    """Return the sentence of one code with its fields."""
    shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in row.items()}
    return TEXTS[row["code"]].format(
        **{name: "none" if value in ("", None) else value for name, value in shown.items()}
    )


def row(code: str, **fields: t.Any) -> JsonObject:
    """Return a finding as data, with its sentence."""
    found: JsonObject = {"code": code, **fields}
    return {**found, "text": sentence(found)}
