# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The groups of a new inventory, from the cluster's nodes.

Each node's kubelet writes its addresses, labels and resources itself: a node is left out where its name or its address
would mean another machine to Ansible, or more than a name.
"""

from __future__ import annotations

import collections
import contextlib
import typing as t
from urllib.parse import urlsplit

from .._allocation import allocators
from .._allocation.cluster import node_of_row
from .._allocation.node_backends import is_control_plane
from .._contracts import gpushare, nvidia_plugin
from .._contracts.model import Node
from .._core import untrusted
from .._core.types import JsonObject
from .._kube.tolerations import REPELLING

# Labels of NVIDIA's GPU feature discovery and of the Node Feature Discovery, by the vendor's PCI id.
GPU_LABELS = (
    nvidia_plugin.LABEL_PRESENT,
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
    gpushare.NODE_LABEL,
)
GPU_RESOURCES = (nvidia_plugin.RESOURCE, gpushare.RESOURCE_MEMORY)
UNCHANGEABLE = ("CoreOS", "Bottlerocket", "Talos", "Flatcar", "Container-Optimized OS")


API_SERVER = "is that of the API server, and the node has no label of the control plane"


class LeftOut(t.TypedDict):
    """A machine that isn't written.

    :ivar node: its name, printable.
    :ivar field: of the Node object, or the variable.
    :ivar code: one of ``untrusted.REFUSALS``, ``same-address``, ``api-server`` or ``named-twice``.
    :ivar text: the same in one sentence.
    """

    node: str
    field: str
    code: str
    text: str


class _Machines:
    """Machines whose names and addresses are checked; those that fail are in ``left_out``."""

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []

    def leave(self, node: str, field: str, code: str, why: str, value: str = "") -> None:
        shown = untrusted.line(node, untrusted.LONGEST_NAME)
        what = f" {untrusted.line(value, untrusted.LONGEST_NAME)!r}" if value else ""
        text = f"{shown or 'a machine'}: {field}{what} {why}"
        self.left_out.append({"node": shown, "field": field, "code": code, "text": text})

    def named(self, variable: str, machines: str | t.Sequence[str]) -> dict[str, str]:
        """Return the addresses that a variable gives, by name.

        :param machines: ``NAME`` or ``NAME=ADDRESS`` of each; a variable of the command line is a text.
        """
        words = machines.split(",") if isinstance(machines, str) else machines
        addresses: dict[str, str] = {}
        for name, equals, address in (word.partition("=") for word in words if word.strip()):
            name, address = name.strip(), address.strip()
            if name in addresses:
                self.leave(name, variable, "named-twice", "names it twice")
                continue
            try:
                known = untrusted.host_name(name)
                addresses[known] = untrusted.address(address) if address or equals else ""
                if not address:
                    untrusted.address(name)
            except untrusted.Refused as error:
                self.leave(name, variable, error.code, f"{error}", address or name)
        return addresses

    def checked(self, nodes: t.Iterable[Node], server: str) -> list[_Machine]:
        """Return the cluster's nodes by names that an inventory can have.

        :param server: the API server's URL.
        """
        known = []
        for node in nodes:
            try:
                known.append(_Machine(untrusted.host_name(node.name), node))
            except untrusted.Refused as error:
                self.leave(node.name, "metadata.name", error.code, f"{error}")
        shared = collections.Counter(address for machine in known for address in machine.announced)
        host = ""
        with contextlib.suppress(untrusted.Refused):
            host = str(untrusted.other_machine(urlsplit(server).hostname or ""))
        for machine in known:
            code, why = machine.refusal
            if not code and any(shared[address] > 1 for address in machine.announced):
                code, why = "same-address", "is that of another node, too"
            if not code and not machine.control_plane and host in machine.announced:
                code, why = "api-server", API_SERVER
            machine.refusal = code, why
        return known


class _Machine:
    """A node whose name is one; ``refusal`` says by code and text why it isn't reached by its address."""

    def __init__(self, name: untrusted.NodeName, node: Node) -> None:
        self.name, self.node = name, node
        self.control_plane = is_control_plane(node)
        # A server of k3s or RKE2 is a worker, too, as long as nobody taints it.
        repelled = any(taint["effect"] in REPELLING for taint in node.taints)
        self.takes_pods = not (self.control_plane and repelled)
        self.given, self.address, self.refusal = node.address, "", ("", "")
        try:
            # Without an address Ansible resolves the name.
            other = untrusted.other_machine(self.given or name)
            self.address = other if self.given else ""
            self.announced = {other}
        except untrusted.Refused as error:
            self.announced, self.refusal = set(), (error.code, str(error))


def _has_gpu(node: Node) -> bool:
    labelled = any(node.labels.get(label) in ("true", allocators.DRA) for label in GPU_LABELS)
    return labelled or any(node.capacity.get(resource) for resource in GPU_RESOURCES)


def initial_inventory(
    nodes: t.Sequence[JsonObject],
    gpu_nodes: str | t.Sequence[str] = (),
    control_plane: str | t.Sequence[str] = (),
    ssh: bool = True,
    server: str = "",
) -> dict[str, t.Any]:
    """Return the groups of a new inventory; see the documentation of the filter.

    :param nodes: as ``cluster_info`` returns them.
    :param gpu_nodes: ``NAME`` or ``NAME=ADDRESS`` of each; empty to take them from ``nodes``.
    :param control_plane: the same for the control plane.
    :param ssh: whether machines are reached over SSH.
    :param server: the API server's URL.
    """
    machines, over_api, assumed = _Machines(), list[str](), False
    if gpu_nodes:
        gpus = machines.named("init_gpu_nodes", gpu_nodes)
        planes = machines.named("init_control_plane", control_plane)
        addresses = {address: name for name, address in gpus.items() if address}
        for name, address in planes.items():
            if addresses.setdefault(address, name) != name and address:
                machines.leave(name, "init_control_plane", "same-address", "is that of another machine, too", address)
        over_api = [] if ssh else list(gpus)
    else:
        known = machines.checked(map(node_of_row, nodes), server)
        with_gpu = [machine for machine in known if _has_gpu(machine.node)]
        assumed = not with_gpu
        gpu = with_gpu or [machine for machine in known if machine.takes_pods]
        systems = {machine.name: machine.node.os for machine in known}
        closed = {name for name, os in systems.items() if not ssh or any(system in os for system in UNCHANGEABLE)}
        over_api = [machine.name for machine in gpu if machine.name in closed]
        by_ssh = [
            machine for machine in known if (machine in gpu or machine.control_plane) and machine.name not in closed
        ]
        for machine in by_ssh:
            if machine.refusal[0]:
                machines.leave(machine.name, "the address InternalIP", *machine.refusal, machine.given)
        reached = [machine for machine in by_ssh if not machine.refusal[0]]
        gpus = {machine.name: machine.address for machine in reached if machine in gpu}
        planes = {machine.name: machine.address for machine in reached if machine.control_plane}
    return {
        "gpu_nodes": {name: address for name, address in gpus.items() if name not in over_api},
        "control_plane": planes if ssh else {},
        "gpushare_nodes": over_api,
        "assumed": assumed,
        "left_out": machines.left_out,
    }
