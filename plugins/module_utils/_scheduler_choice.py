# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""How a cluster runs its scheduler, told from the API alone, and in which order its machines are changed."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _coreos as coreos
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as openshift
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref

AUTO = "auto"
STATIC_POD, K3S, RKE2, DEDICATED, OPENSHIFT = "static_pod", "k3s", "rke2", "dedicated", "openshift"
# Those in which a scheduler is changed on the machine that it runs on.
ON_MACHINES = (STATIC_POD, K3S, RKE2)

LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")
# As kubeadm, kubespray and RKE2 label them.
SCHEDULER_LABEL = "component=kube-scheduler"
CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
MIRROR = "kubernetes.io/config.mirror"
OPENSHIFT_LABEL = "node.openshift.io/os_id"

# What mode dedicated brings, and what it has beside schedulers on machines (up to OpenShift 4.9 also there).
OWN = "gpushare-scheduler"
EXTENDER = "gpushare-extender"
PART_OF = ("app.kubernetes.io/part-of", "gpushare")
# First minor version of Kubernetes with admission policies in v1, and the one with the first beta.
POLICY_SINCE, POLICY_BETA_SINCE = 30, 28
# Which of a namespace's annotations are told.
MARKS = "kubegpu.share/"

ARGUMENTS: Json = {
    "mode": {"type": "str", "choices": [AUTO, STATIC_POD, K3S, RKE2, DEDICATED, OPENSHIFT], "default": AUTO},
    "hosts": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "namespace": {"type": "str", "default": "gpushare-system"},
    "dedicated_namespace": {"type": "str", "default": OWN},
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the API tells.

    :param nodes: name of each node, with its labels, kubelet's version and operating system.
    :param schedulers: image of each kube-scheduler that is a static pod, by its node.
    :param holder: who holds kube-scheduler's lease, as ``<host name>_<uuid>``; empty for nobody.
    :param openshift: version of OpenShift; empty where this isn't one.
    """

    nodes: t.Sequence[Json]
    schedulers: t.Mapping[str, str]
    holder: str = ""
    openshift: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen.

    :param why: one sentence.
    :param hosts: hosts of the inventory whose schedulers are changed, one after another; the lease's holder last.
    """

    mode: str
    why: str
    hosts: t.Sequence[str] = ()


def choose(mode: str, hosts: t.Mapping[str, str], seen: Seen) -> Choice:
    """Which mode fits this cluster.

    :param mode: what the user asks for, or ``auto``.
    :param hosts: name of the node of each host in group control_plane.
    :raises BadInput: what is asked for doesn't fit, or a scheduler would be left without the extender.
    """
    found, why = _looks_like(seen)
    if mode == AUTO:
        mode = found
    elif OPENSHIFT in (mode, found) and mode != found:
        raise BadInput(f"scheduler_mode: {mode} doesn't fit this cluster: {why}")
    elif mode != found:
        why = f"scheduler_mode says so (left to itself it would be {found}: {why})"
    if mode not in ON_MACHINES:
        return Choice(mode, why)
    running = sorted(seen.schedulers) if mode != K3S else []
    running = running or [one["name"] for one in _control_planes(seen)]
    _every_scheduler(mode, hosts, running, seen)
    return Choice(mode, why, sorted(hosts, key=lambda host: _leads(host, hosts[host], seen)))


def _leads(host: str, node: str, seen: Seen) -> tuple[bool, bool]:
    """Whether the lease's holder is this machine: by one of its names, and by the first part of one.

    The lease has the machine's own name, which needn't be its node's, and may be with its domain or without.
    """
    leader = seen.holder.rpartition("_")[0].lower()
    machine = [name for one in seen.nodes if one["name"] == node for name in one.get("hostnames", ())]
    names = {name.lower() for name in (host, node, *machine)}
    return leader in names, leader.partition(".")[0] in {name.partition(".")[0] for name in names}


def _looks_like(seen: Seen) -> tuple[str, str]:
    if seen.openshift:
        return OPENSHIFT, f"it is OpenShift {seen.openshift}"
    for node in _control_planes(seen)[:1]:
        for mark, mode in (("+k3s", K3S), ("+rke2", RKE2)):
            if mark in node["kubelet"]:
                return mode, f"node {node['name']} runs {node['kubelet']}"
    if seen.schedulers:
        return STATIC_POD, f"node {min(seen.schedulers)} runs kube-scheduler as a static pod"
    return DEDICATED, "no node shows a kube-scheduler, so that the control plane is somebody else's"


def _control_planes(seen: Seen) -> list[Json]:
    return [one for one in seen.nodes if any(label in one["labels"] for label in CONTROL_PLANE_LABELS)]


def _every_scheduler(mode: str, hosts: t.Mapping[str, str], running: t.Sequence[str], seen: Seen) -> None:
    """Any scheduler that is left out may be the leader, and binds pods past the extender."""
    missing = sorted(set(running) - set(hosts.values()))
    if missing:
        raise BadInput(
            f"control_plane: node {', '.join(missing)} runs a kube-scheduler, and no host of this group stands for it "
            "(gpu_node_name says which does); with one scheduler left out, pods are bound without a card. Add it, or "
            f"set scheduler_mode to {DEDICATED}"
        )
    known = {one["name"] for one in seen.nodes}
    for host, node in hosts.items():
        if node not in known:
            raise BadInput(f"control_plane: the cluster has no node {node}; set gpu_node_name of host {host}")
        if node not in running:
            raise BadInput(f"control_plane: node {node} of host {host} runs no kube-scheduler")
    if not hosts:
        raise BadInput(f"control_plane: this group is empty, and scheduler_mode is {mode}")


# --------------------------------------------------------------------------- the door


def look(kube: Kube, params: Json) -> Json:
    """Ask the cluster, and choose.

    :raises BadInput: it can't be, also because of what another mode has left at work.
    """
    seen = see(kube)
    hosts = {str(host): str(node) for host, node in params["hosts"].items()}
    choice = choose(params["mode"], hosts, seen)
    version = str(kube.version().get("gitVersion", ""))
    policy = bool(seen.openshift) and openshift.takes_policy(seen.openshift)
    left = [str(ref) for ref in _others(choice.mode, policy, version, params) if _at_work(kube, ref)]
    if params["state"] == "present" and choice.mode in ON_MACHINES and left:
        raise BadInput(_refusal(choice, left))
    namespace = params["namespace"]
    return {
        "scheduler": {
            **dataclasses.asdict(choice),
            "hosts": list(choice.hosts),
            "on_machines": choice.mode in ON_MACHINES,
            "openshift": seen.openshift,
            "policy": policy,
            "versions": sorted({image.rpartition(":")[2] for image in seen.schedulers.values() if ":" in image}),
            "version": version,
            "left": left,
            "namespace": {"name": namespace, "metadata": _marks(kube.get(Ref("v1", "Namespace", "", namespace)))},
        },
        "requests": dict(kube.requests),
    }


def _others(mode: str, policy: bool, version: str, params: Json) -> list[Ref]:
    """What is at work where the cluster was set up in another mode before."""
    if mode == OPENSHIFT and policy:
        return []
    if mode not in ON_MACHINES:
        return [Ref("apps/v1", "DaemonSet", params["namespace"], EXTENDER)]
    found = re.match(r"v?1\.(\d+)", version)
    minor = int(found.group(1)) if found else POLICY_SINCE
    api = "v1" if minor >= POLICY_SINCE else "v1beta1" if minor >= POLICY_BETA_SINCE else ""
    policies = [Ref(f"admissionregistration.k8s.io/{api}", "ValidatingAdmissionPolicy", "", OWN)] if api else []
    return [*policies, Ref("apps/v1", "Deployment", params["dedicated_namespace"], OWN)]


def _at_work(kube: Kube, ref: Ref) -> bool:
    metadata = (kube.get(ref) or {}).get("metadata") or {}
    return PART_OF in (metadata.get("labels") or {}).items() and not metadata.get("deletionTimestamp")


def _refusal(choice: Choice, left: t.Sequence[str]) -> str:
    return (
        f"scheduler_mode: {choice.mode} ({choice.why}) would leave {' and '.join(left)} of mode {DEDICATED} at work: "
        "pods that don't name that scheduler are refused, and two extenders give away the same cards; set it "
        f"to {DEDICATED}, or take that mode away first (playbooks/uninstall.yml --limit localhost,control_plane "
        f"-e scheduler_mode={DEDICATED})"
    )


def _marks(namespace: Json | None) -> Json:
    """What tells whose a namespace is; empty where there is none."""
    if namespace is None:
        return {}
    metadata = namespace["metadata"]
    annotations = metadata.get("annotations") or {}
    marks = {name: text for name, text in annotations.items() if name.startswith(MARKS)}
    return {"name": metadata["name"], "labels": metadata.get("labels") or {}, "annotations": marks}


def see(kube: Kube) -> Seen:
    nodes = [
        {
            "name": str(node["metadata"]["name"]),
            "labels": node["metadata"].get("labels") or {},
            "hostnames": _hostnames(node),
            "kubelet": str(_about(node).get("kubeletVersion", "")),
            "os": str(_about(node).get("osImage", "")),
        }
        for node in kube.list_all("v1", "Node")
    ]
    if any(OPENSHIFT_LABEL in one["labels"] or coreos.is_coreos({"name": one["os"]}) for one in nodes):
        version = kube.get(openshift.CLUSTER_VERSION)
        if version is not None:
            return Seen(nodes, {}, "", _openshift_version(version))
    pods = kube.list_all("v1", "Pod", namespace="kube-system", label_selector=SCHEDULER_LABEL)
    mirrored = [pod for pod in pods if MIRROR in (pod["metadata"].get("annotations") or {})]
    lease = ((kube.get(LEASE) or {}).get("spec") or {}).get("holderIdentity") or ""
    return Seen(nodes, {str(pod["spec"].get("nodeName")): _image(pod) for pod in mirrored}, str(lease))


def _image(pod: Json) -> str:
    containers = pod["spec"].get("containers") or [{}]
    named = [one for one in containers if one.get("name") == "kube-scheduler"] or containers
    return str(named[0].get("image", ""))


def _hostnames(node: Json) -> list[str]:
    """What a node says that its machine is called."""
    addresses = (node.get("status") or {}).get("addresses") or []
    said = [one.get("address") for one in addresses if one.get("type") == "Hostname"]
    said.append((node["metadata"].get("labels") or {}).get("kubernetes.io/hostname"))
    return [str(one) for one in said if one]


def _about(node: Json) -> Json:
    about: Json = (node.get("status") or {}).get("nodeInfo") or {}
    return about


def _openshift_version(version: Json) -> str:
    status = version.get("status") or {}
    told = str((status.get("desired") or {}).get("version") or "")
    openshift.release(told)
    return told
