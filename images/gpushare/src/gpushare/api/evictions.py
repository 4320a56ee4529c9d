# SPDX-License-Identifier: GPL-3.0-or-later
"""Evict pods through the Eviction API, which respects disruption budgets."""

from __future__ import annotations

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.shared._core.types import JsonObject

# The cause in the Status that refuses an eviction; kubernetes v1.36.0, staging/src/k8s.io/api/policy/v1/types.go.
BUDGET_CAUSE = "DisruptionBudget"


def evict(kube: Kube, namespace: str, name: str, uid: str, dry: bool = False) -> None:
    """Request the eviction of a pod, and of no successor of its name.

    :param uid: the pod's.
    :param dry: only ask whether it would be evicted.
    :raises KubeError: it isn't evicted: 404 and 409, it is gone; see also :func:`refused_by_budget`.
    """
    options: JsonObject = {"preconditions": {"uid": uid}}
    if dry:
        options["dryRun"] = ["All"]
    body: JsonObject = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": options,
    }
    kube.post(paths.pod(namespace, name, "eviction"), body)


def refused_by_budget(error: KubeError) -> bool:
    """Return whether disruption budgets refused an eviction (500 where there are two), not a busy server."""
    if error.status == 429:
        return BUDGET_CAUSE in error.causes
    # With two budgets for one pod, the API server's answer is an internal error without such a cause.
    return error.status == 500 and "PodDisruptionBudget" in error.message
