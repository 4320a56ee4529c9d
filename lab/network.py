# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses, pod ranges, routes and the CNI configuration. No I/O."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping

from lab.shell import LabError

POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/12"
REPOSITORY_PORT = 8080


def free_subnet(wanted: str, used: Iterable[str], fixed: bool) -> str:
    """Return the wanted /24 if no route overlaps it, else, unless it was requested explicitly, the next free one."""
    taken = [ipaddress.IPv4Network(each, strict=False) for each in used]
    first = ipaddress.IPv4Network(wanted)
    if not _touches(first, taken):
        return str(first)
    if fixed:
        raise LabError(f"LAB_SUBNET {wanted} is in use on this machine.")
    for number in range(78, 250):
        candidate = ipaddress.IPv4Network(f"172.30.{number}.0/24")
        if not _touches(candidate, taken):
            return str(candidate)
    raise LabError("LAB_SUBNET must be set: no /24 in 172.30.77.0 to 172.30.249.0 is free on this machine.")


def _touches(network: ipaddress.IPv4Network, taken: list[ipaddress.IPv4Network]) -> bool:
    # The default route overlaps everything.
    return any(each.prefixlen > 0 and each.overlaps(network) for each in taken)


def routed_networks(routes: list[Mapping[str, object]]) -> list[str]:
    """Parse the destinations in the output of `ip -json route`."""
    found = [str(route.get("dst", "default")) for route in routes]
    return [each for each in found if each != "default" and ":" not in each]


def addresses(subnet: str, control_planes: list[str], gpu_nodes: list[str]) -> dict[str, str]:
    """Return the fixed addresses: the gateway is .1, the repository .2, control planes from .11, GPU nodes from .21."""
    hosts = ipaddress.IPv4Network(subnet).network_address
    table = {"gateway": str(hosts + 1), "repository": str(hosts + 2)}
    table.update({name: str(hosts + 11 + index) for index, name in enumerate(control_planes)})
    table.update({name: str(hosts + 21 + index) for index, name in enumerate(gpu_nodes)})
    return table


def machine_address(subnet: str, number: int) -> str:
    """Return the fixed address of a machine without a cluster."""
    return str(ipaddress.IPv4Network(subnet).network_address + number)


def pod_cidrs(names: Iterable[str]) -> dict[str, str]:
    """Return a /24 of the pod network for each node."""
    return {name: f"10.244.{number}.0/24" for number, name in enumerate(names)}


def routes(node: str, cidrs: Mapping[str, str], table: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the other nodes' pod ranges and the addresses that they are reached by."""
    return [(cidr, table[name]) for name, cidr in cidrs.items() if name != node]


def conflist(cidr: str) -> str:
    """Return the CNI configuration of a node's bridge network."""
    return (
        json.dumps(
            {
                "cniVersion": "1.0.0",
                "name": "lab",
                "plugins": [
                    {
                        "type": "bridge",
                        "bridge": "cni0",
                        "isGateway": True,
                        "ipMasq": True,
                        "hairpinMode": True,
                        "ipam": {
                            "type": "host-local",
                            "ranges": [[{"subnet": cidr}]],
                            "routes": [{"dst": "0.0.0.0/0"}],
                        },
                    },
                    {"type": "portmap", "capabilities": {"portMappings": True}},
                ],
            },
            indent=2,
        )
        + "\n"
    )
