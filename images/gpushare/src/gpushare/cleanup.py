# SPDX-License-Identifier: GPL-3.0-or-later
"""``gpushare-device-plugin --cleanup``: a node says nothing of our cards any more, and no container is limited by us.

For where nobody else does it, before gpushare leaves a node for good. Pods keep their annotations: they still hold what
these say, and upstream's servers read the same. Interrupted anywhere, the next run does the rest.
"""

from __future__ import annotations

import logging
import socket
import typing as t
from pathlib import Path

from gpushare import contract
from gpushare.admission import slim_pod
from gpushare.kube import Json, Kube, KubeError
from gpushare.kubelet import SOCKET
from gpushare.limit_keeper import LimitKeeper
from gpushare.nvml import NoCards, Nvml, merge
from gpushare.podresources import PodResources, Unreadable

log = logging.getLogger("gpushare.cleanup")

ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT)
RESOURCES = (contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT)


class NotClean(Exception):
    """Something of ours is left, in one sentence."""


def node_patches(node: Json) -> tuple[Json, Json]:
    """What takes our words off a node, and off its status; empty where there are none."""
    annotations, status = (node.get("metadata") or {}).get("annotations") or {}, node.get("status") or {}
    ours = {key: None for key in ANNOTATIONS if key in annotations}
    # kubelet itself shows a resource whose plugin is gone, with nothing of it, until it is restarted.
    counts = {
        field: {name: None for name in RESOURCES if str((status.get(field) or {}).get(name, "0")) != "0"}
        for field in ("capacity", "allocatable")
    }
    left = {field: names for field, names in counts.items() if names}
    return {"metadata": {"annotations": ours}} if ours else {}, {"status": left} if left else {}


def clean(
    name: str,
    kube: Kube,
    nvml: Nvml,
    unit: str,
    podresources: PodResources,
    keeper: LimitKeeper,
    folder: Path,
) -> None:
    """
    :param folder: kubelet's for the sockets of device plugins.
    :raises NotClean: the plugin still runs here, or something couldn't be taken away.
    """
    path = folder / SOCKET
    if _answers(path):
        raise NotClean(
            "--cleanup: the device plugin still runs on this node and would write everything anew; end it first"
        )
    path.unlink(missing_ok=True)
    try:
        node = kube.get(f"/api/v1/nodes/{name}")
        trouble = _release(name, kube, nvml, unit, podresources, keeper, node)
        for at, body in zip((f"/api/v1/nodes/{name}", f"/api/v1/nodes/{name}/status"), node_patches(node), strict=True):
            if body:
                kube.patch(at, body)
                log.info("node %s: taken away", name, extra={"data": {"body": body}})
    except KubeError as error:
        raise NotClean(f"--cleanup: node {name} can't be read or written: {error}") from error
    if trouble:
        raise NotClean(f"--cleanup: limits of running containers may be left: {trouble}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(2)
        try:
            one.connect(str(path))
        except OSError:
            return False
    return True


def _release(
    name: str, kube: Kube, nvml: Nvml, unit: str, podresources: PodResources, keeper: LimitKeeper, node: Json
) -> str:
    """Take our limits off the containers that run; what was in the way, in words."""
    annotations: t.Mapping[str, str] = (node.get("metadata") or {}).get("annotations") or {}
    state = annotations.get(contract.NODE_LIMIT, contract.LIMIT_OFF)
    if state == contract.LIMIT_OFF:
        return ""
    try:
        cards = merge((), nvml.cards(), unit)
        listing = podresources.list()
    except (NoCards, Unreadable) as error:
        # Where nothing was enforced, there is nothing to be taken away.
        return str(error) if state == contract.LIMIT_ENFORCED else ""
    answer = kube.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")
    keeper.release(cards, [slim_pod(pod) for pod in answer.get("items") or []], listing)
    return ""
