# SPDX-License-Identifier: GPL-3.0-or-later
"""``gpushare-device-plugin --cleanup``: remove the plugin's annotations, resources and limits from a node.

For nodes that gpushare leaves for good and that the controller can't reach. Pods keep their annotations: they still
hold their units, and upstream's servers read the same annotations. If it is interrupted, the next run does the rest.
"""

from __future__ import annotations

import logging
import socket
import typing as t
from pathlib import Path

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError, Pages
from gpushare.kubelet.pod_resources import PodResources, Unreadable
from gpushare.kubelet.server import SOCKET
from gpushare.nvml.inventory import merge
from gpushare.nvml.library import Nvml, NvmlError
from gpushare.plugin.admission import trim_pod
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.cleanup")

ANNOTATIONS = (contract.NODE_CARDS, contract.NODE_LIMIT)
RESOURCES = (contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT)


class CleanupError(Exception):
    """The cleanup is incomplete."""


def node_patch(node: JsonObject) -> JsonObject:
    """Return the patch that removes our annotations and resources from a node; empty if there are none."""
    annotations, status = (node.get("metadata") or {}).get("annotations") or {}, node.get("status") or {}
    ours = {key: None for key in ANNOTATIONS if key in annotations}
    # Until its restart kubelet reports a resource without a plugin, with a capacity of 0.
    counts = {
        field: {name: None for name in RESOURCES if str((status.get(field) or {}).get(name, "0")) != "0"}
        for field in ("capacity", "allocatable")
    }
    left = {field: names for field, names in counts.items() if names}
    return {**({"metadata": {"annotations": ours}} if ours else {}), **({"status": left} if left else {})}


def clean(
    name: str,
    kube: Kube,
    nvml: Nvml,
    unit: str,
    podresources: PodResources,
    enforcer: LimitEnforcer,
    folder: Path,
) -> None:
    """Remove the plugin's annotations, resources and limits from a node.

    :param name: the node's.
    :param unit: of the cluster's shares, GiB or MiB.
    :param folder: kubelet's directory of device plugins' sockets.
    :raises CleanupError: the plugin still runs here, or something couldn't be removed.
    """
    path = folder / SOCKET
    if _answers(path):
        raise CleanupError(
            "--cleanup: the device plugin still runs on this node and would write everything again; stop it first"
        )
    path.unlink(missing_ok=True)
    try:
        node = kube.get(paths.node(name))
        problem = _release(name, kube, nvml, unit, podresources, enforcer, node)
        body = node_patch(node)
        if body:
            kube.patch(paths.node(name, "status"), body)
            log.info("node %s: annotations and resources removed", name, extra={"data": {"body": body}})
    except KubeError as error:
        raise CleanupError(f"--cleanup: node {name} can't be read or written: {error}") from error
    if problem:
        raise CleanupError(f"--cleanup: limits of running containers may be left: {problem}")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _release(
    name: str, kube: Kube, nvml: Nvml, unit: str, podresources: PodResources, enforcer: LimitEnforcer, node: JsonObject
) -> str:
    """Remove the plugin's limits from the running containers; return the problem, or an empty string."""
    annotations: t.Mapping[str, str] = (node.get("metadata") or {}).get("annotations") or {}
    state = annotations.get(contract.NODE_LIMIT, contract.LIMIT_OFF)
    if state == contract.LIMIT_OFF:
        return ""
    try:
        cards = merge((), nvml.cards(), unit)
        listing = podresources.list()
    except (NvmlError, Unreadable) as error:
        # Without enforced limits there is nothing to remove.
        return str(error) if state == contract.LIMIT_ENFORCED else ""
    pods = Pages(kube, "/api/v1/pods", paths.of_node(name))
    enforcer.release(cards, [trim_pod(pod) for pod in pods], listing)
    return ""
