# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How NVIDIA's GPU Operator is to be installed: whose the present one is, its chart's values, its nodes' labels. Pure.

The chart's components and their repositories: https://github.com/NVIDIA/gpu-operator/blob/v26.7.0/deployments/gpu-operator/values.yaml
"""

from __future__ import annotations

import copy
import typing as t

from .._contracts import backends
from .._contracts.backends import OPERANDS
from .._contracts.operator_labels import DEVICE_PLUGIN as PLUGIN
from .._core.types import JsonObject
from .._kube.objects import CREATED
from .gpu_operator import CDI, DEFINITION, DEVICE_PLUGIN, NO_PLUGIN_CHECK
from .objects import annotations_of
from .olm import installed

# This collection has installed it in the namespace that is asked for, or in another one; somebody else has.
OURS, ELSEWHERE, THEIRS = "ours", "elsewhere", "theirs"
PACKAGE = "gpu-operator-certified"
# On that namespace: the definitions that weren't there before, which go with it.
BROUGHT = "kubegpu.share/brought-definitions"
# The workers of node feature discovery run on nodes with this label alone; the operator takes only nodes with theirs.
NODE_LABEL, NODE_VALUE = backends.SOFTWARE, backends.OPERATOR
RELEASE, RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
CONTAINER, PRECOMPILED, HOST = "container", "precompiled", "host"
DRIVERS = (CONTAINER, PRECOMPILED, HOST)
REGISTRY = "nvcr.io"
NFD_IMAGE = "nfd/node-feature-discovery"
# By the component's path in the values, the folder of its image in NVIDIA's registry.
COMPONENTS: t.Mapping[tuple[str, ...], str] = {
    ("operator",): "nvidia",
    ("validator",): "nvidia",
    ("driver",): "nvidia",
    ("driver", "manager"): "nvidia/cloud-native",
    ("toolkit",): "nvidia/k8s",
    ("devicePlugin",): "nvidia",
    ("dcgm",): "nvidia/cloud-native",
    ("dcgmExporter",): "nvidia/k8s",
    ("gfd",): "nvidia",
    ("migManager",): "nvidia/cloud-native",
    ("nodeStatusExporter",): "nvidia",
    ("gds",): "nvidia/cloud-native",
    ("gdrcopy",): "nvidia/cloud-native",
    ("vgpuDeviceManager",): "nvidia/cloud-native",
    ("vfioManager",): "nvidia/cloud-native",
    ("vfioManager", "driverManager"): "nvidia/cloud-native",
    ("sandboxDevicePlugin",): "nvidia",
    ("kataSandboxDevicePlugin",): "nvidia/cloud-native",
    ("ccManager",): "nvidia/cloud-native",
}
# Parts of a component, which take its pull secrets.
PARTS = (("driver", "manager"), ("vfioManager", "driverManager"))
NFD_GROUP = ".nfd.k8s-sigs.io"
NFD_DEFINITION = f"nodefeatures{NFD_GROUP}"
# Definitions that the chart brings.
DEFINITIONS = (
    "clusterpolicies.nvidia.com",
    "gpuclusters.nvidia.com",
    "nvidiadrivers.nvidia.com",
    "computedomaincliques.resource.nvidia.com",
    "computedomains.resource.nvidia.com",
    NFD_DEFINITION,
    f"nodefeaturerules{NFD_GROUP}",
    f"nodefeaturegroups{NFD_GROUP}",
)
# What a ClusterPolicy needs beside what is planned, where no chart writes it.
POLICY: t.Mapping[str, JsonObject] = {
    "operator": {"use_ocp_driver_toolkit": True},
    "dcgm": {"enabled": True},
    "dcgmExporter": {"enabled": True},
    "gfd": {"enabled": True},
    "migManager": {"enabled": True},
    "nodeStatusExporter": {"enabled": True},
    "mig": {"strategy": "single"},
}


class Options(t.TypedDict):
    """What is asked for.

    ``chart`` is False where OLM installs the operator. ``nodes`` get their software by it; of them ``shared`` have
    cards that gpushare or HAMi gives away, by a variable of the container or, on ``by_cdi``, by CDI of HAMi's own, and
    ``plugin`` are given to the operator's device plugin. ``others`` are further nodes whose software isn't the
    operator's; ``leaving`` are those of them that it has until this run. ``values`` are the user's: of the chart, or of
    the ClusterPolicy. ``repo_config`` and ``certificates`` are names of ConfigMaps, ``former`` the values of the
    release that is there.
    """

    chart: bool
    release: str
    namespace: str
    nodes: list[str]
    shared: list[str]
    by_cdi: list[str]
    plugin: list[str]
    others: list[str]
    leaving: list[str]
    driver: str
    driver_version: str
    toolkit: bool
    cdi: str
    nfd: str
    tolerations: list[JsonObject]
    registry: str
    pull_secrets: list[str]
    repo_config: str
    certificates: str
    values: JsonObject
    former: JsonObject


class Found(t.TypedDict):
    """Objects of the cluster: the namespace that is asked for, and all of the others' kinds.

    ``elsewhere`` are other namespaces with the label of one in which this collection has installed the operator.
    """

    namespace: JsonObject
    elsewhere: list[JsonObject]
    policies: list[JsonObject]
    gpu_clusters: list[JsonObject]
    subscriptions: list[JsonObject]
    deployments: list[JsonObject]
    definitions: list[JsonObject]


class Planned(t.TypedDict):
    """How the operator is to be installed.

    ``whose`` is ``OURS``, ``ELSEWHERE``, ``THEIRS`` or empty, and ``what`` names what is there. ``policy`` is the
    ClusterPolicy's specification where OLM installs the operator, ``labels`` are those of nodes by their names, ``nfd``
    is whether node feature discovery comes along, and ``brought`` the definitions that do, which ``note`` annotates the
    namespace with. ``problems`` are sentences.
    """

    whose: str
    what: str
    values: JsonObject
    policy: JsonObject
    labels: dict[str, dict[str, str]]
    nfd: bool
    brought: list[str]
    note: dict[str, str]
    problems: list[str]


def is_ours(namespace: JsonObject) -> bool:
    """Return whether this collection has installed an operator in a namespace, or began to."""
    return ((namespace.get("metadata") or {}).get("labels") or {}).get(backends.LABEL) == backends.OPERATOR


def whose(options: Options, found: Found) -> tuple[str, str]:
    """Return whose operator is in the cluster, and what of it is there."""
    names = [
        f"ClusterPolicy {policy['metadata']['name']}" for policy in found["policies"] if not _made_here(policy, options)
    ]
    names += [f"GPUCluster {cluster['metadata']['name']}" for cluster in found["gpu_clusters"]]
    if is_ours(found["namespace"]):
        return OURS, ", ".join(names)
    if found["elsewhere"]:
        return ELSEWHERE, ", ".join(sorted(str(namespace["metadata"]["name"]) for namespace in found["elsewhere"]))
    # Whoever has a namespace may create these there: without the operator's definition they are none.
    served = any(item["metadata"]["name"] == DEFINITION.name for item in found["definitions"])
    names += [
        f"Subscription {item['metadata']['namespace']}/{item['metadata']['name']}"
        for item in found["subscriptions"]
        if (item.get("spec") or {}).get("name") == PACKAGE and (served or installed(item))
    ]
    deployments = found["deployments"] if served else []
    names += [f"Deployment {item['metadata']['namespace']}/{item['metadata']['name']}" for item in deployments]
    return (THEIRS, ", ".join(names)) if names else ("", "")


def _made_here(policy: JsonObject, options: Options) -> bool:
    """Return whether a ClusterPolicy is of the release, or of this collection."""
    marks = annotations_of(policy)
    of_release = (marks.get(RELEASE), marks.get(RELEASE_NAMESPACE)) == (options["release"], options["namespace"])
    return CREATED in marks or of_release


def plan(options: Options, found: Found) -> Planned:
    """Plan the installation; nothing of somebody else's operator is planned."""
    owner, what = whose(options, found)
    nothing: Planned = {
        "whose": owner,
        "what": what,
        "values": {},
        "policy": {},
        "labels": {},
        "nfd": False,
        "brought": [],
        "note": {},
        "problems": [],
    }
    if owner == ELSEWHERE:
        problem = (
            f"gpu_operator_namespace: this collection has installed the GPU Operator in namespace {what}, and not in "
            f"{options['namespace']}; set it to {what}, or run uninstall.yml with that value first"
        )
        return {**nothing, "problems": [problem]}
    if owner == THEIRS:
        return nothing
    served = {item["metadata"]["name"] for item in found["definitions"]}
    noted = annotations_of(found["namespace"]).get(BROUGHT)
    # Whoever may change the namespace has no other definition deleted by it.
    brought = sorted(set(noted.split(",") if noted else set(DEFINITIONS) - served) & set(DEFINITIONS))
    brings_nfd = NFD_DEFINITION in brought
    nfd = brings_nfd if options["nfd"] == "auto" else options["nfd"] == "true"
    values = _merged(_values(options, nfd), options["values"])
    enabled = _at(values, DEVICE_PLUGIN) is True
    problems = _problems(options, owner, what, values)
    coming = [name for name in brought if nfd or not name.endswith(NFD_GROUP)]
    return {
        **nothing,
        "values": values if options["chart"] else {},
        "policy": {} if options["chart"] else _merged(POLICY, values),
        "labels": _labels(options, enabled, nfd),
        "nfd": nfd,
        "brought": coming,
        "note": {BROUGHT: ",".join(coming)} if options["chart"] else {},
        "problems": problems,
    }


def _values(options: Options, nfd: bool) -> JsonObject:
    """Return the values without the user's.

    Once the operator runs, module ``gpu_operator`` changes CDI and the device plugin, which needs an order: the
    release keeps its values of them. The device plugin is added where a node is given to it.
    """
    former = options["former"]
    cdi = not _by_variable(options) if options["cdi"] == "auto" else options["cdi"] == "true"
    before = _at(former, CDI)
    plugin = bool(options["plugin"]) or _at(former, DEVICE_PLUGIN) is True
    values: JsonObject = {
        "driver": {"enabled": options["driver"] != HOST, "usePrecompiled": options["driver"] == PRECOMPILED},
        "toolkit": {"enabled": options["toolkit"]},
        "cdi": {"enabled": cdi if before is None else before},
        "devicePlugin": {"enabled": plugin},
        "daemonsets": {"tolerations": options["tolerations"]},
    }
    if options["driver_version"]:
        values["driver"]["version"] = options["driver_version"]
    if options["repo_config"]:
        values["driver"]["repoConfig"] = {"configMapName": options["repo_config"]}
    if options["certificates"]:
        values["driver"]["certConfig"] = {"name": options["certificates"]}
    if plugin and options["shared"]:
        # It waits for NVIDIA's resources, which nodes without the operator's device plugin don't have.
        check = [{"name": name, "value": value} for name, value in NO_PLUGIN_CHECK.items()]
        values["validator"] = {"plugin": {"env": check}}
    if options["chart"]:
        values["nfd"] = {"enabled": nfd}
        values["node-feature-discovery"] = {
            "worker": {"nodeSelector": {NODE_LABEL: NODE_VALUE}, "tolerations": options["tolerations"]}
        }
        _add_images(values, options)
    return values


def _by_variable(options: Options) -> list[str]:
    """Return the nodes whose pods select their card by a variable, which the operator's CDI ignores."""
    return sorted({*options["shared"]} - {*options["by_cdi"]})


def _add_images(values: JsonObject, options: Options) -> None:
    """Add the user's registry and pull secrets to each component; with OLM the catalog has the images by digest."""
    for path, folder in COMPONENTS.items():
        more: JsonObject = {"repository": f"{options['registry'].rstrip('/')}/{folder}"} if options["registry"] else {}
        if options["pull_secrets"] and path not in PARTS:
            more["imagePullSecrets"] = list(options["pull_secrets"])
        part = values
        if more:
            for name in path:
                part = part.setdefault(name, {})
            part.update(more)
    discovery = values["node-feature-discovery"]
    if options["registry"]:
        discovery["image"] = {"repository": f"{options['registry'].rstrip('/')}/{NFD_IMAGE}"}
    if options["pull_secrets"]:
        discovery["imagePullSecrets"] = [{"name": name} for name in options["pull_secrets"]]


def _labels(options: Options, plugin: bool, nfd: bool) -> dict[str, dict[str, str]]:
    """Return the labels of nodes: those of the operator, and those that it has to leave alone.

    :param plugin: the operator's device plugin runs somewhere.
    :param nfd: node feature discovery comes along, so that the operator sees only its own nodes.
    """
    labels = {name: {NODE_LABEL: NODE_VALUE} for name in options["nodes"]}
    for name in options["plugin"]:
        # Before the operator is waited for: where a switch took its plugin off, its validator would wait for the cards.
        if plugin and name in labels:
            labels[name][PLUGIN] = "true"
    for name in options["shared"]:
        if plugin and name in labels and name not in options["plugin"]:
            labels[name][PLUGIN] = "false"
    if not (nfd and options["chart"]):
        labels.update({name: {OPERANDS: "false"} for name in options["others"] if name not in labels})
    # What feature discovery has labelled stays when its worker leaves, and with that the operator.
    labels.update({name: {OPERANDS: "false"} for name in options["leaving"] if name not in labels})
    return labels


def _problems(options: Options, owner: str, what: str, values: JsonObject) -> list[str]:
    problems = []
    if owner == OURS and what:
        problems.append(
            f"gpu_operator_state: {what} isn't of release {options['release']}, which this role has installed, and the "
            "GPU Operator uses only one; delete it"
        )
    with_cdi = options["toolkit"] and _at(values, CDI) is not False and _at(options["former"], CDI) is None
    by_variable = _by_variable(options)
    if by_variable and with_cdi:
        problems.append(
            "gpu_operator_cdi: with CDI the variable by which pods select their card is ignored, and node "
            f"{by_variable[0]} gives its cards away by it; leave it at auto"
        )
    if _at(values, ("gpuCluster", "deployCR")) is True or _at(values, ("clusterPolicy", "deployCR")) is False:
        problems.append(
            "gpu_operator_values: without a ClusterPolicy (clusterPolicy.deployCR, gpuCluster.deployCR) the operator "
            "gives cards away by claims; this role needs one"
        )
    return problems


def _merged(base: t.Mapping[str, t.Any], over: t.Mapping[str, t.Any]) -> JsonObject:
    """Return values with others merged into them; of lists the latter's is taken."""
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        both = isinstance(value, t.Mapping) and isinstance(merged.get(key), t.Mapping)
        merged[key] = _merged(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _at(values: t.Any, path: t.Sequence[str]) -> t.Any:
    for name in path:
        values = values.get(name) if isinstance(values, t.Mapping) else None
    return values
