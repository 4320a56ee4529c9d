# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What OpenShift says of itself, read from its objects: versions, conditions, revisions of static pods. No I/O."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref

CLUSTER_VERSION = Ref("config.openshift.io/v1", "ClusterVersion", "", "version")
CLUSTER_OPERATOR = Ref("config.openshift.io/v1", "ClusterOperator", "", "kube-scheduler")
SCHEDULER = Ref("config.openshift.io/v1", "Scheduler", "", "cluster")
KUBE_SCHEDULER = Ref("operator.openshift.io/v1", "KubeScheduler", "", "cluster")

# The last release whose kube-scheduler takes a Policy. From the next on the cluster is degraded by one.
LAST_WITH_POLICY = (4, 9)
# Kubernetes' minor version is OpenShift's, and so much more.
KUBERNETES_AHEAD = 13


class Get(t.Protocol):
    """The part of an API that looks at one object."""

    def get(self, ref: Ref) -> Json | None: ...


@dataclasses.dataclass(frozen=True)
class Node:
    """One control-plane node's revision of kube-scheduler."""

    name: str
    current: int
    target: int
    failed: int
    errors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Where OpenShift's operator stands with kube-scheduler.

    :param latest: the newest revision there is.
    :param degraded: the operator's own words; empty where it isn't.
    """

    available: bool
    progressing: bool
    degraded: str
    said: str
    latest: int
    nodes: tuple[Node, ...]

    @property
    def settled(self) -> bool:
        """Every node runs the newest revision, and the operator is content."""
        quiet = self.available and not self.progressing and not self.degraded
        return quiet and bool(self.nodes) and all(one.current == self.latest for one in self.nodes)

    def failure(self, since: int) -> str:
        """Why the revision that came after ``since`` can't come into effect; empty where it still may.

        What an older revision failed with stays in the nodes' status for good.
        """
        if self.degraded:
            return self.degraded
        for one in self.nodes:
            if one.failed > since and one.failed > one.current:
                why = "; ".join(one.errors) or "its operator gives no reason"
                return f"revision {one.failed} failed on node {one.name}: {why}"
        return ""

    def __str__(self) -> str:
        nodes = ", ".join(f"{one.name} at revision {one.current}" for one in self.nodes) or "no node reports a revision"
        said = f" ({self.said})" if self.said else ""
        return f"newest revision {self.latest}, {nodes}{said}"


def release(version: str) -> tuple[int, int]:
    """(4, 9) of 4.9.23 or 4.9.0-rc.1.

    :raises BadInput: it isn't a version.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:[.+-]|$)", version)
    if not found:
        raise BadInput(f"ClusterVersion version: {version!r} isn't a version of OpenShift such as 4.9.23")
    return int(found.group(1)), int(found.group(2))


def takes_policy(version: str) -> bool:
    """Whether kube-scheduler of this release reads the Policy that Scheduler/cluster names."""
    return release(version) <= LAST_WITH_POLICY


def kubernetes_minor(version: str) -> int:
    """N of Kubernetes 1.N in a release of OpenShift 4; 0 where it can't be told."""
    major, minor = release(version)
    return minor + KUBERNETES_AHEAD if major == 4 else 0


def version_of(cluster_version: Json) -> str:
    """The release that the cluster is at, or is becoming."""
    return str(((cluster_version.get("status") or {}).get("desired") or {}).get("version") or "")


def upgrading(cluster_version: Json) -> str:
    """What the cluster says of an upgrade that is going on; empty where none is."""
    history = (cluster_version.get("status") or {}).get("history") or []
    half = bool(history) and history[0].get("state") == "Partial"
    status, message = condition(cluster_version, "Progressing")
    return (message or "its version is Partial") if status == "True" or half else ""


def condition(live: Json, kind: str) -> tuple[str, str]:
    """Status and message of one condition; empty where there is none."""
    for one in (live.get("status") or {}).get("conditions") or []:
        if one.get("type") == kind:
            return str(one.get("status") or ""), " ".join(str(one.get("message") or one.get("reason") or "").split())
    return "", ""


def rollout_of(operator: Json | None, revisions: Json | None) -> Rollout:
    """The two objects' story as one."""
    operator, status = operator or {}, (revisions or {}).get("status") or {}
    degraded, why = condition(operator, "Degraded")
    progressing, said = condition(operator, "Progressing")
    nodes = [
        Node(
            str(one.get("nodeName", "")),
            int(one.get("currentRevision") or 0),
            int(one.get("targetRevision") or 0),
            int(one.get("lastFailedRevision") or 0),
            tuple(" ".join(str(error).split()) for error in one.get("lastFailedRevisionErrors") or []),
        )
        for one in status.get("nodeStatuses") or []
    ]
    return Rollout(
        available=condition(operator, "Available")[0] == "True",
        # An operator that says nothing of it is none to rely on.
        progressing=progressing != "False",
        degraded=(why or "without a reason") if degraded == "True" else "",
        said=said,
        latest=int(status.get("latestAvailableRevision") or 0),
        nodes=tuple(nodes),
    )


def look_at_rollout(api: Get) -> Rollout:
    """Ask for both objects."""
    return rollout_of(api.get(CLUSTER_OPERATOR), api.get(KUBE_SCHEDULER))


def cluster_version(api: Get) -> Json:
    """ClusterVersion/version.

    :raises BadInput: this is no OpenShift.
    """
    found = api.get(CLUSTER_VERSION)
    if found is None:
        raise BadInput("scheduler_mode: this cluster has no ClusterVersion, so it isn't OpenShift; choose another mode")
    return found
