# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight: all that would stop site.yml, before it changes anything. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._allocation import foreign as foreign_plugins
from .._allocation import node_backends
from .._allocation.cluster import Cluster
from .._allocation.foreign_bindings import Bindings, none
from .._allocation.node_backends import EVERY_TAINT
from .._contracts import backends, operator_labels
from .._contracts import gpushare as contract
from .._contracts.card_exclusion import address_of
from .._contracts.model import Node, node_unit
from .._host.types import Excluded
from .._images import delivery
from .._kube import setup_record, tolerations
from .._node.types import GpuNode
from .._openshift import gpu_operator as operator
from . import claims as allocation
from . import node as machines
from . import ownership, software, virtual
from .findings import NOTE, PROBLEM, WARNING, Finding, Findings
from .inventory import ALL_CARDS, CARDS
from .node import Machine, NodeOptions

# As nodes name them in their status.
RUNTIMES = ("containerd", "docker", "cri-o")
# Without these the run can't go on, and they can't be ignored.
INPUT = {
    "wrong-value": "A variable's value isn't what its role accepts, or would make the run remove what it sets up.",
    "missing-value": "A variable that a role needs isn't set.",
    "missing-file": "A variable names a file or a directory that isn't there on the controller.",
    "unreachable": "Ansible can't log in to the machine.",
    "no-facts": "The machine's facts can't be collected.",
    "no-gpu-nodes": "The group gpu_nodes is empty, and gpushare_nodes names no node.",
    "unknown-node": "A host, or a name in gpushare_nodes, isn't a node of the cluster.",
    "twin-nodes": "Two hosts have the same node name.",
    "coreos": "The machine runs OpenShift's own system, in which nothing may be changed over SSH.",
    "image-archive": "The servers' image is to be imported, and its archive is missing or holds another image.",
    "image-build": "A machine lacks the servers' image, and the machine that is to build it can't.",
    **ownership.INPUT,
}
# Findings about the cluster, and of the roles' own plans. The user may ignore them.
CLUSTER = {
    "unknown-variable": "A variable has a prefix of this collection, and no role knows it: its name may be misspelt.",
    "unknown-yet": "A variable's template uses what isn't defined before the run.",
    "not-root": "The user that logs in to the machine isn't root, and nothing asks Ansible to become root.",
    "no-escalation": "The user that logs in to the machine can't become root; often its password is missing.",
    "old-image": "An image of upstream's is from 2019 and can't bind a pod on this cluster.",
    "node-not-ready": "A node isn't Ready.",
    "not-joined": "Other hosts than those that add_node.yml names aren't in the cluster yet.",
    "runtime": "The node's container runtime isn't one of those that can be set up.",
    "image-delivery": "Images can't be imported: the runtime isn't containerd, or the node isn't in the inventory.",
    "taint-servers": "A node has a taint that its device plugin, or DRA driver, doesn't tolerate.",
    "taint-pods": "A node has a taint that users' pods need a toleration for.",
    "foreign-plugin": "Another device plugin announces the same cards.",
    "cards-given-away": "VFIO has all cards of a node that is to share them, for virtual machines.",
    "no-helm": "The controller lacks helm, by which HAMi's and NVIDIA's charts are deployed.",
    "driver-container-absent": "The GPU Operator gives the node its driver by a container, which doesn't run now.",
    "unit-change": "The memory unit differs from the present one, and pods hold memory in that one.",
    "driver-refused": "Role driver can't do what is asked for on this machine.",
    "toolkit-refused": "Role toolkit can't do what is asked for on this machine.",
    "runtime-refused": "Role runtime can't configure this machine's container runtime.",
    "exclude-unmatched": "An entry of gpu_exclude names no card of any machine that has it.",
    "exclude-unsupported": "The node's back end can't leave a card alone, and gpu_exclude names one.",
    "mirror-missing": "A mirror that a variable names lacks an image, a chart, a package or a file that the run needs.",
    "mirror-not-checked": "Whether a mirror has what the run needs isn't known, where the controller doesn't reach it.",
    "registry-without-tls": "A registry of images has no TLS, and nothing says that the nodes' runtimes know it.",
    "mirror-not-named": "Some items come from mirrors, and others from where they are public.",
    "runtime-warning": "The container runtime needs attention: its cgroup driver isn't kubelet's, for example.",
    **ownership.DESCRIBED,
}
# Found and to do where a machine's facts are missing.
TROUBLE = {
    "unreachable": (
        "can't be reached{by}: {reason}",
        "mend its address or its SSH access, or leave it out (--limit 'localhost,all,!NAME')",
    ),
    "not-root": (
        "runs modules as {user}, and the roles need root there",
        "set ansible_become: true for it or run with --become (sudo's password: --ask-become-pass), or log in as root",
    ),
    "no-escalation": (
        "is reached as {user}, who can't become root: {reason}",
        "run with --ask-become-pass or set ansible_become_password to {user}'s, or let {user} use sudo without one",
    ),
    "no-facts": (
        "returns no facts: {reason}",
        "mend that on the machine, or leave it out (--limit 'localhost,all,!NAME')",
    ),
}

# By back end, the variable with the tolerations of its pods on the nodes, and what they are.
TOLERATIONS = {
    backends.GPUSHARE: ("gpushare_tolerations", "gpushare's device plugin or DRA driver"),
    backends.HAMI: ("hami_tolerations", "HAMi's device plugin"),
    backends.NVIDIA: ("nvidia_device_plugin_tolerations", "NVIDIA's device plugin"),
}

# Upstream's published images are builds of early 2019, with a Kubernetes 1.11 client.
OLD_IMAGES = {"gpushare_extender_image": "1.11-d170d8a", "gpushare_device_plugin_image": "v2-1.11-aff8a23"}
# Since this version pods have fields that the old client drops when it writes pods back.
OLD_IMAGES_END = (1, 16)


@dataclasses.dataclass(frozen=True)
class Options:
    """The user's variables.

    :param nodes: nodes whose cards are shared, by their names in the cluster; empty for the hosts of gpu_nodes.
    :param alone: nodes that join, beside which nothing changes; empty where all nodes are set up.
    :param gpu_operator: NVIDIA's GPU Operator will remove its device plugin from these nodes.
    :param claims: who allocates the cards, and what is known of claims.
    :param operator_external: this run installs no GPU Operator.
    :param operator_host_driver: that operator uses the machines' own drivers.
    :param owner: who this run is for: playbooks, or a resource of the operator.
    :param take_over: whose set-up is taken over on purpose; empty for nobody's.
    :param record: who owns what is set up; None where it wasn't read.
    :param bindings: RoleBindings of others in the servers' namespaces.
    """

    memory_unit: str = "GiB"
    image_delivery: str = "import"
    extender_image: str = ""
    device_plugin_image: str = ""
    nodes: t.Sequence[str] = ()
    alone: t.Sequence[str] = ()
    gpu_operator: bool = False
    memory_limit: str = "auto"
    claims: allocation.Claims = dataclasses.field(default_factory=allocation.Claims)
    operator_external: bool = False
    operator_host_driver: bool = False
    owner: str = setup_record.PLAYBOOK
    take_over: str = ""
    record: setup_record.Record | None = None
    bindings: Bindings = dataclasses.field(default_factory=none)


@dataclasses.dataclass(frozen=True)
class Host:
    """One machine of the inventory, or a node of the cluster that is none.

    :param host: its name in the inventory.
    :param node: its name in the cluster.
    :param source: the group gpu_nodes or control_plane, or the variable gpushare_nodes.
    :param facts: ``gpu_node``; None where they weren't collected in this run.
    :param options: variables of the nodes' roles.
    :param plans: findings of these roles' own plans.
    :param trouble: why there are no facts, as ``gpu_node_info`` reports it.
    :param virtual: what its variables say about cards for virtual machines.
    """

    host: str
    node: str
    source: str
    facts: GpuNode | None = None
    options: NodeOptions = dataclasses.field(default_factory=NodeOptions)
    plans: tuple[Finding, ...] = ()
    trouble: t.Mapping[str, str] | None = None
    virtual: virtual.VirtualOptions = dataclasses.field(default_factory=virtual.VirtualOptions)

    @property
    def is_gpu_host(self) -> bool:
        """The nodes' roles set it up."""
        return self.source == "gpu_nodes"

    @property
    def is_machine(self) -> bool:
        """It is a host of the inventory."""
        return self.source != "gpushare_nodes"


def examine(
    options: Options, cluster: Cluster | None, hosts: t.Sequence[Host], ignore: t.Sequence[str] = ()
) -> Findings:
    """Return all that would stop the run.

    :param cluster: None to examine the machines alone.
    :param ignore: findings that the user accepts: ``id`` or ``id@host``.
    :raises BadInput: ``ignore`` names no such finding.
    """
    known = {host.node for host in hosts}
    others = [Host(name, name, "gpushare_nodes") for name in dict.fromkeys(options.nodes) if name not in known]
    hosts = (*hosts, *others)
    absent = [host for host in hosts if cluster and node_backends.is_absent(host.node, cluster, options.alone)]
    hosts = tuple(host for host in hosts if host not in absent)
    findings = Findings(_trouble(host, host.trouble) for host in hosts if host.trouble)
    if absent:
        what = "left out of this run, in which only {alone} may change, since they aren't in the cluster yet: {absent}"
        fields = {"alone": list(options.alone), "absent": [host.host for host in absent]}
        findings.append(Finding("not-joined", NOTE, what, fields=fields))
    shared = frozenset(options.nodes or (host.node for host in hosts if host.is_gpu_host))
    if options.claims.backends:
        shared |= {row["node"] for row in options.claims.backends["nodes"]}
        shared -= {*options.claims.backends["virtual"]}
    if not shared and not (options.claims.backends and options.claims.backends["nodes"]):
        what = "the group names no host, and gpushare_nodes no node: there is nothing to set up"
        action = "add the machines with GPUs to the group, or name their nodes in gpushare_nodes"
        findings.append(Finding("no-gpu-nodes", PROBLEM, what, action, variable="gpu_nodes"))
    if cluster is not None:
        findings += _cluster(options, cluster, hosts, shared)
    for host in hosts:
        if host.is_gpu_host and host.facts is not None:
            findings += _of_machine(options, host, host.facts)
    findings += _exclusions(options, hosts)
    findings.ignore(ignore, described())
    return findings


def _exclusions(options: Options, hosts: t.Sequence[Host]) -> t.Iterator[Finding]:
    """Report entries of gpu_exclude that name no card anywhere, and cards that a back end would take nevertheless."""
    seen = {
        host.host: _without(host.facts["driver"]["excluded"], host.virtual.cards)
        for host in hosts
        if host.is_gpu_host and host.facts is not None
    }
    # A group's entries may name cards of some of its machines.
    named = {card["entry"] for excluded in seen.values() for card in excluded["cards"]}
    for entry in dict.fromkeys(unmatched for excluded in seen.values() for unmatched in excluded["unmatched"]):
        having = {host: excluded for host, excluded in seen.items() if entry in excluded["unmatched"]}
        if entry in named:
            continue
        unknown = not address_of(entry) and any(excluded["unnamed"] for excluded in having.values())
        what, action = (
            "{entry} names no card",
            ("correct it, or remove it: 'lspci -D -d 10de:' lists the addresses, 'nvidia-smi -L' UUIDs and models"),
        )
        if unknown:
            what = "{entry} names no card yet: of a card without a loaded driver only the PCI address is known"
            action = "use the card's PCI address ('lspci -D -d 10de:')"
        severity, fields = WARNING if unknown else PROBLEM, {"entry": entry}
        yield Finding(
            "exclude-unmatched", severity, what, action, variable="gpu_exclude", fields=fields, hosts=tuple(having)
        )
    for machine in hosts:
        if machine.host not in seen or not seen[machine.host]["cards"]:
            continue
        if options.claims.shares(machine.node) and not options.device_plugin_image:
            continue
        whose = "gpushare_device_plugin_image" if options.claims.shares(machine.node) else "its back end (gpu_backend)"
        yield Finding(
            "exclude-unsupported",
            PROBLEM,
            "keeps {cards} from Kubernetes by gpu_exclude, and {whose} takes every card that the driver has",
            "bind the card to vfio-pci, let gpushare's own device plugin have the node, or where the back end can "
            "leave the card out (HAMi: filterdevices in hami_node_configuration), set preflight_ignore: "
            "[exclude-unsupported@{host}]",
            machine.host,
            "gpu_exclude",
            {"cards": [card["address"] for card in seen[machine.host]["cards"]], "whose": whose},
            machines.SUBJECT,
        )


def _without(excluded: Excluded, cards: t.Collection[str]) -> Excluded:
    """Return the cards that are left alone without those that role passthrough binds, and which it answers for."""
    return {
        **excluded,
        "cards": [card for card in excluded["cards"] if card["entry"] not in cards],
        "unmatched": [entry for entry in excluded["unmatched"] if entry not in cards],
    }


def described() -> dict[str, str]:
    """Return id and meaning of every finding that can be ignored, for the documentation."""
    return {**CLUSTER, **allocation.DESCRIBED, **software.DESCRIBED, **virtual.DESCRIBED, **machines.described()}


def _of_machine(options: Options, host: Host, facts: GpuNode) -> list[Finding]:
    """Return the findings about a machine; where roles install nothing, those about its system and cards alone."""
    backend = virtual.backend_of(host.node, host.virtual, options.claims.backends)
    if backend:
        return [*_of_virtual(options, host, facts, backend)]
    found = machines.examine(_machine(options, host, facts))
    if options.claims.installed_by_roles(host.node):
        return [*found, *host.plans]
    return [finding for finding in found if finding.id in INPUT or finding.id in software.OF_MACHINES]


def _of_virtual(options: Options, host: Host, facts: GpuNode, backend: str) -> t.Iterator[Finding]:
    """Yield the findings about a machine whose cards are for virtual machines."""
    own = dataclasses.replace(host.options, driver_state="external", toolkit_state="external")
    found = machines.examine(_machine(options, dataclasses.replace(host, options=own), facts))
    yield from (finding for finding in found if finding.id in INPUT or finding.id in virtual.OF_MACHINES)
    yield from host.plans
    yield from virtual.examine(host.host, backend, host.virtual, facts)


def _machine(options: Options, host: Host, facts: GpuNode) -> Machine:
    unit = options.memory_unit if options.memory_unit in contract.MIB_PER_UNIT else ""
    # Upstream's device plugin has no limits, and other back ends have their own.
    limit = "off" if options.device_plugin_image or not options.claims.shares(host.node) else options.memory_limit
    # Only a device plugin lists devices to kubelet.
    listed = options.claims.by_extender(host.node)
    return Machine(host.host, facts, host.options, unit, limit, listed)


def _trouble(host: Host, trouble: t.Mapping[str, str]) -> Finding:
    what, action = TROUBLE[trouble["id"]]
    # Without a name ssh logs in as the user who runs Ansible.
    fields = {**trouble, "by": f" as {trouble['user']}" if trouble["user"] else ""}
    return Finding(trouble["id"], PROBLEM, what, action, host.host, "", fields, machines.SUBJECT)


# --------------------------------------------------------------------------- cluster


def _cluster(
    options: Options, cluster: Cluster, hosts: t.Sequence[Host], shared: frozenset[str]
) -> t.Iterator[Finding]:
    if options.record is not None:
        decided = options.claims.backends
        set_up = decided is not None and any(decided["there"].values())
        yield from ownership.examine(options.record, options.owner, options.take_over, set_up)
    yield from ownership.bindings(options.bindings)
    yield from _images(options, cluster.version)
    yield from allocation.examine(options.claims, cluster, shared)
    if options.claims.backends is not None:
        machines_nodes = {host.node for host in hosts if host.is_gpu_host}
        yield from virtual.unreached(options.claims.backends, machines_nodes)
    if options.claims.software is not None:
        known = {host.node: host.facts for host in hosts if host.is_gpu_host and host.facts is not None}
        external, host_driver = options.operator_external, options.operator_host_driver
        yield from software.examine(options.claims.software, cluster, known, external, host_driver)
    nodes = {node.name: node for node in cluster.nodes}
    for host in hosts:
        twins = [other.host for other in hosts if other.node == host.node]
        if len(twins) > 1 and twins[0] == host.host:
            fields = {"hosts": twins, "node": host.node}
            what = "the hosts {hosts} have the same node name, {node}"
            action = "set it for each host to the name of its own node, or remove the other hosts"
            yield Finding("twin-nodes", PROBLEM, what, action, variable="gpu_node_name", fields=fields)
        node = nodes.get(host.node)
        if node is None:
            yield _unknown_node(host, nodes)
        else:
            yield from _node(options, host, node, host.node in shared, cluster.plugins)
            if host.node in shared:
                yield from _given_away(options, host)
            backend = virtual.backend_of(host.node, host.virtual, options.claims.backends)
            if backend == backends.KATA:
                yield from virtual.kata_runtime(host.node, node.runtime.partition(":")[0])
            if backend:
                yield from virtual.operator_parts(host.host, backend, host.virtual, cluster.operators)
            if options.claims.installed_by_roles(host.node):
                yield from _driver_container(host, node, cluster.operators)
    yield from _taints(options, cluster, shared)
    if options.memory_unit in contract.MIB_PER_UNIT:
        yield from _unit_change(options, cluster)


def _images(options: Options, version: str) -> t.Iterator[Finding]:
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if not numbers or (int(numbers.group(1)), int(numbers.group(2))) < OLD_IMAGES_END:
        return
    for variable, image in (
        ("gpushare_extender_image", options.extender_image),
        ("gpushare_device_plugin_image", options.device_plugin_image),
    ):
        if any(tag in image for tag in OLD_IMAGES.values()):
            yield Finding(
                "old-image",
                PROBLEM,
                "{image} is a build of 2019. Its Kubernetes 1.11 client drops unknown fields when it writes "
                "a pod back; the API server of this cluster ({version}) refuses that, and no pod could be "
                "bound or assigned",
                "leave the variable unset, or name a newer build",
                variable=variable,
                fields={"image": image, "version": version},
            )


def _unknown_node(host: Host, nodes: t.Mapping[str, Node]) -> Finding:
    what = "host {host}" if host.is_machine else "{host}"
    if host.node != host.host:
        what += " (gpu_node_name: {node})"
    return Finding(
        "unknown-node",
        PROBLEM,
        what + " isn't a node of the cluster, whose nodes are {known}",
        "set gpu_node_name where the cluster has another name for a host"
        if host.is_machine
        else "use the name that the cluster has for it",
        host.host,
        host.source,
        {"node": host.node, "known": _first(sorted(nodes), 10) or "none"},
    )


def _driver_container(host: Host, node: Node, operators: t.Sequence[foreign_plugins.Operator]) -> t.Iterator[Finding]:
    """Report a driver container that is to come: role driver would install a second driver meanwhile."""
    label, value = foreign_plugins.DRIVER_LABEL
    if host.facts is None or host.options.driver_state != "present" or node.labels.get(label) != value:
        return
    names = [operator["name"] for operator in operators if operator["drives"]]
    if names and not host.facts["driver"]["others"]:
        yield Finding(
            "driver-container-absent",
            PROBLEM,
            "gets its driver by a container of NVIDIA's GPU Operator (label {label}={value}), and none runs there now",
            "wait until the operator's driver runs on the node, or set driver_state: external; where role driver is to "
            "install it, switch the operator's off: spec.driver.enabled=false in ClusterPolicy {policy}",
            host.host,
            "driver_state",
            {"label": label, "value": value, "policy": names[0]},
            machines.SUBJECT,
        )


def _given_away(options: Options, host: Host) -> t.Iterator[Finding]:
    """Report a node without a card for pods, which a device plugin or driver would find no card on."""
    cards = host.facts["gpus"] if host.is_gpu_host and host.facts is not None else []
    claims = options.claims.backends
    given = {row["node"]: row["backend"] for row in claims["nodes"]} if claims else {}
    if host.is_gpu_host and ALL_CARDS in host.virtual.cards:
        yield Finding(
            "cards-given-away",
            PROBLEM,
            "is to share its cards by {backend}, and gives all of them to virtual machines",
            "name the cards that virtual machines get, or set gpu_backend to passthrough",
            host.host,
            CARDS,
            {"backend": given.get(host.node, backends.GPUSHARE)},
            machines.SUBJECT,
        )
        return
    if not cards or not all("vfio" in (card["driver"] or "") for card in cards):
        return
    present = next((row["present"] for row in claims["nodes"] if row["node"] == host.node), []) if claims else []
    if any(name in backends.VIRTUAL for name in present):
        # Role switch returns them.
        return
    yield Finding(
        "cards-given-away",
        PROBLEM,
        "is to share its cards by {backend}, and VFIO has all of them for virtual machines: {cards}",
        "take them back (passthrough.yml -e passthrough_state=absent, and remove passthrough_cards), set it to "
        "passthrough, or leave the node out: name the nodes that share in gpushare_nodes, and set it for none of them",
        host.host,
        "gpu_backend",
        {"backend": given.get(host.node, backends.GPUSHARE), "cards": [card["address"] for card in cards]},
        machines.SUBJECT,
    )


def _node(
    options: Options, host: Host, node: Node, shared: bool, plugins: t.Sequence[foreign_plugins.Plugin]
) -> t.Iterator[Finding]:
    """Report what is in the way of one node.

    :param shared: its cards are to be shared.
    :param plugins: of others, in the cluster.
    """
    variable = "gpushare_nodes" if options.nodes else "gpu_nodes"

    runtime = node.runtime.partition(":")[0]
    foreign = [name for name in foreign_plugins.announced(node.allocatable) if not _goes(options, node, name)]
    here = foreign_plugins.on_node(plugins, node.labels) if foreign else []
    fields = {
        "node": host.node,
        "runtime": node.runtime,
        "name": runtime,
        "resources": foreign,
        "known": " or ".join(RUNTIMES),
        "named_by": variable,
        "plugin": foreign_plugins.told(here) or "another device plugin",
        "plugins": here,
    }

    def finding(id: str, what: str, action: str = "", variable: str = variable, severity: str = PROBLEM) -> Finding:
        return Finding(id, severity, what, action, host.host, variable, fields, "node {node} ")

    conditions = "run 'kubectl describe node {node}': its conditions have the reason"
    if node.ready != "True" and options.claims.moves(node):
        do = f"mend the node first, or leave it out of this run; {conditions}"
        yield finding("node-not-ready", "isn't Ready: its kubelet ends no pod, and starts none", do, variable="")
    elif node.ready != "True":
        yield finding("node-not-ready", "isn't Ready", conditions, variable="", severity=WARNING)
    if not (host.is_gpu_host or shared):
        return
    # Others bring their own image by their charts.
    own = options.claims.shares(host.node)
    registry = "put the servers' image into a registry and set it to registry"
    if runtime not in RUNTIMES:
        what = "runs " + ("{runtime}" if node.runtime else "an unknown container runtime")
        yield finding("runtime", what, "what can be set up is {known}")
    elif own and options.image_delivery in delivery.IMPORTED and runtime != "containerd":
        what = "runs {name}, and images are imported into containerd only"
        yield finding("image-delivery", what, registry, "gpushare_image_delivery")
    elif own and options.image_delivery in delivery.IMPORTED and not host.is_machine:
        what = "is no host of the inventory, and only hosts import images"
        yield finding("image-delivery", what, registry, "gpushare_image_delivery")
    if foreign and shared and not _configures(options, host.node, here):
        yield finding(
            "foreign-plugin",
            "announces {resources} already: {plugin} gives away the same cards",
            foreign_plugins.way_out(here),
        )


def _goes(options: Options, node: Node, resource: str) -> bool:
    """Return whether a resource is no other plugin's: of this collection's, or of one that goes.

    The GPU Operator's device plugin goes from the nodes that it labels, where role gpushare has it do so.
    """
    if backends.LABEL in node.labels:
        return True
    return bool(
        options.gpu_operator and operator.ANNOUNCED.fullmatch(resource) and operator_labels.DEVICE_PLUGIN in node.labels
    )


def _configures(options: Options, node: str, here: t.Sequence[foreign_plugins.Plugin]) -> bool:
    """Return whether the plugins on a node are the GPU Operator's, which role nvidia_device_plugin configures."""
    ours = options.claims.backends is not None and node in options.claims.backends["nvidia"]
    return ours and bool(here) and all(plugin["owner"].startswith("ClusterPolicy ") for plugin in here)


def _taints(options: Options, cluster: Cluster, shared: frozenset[str]) -> t.Iterator[Finding]:
    """Report taints that keep the pods of a back end, or those of users, off nodes with shared cards."""
    known = options.claims.backends
    given = {row["node"]: row["backend"] for row in known["nodes"]} if known else {}
    operated = allocation.has_cluster_policy(cluster.operators)
    needed: dict[tuple[str, ...], list[str]] = {}
    for node in cluster.nodes:
        lasting = tolerations.lasting(node.taints)
        if node.name not in shared or not lasting:
            continue
        needed.setdefault(tuple(tolerations.shown(lasting)), []).append(node.name)
        backend = given.get(node.name, backends.GPUSHARE)
        variable, server = TOLERATIONS[backend]
        refused = tolerations.untolerated(lasting, options.claims.values.get(variable, EVERY_TAINT))
        # The GPU Operator's ClusterPolicy has the tolerations of its own pods.
        if refused and not (backend == backends.NVIDIA and operated):
            yield Finding(
                "taint-servers",
                PROBLEM,
                "node {node} has {taints}, which its entries don't tolerate: {server} wouldn't run there",
                "leave it unset, which tolerates every taint, or add {toleration}",
                node.name,
                variable,
                {
                    "node": node.name,
                    "taints": tolerations.shown(refused),
                    "server": server,
                    "toleration": [f"{{key: {taint['key']}, operator: Exists}}" for taint in refused],
                },
            )
    for taints, names in needed.items():
        yield Finding(
            "taint-pods",
            NOTE,
            "node{s} {nodes} {has} {taints}: no pod of users runs there without a toleration of it, and Kubernetes' "
            "ExtendedResourceToleration adds one only for a taint whose key is the requested resource",
            "add it to the pods; acceptance.yml's get it by acceptance_tolerations",
            fields={
                "nodes": names,
                "taints": list(taints),
                "s": "s" if len(names) > 1 else "",
                "has": "have" if len(names) > 1 else "has",
            },
        )


def _unit_change(options: Options, cluster: Cluster) -> t.Iterator[Finding]:
    units = (None, options.memory_unit)
    noted = {node.name for node in cluster.nodes if node_unit(node.cards) not in units}
    sliced = {announced["node"] for announced in cluster.slices or () if announced["unit"] not in units}
    other = sorted(noted | sliced)
    held = [pod for pod in cluster.sharing_pods or () if pod.node in other]
    # A template's name has the number only, and its content follows the unit.
    held += [pod for pod in cluster.claiming_pods or () if sliced and pod.node in ("", *other)]
    pods = [pod.key for pod in held]
    where = "there" if all(pod.node for pod in held) else "there, or waiting,"
    if other and pods:
        yield Finding(
            "unit-change",
            PROBLEM,
            f"{{unit}} isn't the present unit of node{'s' if len(other) > 1 else ''} {{nodes}}, and {{count}} "
            f"pod{'s' if len(pods) > 1 else ''} {where} ({{pods}}) would hold another amount than they asked for",
            "delete them first",
            variable="gpushare_memory_unit",
            fields={
                "unit": options.memory_unit,
                "nodes": other,
                "count": len(pods),
                "pods": _first(pods, 3),
            },
        )


def _first(names: list[str], most: int) -> list[str]:
    """Return the first names, and an ellipsis where there are more."""
    return [*names[:most], "…"] if len(names) > most else names
