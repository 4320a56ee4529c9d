# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Ask a cluster what the invariants are about, in few requests, and make the report."""

from __future__ import annotations

import datetime
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Options
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_run import report
from ansible_collections.kubegpu.share.plugins.module_utils._check_snapshot import read_pods, snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import UNFINISHED
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import NODE_CARDS, RESOURCE_COUNT, Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._kube_stream import Wanted, listed, uncollected

PROCESSES = (
    "nvidia-persistenced",
    "nv-hostengine",
    "dcgm",
    "nvidia-cuda-mps-server",
    "nvidia-cuda-mps-control",
    "Xorg",
    "gnome-shell",
)
SCHEDULERS = ("default-scheduler", "gpushare-scheduler", "secondary-scheduler")
HAMI_SCHEDULERS = ("hami-scheduler",)
GRACE_SECONDS = 30

ARGUMENTS: Json = {
    "nodes": {"type": "dict", "default": {}},
    "before": {"type": "dict"},
    "story": {"type": "dict"},
    "extender": {"type": "dict"},
    "allowed_processes": {"type": "list", "elements": "str", "default": list(PROCESSES)},
    "allowed_pods": {"type": "list", "elements": "str", "default": []},
    "schedulers": {"type": "list", "elements": "str", "default": list(SCHEDULERS)},
    "hami_schedulers": {"type": "list", "elements": "str", "default": list(HAMI_SCHEDULERS)},
    "grace_seconds": {"type": "int", "default": GRACE_SECONDS},
}


def look(kube: Kube, params: Json, now: int | None = None, cluster: str = "") -> Json:
    """Ask the cluster, check, and report.

    :param now: seconds since 1970.
    :raises ShareError: the API doesn't answer, or an option can't be served.
    """
    if params["grace_seconds"] < 0:
        raise BadInput(f"grace_seconds: {params['grace_seconds']} is less than none")
    reader = Reader()
    with uncollected():
        nodes, pods = listed(
            kube,
            Wanted("Node", lambda raw: [raw]),
            # Who wrote spec.nodeName is in managedFields.
            Wanted("Pod", lambda raw: read_pods([raw], reader), UNFINISHED, whole=True),
        )
        configmaps, problem = _configmaps(kube, nodes)
        moment = _now() if now is None else now
        seen = snapshot(nodes, pods, params["nodes"], _options(params), moment, reader, configmaps, problem)
        told = report(seen, cluster, params["before"])
    return {"report": told, "requests": dict(kube.requests)}


def _options(params: Json) -> Options:
    return Options(
        processes=tuple(params["allowed_processes"]),
        pods=tuple(params["allowed_pods"]),
        schedulers=tuple(params["schedulers"]),
        hami_schedulers=tuple(params["hami_schedulers"]),
        grace=params["grace_seconds"],
        extender=params["extender"],
        story=params["story"],
    )


def _configmaps(kube: Kube, nodes: t.Iterable[t.Any]) -> tuple[list[Json] | None, str]:
    """kube-system's ConfigMaps, where a node has upstream's plugin; nobody else's scheduler reads them."""
    if not any(_upstream(node) for node in nodes):
        return [], ""
    try:
        return kube.list_all("v1", "ConfigMap", namespace="kube-system"), ""
    except ShareError as error:
        return None, shorten(str(error), 300)


def _upstream(node: t.Any) -> bool:
    try:
        annotations = node["metadata"].get("annotations") or {}
        return RESOURCE_COUNT in (node["status"].get("capacity") or {}) and not annotations.get(NODE_CARDS)
    except (AttributeError, KeyError, TypeError):
        return False


def host_of(kube: t.Any) -> str:
    """The API server's address."""
    try:
        return str(kube.api_client.configuration.host)
    except AttributeError:
        return ""


def _now() -> int:
    return int(datetime.datetime.now(datetime.timezone.utc).timestamp())
