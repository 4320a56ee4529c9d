# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What would stop site.yml, told before it changes anything: findings that name the variable or the host. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _coreos as coreos
from ansible_collections.kubegpu.share.plugins.module_utils import _driver_conflicts as driver_conflicts
from ansible_collections.kubegpu.share.plugins.module_utils import _gpu_operator as operator
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils import _memory_limit as limits
from ansible_collections.kubegpu.share.plugins.module_utils import _node_failures as node_failures
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_unit
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import node_cards
from ansible_collections.kubegpu.share.plugins.module_utils._findings import NOTE, WARNING, Findings
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json

BACKENDS = ("gpushare",)
PLACEMENTS = ("binpack", "spread")
DELIVERIES = ("import", "registry")
# What the node roles can set up; a role that learns another one adds it here.
FAMILIES = ("debian", "redhat", "suse")
ARCHITECTURES = ("amd64", "arm64")
# As nodes name them in their status.
RUNTIMES = ("containerd", "docker", "cri-o")
MAINTENANCE = ("never", "drain", "reboot")
# What was asked for can't be served: there is nothing to go on with, and it can't be ignored.
INPUT = {
    "unknown-value": "A variable has a value that isn't known.",
    "no-gpu-nodes": "The group gpu_nodes is empty, and gpushare_nodes names no node.",
    "unknown-node": "A host, or what gpushare_nodes names, isn't a node of the cluster.",
    "twin-nodes": "Two hosts are said to be the same node.",
    "coreos": "The machine is OpenShift's own system, in which nothing may be changed over SSH.",
    "image-archive": "The servers' image is to be imported and its archive isn't there, or holds another image.",
}
# What is said of the cluster and the machines. The user may know better.
KNOWN = {
    "old-image": "An image of upstream's is from 2019 and can't bind a pod on this cluster.",
    "node-not-ready": "A node isn't Ready.",
    "runtime": "The node's container runtime isn't one of those that can be set up.",
    "image-delivery": "Images can't be imported: the runtime isn't containerd, or the node isn't in the inventory.",
    "foreign-plugin": "Another device plugin gives away the same cards.",
    "distribution": "The machine's distribution isn't of a family that can be set up.",
    "architecture": "The machine's architecture has no driver or no servers.",
    "no-gpu": "No NVIDIA GPU is on the machine's PCI bus.",
    "unknown-cards": "The driver isn't loaded, so that its cards' memory can't be judged yet.",
    "device-list": "The memory unit makes more device IDs than kubelet takes.",
    "small-card": "A card has less memory than one unit.",
    "unit-change": "The memory unit is another than now, and pods hold memory in the old one.",
    "driver-refused": "Role driver can't do what is asked for on this machine.",
    "toolkit-refused": "Role toolkit can't do what is asked for on this machine.",
    "runtime-refused": "Role runtime can't configure this machine's container runtime.",
    "memory-limit": "Limits of memory are required and the machine can't keep pods to them.",
    "runtime-warning": "Something of the container runtime deserves a look: its cgroup driver isn't kubelet's, say.",
}

# Upstream's published images are builds of early 2019, with a Kubernetes 1.11 client.
OLD_IMAGES = {"gpushare_extender_image": "1.11-d170d8a", "gpushare_device_plugin_image": "v2-1.11-aff8a23"}
# Pods have had fields that this client drops since this version; it writes pods back whole.
OLD_IMAGES_END = (1, 16)

# Resources by which other stacks announce the very cards that we would announce.
FOREIGN = re.compile(r"nvidia\.com/(gpu|gpu\.shared|gpumem|gpumem-percentage|gpucores|mig-.+)|volcano\.sh/(v?gpu-.+)")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user asks for.

    :param nodes: those whose cards are shared, by their names in the cluster; empty for the hosts of gpu_nodes.
    :param gpu_operator: NVIDIA's GPU Operator is told to take its device plugin from these nodes.
    """

    backend: str = "gpushare"
    memory_unit: str = "GiB"
    placement: str = "binpack"
    image_delivery: str = "import"
    extender_image: str = ""
    device_plugin_image: str = ""
    nodes: t.Sequence[str] = ()
    gpu_operator: bool = False
    memory_limit: str = "auto"


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine of the inventory, or a node of the cluster that is none.

    :param host: its name in the inventory.
    :param node: its name in the cluster.
    :param named: where: the group gpu_nodes, else control_plane, else the variable gpushare_nodes.
    :param seen: its observation (``gpu_node``); None where it wasn't looked at in this run.
    :param wish: what the nodes' roles are asked for on it.
    :param plans: what these roles' own plans say, as (id, severity, sentence).
    """

    host: str
    node: str
    named: str
    seen: t.Mapping[str, t.Any] | None = None
    wish: node_failures.NodeWish = dataclasses.field(default_factory=node_failures.NodeWish)
    plans: tuple[tuple[str, str, str], ...] = ()

    @property
    def gpu(self) -> bool:
        """The nodes' roles set it up."""
        return self.named == "gpu_nodes"

    @property
    def machine(self) -> bool:
        return self.named != "gpushare_nodes"


def examine(wish: Wish, cluster: Json | None, hosts: t.Sequence[Host], ignore: t.Sequence[str] = ()) -> Findings:
    """All that would stop the run.

    :param cluster: as the module ``cluster_info`` returns it; None to judge the machines alone.
    :param ignore: findings that the user knows of: ``id`` or ``id@host``.
    :raises BadInput: ``ignore`` names no such finding.
    """
    found = Findings()
    _values(wish, found)
    known = {host.node for host in hosts}
    others = [Host(name, name, "gpushare_nodes") for name in dict.fromkeys(wish.nodes) if name not in known]
    hosts = (*hosts, *others)
    shared = frozenset(wish.nodes or (host.node for host in hosts if host.gpu))
    if not shared:
        found.problem(
            "no-gpu-nodes",
            "gpu_nodes: the group names no host, and gpushare_nodes no node, so that there is nothing to set up",
        )
    if cluster is not None:
        _cluster(wish, cluster, hosts, shared, found)
    for host in hosts:
        if host.gpu and host.seen is not None:
            _machine(wish, host, found)
    found.ignore(ignore, ids())
    return found


def ids() -> tuple[str, ...]:
    """Ids of all findings that can be ignored."""
    return tuple(described())


def described() -> dict[str, str]:
    """Id and meaning of every finding that can be ignored, for the documentation."""
    return {**KNOWN, **dict(node_failures.described()), **driver_conflicts.IDS}


def _cluster(wish: Wish, cluster: Json, hosts: t.Sequence[Host], shared: frozenset[str], found: Findings) -> None:
    _images(wish, str(cluster.get("version", "")), found)
    nodes = {node["name"]: node for node in cluster.get("nodes") or []}
    for host in hosts:
        twins = [other.host for other in hosts if other.node == host.node]
        if len(twins) > 1 and twins[0] == host.host:
            found.problem(
                "twin-nodes", f"gpu_node_name: the hosts {', '.join(twins)} are all said to be node {host.node}"
            )
        node = nodes.get(host.node)
        if node is None:
            _stranger(host, nodes, found)
        else:
            _node(wish, host, node, host.node in shared, found)
    if wish.memory_unit in contract.MIB_PER_UNIT:
        _unit_change(wish, nodes.values(), cluster.get("sharing_pods") or [], found)


def _values(wish: Wish, found: Findings) -> None:
    for variable, value, known in (
        ("gpu_backend", wish.backend, BACKENDS),
        ("gpushare_memory_unit", wish.memory_unit, tuple(contract.MIB_PER_UNIT)),
        ("gpushare_placement", wish.placement, PLACEMENTS),
        ("gpushare_image_delivery", wish.image_delivery, DELIVERIES),
        ("gpushare_memory_limit", wish.memory_limit, limits.MODES),
    ):
        if value not in known:
            found.problem("unknown-value", f"{variable}: {value!r} isn't known; it can be {' or '.join(known)}")


def _images(wish: Wish, version: str, found: Findings) -> None:
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if not numbers or (int(numbers.group(1)), int(numbers.group(2))) < OLD_IMAGES_END:
        return
    for variable, image in (
        ("gpushare_extender_image", wish.extender_image),
        ("gpushare_device_plugin_image", wish.device_plugin_image),
    ):
        if any(tag in image for tag in OLD_IMAGES.values()):
            found.problem(
                "old-image",
                f"{variable}: {image} is a build of 2019 whose Kubernetes 1.11 client drops the fields of a pod that "
                f"it doesn't know when it writes the pod back, which the API server of this cluster ({version}) "
                "refuses, so that no pod could be bound or assigned",
                "leave the variable unset, or name a newer build",
            )


def _stranger(host: Host, nodes: t.Mapping[str, Json], found: Findings) -> None:
    known = ", ".join(sorted(nodes)[:10]) + (", …" if len(nodes) > 10 else "")
    named = "" if host.node == host.host else f" (as gpu_node_name says: {host.node})"
    what, do = "host ", "set gpu_node_name where a host is called otherwise there"
    if not host.machine:
        what, do = "", "call it as the cluster does"
    found.problem(
        "unknown-node",
        f"{host.named}: {what}{host.host}{named} isn't a node of the cluster, whose nodes are {known or 'none'}",
        do,
        host.host,
    )


def _node(wish: Wish, host: Host, node: Json, shared: bool, found: Findings) -> None:
    if not node["ready"]:
        found.add("node-not-ready", WARNING, f"node {host.node} isn't Ready", host=host.host)
    if not (host.gpu or shared):
        return
    variable = "gpushare_nodes" if wish.nodes else "gpu_nodes"
    runtime = str(node["runtime"]).partition(":")[0]
    if runtime not in RUNTIMES:
        found.problem(
            "runtime",
            f"{variable}: node {host.node} runs {node['runtime'] or 'an unknown container runtime'}",
            f"what can be set up is {' or '.join(RUNTIMES)}",
            host.host,
        )
    elif runtime != "containerd" and wish.image_delivery == "import":
        found.problem(
            "image-delivery",
            f"gpushare_image_delivery: node {host.node} runs {runtime}, and images are imported into containerd only",
            "put the servers' image into a registry and set it to registry",
            host.host,
        )
    elif not host.machine and wish.image_delivery == "import":
        found.problem(
            "image-delivery",
            f"gpushare_image_delivery: node {host.node} is no host of the inventory, and only hosts import images",
            "put the servers' image into a registry and set it to registry",
            host.host,
        )
    foreign = sorted(name for name in node["capacity"] if _is_foreign(wish, node, name))
    if foreign and shared:
        found.problem(
            "foreign-plugin",
            f"{variable}: node {host.node} announces {', '.join(foreign)} already, so another device plugin gives away "
            "the same cards",
            f"take that plugin off the node, or the node out of {variable}",
            host.host,
        )


def _is_foreign(wish: Wish, node: Json, resource: str) -> bool:
    if not FOREIGN.fullmatch(resource) or contract.quantity(node["capacity"][resource]) <= 0:
        return False
    # The operator labels the nodes that it serves; what its device plugin announces there goes with that plugin.
    return not (wish.gpu_operator and operator.ANNOUNCED.fullmatch(resource) and operator.PLUGIN in node["labels"])


def _machine(wish: Wish, host: Host, found: Findings) -> None:
    seen = host.seen or {}
    distribution = seen.get("distribution") or {}
    own = coreos.refusal(host.host, distribution)
    if own:
        found.problem("coreos", f"gpu_nodes: {own}", host=host.host)
        return
    if distribution.get("family") not in FAMILIES:
        found.problem(
            "distribution",
            f"gpu_nodes: host {host.host} runs {distribution.get('id', 'an unknown system')} "
            f"{distribution.get('version', '')}",
            f"what can be set up is a family of {' or '.join(FAMILIES)}",
            host.host,
        )
    if distribution.get("arch") not in ARCHITECTURES:
        found.problem(
            "architecture",
            f"gpu_nodes: host {host.host} is of architecture {distribution.get('arch', 'unknown')}",
            f"the driver and the servers are there for {' and '.join(ARCHITECTURES)}",
            host.host,
        )
    if not seen.get("gpus"):
        found.problem("no-gpu", f"gpu_nodes: host {host.host} has no NVIDIA GPU on its PCI bus", host=host.host)
    if host.wish.maintenance not in MAINTENANCE:
        found.problem(
            "unknown-value",
            f"gpu_maintenance: {host.wish.maintenance!r} isn't known; it can be {' or '.join(MAINTENANCE)}",
            host=host.host,
        )
    found.all += node_failures.examine(seen, host.wish, host.host)
    for clash in driver_conflicts.conflicts(seen, host.wish.driver()):
        found.problem(clash["id"], f"host {host.host} {clash['found']}", clash["do"], host.host)
    for id, severity, sentence in host.plans:
        found.add(id, severity, sentence, host=host.host)
    _memory(wish, host, found)
    _memory_limit(wish, host, found)


def _memory_limit(wish: Wish, host: Host, found: Findings) -> None:
    # Upstream's plugin has no limits to keep.
    if wish.memory_limit not in ("auto", "required") or wish.device_plugin_image:
        return
    driver = host.wish.driver_version if host.wish.driver_state == "present" else ""
    toolkit = host.wish.toolkit_version if host.wish.toolkit_state == "present" else ""
    why = "; ".join(limits.obstacles(host.seen or {}, driver, toolkit))
    if not why:
        return
    if wish.memory_limit == "required":
        found.problem(
            "memory-limit",
            f"gpushare_memory_limit: host {host.host} can't hold pods to their shares, because {why}",
            "set it to auto where that may be, or give the machine what it lacks",
            host.host,
        )
    else:
        found.add(
            "memory-limit",
            NOTE,
            f"gpushare_memory_limit: nobody holds the pods of host {host.host} to their shares, because {why}",
            host=host.host,
        )


def _memory(wish: Wish, host: Host, found: Findings) -> None:
    if wish.memory_unit not in contract.MIB_PER_UNIT:
        return
    rows = ((host.seen or {}).get("driver") or {}).get("cards") or []
    # A card that the driver can't read has no size; node-side checks tell of it.
    cards = _cards([row for row in rows if row.get("memory_mib")], wish.memory_unit)
    if not cards:
        found.add(
            "unknown-cards",
            NOTE,
            f"gpushare_memory_unit: host {host.host} shows no card before its driver is loaded, so that the device "
            f"plugin itself will judge whether {wish.memory_unit} makes too many device IDs there",
            host=host.host,
        )
        return
    try:
        contract.check_device_list(cards, wish.memory_unit)
    except contract.ContractError as error:
        found.problem("device-list", f"{error} (host {host.host})", host=host.host)
    small = [card for card in cards if card.units <= 0]
    if small:
        found.problem(
            "small-card",
            f"gpushare_memory_unit: card {small[0].index} of host {host.host} has {small[0].memory_mib} MiB, "
            f"not one whole {wish.memory_unit}",
            host=host.host,
        )


def _cards(rows: t.Iterable[t.Mapping[str, t.Any]], unit: str) -> list[Card]:
    return [
        Card(
            index=int(row["index"]),
            uuid=str(row["uuid"]),
            minor=int(row.get("minor") or 0),
            memory_mib=int(row["memory_mib"]),
            units=contract.units_of(int(row["memory_mib"]), unit),
        )
        for row in rows
    ]


def _unit_change(wish: Wish, nodes: t.Iterable[Json], pods: t.Sequence[Json], found: Findings) -> None:
    other = sorted(node["name"] for node in nodes if node_unit(node_cards(node)) not in (None, wish.memory_unit))
    held = [pod for pod in pods if pod["node"] in other]
    if other and held:
        named = ", ".join(f"{pod['namespace']}/{pod['name']}" for pod in held[:3]) + (", …" if len(held) > 3 else "")
        found.problem(
            "unit-change",
            f"gpushare_memory_unit: {wish.memory_unit} isn't what node{'s' if len(other) > 1 else ''} "
            f"{', '.join(other)} count{'' if len(other) > 1 else 's'} in now, and {len(held)} "
            f"pod{'s' if len(held) > 1 else ''} there ({named}) would hold another amount than they asked for",
            "delete them first",
        )
