# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Whether a namespace that is about to go holds anything that isn't ours: it would go with it."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref

# On what wasn't there before us, which is all that goes again.
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
# What Kubernetes and OpenShift put into every namespace.
EVERYWHERE = {("ConfigMap", "kube-root-ca.crt"), ("ConfigMap", "openshift-service-ca.crt")}
TOKENS = ("kubernetes.io/service-account-token", "kubernetes.io/dockercfg")
# On ConfigMaps in which programs keep who of them leads.
LOCK = "control-plane.alpha.kubernetes.io/leader"


class Lists(t.Protocol):
    """The part of an API that looks at all objects of a kind."""

    def list_all(self, api_version: str, kind: str, namespace: str = "") -> list[Json]: ...


def strangers(kube: Lists, namespace: str, ours: t.Collection[Ref]) -> list[str]:
    """What is in a namespace and neither one of these objects nor made by one of them, as ``Kind name``."""
    return [
        f"{kind} {one['metadata']['name']}"
        for api_version, kind in KINDS
        for one in kube.list_all(api_version, kind, namespace)
        if Ref(api_version, kind, namespace, one["metadata"]["name"]) not in ours and not _made(kind, one)
    ]


def _made(kind: str, one: Json) -> bool:
    metadata = one["metadata"]
    return bool(
        metadata.get("ownerReferences")
        or metadata.get("deletionTimestamp")
        or (kind, metadata["name"]) in EVERYWHERE
        or LOCK in (metadata.get("annotations") or {})
        or (kind == "Secret" and one.get("type") in TOKENS)
    )
