# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kube-scheduler of the collection's own beside the cluster's, and its namespace. Pure.

Mode ``dedicated`` runs it as a Deployment of the collection. On OpenShift from 4.10 on the Secondary Scheduler Operator
runs it, with an image that has /bin/kube-scheduler, which Kubernetes' own images haven't.
"""

from __future__ import annotations

import json
import re
import typing as t

from .._allocation import node_backends
from .._allocation.cluster import node_of_row, rows_of
from .._contracts.gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from .._contracts.model import Node
from .._core.digest import digest
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._kube import tolerations
from .._kube.objects import CREATED, DIGEST
from .._openshift import cluster as openshift
from . import config
from .constants import ADMISSION_BETA_SINCE, ADMISSION_SINCE, DEDICATED_NAME, OPENSHIFT
from .extenders import Extender, Tls

OLDEST = 19
BUDGET_SINCE = 21
# Images of the scheduler-plugins project, by the minor version of Kubernetes that they are built from.
# https://github.com/kubernetes-sigs/scheduler-plugins/tree/v0.34.7#compatibility-matrix
REPOSITORY = "registry.k8s.io/scheduler-plugins/kube-scheduler"
TAGS = {34: "v0.34.7", 33: "v0.33.5", 32: "v0.32.7", 30: "v0.30.6", 28: "v0.28.9", 27: "v0.27.8"}

# Distributors number their own patches of a release that upstream has ended from here on (AKS: 1.28.101); upstream has
# no image of them. https://github.com/kubernetes/website/blob/main/data/releases/eol.yaml
OWN_PATCHES_FROM = 100
# Upstream's last patch of those releases, by the minor version.
LAST_PATCH = {27: 16, 28: 15, 29: 14, 30: 14, 31: 14, 32: 13, 33: 13}

_VERSION = re.compile(r"^v?(1\.([0-9]+)\.[0-9]+(?:-(?:alpha|beta|rc)\.[0-9]+)?)")
# Valid as a profile's name, as a label's value and within an expression.
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


class SchedulerOptions(t.TypedDict, total=False):
    """Options of the filter ``dedicated_scheduler``, as role scheduler passes them.

    ``imported`` names the nodes that get the extender's image from the playbooks; None where each node pulls it.
    """

    mode: str
    state: str
    name: str
    namespace: str
    image: str
    version: str
    replicas: int
    nodes: t.Sequence[str]
    imported: t.Sequence[str] | None
    tolerations: t.Sequence[JsonObject]
    extender: str
    timeout: int
    preemption: bool
    tls: t.Mapping[str, str]


class ClusterNodes(t.TypedDict):
    """The part of ``cluster_info``'s result that is read; for OpenShift ``version`` is its release."""

    version: str
    nodes: t.Sequence[JsonObject]


class DedicatedScheduler(t.TypedDict):
    """Values for the role's templates; those that don't apply are empty.

    ``control_plane`` is whether its pods run on nodes with the control plane's label, in place of ``nodes``.
    """

    image: str
    minor: int
    config: str
    config_name: str
    nodes: list[str]
    control_plane: bool
    live: str
    ready: str
    policy_api: str
    budget_api: str


def plan(cluster: ClusterNodes, options: SchedulerOptions) -> DedicatedScheduler:
    """Return what the templates need and the user didn't set.

    :raises BadInput: the scheduler can't run here; the message names the variable.
    """
    on_openshift = options["mode"] == OPENSHIFT
    version = str(cluster["version"])
    release, server = ("", openshift.kubernetes_minor(version)) if on_openshift else _server(version)
    result: DedicatedScheduler = {
        "image": "",
        "minor": 0,
        "config": "",
        "config_name": "",
        "nodes": [],
        "control_plane": False,
        "live": "",
        "ready": "",
        "policy_api": _policy_api(server, on_openshift),
        "budget_api": "policy/v1" if server >= BUDGET_SINCE or on_openshift else "policy/v1beta1",
    }
    if options["state"] == "absent":
        # Removal only needs names; an option that has become invalid must not prevent it.
        return result
    _check_name("scheduler_name", str(options["name"]))
    if options["name"] == "default-scheduler":
        raise BadInput("scheduler_name: default-scheduler is the name of the cluster's own scheduler")
    fields: JsonObject
    if on_openshift:
        image = str(options["image"]) or _plugins_image(server, version)
        minor = _plugins_minor(image, str(options["version"]))
        # The pod has no loopback address in common with the extender, so it uses the Service's name.
        url = f"https://{options['extender']}.svc:{EXTENDER_PORT}{EXTENDER_PREFIX}"
        tls = Tls(*(str(options["tls"][part]) for part in ("authority", "certificate", "key")))
        # Releases of the operator that run several pods set the flags for it, which take precedence.
        fields = {"leaderElection": {"leaderElect": False}}
    else:
        _check_dedicated(options)
        image = _image(str(options["image"]), str(options["version"] or ""), release)
        minor = _minor(image, str(options["version"] or ""))
        url, tls = f"http://127.0.0.1:{EXTENDER_PORT}{EXTENDER_PREFIX}", None
        fields = {
            "leaderElection": {
                "leaderElect": True,
                "resourceLock": "leases",
                # With the lease of the cluster's scheduler the two would take turns.
                "resourceName": DEDICATED_NAME,
                "resourceNamespace": str(options["namespace"]),
            },
            **config.insecure_addresses(minor, {"port": "0"}),
        }
        result["nodes"], result["control_plane"] = _nodes(map(node_of_row, rows_of(cluster)), options)
    _check_server(minor, server, "scheduler_openshift_image" if on_openshift else "scheduler_dedicated_image")
    extender = Extender(url, int(options["timeout"]), bool(options["preemption"]), tls)
    # Without a kubeconfig, kube-scheduler uses its pod's service account.
    text = config.generate(minor, {**fields, "profiles": [{"schedulerName": str(options["name"])}]}, extender)
    result["image"], result["minor"], result["config"] = image, minor, text
    result["config_name"] = digest(text)[:10]
    result["live"], result["ready"] = config.health_paths(minor)[0], config.health_paths(minor)[-1]
    return result


def _server(version: str) -> tuple[str, int]:
    """Return the API server's release of Kubernetes, without its distributor's suffix, and its minor version."""
    match = _VERSION.match(version)
    if not match:
        raise BadInput(f"scheduler_mode: the API server's version {version!r} isn't one of Kubernetes 1.x")
    minor = int(match.group(2))
    if minor < OLDEST:
        raise BadInput(f"scheduler_mode: dedicated needs Kubernetes 1.{OLDEST} or newer, and this cluster is {version}")
    return match.group(1), minor


def _check_name(variable: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise BadInput(f"{variable}: {value!r} isn't at most 63 lower-case letters, digits and dashes")


def _check_dedicated(options: SchedulerOptions) -> None:
    _check_name("scheduler_dedicated_namespace", str(options["namespace"]))
    numbers = {"scheduler_replicas": options["replicas"], "scheduler_extender_timeout": options["timeout"]}
    for variable, value in numbers.items():
        if int(value) < 1:
            raise BadInput(f"{variable}: {value} is less than 1")


def _image(image: str, version: str, server: str) -> str:
    """Return the image with its tag, by default that of the cluster's own release."""
    if not image or image != image.strip():
        raise BadInput(f"scheduler_dedicated_image: {image!r} is no image")
    if "@" in image or ":" in image.rpartition("/")[2]:
        return image
    match = _VERSION.match(version) if version else None
    if version and not match:
        raise BadInput(
            f"scheduler_version: {version!r} isn't a complete version such as 1.36.3, which the image's tag needs"
        )
    return f"{image}:v{match.group(1) if match else upstream(server)}"


def upstream(release: str) -> str:
    """Return upstream's own release for a distributor's: its last patch where theirs has a number of their own."""
    major, minor, patch = (int(number) for number in release.partition("-")[0].split("."))
    if patch < OWN_PATCHES_FROM:
        return release
    if minor not in LAST_PATCH:
        raise BadInput(
            f"scheduler_dedicated_image: {release} is a distributor's own patch release, of which Kubernetes has no "
            f"image; set scheduler_version to the newest patch of 1.{minor} that Kubernetes released"
        )
    return f"{major}.{minor}.{LAST_PATCH[minor]}"


def _minor(image: str, version: str) -> int:
    if "@" in image and not version and ":" not in image.partition("@")[0].rpartition("/")[2]:
        raise BadInput(f"scheduler_version: {image} has no tag with kube-scheduler's version; set this variable")
    return config.minor_of(image, version or None)


def _check_server(minor: int, server: int, variable: str) -> None:
    if server and (minor < OLDEST or not server - 1 <= minor <= server):
        raise BadInput(
            f"{variable}: kube-scheduler 1.{minor} doesn't work with an API server 1.{server}, which needs a "
            "kube-scheduler of the same minor version or of the one before"
        )


def _nodes(nodes: t.Iterable[Node], options: SchedulerOptions) -> tuple[list[str], bool]:
    """Return the nodes where pods of the scheduler may run; none where all of them may, or the control plane's do.

    The kubelet of a node that somebody took gets the account of each pod there: so these are the control plane's nodes,
    if there are enough, and no node is named.
    """
    on_linux = [node for node in nodes if node.labels.get("kubernetes.io/os", "linux") == "linux"]
    linux = [node.name for node in on_linux]
    imported = options.get("imported")
    if not options["nodes"]:
        control = node_backends.control_plane(on_linux, imported)
        if len(control) >= max(int(options["replicas"]), 1):
            return [], True
    wanted = [str(name) for name in options["nodes"] or imported or ()]
    # A machine of the inventory may not have joined yet.
    chosen = sorted({name for name in wanted if name in linux})
    if wanted and not chosen:
        raise BadInput(f"scheduler_dedicated_nodes: none of {', '.join(wanted)} is a node of the cluster")
    tolerated = [*tolerations.exist(node_backends.TOLERATED), *(options.get("tolerations") or ())]
    if chosen:
        # As the template has it: nodes that were chosen by name may be those of the GPUs.
        tolerated += tolerations.exist(["nvidia.com/gpu"])
    refused = {
        node.name: tolerations.untolerated(tolerations.lasting(node.taints), tolerated)
        for node in on_linux
        if node.name in (chosen or linux)
    }
    open_nodes = [name for name, taints in refused.items() if not taints]
    if len(open_nodes) < int(options["replicas"]) <= len(refused):
        closed = [f"{name} has {', '.join(tolerations.shown(taints))}" for name, taints in refused.items() if taints]
        raise BadInput(
            f"scheduler_dedicated_tolerations: {options['replicas']} pods need as many nodes, and tolerate the taints "
            f"of {len(open_nodes)} only: {'; '.join(closed[:3])}"
        )
    places, replicas = len(refused), int(options["replicas"])
    if places < replicas:
        raise BadInput(
            f"scheduler_replicas: {replicas} pods need as many nodes, and there "
            f"{'is' if places == 1 else 'are'} only {places}"
        )
    return chosen, False


def _policy_api(minor: int, on_openshift: bool) -> str:
    group = "admissionregistration.k8s.io"
    # A release of OpenShift that is newer than those known here has what the newest has.
    if minor >= ADMISSION_SINCE or (on_openshift and not minor):
        return f"{group}/v1"
    return f"{group}/v1beta1" if minor >= ADMISSION_BETA_SINCE and not on_openshift else ""


# --------------------------------------------------------------------------- OpenShift


def _plugins_image(server: int, version: str) -> str:
    for minor in (server, server - 1):
        if minor in TAGS:
            return f"{REPOSITORY}:{TAGS[minor]}"
    kubernetes = f" (Kubernetes 1.{server})" if server else ""
    raise BadInput(
        f"scheduler_openshift_image: no image is known for OpenShift {version}{kubernetes}; set one with "
        "/bin/kube-scheduler of its version of Kubernetes or the one before"
    )


def _plugins_minor(image: str, version: str) -> int:
    """Return the minor version of the kube-scheduler in an image; scheduler-plugins' v0.34 is built from 1.34."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    match = re.match(r"v?[01]\.(\d+)(?:[.+-]|$)", version or tag)
    if not match:
        raise BadInput(f"scheduler_version: {version or image!r} has no version of kube-scheduler; set this variable")
    return int(match.group(1))


# On another owner's namespace: the former values of our labels, null for those that weren't set.
BEFORE = "kubegpu.share/labels-before"


class Terms(t.TypedDict):
    """The result of the filter; ``undo`` is a merge patch, empty where there is nothing to restore."""

    ours: bool
    definition: JsonObject
    undo: JsonObject


def terms(metadata: JsonObject, definition: JsonObject) -> Terms:
    """Return whether the namespace is ours, the definition to apply, and the patch that reverts it.

    :param metadata: of the live namespace; empty where it doesn't exist.
    :param definition: the namespace with the labels that we need.
    """
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    wanted = definition["metadata"]["labels"]
    if not metadata or CREATED in annotations:
        return {"ours": True, "definition": _noted(definition, CREATED, "true"), "undo": {}}
    recorded = json.loads(annotations[BEFORE]) if BEFORE in annotations else {}
    before = {**{label: labels.get(label) for label in wanted}, **recorded}
    undo: JsonObject = {}
    if BEFORE in annotations:
        # Labels that were changed since then aren't ours.
        unchanged = {label: value for label, value in before.items() if labels.get(label) == wanted.get(label)}
        restored = {"labels": unchanged, "annotations": {BEFORE: None, DIGEST: None}}
        undo = {**definition, "metadata": {"name": definition["metadata"]["name"], **restored}}
    return {"ours": False, "definition": _noted(definition, BEFORE, json.dumps(before, sort_keys=True)), "undo": undo}


def _noted(definition: JsonObject, annotation: str, text: str) -> JsonObject:
    return {**definition, "metadata": {**definition["metadata"], "annotations": {annotation: text}}}
