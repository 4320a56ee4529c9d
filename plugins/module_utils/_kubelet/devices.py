# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the devices that a node's kubelet allocated to containers, and those that they have. No I/O."""

from __future__ import annotations

import posixpath
import typing as t

from .._contracts.claim_templates import DRIVER
from .._contracts.pod_resources import PodDevices, decode_pod, split_pods
from .._contracts.protobuf import MalformedMessage
from .._core.errors import BadInput
from .checkpoint import parse_checkpoint, prepared_claims
from .source import KubeletSource, Missing, Unreadable
from .types import Checkpoint, KubeletDevices, ListedPod, PodResources, no_checkpoint, no_pod_resources

RESOURCES = ["aliyun.com/gpu-", "nvidia.com/"]


def collect(source: KubeletSource, root: str, resources: t.Sequence[str]) -> KubeletDevices:
    """Read checkpoint, PodResources, the device plugins' sockets, the containers' device nodes and prepared claims.

    :param root: kubelet's directory.
    :param resources: prefixes of the resource names to return.
    :raises BadInput: an option is invalid.
    """
    if not resources or not all(resources):
        raise BadInput("resources: each item has to be the prefix of a resource's name")
    if not root.startswith("/"):
        raise BadInput(f"root: {root!r} isn't an absolute path")
    plugins = posixpath.join(root, "device-plugins")
    return {
        "root": root,
        "checkpoint": _checkpoint(source, posixpath.join(plugins, "kubelet_internal_checkpoint"), resources),
        "pod_resources": _pod_resources(source, posixpath.join(root, "pod-resources", "kubelet.sock"), resources),
        "sockets": source.sockets(plugins),
        "device_nodes": source.device_nodes(),
        "prepared": prepared_claims(source, root),
    }


def parse_pod_resources(response: bytes, resources: t.Sequence[str]) -> PodResources:
    """Decode kubelet's response to List; never raises.

    :returns: pods that have a device of these resources, or a card by a claim, by name; ``state`` is ``ok`` or
        ``unknown``.
    """
    try:
        pods = [_listed(decode_pod(message, tuple(resources), DRIVER)) for message in split_pods(response)]
    except MalformedMessage as error:
        return no_pod_resources("unknown", f"kubelet's PodResources response isn't a message of version 1: {error}")
    listed = [pod for pod in pods if pod["containers"]]
    return {"state": "ok", "problem": "", "pods": sorted(listed, key=lambda pod: (pod["namespace"], pod["name"]))}


def _listed(pod: PodDevices) -> ListedPod:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "containers": [
            {
                "name": container.name,
                "devices": [{"resource": name, "ids": list(ids)} for name, ids in sorted(container.devices.items())],
                "claims": [
                    {
                        "namespace": each.namespace,
                        "claim": each.claim,
                        "pool": each.pool,
                        "device": each.device,
                        "share": each.share,
                    }
                    for each in container.claimed
                ],
            }
            for container in pod.containers
            if container.devices or container.claimed
        ],
    }


def _checkpoint(source: KubeletSource, path: str, resources: t.Sequence[str]) -> Checkpoint:
    try:
        return parse_checkpoint(source.file(path), resources)
    except Missing as error:
        return no_checkpoint("missing", str(error))
    except Unreadable as error:
        return no_checkpoint("unreadable", str(error))


def _pod_resources(source: KubeletSource, path: str, resources: t.Sequence[str]) -> PodResources:
    try:
        return parse_pod_resources(source.pod_resources(path), resources)
    except Missing as error:
        return no_pod_resources("missing", str(error))
    except Unreadable as error:
        return no_pod_resources("unreadable", str(error))
