# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find objects of others in a namespace that is to be deleted, because they would be deleted with it."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .refs import Ref

# Marks objects that this collection created; only those are deleted.
CREATED = "kubegpu.share/created"

KINDS = (
    ("apps/v1", "DaemonSet"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("batch/v1", "CronJob"),
    ("batch/v1", "Job"),
    ("v1", "ConfigMap"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Pod"),
    ("v1", "Secret"),
    ("v1", "Service"),
)
# Kubernetes and OpenShift create these in every namespace.
DEFAULT_OBJECTS = {("ConfigMap", "kube-root-ca.crt"), ("ConfigMap", "openshift-service-ca.crt")}
TOKENS = ("kubernetes.io/service-account-token", "kubernetes.io/dockercfg")
# On ConfigMaps with which programs elect a leader.
LEADER = "control-plane.alpha.kubernetes.io/leader"


class Lister(t.Protocol):
    """The part of a client that lists objects."""

    def list_all(self, api_version: str, kind: str, namespace: str = "") -> list[JsonObject]: ...


def foreign_objects(kube: Lister, namespace: str, ours: t.Collection[Ref]) -> list[str]:
    """Return other objects in a namespace as ``Kind name``.

    :param ours: this collection's objects; what Kubernetes created because of them is theirs, too.
    """
    return [
        f"{kind} {one['metadata']['name']}"
        for api_version, kind in KINDS
        for one in kube.list_all(api_version, kind, namespace)
        if Ref(api_version, kind, namespace, one["metadata"]["name"]) not in ours and not _dependent(kind, one)
    ]


def _dependent(kind: str, one: JsonObject) -> bool:
    metadata = one["metadata"]
    return bool(
        metadata.get("ownerReferences")
        or metadata.get("deletionTimestamp")
        or (kind, metadata["name"]) in DEFAULT_OBJECTS
        or LEADER in (metadata.get("annotations") or {})
        or (kind == "Secret" and one.get("type") in TOKENS)
    )
