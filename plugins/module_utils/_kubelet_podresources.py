# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""kubelet's PodResources interface (v1): which container has which device IDs. Pure; the call itself is a door's.

Contract: k8s.io/kubelet, pkg/apis/podresources/v1/api.proto. kubelet names pods without UID, sends one message for each
device ID, and leaves plain init containers out; older ones list finished pods too.
"""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet_wire import Broken, fields, text, texts

LIST = "/v1.PodResourcesLister/List"
# ListPodResourcesRequest has no fields.
LIST_REQUEST = b""


def listed(answer: bytes, resources: t.Sequence[str]) -> Json:
    """State, problem and pods of kubelet's answer to List; only pods that have a device, in order of their names.

    :param resources: beginnings of the resource names that are of interest; nothing else is returned.
    """
    try:
        pods = [_pod(one, tuple(resources)) for one in fields(answer, (1,)).get(1, [])]
    except Broken as error:
        return state("unknown", f"kubelet's PodResources answered with what isn't its message of version 1: {error}")
    having = [one for one in pods if one["containers"]]
    return {**state("ok"), "pods": sorted(having, key=lambda one: (one["namespace"], one["name"]))}


def state(name: str, problem: str = "") -> Json:
    return {"state": name, "problem": problem, "pods": []}


def _pod(data: bytes, resources: tuple[str, ...]) -> Json:
    parts = fields(data, (1, 2, 3))
    containers = [_container(one, resources) for one in parts.get(3, [])]
    return {
        "namespace": text(parts.get(2)),
        "name": text(parts.get(1)),
        "containers": [one for one in containers if one["devices"]],
    }


def _container(data: bytes, resources: tuple[str, ...]) -> Json:
    parts = fields(data, (1, 2))
    # An ID stands once, however many messages name it; dict keeps the order.
    found: dict[str, dict[str, None]] = {}
    for one in parts.get(2, []):
        devices = fields(one, (1, 2))
        resource = text(devices.get(1))
        if resource.startswith(resources):
            found.setdefault(resource, {}).update(dict.fromkeys(texts(devices.get(2))))
    return {
        "name": text(parts.get(1)),
        "devices": [{"resource": resource, "ids": list(ids)} for resource, ids in sorted(found.items())],
    }
