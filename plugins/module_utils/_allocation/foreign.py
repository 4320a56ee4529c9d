# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Device plugins and DRA drivers of others that give away a node's cards, and where they come from. Pure."""

from __future__ import annotations

import re
import typing as t

from .._contracts import operator_labels
from .._core.types import JsonObject
from .._kube.errors import KubeError

if t.TYPE_CHECKING:
    from .._kube.api import Kube

# Resources by which other stacks announce the cards that this collection would announce.
RESOURCES = re.compile(r"nvidia\.com/(gpu|gpu\.shared|gpumem|gpumem-percentage|gpucores|mig-.+)|volcano\.sh/(v?gpu-.+)")
# Drivers for dynamic resource allocation that announce the same cards: how each is called, and how it leaves a node.
DRIVERS = {
    "gpu.nvidia.com": ("NVIDIA's DRA driver", "its nodeAffinity, or resources.gpus.enabled=false"),
    "hami-core-gpu.project-hami.io": ("HAMi's DRA driver", "its nodeSelector"),
}
# Names of images, without registry and tag.
_IMAGES = re.compile(
    r"k8s-device-plugin|hami|k8s-vgpu|volcano-vgpu-device-plugin|.*nvidia.*device-plugin.*|k8s-dra-driver.*|dra-driver-nvidia.*"
)
_NAMES = re.compile(r".*(nvidia.*device-plugin|hami-device-plugin|nvidia-dra-driver|dra-driver-gpu-kubelet-plugin).*")
RELEASE, RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
# What the GPU Operator makes its DaemonSets of, in API group nvidia.com or resource.nvidia.com.
OPERATORS: t.Mapping[str, str] = {"ClusterPolicy": "nvidia.com/v1", "GPUCluster": "nvidia.com/v1alpha1"}
# The same, as roles name them.
OPERATORS_RESOURCES = {"ClusterPolicy": "clusterpolicies.nvidia.com", "GPUCluster": "gpuclusters.nvidia.com"}
# Of the labels by which the GPU Operator selects each node for its parts.
OPERATORS_LABELS = operator_labels.PREFIX
# On a node that gets its driver by a container of the GPU Operator; ``pre-installed`` where the machine has one.
DRIVER_LABEL = (operator_labels.DRIVER, "true")
# On a node: ``device-plugin`` or ``dra``, by which it has a ClusterPolicy or a GPUCluster where there are both.
MODE = "nvidia.com/gpu-operator.resource-allocation.mode"
# On a ClusterPolicy that role nvidia_device_plugin has changed.
CHANGED = "kubegpu.share/nvidia-before"


class Plugin(t.TypedDict):
    """A DaemonSet of others that gives away cards.

    ``owner`` is the object that made it, as ``ClusterPolicy cluster-policy``; ``release`` that of helm, as
    ``namespace/name``. Either may be empty. Its pods run on nodes with the labels in ``selector``.
    """

    name: str
    owner: str
    release: str
    selector: dict[str, str]


class Operator(t.TypedDict):
    """What the GPU Operator was told to do: a ClusterPolicy or a GPUCluster.

    ``changed`` is whether role nvidia_device_plugin has changed it, ``drives`` and ``toolkit`` whether nodes get
    drivers and toolkits by it. ``workloads`` is whether it runs parts for virtual machines, on nodes by their label
    ``operator_labels.WORKLOAD``; ``takes`` are those of these parts that bind or divide cards, by that label's value.
    """

    kind: str
    name: str
    changed: bool
    drives: bool
    toolkit: bool
    workloads: bool
    takes: dict[str, list[str]]


# Of a ClusterPolicy, by that label's value.
TAKING: t.Mapping[str, tuple[str, ...]] = {
    operator_labels.WHOLE: ("vfioManager",),
    operator_labels.DIVIDED: ("vgpuManager", "vgpuDeviceManager"),
}


def _takes(spec: JsonObject) -> dict[str, list[str]]:
    """Return the parts of a ClusterPolicy that bind or divide cards of virtual machines."""
    return {
        workload: [name for name in parts if operator_labels.runs(spec, name)] for workload, parts in TAKING.items()
    }


def operators(kube: Kube, labels: t.Iterable[str]) -> tuple[list[Operator], list[str]]:
    """Return what the GPU Operator was told, and the resources that the user may not list; none without labels of it.

    :param labels: the names of all labels of nodes.
    """
    installed: list[Operator] = []
    refused: list[str] = []
    if not any(name.startswith(OPERATORS_LABELS) for name in labels):
        return installed, refused
    for kind, api_version in OPERATORS.items():
        try:
            objects = kube.list_all(api_version, kind)
        except KubeError as error:
            if error.status != 403:
                raise
            refused.append(OPERATORS_RESOURCES[kind])
            objects = []
        for resource in objects:
            name, annotations = str(resource["metadata"]["name"]), resource["metadata"].get("annotations") or {}
            spec, policy, changed = resource.get("spec") or {}, kind == "ClusterPolicy", CHANGED in annotations
            drives, tools, workloads = (
                policy and operator_labels.runs(spec, part) for part in ("driver", "toolkit", "sandboxWorkloads")
            )
            installed.append(
                {
                    "kind": kind,
                    "name": name,
                    "changed": changed,
                    "drives": drives,
                    "toolkit": tools,
                    "workloads": workloads,
                    "takes": _takes(spec) if workloads else {},
                }
            )
    return installed, refused


def announced(allocatable: t.Mapping[str, int]) -> list[str]:
    """Return the resources of other stacks that a node has now.

    kubelet reports the capacity of a removed plugin for five minutes, with nothing allocatable.
    """
    return sorted(name for name, number in allocatable.items() if RESOURCES.fullmatch(name) and number > 0)


def plugins(daemon_sets: t.Iterable[JsonObject]) -> list[Plugin]:
    """Return the DaemonSets that give away cards, of all of a cluster."""
    others: list[Plugin] = []
    for daemon_set in daemon_sets:
        metadata, spec = daemon_set["metadata"], daemon_set["spec"]["template"]["spec"]
        if (metadata.get("labels") or {}).get("app.kubernetes.io/part-of") == "gpushare":
            continue
        images = {_bare(str(container.get("image", ""))) for container in spec.get("containers") or []}
        if not any(map(_IMAGES.fullmatch, images)) and not _NAMES.fullmatch(str(metadata["name"])):
            continue
        annotations = metadata.get("annotations") or {}
        owners = [f"{owner['kind']} {owner['name']}" for owner in metadata.get("ownerReferences") or []]
        release = annotations.get(RELEASE)
        where = annotations.get(RELEASE_NAMESPACE) or metadata.get("namespace")
        others.append(
            {
                "name": f"DaemonSet {metadata.get('namespace')}/{metadata['name']}",
                "owner": owners[0] if owners else "",
                "release": f"{where}/{release}" if release else "",
                "selector": dict(spec.get("nodeSelector") or {}),
            }
        )
    return others


def _bare(image: str) -> str:
    return image.rpartition("/")[2].partition("@")[0].partition(":")[0]


def on_node(installed: t.Iterable[Plugin], labels: t.Mapping[str, str]) -> list[Plugin]:
    """Return those whose pods a node with these labels may have."""
    return [plugin for plugin in installed if plugin["selector"].items() <= labels.items()]


def told(installed: t.Sequence[Plugin]) -> str:
    """Return names and origins for a message; empty where there are none."""

    def origin(plugin: Plugin) -> str:
        if plugin["owner"]:
            return f" of {plugin['owner']}"
        return f" of helm's release {plugin['release']}" if plugin["release"] else ""

    return " and ".join(f"{plugin['name']}{origin(plugin)}" for plugin in installed)


def way_out(installed: t.Sequence[Plugin]) -> str:
    """Return the template of what takes a plugin off one node; ``{named_by}`` is the variable that names the node."""
    first: Plugin = installed[0] if installed else {"name": "", "owner": "", "release": "", "selector": {}}
    or_node = ", or take the node out of {named_by}"
    kind = first["owner"].split(" ")[0]
    if kind in OPERATORS:
        part = "dra-driver" if kind == "GPUCluster" else "device-plugin"
        label = next((key for key in first["selector"] if key.startswith(OPERATORS_LABELS)), OPERATORS_LABELS + part)
        return f"label the node {label}=false, by which the GPU Operator leaves it" + or_node
    if first["release"]:
        return "take the node out of the release's nodeSelector or affinity" + or_node
    return "remove that plugin from the node, or the node from {named_by}"
