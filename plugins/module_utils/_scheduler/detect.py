# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Detect from the API how a cluster runs its scheduler, and which machines have to be changed for it."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._allocation import cluster
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._kube.client import Kube, auth_arguments
from .._kube.refs import Ref
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

LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
MIRROR = "kubernetes.io/config.mirror"
OPENSHIFT_LABEL = "node.openshift.io/os_id"
# Annotations of the servers' namespace that are returned.
OWN_ANNOTATIONS = "kubegpu.share/"

SCHEDULER_OPTIONS: JsonObject = {
    "mode": {"type": "str", "choices": [AUTO, STATIC_POD, K3S, RKE2, DEDICATED, OPENSHIFT], "default": AUTO},
    "hosts": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "namespace": {"type": "str", "default": "gpushare-system"},
    "dedicated_namespace": {"type": "str", "default": DEDICATED_NAME},
}
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "memory_unit": {"type": "str", "choices": ["GiB", "MiB"]},
    "scheduler": {"type": "dict", "options": SCHEDULER_OPTIONS},
}


class NamespaceState(t.TypedDict):
    """A namespace's name and the part of its metadata by which its owner is known; empty where it doesn't exist."""

    name: str
    metadata: JsonObject


class DetectedScheduler(t.TypedDict):
    """How a cluster runs its scheduler, as the module ``cluster_info`` returns it."""

    mode: str
    reason: str
    hosts: list[str]
    on_machines: bool
    openshift: str
    takes_policy: bool
    versions: list[str]
    version: str
    leftovers: list[str]
    namespace: NamespaceState


@dataclasses.dataclass(frozen=True)
class Node:
    """One node; ``hostnames`` are the names that the API reports for its machine."""

    name: str
    labels: t.Mapping[str, str]
    kubelet: str
    os: str
    hostnames: tuple[str, ...] = ()

    @property
    def control_plane(self) -> bool:
        return any(label in self.labels for label in CONTROL_PLANE_LABELS)


@dataclasses.dataclass(frozen=True)
class State:
    """What the API reports.

    :param schedulers: image of each kube-scheduler that is a static pod, by its node.
    :param holder: holder of kube-scheduler's lease, as ``<host name>_<uuid>``; empty for none.
    :param openshift: version of OpenShift; empty for another cluster.
    """

    nodes: t.Sequence[Node]
    schedulers: t.Mapping[str, str]
    holder: str = ""
    openshift: str = ""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The mode, why it was selected, and the inventory hosts to change one after another, the lease's holder last."""

    mode: str
    reason: str
    hosts: tuple[str, ...] = ()


def select_mode(mode: str, hosts: t.Mapping[str, str], state: State) -> Selection:
    """Select the mode that fits this cluster.

    :param mode: the mode that the user requests, or ``auto``.
    :param hosts: the node's name of each host in group control_plane.
    :raises BadInput: the requested mode doesn't fit, or a scheduler would be left without the extender.
    """
    fitting, reason = _fitting_mode(state)
    if mode == AUTO:
        mode = fitting
    elif OPENSHIFT in (mode, fitting) and mode != fitting:
        raise BadInput(f"scheduler_mode: {mode} doesn't fit this cluster: {reason}")
    elif mode != fitting:
        reason = f"scheduler_mode sets it; auto would select {fitting}: {reason}"
    if mode not in ON_MACHINES:
        return Selection(mode, reason)
    running = sorted(state.schedulers) if mode != K3S else []
    running = running or [one.name for one in state.nodes if one.control_plane]
    _require_every_scheduler(mode, hosts, running, state)
    return Selection(mode, reason, tuple(sorted(hosts, key=lambda host: _leads(host, hosts[host], state))))


def _leads(host: str, node: str, state: State) -> tuple[bool, bool]:
    """Return whether this machine holds the lease: by one of its full names, and by the first label of one.

    The lease has the machine's own name, with or without its domain, which may differ from its node's.
    """
    leader = state.holder.rpartition("_")[0].lower()
    machine = [name for one in state.nodes if one.name == node for name in one.hostnames]
    names = {name.lower() for name in (host, node, *machine)}
    return leader in names, leader.partition(".")[0] in {name.partition(".")[0] for name in names}


def _fitting_mode(state: State) -> tuple[str, str]:
    if state.openshift:
        return OPENSHIFT, f"it is OpenShift {state.openshift}"
    for node in [one for one in state.nodes if one.control_plane][:1]:
        for mark, mode in (("+k3s", K3S), ("+rke2", RKE2)):
            if mark in node.kubelet:
                return mode, f"node {node.name} runs {node.kubelet}"
    if state.schedulers:
        return STATIC_POD, f"node {min(state.schedulers)} runs kube-scheduler as a static pod"
    return DEDICATED, "no node reports a kube-scheduler, so the control plane is managed by a provider"


def _require_every_scheduler(mode: str, hosts: t.Mapping[str, str], running: t.Sequence[str], state: State) -> None:
    """Refuse to leave a scheduler out: it may become the leader and bind pods without the extender."""
    missing = sorted(set(running) - set(hosts.values()))
    if missing:
        raise BadInput(
            f"control_plane: node {', '.join(missing)} runs a kube-scheduler and has no host in this group (set "
            "gpu_node_name where a host's name differs from its node's); a scheduler that is left out binds pods "
            f"without a card. Add the host, or set scheduler_mode to {DEDICATED}"
        )
    known = {one.name for one in state.nodes}
    for host, node in hosts.items():
        if node not in known:
            raise BadInput(f"control_plane: the cluster has no node {node}; set gpu_node_name of host {host}")
        if node not in running:
            raise BadInput(f"control_plane: node {node} of host {host} runs no kube-scheduler")
    if not hosts:
        raise BadInput(f"control_plane: this group is empty, and scheduler_mode is {mode}")


# --------------------------------------------------------------------------- reading the cluster


def collect(kube: Kube, params: JsonObject) -> JsonObject:
    """Run the module ``cluster_info``: read version and nodes once and, if asked for, detect the scheduler.

    :raises BadInput: the scheduler can't be used in the requested mode.
    """
    version = str(kube.version().get("gitVersion", ""))
    nodes = kube.list_all("v1", "Node")
    scheduler = detect(kube, params["scheduler"], nodes, version) if params["scheduler"] is not None else None
    found = cluster.collect(kube, nodes, version, params["memory_unit"])
    return {"changed": False, **found, "scheduler": scheduler, "requests": dict(kube.requests)}


def detect(kube: Kube, options: JsonObject, nodes: t.Sequence[JsonObject], version: str) -> DetectedScheduler:
    """Detect how the cluster runs its scheduler.

    :param options: as ``SCHEDULER_OPTIONS``.
    :param nodes: the API's Node objects.
    :param version: the API server's version.
    :raises BadInput: a scheduler would be left without the extender, or a dedicated scheduler would stay at work.
    """
    state = read_state(kube, nodes)
    hosts = {str(host): str(node) for host, node in options["hosts"].items()}
    selected = select_mode(options["mode"], hosts, state)
    policy = bool(state.openshift) and openshift.takes_policy(state.openshift)
    leftovers = [str(ref) for ref in _of_other_modes(selected.mode, policy, version, options) if _exists(kube, ref)]
    on_machines = selected.mode in ON_MACHINES
    if options["state"] == "present" and on_machines and leftovers:
        raise BadInput(
            f"scheduler_mode: {selected.mode} ({selected.reason}) would leave {' and '.join(leftovers)} of mode "
            f"{DEDICATED} at work: pods that don't name that scheduler are refused, and two extenders allocate the "
            f"same cards. Set scheduler_mode to {DEDICATED}, or remove that mode first "
            f"(playbooks/uninstall.yml --limit localhost,control_plane -e scheduler_mode={DEDICATED})"
        )
    namespace = str(options["namespace"])
    return {
        "mode": selected.mode,
        "reason": selected.reason,
        "hosts": list(selected.hosts),
        "on_machines": on_machines,
        "openshift": state.openshift,
        "takes_policy": policy,
        "versions": sorted({image.rpartition(":")[2] for image in state.schedulers.values() if ":" in image}),
        "version": version,
        "leftovers": leftovers,
        "namespace": {"name": namespace, "metadata": _ownership(kube.get(Ref("v1", "Namespace", "", namespace)))},
    }


def _of_other_modes(mode: str, policy: bool, version: str, options: JsonObject) -> list[Ref]:
    """Return the objects that a set-up in another mode leaves in the cluster."""
    if mode == OPENSHIFT and policy:
        return []
    if mode not in ON_MACHINES:
        return [Ref("apps/v1", "DaemonSet", options["namespace"], EXTENDER)]
    found = re.match(r"v?1\.(\d+)", version)
    minor = int(found.group(1)) if found else ADMISSION_SINCE
    api = "v1" if minor >= ADMISSION_SINCE else "v1beta1" if minor >= ADMISSION_BETA_SINCE else ""
    kind = "ValidatingAdmissionPolicy"
    policies = [Ref(f"admissionregistration.k8s.io/{api}", kind, "", DEDICATED_NAME)] if api else []
    return [*policies, Ref("apps/v1", "Deployment", options["dedicated_namespace"], DEDICATED_NAME)]


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


def read_state(kube: Kube, nodes: t.Sequence[JsonObject]) -> State:
    """Read kube-scheduler's pods and lease, or OpenShift's version."""
    known = [_node(one) for one in nodes]
    if any(OPENSHIFT_LABEL in one.labels or coreos.is_coreos({"name": one.os}) for one in known):
        version = kube.get(openshift.CLUSTER_VERSION)
        if version is not None:
            release = openshift.version_of(version)
            openshift.release(release)
            return State(known, {}, "", release)
    pods = kube.list_all("v1", "Pod", namespace="kube-system", label_selector=SCHEDULER_LABEL)
    mirrored = [pod for pod in pods if MIRROR in (pod["metadata"].get("annotations") or {})]
    lease = ((kube.get(LEASE) or {}).get("spec") or {}).get("holderIdentity") or ""
    return State(known, {str(pod["spec"].get("nodeName")): _image(pod) for pod in mirrored}, str(lease))


def _image(pod: JsonObject) -> str:
    containers = pod["spec"].get("containers") or [{}]
    named = [one for one in containers if one.get("name") == "kube-scheduler"] or containers
    return str(named[0].get("image", ""))


def _node(node: JsonObject) -> Node:
    metadata, status = node["metadata"], node.get("status") or {}
    info = status.get("nodeInfo") or {}
    labels = metadata.get("labels") or {}
    names = [one.get("address") for one in status.get("addresses") or [] if one.get("type") == "Hostname"]
    names.append(labels.get("kubernetes.io/hostname"))
    return Node(
        str(metadata["name"]),
        labels,
        str(info.get("kubeletVersion", "")),
        str(info.get("osImage", "")),
        tuple(str(one) for one in names if one),
    )
