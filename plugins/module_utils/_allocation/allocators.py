# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who can give away a node's cards, and by what that is known of the node. Pure."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from .._contracts import backends, hami, hami_marks, nvidia_plugin
from .._contracts import gpushare as contract
from .._contracts.backends import GPUSHARE, HAMI, KATA, NVIDIA, PASSTHROUGH, VGPU, VIRTUAL
from .._contracts.model import Node

# Values of gpushare_allocation, a node's variable, beside ``auto``.
EXTENDER, DRA = "extender", "dra"
# The first release whose kube-apiserver and kube-scheduler divide a device by claims, by the feature gate.
CLAIMS_SINCE = (1, 36)


@dataclasses.dataclass(frozen=True)
class Allocator:
    """Who gives away a node's cards, and by what that is known of the node.

    :param backend: a value of gpu_backend.
    :param role: the role that deploys it. Role switch goes through its files of tasks: ``backend_deploy``,
        ``backend_remove``, ``backend_clean`` on the machine, and ``backend_canary``, the pod that proves it. Kata's has
        ``backend_check``, too, for before the drain.
    :param title: in messages.
    :param label: of a node that has it.
    :param restricted: the label that lets its servers run on a node, which no kubelet may set.
    :param server: label of its server's pods on a node, where it has one.
    :param namespace: the variable with the namespace of its server. Anybody's pod may have that label.
    :param annotations: what that server writes on a node.
    :param resources: what a node announces by it, as a shell matches names.
    """

    backend: str
    role: str
    title: str
    label: tuple[str, str]
    restricted: tuple[str, str]
    server: tuple[str, str]
    namespace: str
    annotations: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()

    def labels(self, labels: t.Mapping[str, t.Any]) -> bool:
        """Return whether these labels of a node say that it has the node."""
        return labels.get(self.label[0]) == self.label[1]

    def announces(self, resource: str) -> bool:
        """Return whether a resource is one of its own."""
        return any(fnmatch.fnmatchcase(resource, pattern) for pattern in self.resources)


_NAME = "app.kubernetes.io/name"
# What tells the pods of role sandbox_device_plugin's two kinds from each other; both have one name.
_SANDBOX = {kind: ("app.kubernetes.io/component", kind) for kind in ("kubevirt", "kata")}
ALLOCATORS: t.Mapping[str, Allocator] = {
    EXTENDER: Allocator(
        GPUSHARE,
        "gpushare",
        "the extender",
        (contract.NODE_LABEL, contract.NODE_LABEL_VALUE),
        (backends.RESTRICTED, EXTENDER),
        (_NAME, "gpushare-device-plugin"),
        "gpushare_namespace",
        (contract.NODE_CARDS,),
        (contract.RESOURCE_MEMORY,),
    ),
    DRA: Allocator(
        GPUSHARE,
        "gpushare",
        "claims",
        (contract.NODE_LABEL, contract.NODE_LABEL_CLAIMS),
        (backends.RESTRICTED, DRA),
        (_NAME, "gpushare-dra-driver"),
        "gpushare_namespace",
    ),
    HAMI: Allocator(
        HAMI,
        "hami",
        "HAMi",
        (backends.LABEL, HAMI),
        (backends.RESTRICTED, HAMI),
        hami_marks.PLUGIN_LABEL,
        "hami_namespace",
        (hami.NODE_REGISTER,),
        (hami.RESOURCE_COUNT,),
    ),
    NVIDIA: Allocator(
        NVIDIA,
        "nvidia_device_plugin",
        "NVIDIA's device plugin",
        (backends.LABEL, NVIDIA),
        (backends.RESTRICTED, NVIDIA),
        (_NAME, "nvidia-device-plugin"),
        "nvidia_device_plugin_namespace",
        (),
        (nvidia_plugin.RESOURCE, nvidia_plugin.RESOURCE_SHARED, f"{nvidia_plugin.RESOURCE_MIG}*"),
    ),
    **{
        name: Allocator(
            name,
            role,
            title,
            (backends.LABEL, name),
            (backends.RESTRICTED, name),
            _SANDBOX[kind],
            "sandbox_device_plugin_namespace",
            (),
            own,
        )
        for name, role, title, kind, own in (
            # The plugin of NVIDIA's for KubeVirt, where that doesn't announce the cards by itself.
            (PASSTHROUGH, "passthrough", "virtual machines (passthrough)", "kubevirt", ()),
            (VGPU, "vgpu", "virtual machines (vGPU)", "kubevirt", ()),
            (KATA, "kata", "Kata's virtual machines", "kata", ("nvidia.com/pgpu",)),
        )
    },
}
BACKENDS = tuple(dict.fromkeys(allocator.backend for allocator in ALLOCATORS.values()))


def allocator_of(node: Node) -> str:
    """Return the allocator that has a node, whoever deployed it; empty where nobody has.

    Its label decides; a node without one has what its allocator writes there, or announces.
    """
    for name, allocator in ALLOCATORS.items():
        if allocator.labels(node.labels):
            return name
    for name, allocator in ALLOCATORS.items():
        if any(key in node.annotations for key in allocator.annotations):
            return name
    for name, allocator in ALLOCATORS.items():
        # HAMi's resource is NVIDIA's, too; a node of HAMi has its annotation.
        if name != HAMI and any(allocator.announces(key) and size > 0 for key, size in node.capacity.items()):
            return name
    return ""


def is_virtual(name: str) -> bool:
    """Return whether an allocator gives the cards to virtual machines, so that no pod of containers gets one."""
    return name in VIRTUAL


def lacks_restricted(labels: t.Mapping[str, t.Any], allocator: str) -> bool:
    """Return whether a node's labels say that an allocator has it, without the one that no kubelet may set."""
    entry = ALLOCATORS[allocator]
    return entry.labels(labels) and labels.get(entry.restricted[0]) != entry.restricted[1]


def release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version; zeros for one that has none."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
