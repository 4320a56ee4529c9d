# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse OpenShift's own objects: versions, conditions, revisions of static pods. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._kube.refs import Ref

CLUSTER_VERSION = Ref("config.openshift.io/v1", "ClusterVersion", "", "version")
CLUSTER_OPERATOR = Ref("config.openshift.io/v1", "ClusterOperator", "", "kube-scheduler")
SCHEDULER = Ref("config.openshift.io/v1", "Scheduler", "", "cluster")
KUBE_SCHEDULER = Ref("operator.openshift.io/v1", "KubeScheduler", "", "cluster")

# The last release whose kube-scheduler reads a Policy; a later one is degraded by it.
LAST_WITH_POLICY = (4, 9)
# The minor version of Kubernetes is OpenShift's plus this number.
KUBERNETES_AHEAD = 13


class Get(t.Protocol):
    """The part of a client that reads one object."""

    def get(self, ref: Ref) -> JsonObject | None: ...


@dataclasses.dataclass(frozen=True)
class Node:
    """kube-scheduler's revisions on one control-plane node."""

    name: str
    current: int
    target: int
    failed: int
    errors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The state of kube-scheduler's rollout by OpenShift's operator.

    :param latest: the newest revision.
    :param degraded: the message of the condition Degraded; empty where it isn't degraded.
    :param progress: the message of the condition Progressing.
    """

    available: bool
    progressing: bool
    degraded: str
    progress: str
    latest: int
    nodes: tuple[Node, ...]

    @property
    def settled(self) -> bool:
        """Every node runs the newest revision, and the operator is available, idle and not degraded."""
        quiet = self.available and not self.progressing and not self.degraded
        return quiet and bool(self.nodes) and all(node.current == self.latest for node in self.nodes)

    def failure(self, since: int) -> str:
        """Return why a revision after ``since`` failed; empty where it may still take effect.

        Failures of older revisions stay in the nodes' status permanently.
        """
        if self.degraded:
            return self.degraded
        for node in self.nodes:
            if node.failed > since and node.failed > node.current:
                why = "; ".join(node.errors) or "its operator reports no reason"
                return f"revision {node.failed} failed on node {node.name}: {why}"
        return ""

    def __str__(self) -> str:
        nodes = ", ".join(f"{node.name} at revision {node.current}" for node in self.nodes)
        progress = f" ({self.progress})" if self.progress else ""
        return f"newest revision {self.latest}, {nodes or 'no node reports a revision'}{progress}"


def release(version: str) -> tuple[int, int]:
    """Parse a release: (4, 9) for 4.9.23 or 4.9.0-rc.1.

    :raises BadInput: it isn't a version.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:[.+-]|$)", version)
    if not match:
        raise BadInput(f"ClusterVersion version: {version!r} isn't a version of OpenShift such as 4.9.23")
    return int(match.group(1)), int(match.group(2))


def takes_policy(version: str) -> bool:
    """Return whether this release's kube-scheduler reads the Policy that Scheduler/cluster names."""
    return release(version) <= LAST_WITH_POLICY


def kubernetes_minor(version: str) -> int:
    """Return N of Kubernetes 1.N in a release of OpenShift 4; 0 for another major version."""
    major, minor = release(version)
    return minor + KUBERNETES_AHEAD if major == 4 else 0


def version_of(cluster_version: JsonObject) -> str:
    """Return the release that the cluster has or is upgrading to."""
    return str(((cluster_version.get("status") or {}).get("desired") or {}).get("version") or "")


def upgrading(cluster_version: JsonObject) -> str:
    """Return the message of an upgrade in progress; empty for none."""
    history = (cluster_version.get("status") or {}).get("history") or []
    partial = bool(history) and history[0].get("state") == "Partial"
    status, message = condition(cluster_version, "Progressing")
    return (message or "its version is Partial") if status == "True" or partial else ""


def condition(live: JsonObject, kind: str) -> tuple[str, str]:
    """Return status and message of a condition; empty where there is none."""
    for row in (live.get("status") or {}).get("conditions") or []:
        if row.get("type") == kind:
            text = row.get("message") or row.get("reason") or ""
            return str(row.get("status") or ""), " ".join(str(text).split())
    return "", ""


def rollout_of(operator: JsonObject | None, revisions: JsonObject | None) -> Rollout:
    """Combine the operator's conditions with the revisions of the nodes."""
    operator, status = operator or {}, (revisions or {}).get("status") or {}
    degraded, why = condition(operator, "Degraded")
    progressing, progress = condition(operator, "Progressing")
    nodes = [
        Node(
            str(row.get("nodeName", "")),
            int(row.get("currentRevision") or 0),
            int(row.get("targetRevision") or 0),
            int(row.get("lastFailedRevision") or 0),
            tuple(" ".join(str(error).split()) for error in row.get("lastFailedRevisionErrors") or []),
        )
        for row in status.get("nodeStatuses") or []
    ]
    return Rollout(
        available=condition(operator, "Available")[0] == "True",
        # Without this condition the operator's state is unknown.
        progressing=progressing != "False",
        degraded=(why or "without a reason") if degraded == "True" else "",
        progress=progress,
        latest=int(status.get("latestAvailableRevision") or 0),
        nodes=tuple(nodes),
    )


def observe_rollout(api: Get) -> Rollout:
    """Read the rollout's state."""
    return rollout_of(api.get(CLUSTER_OPERATOR), api.get(KUBE_SCHEDULER))


def cluster_version(api: Get) -> JsonObject:
    """Read ClusterVersion/version.

    :raises BadInput: this isn't OpenShift.
    """
    version = api.get(CLUSTER_VERSION)
    if version is None:
        raise BadInput("scheduler_mode: this cluster has no ClusterVersion, so it isn't OpenShift; set another mode")
    return version
