# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the user may choose of the canary, and the objects that it makes. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as workloads
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

NAMESPACE = "gpushare-canary"
# On the namespace and the pods: who made them, and in which run.
LABEL = "kubegpu.share/canary"
LABEL_VALUE = "true"
RUN_LABEL = "kubegpu.share/canary-run"
# OpenShift's own, on a namespace: the users that its pods may run as.
UID_RANGE = "openshift.io/sa.scc.uid-range"
NOBODY = 65534


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user may choose.

    :param image: of the pods; None takes the device plugin's own.
    :param node: the only node to use; None takes the one on which most can be shown.
    :param timeout: seconds that each wait may take.
    :param allocate_command: run in a container of the canary; it tries to hold more than the container's share.
    """

    namespace: str = NAMESPACE
    image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    node: str | None = None
    scheduler_name: str | None = None
    runtime_class: str | None = None
    priority_class: str | None = None
    timeout: float = 120.0
    allocate_command: t.Sequence[str] = ()


def namespace(name: str, run: str) -> Json:
    labels = {LABEL: LABEL_VALUE, RUN_LABEL: run, "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def labels_of(one: Json | None) -> Json:
    found = ((one or {}).get("metadata") or {}).get("labels")
    return found if isinstance(found, dict) else {}


def user_of(space: Json | None) -> int:
    """The user that the pods run as: anybody but root, and on OpenShift one of the namespace's own."""
    annotations = ((space or {}).get("metadata") or {}).get("annotations")
    first = str((annotations if isinstance(annotations, dict) else {}).get(UID_RANGE, "")).partition("/")[0]
    return int(first) if first.isdigit() and len(first) < 11 and int(first) > 0 else NOBODY


def pod(wish: Wish, image: str, run: str, name: str, units: int, node: str, user: int) -> Json:
    """A pod that sleeps with a share; it may run on this node only, and the scheduler still places it.

    The node is a field, not a label: a cluster autoscaler sees that no new node would help, and makes none.
    """
    made = workloads.Workload(wish.namespace, image, {}, wish.runtime_class, wish.scheduler_name).pod(
        name, [units], node
    )
    made["metadata"]["labels"] = {LABEL: LABEL_VALUE, RUN_LABEL: run}
    spec = made["spec"]
    spec["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in spec["containers"]:
        container["imagePullPolicy"] = wish.image_pull_policy
    if wish.priority_class:
        spec["priorityClassName"] = wish.priority_class
    return made
