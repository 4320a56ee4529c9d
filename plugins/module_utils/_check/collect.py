# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query the API in few requests for what the checks need, and make the report."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import typing as t

from .._allocation import claims
from .._contracts import claim_templates, hami, hami_marks
from .._contracts.gpushare import (
    NODE_CARDS,
    NODE_LABEL,
    NODE_LABEL_CLAIMS,
    NODE_LABEL_VALUES,
    RESOURCE_COUNT,
    RESOURCE_MEMORY,
)
from .._contracts.model import UNFINISHED, Node, Pod
from .._contracts.virtual import CLASSES
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from .._kube.stream import Wanted, listed, uncollected
from .._scheduler import constants
from .evidence import Reader
from .grants import is_driver
from .model import Options, Servers
from .node_pods import NodePod, evidence_from, pod_of
from .parse import shorten
from .registry import ALL, SCOPES
from .report import report
from .servers import is_server_pod
from .servers_scheduler import DENY, NONE, WARN
from .snapshot import classes_of, read_nodes, read_pods, snapshot

if t.TYPE_CHECKING:
    from .._kube.api import Kube
    from .._kube.pod_exec import Execute

PROCESSES = (
    "nvidia-persistenced",
    "nv-hostengine",
    "dcgm",
    "nvidia-cuda-mps-server",
    "nvidia-cuda-mps-control",
    "Xorg",
    "gnome-shell",
)
EXEMPT_NAMESPACES = ("kube-system", "gpu-operator", "nvidia-gpu-operator", "gpushare-system")
SCHEDULERS = ("default-scheduler", "gpushare-scheduler", "secondary-scheduler")
HAMI_SCHEDULERS = ("hami-scheduler",)
GRACE_SECONDS = 30

SERVERS_ARGUMENTS: JsonObject = {
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "namespace": {"type": "str", "default": "gpushare-system"},
    "dedicated_namespace": {"type": "str", "default": "gpushare-scheduler"},
    "scheduler": {
        "type": "str",
        "choices": [*constants.ON_MACHINES, constants.DEDICATED, constants.OPENSHIFT],
        "default": constants.STATIC_POD,
    },
    "admission": {"type": "str", "choices": [DENY, WARN, NONE], "default": DENY},
    "problem": {"type": "str", "default": ""},
    "running": {"type": "dict", "default": {}},
    "reserved_mib": {"type": "int", "default": 0},
}
# Seconds that a pod's answer may take beyond the time that NVML has there.
ANSWER_SECONDS = 20
LONGEST_SECONDS = 600
PODS_ARGUMENTS: JsonObject = {
    "namespace": {"type": "str", "default": "gpushare-system"},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "timeout": {"type": "int", "default": 30},
}
ARGUMENTS: JsonObject = {
    "scope": {"type": "str", "choices": list(SCOPES), "default": ALL},
    "nodes": {"type": "dict", "default": {}},
    "pods": {"type": "dict", "options": PODS_ARGUMENTS},
    "servers": {"type": "dict", "options": SERVERS_ARGUMENTS},
    "before": {"type": "dict"},
    "extender": {"type": "dict"},
    "allowed_processes": {"type": "list", "elements": "str", "default": list(PROCESSES)},
    "allowed_pods": {"type": "list", "elements": "str", "default": []},
    "exempt_namespaces": {"type": "list", "elements": "str", "default": list(EXEMPT_NAMESPACES)},
    "stack_namespaces": {"type": "list", "elements": "str", "default": []},
    "schedulers": {"type": "list", "elements": "str", "default": list(SCHEDULERS)},
    "hami_schedulers": {"type": "list", "elements": "str", "default": list(HAMI_SCHEDULERS)},
    "grace_seconds": {"type": "int", "default": GRACE_SECONDS},
}


def check(
    kube: Kube,
    params: JsonObject,
    now: int | None = None,
    cluster: str = "",
    executor: t.Callable[[float], Execute] | None = None,
) -> JsonObject:
    """Query the cluster, run the checks, and make the report.

    :param params: the module's options.
    :param now: seconds since 1970.
    :param cluster: the API server's address.
    :param executor: returns what runs commands in containers, each in so many seconds; needed with ``pods`` only.
    :raises ShareError: the API server doesn't answer, or an option is invalid.
    """
    if params["grace_seconds"] < 0:
        raise BadInput(f"grace_seconds: {params['grace_seconds']} is negative")
    asked = params["pods"] if params["scope"] == ALL else None
    if asked is not None and not 1 <= asked["timeout"] <= LONGEST_SECONDS:
        raise BadInput(f"pods.timeout: {asked['timeout']} isn't between 1 and {LONGEST_SECONDS} seconds")
    reader = Reader()
    server_pods: list[JsonObject] = []
    node_pods: list[NodePod] = []

    def keep(raw: t.Any) -> list[Pod]:
        if params["servers"] is not None and isinstance(raw, dict) and is_server_pod(raw):
            server_pods.append(raw)
        if asked is not None and (pod := pod_of(raw, asked["namespace"])) is not None:
            node_pods.append(pod)
        return read_pods([raw], reader)

    with uncollected():
        # Which client set spec.nodeName is in managedFields, so pods are needed whole.
        nodes, pods = listed(
            kube, Wanted("Node", lambda raw: read_nodes([raw], reader)), Wanted("Pod", keep, UNFINISHED, whole=True)
        )
        if params["scope"] == ALL and any(node.annotations.get(hami.NODE_REGISTER) for node in nodes):
            pods = [*pods, *_refused(kube, reader)]
        configmaps, problem = _configmaps(kube, nodes) if params["scope"] == ALL else ([], "")
        servers = _servers(kube, params["servers"], server_pods)
        evidence = params["nodes"]
        if asked is not None and node_pods and executor is not None:
            wanted, seconds = frozenset(asked["nodes"]), asked["timeout"]
            with_seconds = functools.partial(executor, seconds + ANSWER_SECONDS)
            evidence = evidence_from(kube, node_pods, evidence, wanted, seconds, with_seconds)
        # After the pods: a claim whose pod is gone by then is gone in the second sample.
        by_claims = claims.read(kube) if _may_have_claims(nodes, pods) else None
        seen = snapshot(
            nodes,
            pods,
            evidence,
            _options(params),
            _now() if now is None else now,
            reader,
            configmaps,
            problem,
            servers,
            by_claims,
            _templates(kube) if by_claims is not None and not by_claims.problem else (),
        )
        if any(node.kata is not None for node in seen.nodes):
            seen = dataclasses.replace(seen, **_classes(kube))
        result = report(seen, cluster, params["before"], params["scope"])
    return {"report": result, "requests": dict(kube.requests)}


def _options(params: JsonObject) -> Options:
    names = ("allowed_processes", "allowed_pods", "exempt_namespaces", "schedulers", "hami_schedulers")
    lists = {name: tuple(params[name]) for name in names}
    lists["exempt_namespaces"] += tuple(params["stack_namespaces"])
    return Options(**lists, grace_seconds=params["grace_seconds"], extender=params["extender"])


def _servers(kube: Kube, given: JsonObject | None, pods: t.Sequence[JsonObject]) -> Servers | None:
    if given is None:
        return None
    return Servers(**{**given, "control_plane": tuple(given["control_plane"])}, pods=tuple(pods), api=kube)


def _may_have_claims(nodes: t.Iterable[Node], pods: t.Iterable[Pod]) -> bool:
    """Return whether there may be slices and claims of this collection: who has neither saves three requests."""
    return any(pod.uses or is_driver(pod) for pod in pods) or any(_is_without_plugin(node) for node in nodes)


def _is_without_plugin(node: Node) -> bool:
    """Return whether a node is to share its cards, by claims or without a device plugin that announces them."""
    label = node.labels.get(NODE_LABEL)
    if label == NODE_LABEL_CLAIMS:
        return True
    announces = NODE_CARDS in node.annotations or bool(node.allocatable.get(RESOURCE_MEMORY))
    return label in NODE_LABEL_VALUES and not announces


def _templates(kube: Kube) -> list[str]:
    """Return the templates of gpushare-dra-templates, as ``namespace/name``; none where they can't be read."""
    try:
        templates = kube.list_all(
            claim_templates.API_VERSION,
            "ResourceClaimTemplate",
            label_selector=f"{claim_templates.MANAGED_BY}={claim_templates.MANAGER}",
        )
    except ShareError:
        return []
    return ["/".join(str((raw.get("metadata") or {}).get(key)) for key in ("namespace", "name")) for raw in templates]


def _configmaps(kube: Kube, nodes: t.Iterable[Node]) -> tuple[list[JsonObject] | None, str]:
    """Return kube-system's ConfigMaps, where a node has upstream's plugin: only upstream's extender reads them."""
    if not any(RESOURCE_COUNT in node.capacity and not node.announced for node in nodes):
        return [], ""
    try:
        return kube.list_all("v1", "ConfigMap", namespace="kube-system"), ""
    except ShareError as error:
        return None, shorten(str(error), 300)


def _refused(kube: Kube, reader: Reader) -> list[t.Any]:
    """Return the pods that kubelet refused on HAMi's nodes; others that failed aren't read."""

    def keep(raw: t.Any) -> list[Pod]:
        try:
            return read_pods([raw], reader) if hami_marks.is_refused(raw) else []
        except (AttributeError, TypeError):
            # Malformed: whoever reads unfinished pods reports such ones.
            return []

    return listed(kube, Wanted("Pod", keep, "status.phase=Failed", whole=True))[0]


def _classes(kube: Kube) -> dict[str, t.Any]:
    """Return the RuntimeClasses, or why they are unknown, as fields of a snapshot."""
    try:
        items = kube.list_all(*CLASSES)
    except ShareError as error:
        return {"classes": None, "classes_problem": shorten(str(error), 300)}
    return {"classes": classes_of(items)}


def _now() -> int:
    return int(datetime.datetime.now(datetime.timezone.utc).timestamp())
