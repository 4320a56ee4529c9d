# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect from the API how a cluster runs its scheduler, and which machines have to be changed for it."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._allocation import allocators, cluster, foreign_bindings, node_backends, node_software
from .._allocation.allocators import CLAIMS_SINCE, DRA, release
from .._allocation.node_backends import OPENSHIFT_LABEL, is_control_plane
from .._contracts import claim_templates, model, virtual
from .._contracts import claims as dra
from .._contracts.backends import GPUSHARE, HAMI, KATA, LABEL, NVIDIA, OPERATOR, RESTRICTED, VIRTUAL
from .._contracts.gpushare import NODE_LABEL, ContractError, pod_node
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._core.untrusted import line
from .._kube import helm, setup_record
from .._kube.api import Kube
from .._kube.errors import KubeError
from .._kube.options import auth_arguments
from .._kube.refs import Ref
from .._kubevirt import devices as kubevirt
from .._openshift import cluster as openshift
from .._openshift import coreos
from .constants import (
    ADMISSION_BETA_SINCE,
    ADMISSION_SINCE,
    AUTO,
    DEDICATED,
    DEDICATED_NAME,
    EXTENDER,
    K3S,
    ON_MACHINES,
    OPENSHIFT,
    PART_OF,
    RKE2,
    SCHEDULER_LABEL,
    STATIC_POD,
)
from .pods import is_mirror, scheduler_container

LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")

# Modes and names of the distributions whose servers have a mode, by a mark of their kubelets' versions.
SERVERS = {"+k3s": (K3S, "k3s"), "+rke2": (RKE2, "RKE2")}
# Distributions that run kube-scheduler outside of a pod, by a mark of their nodes.
K0S, MICROK8S_LABEL, RKE1_ANNOTATIONS = "+k0s", "microk8s.io/cluster", "rke.cattle.io/"
# The arguments with which k3s and RKE2 run on a node, as a list in JSON; the first is server or agent.
NODE_ARGUMENTS = ("k3s.io/node-args", "rke2.io/node-args")
# Annotations of the servers' namespace that are returned.
OWN_ANNOTATIONS = "kubegpu.share/"

# How nodes are returned.
ROWS, TEXT, NO_NODES = "rows", "text", "none"

SCHEDULER_OPTIONS: JsonObject = {
    "mode": {"type": "str", "choices": [AUTO, STATIC_POD, K3S, RKE2, DEDICATED, OPENSHIFT], "default": AUTO},
    "hosts": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "namespace": {"type": "str", "default": "gpushare-system"},
    "dedicated_namespace": {"type": "str", "default": DEDICATED_NAME},
    "operator_namespace": {"type": "str", "default": "gpu-operator"},
}
WANTED: JsonObject = {
    "node": {"type": "str", "required": True},
    "backend": {"type": "str", "choices": list(allocators.BACKENDS), "default": GPUSHARE},
    "allocation": {"type": "str", "choices": list(node_backends.ALLOCATIONS), "default": allocators.EXTENDER},
    "cards": {"type": "bool", "default": False},
}
SOFTWARE: JsonObject = {
    "node": {"type": "str", "required": True},
    "software": {"type": "str", "choices": list(node_software.CHOICES), "default": node_software.AUTO},
    "machine": {"type": "bool", "default": True},
}
BACKENDS_OPTIONS: JsonObject = {
    "wanted": {"type": "list", "elements": "dict", "options": WANTED},
    "software": {"type": "list", "elements": "dict", "options": SOFTWARE, "default": []},
    "values": {"type": "dict", "default": {}},
    "switch": {"type": "list", "elements": "str", "default": []},
    "alone": {"type": "list", "elements": "str", "default": []},
    "owner": {"type": "str", "default": ""},
}
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "memory_unit": {"type": "str", "choices": ["GiB", "MiB"]},
    "sharing_pods": {"type": "bool", "default": False},
    "nodes": {"type": "str", "choices": [ROWS, TEXT, NO_NODES], "default": ROWS},
    "scheduler": {"type": "dict", "options": SCHEDULER_OPTIONS},
    "backends": {"type": "dict", "options": BACKENDS_OPTIONS},
}
# A claim on a part of a device: the API server drops its capacity where the feature gate is off.
PROBE: JsonObject = {
    "apiVersion": claim_templates.API_VERSION,
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "gpushare-preflight", "namespace": "default"},
    "spec": {
        "spec": {
            "devices": {
                "requests": [
                    {
                        "name": "gpu",
                        "exactly": {
                            "deviceClassName": claim_templates.DRIVER,
                            "capacity": {"requests": {claim_templates.CAPACITY: "1Gi"}},
                        },
                    }
                ]
            }
        }
    },
}
# By which parts of an allocation are known, in the order in which they are removed; the servers make the Leases.
DAEMON_SETS: t.Mapping[str, tuple[str, ...]] = {
    allocators.EXTENDER: ("gpushare-device-plugin", EXTENDER),
    DRA: ("gpushare-dra-driver",),
}
LEASES: t.Mapping[str, str] = {allocators.EXTENDER: "gpushare-ledger", DRA: "gpushare-dra-templates"}


class NamespaceState(t.TypedDict):
    """A namespace's name and the part of its metadata by which its owner is known; empty where it doesn't exist."""

    name: str
    metadata: JsonObject


class DetectedScheduler(t.TypedDict):
    """How a cluster runs its scheduler.

    ``hosts`` are the machines to change, the lease's holder last; ``unlabelled`` those of their nodes without a label
    of a control plane. ``versions`` are the static pods'. ``leftovers`` are of another mode, as kind and name.
    """

    mode: str
    reason: str
    hosts: list[str]
    unlabelled: list[str]
    on_machines: bool
    openshift: str
    takes_policy: bool
    versions: list[str]
    version: str
    leftovers: list[str]
    namespace: NamespaceState


@dataclasses.dataclass(frozen=True)
class Node(model.Node):
    """A node, and what of it tells how it runs kube-scheduler; ``hostnames`` are all names of its machine.

    :param distribution: that runs kube-scheduler outside of a pod; empty for another or an unknown one.
    :param server: k3s or RKE2 run there as a server, by what its kubelet says of itself; asked of machines in group
        control_plane only.
    """

    distribution: str = ""
    server: bool = False

    @property
    def labelled(self) -> bool:
        return is_control_plane(self)

    @property
    def control_plane(self) -> bool:
        return self.labelled or self.server


@dataclasses.dataclass(frozen=True)
class State:
    """What the API reports.

    :param schedulers: image of each kube-scheduler that is a static pod, by its node.
    :param holder: holder of kube-scheduler's lease, as ``<host name>_<uuid>``; empty for none.
    :param openshift: version of OpenShift; empty for another cluster.
    :param hosted: name of each kube-scheduler's pod that a controller made and no kubelet's file, by its node.
    """

    nodes: t.Sequence[Node]
    schedulers: t.Mapping[str, str]
    holder: str = ""
    openshift: str = ""
    hosted: t.Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def leader(self) -> str:
        """Return the host name of the lease's holder, in lower case."""
        return self.holder.rpartition("_")[0].lower()


@dataclasses.dataclass(frozen=True)
class Selection:
    """The mode, why it was selected, and the inventory hosts to change one after another, the lease's holder last."""

    mode: str
    reason: str
    hosts: tuple[str, ...] = ()


def select_mode(
    mode: str, hosts: t.Mapping[str, str], state: State, present: bool = True, extended: bool = True
) -> Selection:
    """Select the mode that fits this cluster.

    :param mode: the mode that the user requests, or ``auto``.
    :param hosts: the node's name of each host in group control_plane.
    :param state: what the API reports.
    :param present: the extender is set up; its removal isn't refused where no mode configures the cluster's scheduler.
    :param extended: schedulers on machines may have the extender, so that its removal needs these machines.
    :raises BadInput: the requested mode doesn't fit, or a scheduler would be left without the extender.
    """
    fitting, reason = _fitting_mode(state)
    unsupported = "" if reason else _unsupported(hosts, state)
    reason = reason or unsupported or "no node reports a kube-scheduler, so the control plane is managed by a provider"
    if mode == AUTO:
        if unsupported and present:
            raise BadInput(
                f"scheduler_mode: {unsupported}, and no mode configures it there; set scheduler_mode: {DEDICATED}, "
                "which runs a scheduler of its own for GPU pods beside it"
            )
        mode = fitting
        if mode in ON_MACHINES and not (present or hosts or extended):
            mode, reason = DEDICATED, f"{reason}, group control_plane is empty, and the cluster has no {EXTENDER}"
    elif OPENSHIFT in (mode, fitting) and mode != fitting:
        raise BadInput(f"scheduler_mode: {mode} doesn't fit this cluster: {reason}; set it to {AUTO}")
    elif mode != fitting:
        reason = f"scheduler_mode sets it; auto would select {fitting}: {reason}"
    if mode not in ON_MACHINES:
        return Selection(mode, reason)
    running = sorted(state.schedulers) if mode != K3S else []
    running = running or [node.name for node in state.nodes if node.control_plane]
    _require_every_scheduler(mode, hosts, running, state)
    machines = {node.name: node.hostnames for node in state.nodes}

    def last(host: str) -> tuple[bool, bool, bool]:
        return _leads(state, host, hosts[host], *machines.get(hosts[host], ()))

    return Selection(mode, reason, tuple(sorted(hosts, key=last)))


def _leads(state: State, *machine: str) -> tuple[bool, bool, bool]:
    """Return whether a machine holds the lease: by a full name, by one of which a domain is missing, by a first label.

    The lease has the machine's own name, with or without its domain, which may differ from its node's.
    """
    label, _dot, domain = state.leader.partition(".")
    names = {name.lower() for name in machine}
    alike = [name for name in names if name.partition(".")[0] == label]
    return state.leader in names, any(not domain or "." not in name for name in alike), bool(alike)


def _leading_node(state: State) -> str:
    """Return the node whose machine holds the lease; empty where none does, as in a managed control plane.

    Machines of several domains, such as a provider's and its user's, may share a first label.
    """
    leads = [(_leads(state, node.name, *node.hostnames), node.name) for node in state.nodes] if state.leader else []
    matching = [lead for lead in leads if any(lead[0][:2])]
    return max(matching)[1] if matching else ""


def _fitting_mode(state: State) -> tuple[str, str]:
    """Return the mode that fits, and why; no reason for a cluster whose scheduler isn't found."""
    if state.openshift:
        return OPENSHIFT, f"it is OpenShift {state.openshift}"
    for node in [node for node in state.nodes if node.control_plane][:1]:
        for mark, (mode, _title) in SERVERS.items():
            if mark in node.kubelet_version:
                return mode, f"node {node.name} runs {node.kubelet_version}"
    if state.schedulers:
        return STATIC_POD, f"node {min(state.schedulers)} runs kube-scheduler as a static pod"
    return DEDICATED, ""


def _unsupported(hosts: t.Mapping[str, str], state: State) -> str:
    """Return where kube-scheduler runs if no mode configures it there; empty for a managed control plane."""
    if state.hosted:
        # A pending one last.
        node = min(state.hosted, key=lambda name: (not name, name))
        where = f"on node {node} " if node else ""
        return (
            f"kube-scheduler runs {where}in pod kube-system/{state.hosted[node]}, which is no static pod (a "
            "Deployment or DaemonSet, as bootkube's)"
        )
    distributions = sorted({node.distribution for node in state.nodes} - {""})
    leading = _leading_node(state)
    places = [leading] if leading else sorted(set(hosts.values()))
    if not distributions and not places:
        return ""
    where = f" on {', '.join(places)}" if places else ""
    # A server without an agent is no node.
    kubelets = [node.kubelet_version for node in state.nodes]
    servers = [title for mark, (_mode, title) in SERVERS.items() if any(mark in kubelet for kubelet in kubelets)]
    how = ", ".join(distributions or servers) or "MicroK8s, k0s, RKE1, or a unit of systemd, as kubeasz installs it"
    return f"kube-scheduler runs{where} outside of a pod ({how})"


def _require_every_scheduler(mode: str, hosts: t.Mapping[str, str], running: t.Sequence[str], state: State) -> None:
    """Refuse to leave a scheduler out: it may become the leader and bind pods without the extender."""
    missing = sorted(set(running) - set(hosts.values()))
    if missing:
        raise BadInput(
            f"control_plane: node {', '.join(missing)} runs a kube-scheduler and has no host in this group (set "
            "gpu_node_name where a host's name differs from its node's); a scheduler that is left out binds pods "
            f"without a card. Add the host, or set scheduler_mode to {DEDICATED}"
        )
    known = {node.name for node in state.nodes}
    for host, node in hosts.items():
        if node not in known:
            raise BadInput(f"control_plane: the cluster has no node {node}; set gpu_node_name of host {host}")
        if node not in running:
            raise BadInput(
                f"control_plane: node {node} of host {host} runs no kube-scheduler; take it out of the group"
            )
    if not hosts:
        raise BadInput(
            f"control_plane: this group is empty, and scheduler_mode is {mode}; add the control plane's machines "
            f"to it, or set scheduler_mode to {DEDICATED}"
        )


# --------------------------------------------------------------------------- reading the cluster


def collect(kube: Kube, params: JsonObject) -> JsonObject:
    """Run the module ``cluster_info``: read version and nodes once and, if asked for, detect the scheduler.

    :raises BadInput: the scheduler can't be used in the requested mode.
    """
    version = cluster.known_version(kube.version().get("gitVersion"))
    listed = [] if params.get("nodes") == NO_NODES else kube.list_all("v1", "Node")
    nodes = model.well_formed("node", map(model.node_of, listed))
    unit, wanted, options = params["memory_unit"], params.get("backends"), params["scheduler"]
    slices = None if unit is None and wanted is None else _slices(kube, version)
    by_claims = wanted is not None and any(
        row["backend"] == GPUSHARE and row["allocation"] != allocators.EXTENDER for row in wanted["wanted"] or ()
    )
    pods = bool(params.get("sharing_pods")) or by_claims
    # Who takes the nodes as they are, as verify does, may not read others' objects.
    as_it_is = wanted is not None and wanted["wanted"] is None
    state = cluster.collect(kube, nodes, version, unit, pods, slices, not as_it_is)
    capacity = _keeps_capacity(kube, version) if by_claims else None
    nothing: JsonObject = {"backends": None, "given": {}, "releases": {}, "bindings": foreign_bindings.none()}
    result = {**state.result(), "capacity": capacity, **nothing}
    if params.get("nodes") == TEXT:
        result["all_nodes"] = cluster.packed(result["nodes"])
        named = {row["node"] for row in (wanted or {}).get("wanted") or ()}
        rows = zip(nodes, result["nodes"])
        result["nodes"] = [row for node, row in rows if node.name in named or _is_looked_at(node, row)]
    result["owner"] = setup_record.read(kube, wanted["owner"]) if wanted is not None and wanted.get("owner") else None
    # The nodes as they are say nothing of what isn't there yet.
    release_of = _openshift(kube, nodes) if wanted is not None and not as_it_is else None
    if wanted is not None:
        made = _backends(kube, wanted, state, capacity, options, release_of or "")
        result["bindings"] = foreign_bindings.none() if as_it_is else _bindings(kube, made, options)
        result |= {"backends": made, "given": wanted["values"]}
        result["releases"] = {} if as_it_is else _others_releases(kube, made, wanted["values"])
        if options is not None:
            there = {host: node for host, node in options["hosts"].items() if node not in made["absent"]}
            options = {**options, "hosts": there}
        if options is not None and not made["parts"]["extender"]:
            # Nothing of it is in any scheduler, or it is to be removed.
            options = {**options, "state": "absent"} if made["leaving"]["extender"] else None
    scheduler = detect(kube, options, nodes, version, release_of) if options is not None else None
    result |= {"scheduler": scheduler, "server": kube.server, "requests": dict(kube.requests)}
    return {"changed": False, **result}


def _is_looked_at(node: model.Node, row: JsonObject) -> bool:
    """Return whether plays read a node's row beside those of the nodes that they are for."""
    return is_control_plane(node) or LABEL in node.labels or NODE_LABEL in node.labels or bool(row["annotations"])


def _backends(
    kube: Kube,
    wanted: JsonObject,
    state: cluster.Cluster,
    capacity: bool | None,
    options: JsonObject | None,
    openshift_version: str,
) -> node_software.Decided:
    """Decide each node's back end, and who installs its software.

    :param wanted: as ``BACKENDS_OPTIONS``; without nodes the back ends are those that the nodes have.
    :param capacity: as for ``node_backends.resolve``.
    :param options: as ``SCHEDULER_OPTIONS``.
    :param openshift_version: empty for another cluster.
    """
    if wanted["wanted"] is None:
        return {**node_backends.as_it_is(state), "software": node_software.resolve((), state)}
    namespaces = options or {name: option.get("default") for name, option in SCHEDULER_OPTIONS.items()}
    there, dedicated, selecting, operator = _parts(kube, namespaces, state)
    served, there["kubevirt"] = _kubevirt(kube, wanted["wanted"], state)
    switch, alone = frozenset(wanted["switch"]), frozenset(wanted["alone"])
    made = node_backends.resolve(
        wanted["wanted"], state, capacity, wanted["values"], switch, there, dedicated, alone, selecting, served
    )
    # Machines of the control plane join, too.
    hosts = [node for node in namespaces["hosts"].values() if node_backends.is_absent(node, state, alone)]
    asked = wanted.get("software") or []
    left_out = {row["node"] for row in asked if node_backends.is_absent(row["node"], state, alone)}
    software = node_software.resolve(asked, state, operator, left_out, bool(openshift_version))
    return {
        **made,
        "absent": list(dict.fromkeys([*made["absent"], *hosts])),
        "openshift": openshift_version,
        "software": software,
    }


def _kubevirt(kube: Kube, wanted: t.Iterable[JsonObject], state: cluster.Cluster) -> tuple[bool, bool]:
    """Return whether the cluster has KubeVirt, and whether it permits cards by this collection's entries.

    It isn't looked for where no node has, or is to have, cards for virtual machines, and no node runs KubeVirt's.

    :param wanted: rows as ``WANTED``.
    """
    asked = any(row["backend"] in VIRTUAL or row.get("cards") for row in wanted)
    # Entries outlast the variables of a node that had given away some of its cards.
    had = any(node.labels.get(LABEL) in VIRTUAL or virtual.SCHEDULABLE in node.labels for node in state.nodes)
    if not asked and not had:
        return False, False
    try:
        live = kubevirt.find(kube)
    except KubeError as error:
        if error.status != 403:
            raise
        return False, False
    return live is not None, live is not None and kubevirt.is_ours(live.item)


def _bindings(kube: Kube, made: node_software.Decided, options: JsonObject | None) -> foreign_bindings.Bindings:
    """Return the RoleBindings of others in the namespaces in which this run deploys servers, or finds them."""
    given = options or {name: option.get("default") for name, option in SCHEDULER_OPTIONS.items()}
    parts, charts = t.cast(JsonObject, made["parts"]), []
    namespaces = [str(given["namespace"])] if parts["extender"] or parts["dra"] else []
    if parts["extender"]:
        namespaces.append(str(given["dedicated_namespace"]))
    if made["software"]["installs"]:
        charts.append(str(given["operator_namespace"]))
    return foreign_bindings.foreign_bindings(kube, [*namespaces, *charts], charts)


def _others_releases(kube: Kube, made: node_software.Decided, values: JsonObject) -> dict[str, list[str]]:
    """Return, by back end, helm's releases of the names that this run's would have, as ``namespace/name``.

    Where this collection has deployed a chart, or begun to, its namespace has a label. Objects of the whole cluster are
    named by the release, whatever its namespace.
    """
    parts, there = t.cast(JsonObject, made["parts"]), t.cast(JsonObject, made["there"])
    names = {}
    for backend, (variable, _namespace) in node_backends.RELEASES.items():
        name = values.get(variable)
        if not name or there[backend] or not parts[backend]:
            continue
        try:
            secrets = kube.list_all("v1", "Secret", label_selector=helm.selector(str(name)))
        except KubeError as error:
            if error.status != 403:
                raise
            secrets = []
        if secrets:
            names[backend] = sorted({f"{secret['metadata']['namespace']}/{name}" for secret in secrets})
    return names


def _keeps_capacity(kube: Kube, version: str) -> bool | None:
    """Return whether the API server keeps the capacity that a claim asks for; None where it can't be asked."""
    if release(version) < CLAIMS_SINCE:
        return None
    try:
        kept = kube.try_create(PROBE)
    except KubeError as error:
        if error.status == 403:
            return None
        if error.status == 404:
            return False
        raise
    return "capacity" in kept["spec"]["spec"]["devices"]["requests"][0]["exactly"]


def _parts(
    kube: Kube, options: JsonObject, state: cluster.Cluster
) -> tuple[node_backends.Parts, bool, list[str], bool]:
    """Return the allocators of which parts are in the cluster, and whether a dedicated scheduler is.

    The third are those whose server selects its nodes without the restricted label, as earlier versions deployed it;
    the fourth is whether this collection has installed the GPU Operator.

    :param options: as ``SCHEDULER_OPTIONS``.
    """
    namespaces = kube.list_all("v1", "Namespace", label_selector=LABEL)
    labelled = {(item["metadata"].get("labels") or {}).get(LABEL) for item in namespaces}
    operator = OPERATOR in labelled
    # A kubelet labels its own node as it likes: what is there is removed by its name, which may be somebody else's.
    given = [(node.labels.get(LABEL), node.labels.get(RESTRICTED)) for node in state.nodes]
    labelled |= {value for value, restricted in given if value == restricted}
    labelled |= {NVIDIA for operator in state.operators if operator["changed"]}
    namespace = str(options["namespace"])
    daemon_sets = kube.list_all("apps/v1", "DaemonSet", namespace=namespace)
    sets = {item["metadata"]["name"]: item for item in daemon_sets}
    leases = kube.list_all("coordination.k8s.io/v1", "Lease", namespace=namespace)
    lease_names = {item["metadata"]["name"] for item in leases}
    dedicated = _exists(kube, Ref("apps/v1", "Deployment", str(options["dedicated_namespace"]), DEDICATED_NAME))
    there = {
        allocation: LEASES[allocation] in lease_names or not sets.keys().isdisjoint(DAEMON_SETS[allocation])
        for allocation in (allocators.EXTENDER, DRA)
    }
    selecting = []
    for allocation, (server, *_others) in DAEMON_SETS.items():
        key, value = allocators.ALLOCATORS[allocation].restricted
        if server in sets:
            selector = sets[server]["spec"]["template"]["spec"].get("nodeSelector") or {}
            if selector.get(key) != value:
                selecting.append(allocation)
    parts = node_backends.Parts(
        extender=there[allocators.EXTENDER] or dedicated,
        dra=there[DRA],
        hami=HAMI in labelled,
        nvidia=NVIDIA in labelled,
        kata=KATA in labelled,
        kubevirt=False,
    )
    return parts, dedicated, selecting, operator


def _slices(kube: Kube, version: str) -> list[cluster.AnnouncedSlice] | None:
    """Return which drivers announce devices; None where no share can be one, or the user may not read them."""
    if release(version) < CLAIMS_SINCE:
        return None
    try:
        slices = kube.list_all("resource.k8s.io/v1", "ResourceSlice")
    except KubeError as error:
        if error.status != 403:
            raise
        return None
    return [
        {"driver": str(item["spec"]["driver"]), "node": str(item["spec"].get("nodeName") or ""), "unit": _unit(item)}
        for item in slices
    ]


def _unit(raw: JsonObject) -> str | None:
    """Return the unit of a slice's cards; None where it has none of this collection's."""
    try:
        units = {device.unit for device in dra.slice_of(raw).devices}
    except ContractError:
        return None
    return units.pop() if len(units) == 1 else None


def detect(
    kube: Kube, options: JsonObject, nodes: t.Sequence[model.Node], version: str, openshift_version: str | None = None
) -> DetectedScheduler:
    """Detect how the cluster runs its scheduler.

    :param options: as ``SCHEDULER_OPTIONS``.
    :param version: the API server's version.
    :param openshift_version: as for ``read_state``.
    :raises BadInput: a scheduler would be left without the extender, or a dedicated scheduler would stay at work.
    """
    hosts = {str(host): str(node) for host, node in options["hosts"].items()}
    state = read_state(kube, nodes, hosts.values(), openshift_version)
    present = options["state"] == "present"
    extended = present or bool(hosts) or _exists(kube, _extender(options))
    selected = select_mode(options["mode"], hosts, state, present, extended)
    policy = bool(state.openshift) and openshift.takes_policy(state.openshift)
    leftovers = [str(ref) for ref in _of_other_modes(selected.mode, policy, version, options) if _exists(kube, ref)]
    on_machines = selected.mode in ON_MACHINES
    if present and on_machines and leftovers:
        raise BadInput(
            f"scheduler_mode: {selected.mode} ({selected.reason}) would leave {' and '.join(leftovers)} of mode "
            f"{DEDICATED} at work: pods that don't name that scheduler are refused, and two extenders allocate the "
            f"same cards. Set scheduler_mode to {DEDICATED}, or remove that mode first "
            f"(kubegpu.share.uninstall --limit localhost,control_plane -e scheduler_mode={DEDICATED})"
        )
    namespace = str(options["namespace"])
    places = {hosts[host] for host in selected.hosts}
    return {
        "mode": selected.mode,
        "reason": selected.reason,
        "hosts": list(selected.hosts),
        "unlabelled": sorted(node.name for node in state.nodes if not node.labelled and node.name in places),
        "on_machines": on_machines,
        "openshift": state.openshift,
        "takes_policy": policy,
        "versions": sorted({line(image.rpartition(":")[2]) for image in state.schedulers.values() if ":" in image}),
        "version": version,
        "leftovers": leftovers,
        "namespace": {"name": namespace, "metadata": _ownership(kube.get(Ref("v1", "Namespace", "", namespace)))},
    }


def _of_other_modes(mode: str, policy: bool, version: str, options: JsonObject) -> list[Ref]:
    """Return the objects that a set-up in another mode leaves in the cluster."""
    if mode == OPENSHIFT and policy:
        return []
    if mode not in ON_MACHINES:
        return [_extender(options)]
    match = re.match(r"v?1\.(\d+)", version)
    minor = int(match.group(1)) if match else ADMISSION_SINCE
    deployment = Ref("apps/v1", "Deployment", options["dedicated_namespace"], DEDICATED_NAME)
    if minor < ADMISSION_BETA_SINCE:
        return [deployment]
    api = "v1" if minor >= ADMISSION_SINCE else "v1beta1"
    return [Ref(f"admissionregistration.k8s.io/{api}", "ValidatingAdmissionPolicy", "", DEDICATED_NAME), deployment]


def _extender(options: JsonObject) -> Ref:
    """Return the extender that serves schedulers on machines."""
    return Ref("apps/v1", "DaemonSet", options["namespace"], EXTENDER)


def _exists(kube: Kube, ref: Ref) -> bool:
    metadata = (kube.get(ref) or {}).get("metadata") or {}
    return PART_OF in (metadata.get("labels") or {}).items() and not metadata.get("deletionTimestamp")


def _ownership(namespace: JsonObject | None) -> JsonObject:
    """Return the part of a namespace's metadata by which its owner is known; empty where there is none."""
    if namespace is None:
        return {}
    metadata = namespace["metadata"]
    annotations = metadata.get("annotations") or {}
    own = {name: text for name, text in annotations.items() if name.startswith(OWN_ANNOTATIONS)}
    return {"name": metadata["name"], "labels": metadata.get("labels") or {}, "annotations": own}


def _openshift(kube: Kube, nodes: t.Iterable[model.Node]) -> str:
    """Return OpenShift's version; empty for another cluster, whatever its nodes say.

    :raises BadInput: it is of an unknown form.
    """
    if any(OPENSHIFT_LABEL in node.labels or coreos.is_coreos({"name": node.os}) for node in nodes):
        version = kube.get(openshift.CLUSTER_VERSION)
        if version is not None:
            release = openshift.version_of(version)
            openshift.release(release)
            return release
    return ""


def read_state(
    kube: Kube, nodes: t.Sequence[model.Node], hosts: t.Iterable[str] = (), openshift_version: str | None = None
) -> State:
    """Read kube-scheduler's pods and lease, or OpenShift's version.

    :param hosts: names of the nodes of group control_plane.
    :param openshift_version: empty for another cluster; None if it wasn't read.
    """
    hosts = frozenset(hosts)
    known = [_node(node, hosts) for node in nodes]
    release = _openshift(kube, known) if openshift_version is None else openshift_version
    if release:
        return State(known, {}, "", release)
    pods = kube.list_all("v1", "Pod", namespace="kube-system", label_selector=SCHEDULER_LABEL)
    lease = ((kube.get(LEASE) or {}).get("spec") or {}).get("holderIdentity") or ""
    state = State(known, _schedulers(pods), str(lease))
    for node in _unlabelled(state, hosts):
        pods += kube.list_all("v1", "Pod", namespace="kube-system", field_selector=f"spec.nodeName={node}")
    schedulers = _schedulers(pods)
    hosted = {
        pod_node(pod): str(pod["metadata"]["name"])
        for pod in pods
        if not is_mirror(pod) and scheduler_container(pod) is not None and pod_node(pod) not in schedulers
    }
    return dataclasses.replace(state, schedulers=schedulers, hosted=hosted)


def _unlabelled(state: State, hosts: t.Iterable[str]) -> list[str]:
    """Return the nodes whose pods have to be read, because kube-scheduler's pods have other labels there or none."""
    expected = {node.name for node in state.nodes if node.control_plane}
    if _fitting_mode(state)[0] == K3S or (state.schedulers and expected <= set(state.schedulers)):
        return []
    candidates = expected | {_leading_node(state), *hosts}
    return [node.name for node in state.nodes if node.name in candidates and node.name not in state.schedulers]


def _schedulers(pods: t.Iterable[JsonObject]) -> dict[str, str]:
    """Return the image of each kube-scheduler that is a static pod, by its node."""
    pairs = [(pod, scheduler_container(pod)) for pod in pods if is_mirror(pod)]
    return {pod_node(pod): str(container.get("image", "")) for pod, container in pairs if container is not None}


def _is_server(annotations: t.Mapping[str, str]) -> bool:
    for name in NODE_ARGUMENTS:
        try:
            words = json.loads(annotations.get(name) or "[]")
        except (TypeError, ValueError, RecursionError):
            continue
        if isinstance(words, list) and words[:1] == ["server"] and "--disable-scheduler" not in words:
            return True
    return False


def _node(node: model.Node, hosts: t.Collection[str]) -> Node:
    kubelet = cluster.known_version(node.kubelet_version)
    marks = {
        "k0s": K0S in kubelet,
        "MicroK8s": MICROK8S_LABEL in node.labels,
        "RKE1": any(name.startswith(RKE1_ANNOTATIONS) for name in node.annotations),
    }
    hostname = node.labels.get("kubernetes.io/hostname")
    return Node(
        **{
            **vars(node),
            "kubelet_version": kubelet,
            "hostnames": (*node.hostnames, hostname) if hostname else node.hostnames,
            "distribution": next((title for title, marked in marks.items() if marked), ""),
            "server": node.name in hosts and _is_server(node.annotations),
        }
    )
