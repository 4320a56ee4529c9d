# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulation of OpenShift's kube-scheduler operator on a real API server.

Sequences and messages are those of cluster-kube-scheduler-operator 4.6 to 4.10: it copies the policy, creates a new
revision, installs it on one node after the other, and reports it in KubeScheduler/cluster and ClusterOperator
kube-scheduler. Each failure has a script of its own.
"""

from __future__ import annotations

import contextlib
import typing as t

from real_apiserver import MERGE, ApiServer, Refused
from simulation import Simulation

NODES = ("master-0", "master-1", "master-2")
CONFIG = "/apis/config.openshift.io/v1"
STATUS = {
    "operator": f"{CONFIG}/clusteroperators/kube-scheduler/status",
    "revisions": "/apis/operator.openshift.io/v1/kubeschedulers/cluster/status",
    "version": f"{CONFIG}/clusterversions/version/status",
}
PODS = "/api/v1/namespaces/openshift-kube-scheduler/pods"
COPY = "/api/v1/namespaces/openshift-kube-scheduler/configmaps"
NOW = "2026-11-21T12:00:00Z"

CRASH = (
    'StaticPodsDegraded: pod/openshift-kube-scheduler-master-0 container "kube-scheduler" is waiting: '
    "CrashLoopBackOff: back-off 5m0s restarting failed container=kube-scheduler"
)
INSTALLER = "installer: Error: couldn't get policy config map openshift-kube-scheduler/policy-configmap"
REMOVED = (
    'TargetConfigControllerDegraded: "configmap": scheduler Policy config has been removed upstream, this field '
    "remains for CRD compatibility but does nothing now. Please use a Profile instead (defaulting to "
    "LowNodeUtilization)."
)


def conditions(**given: tuple[bool, str]) -> list[dict[str, str]]:
    return [
        {"type": kind, "status": str(on), "reason": "AsExpected", "message": message, "lastTransitionTime": NOW}
        for kind, (on, message) in given.items()
    ]


class PlayedOperator(Simulation):
    """Follow Scheduler/cluster from a thread until the context ends.

    :param scripts: the outcomes of the next changes: ``rollout`` (also when there are no more), ``crash``,
        ``failed-revision``, ``slow`` (a rollout that ends on the first node), ``lingering`` (a rollout that reports
        the earlier crash until its end) or ``asleep`` (nothing happens at all).
    """

    def __init__(self, server: ApiServer, version: str, scripts: t.Sequence[str] = (), policy: str = "") -> None:
        super().__init__()
        self.server = server
        self.scripts = list(scripts)
        self.policy_removed = tuple(map(int, version.split(".")[:2])) >= (4, 10)
        self.revision = 8
        self.current = dict.fromkeys(NODES, 8)
        self.failed: dict[str, list[str]] = {}
        self.named = policy
        self.history: list[str] = []
        self._reset(version)

    # ----------------------------------------------------------------- the initial cluster

    def _reset(self, version: str) -> None:
        server = self.server
        for path in (
            *(f"{CONFIG}/{one}" for one in ("schedulers/cluster", "clusteroperators/kube-scheduler")),
            *(f"{CONFIG}/clusterversions/version", "/apis/operator.openshift.io/v1/kubeschedulers/cluster"),
        ):
            with contextlib.suppress(Refused):
                server.request("DELETE", path)
        for namespace in ("openshift-config", "openshift-kube-scheduler"):
            with contextlib.suppress(Refused):
                server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        for place in ("openshift-kube-scheduler/pods", "openshift-kube-scheduler/configmaps"):
            server.request("DELETE", f"/api/v1/namespaces/{place}?gracePeriodSeconds=0")
        keep = server.request("GET", "/api/v1/namespaces/openshift-config/configmaps")["items"]
        spec = {"policy": {"name": self.named}} if self.named else {}
        config, operator = "config.openshift.io/v1", "operator.openshift.io/v1"
        server.apply(
            {"apiVersion": config, "kind": "Scheduler", "metadata": {"name": "cluster"}, "spec": spec},
            {"apiVersion": config, "kind": "ClusterOperator", "metadata": {"name": "kube-scheduler"}, "spec": {}},
            {
                "apiVersion": config,
                "kind": "ClusterVersion",
                "metadata": {"name": "version"},
                "spec": {"clusterID": "3c2f7d3e-2f3a-4a0e-9d6e-6c6b5f0d9a11"},
            },
            {
                "apiVersion": operator,
                "kind": "KubeScheduler",
                "metadata": {"name": "cluster"},
                "spec": {"managementState": "Managed"},
            },
        )
        # A node's revisions can't be set in the moment in which the node is listed.
        self._status("revisions", {"nodeStatuses": [{"nodeName": node} for node in NODES]})
        self.version(version)
        found = [one for one in keep if one["metadata"]["name"] == self.named]
        self._copy(found[0]["data"]["policy.cfg"] if found else None)
        if self.policy_removed and self.named:
            self._report(degraded=REMOVED)
        else:
            self._report()

    def version(self, version: str, upgrading: str = "") -> None:
        history = {"completionTime": NOW, "image": "i", "startedTime": NOW, "verified": False, "version": version}
        self._status(
            "version",
            {
                "availableUpdates": [],
                "observedGeneration": 1,
                "versionHash": "h",
                "desired": {"image": "i", "version": version},
                "history": [{**history, "state": "Partial" if upgrading else "Completed"}],
                "conditions": conditions(Progressing=(bool(upgrading), upgrading)),
            },
        )

    # ----------------------------------------------------------------- reactions

    def _step(self) -> None:
        spec = self.server.request("GET", f"{CONFIG}/schedulers/cluster").get("spec") or {}
        name = (spec.get("policy") or {}).get("name") or ""
        if name != self.named:
            self.named = name
            self.history.append(name)
            self._play(self.scripts.pop(0) if self.scripts else "rollout")

    def _play(self, script: str) -> None:
        if script == "asleep":
            return
        if self.policy_removed:
            self._report(degraded=REMOVED if self.named else "")
            return
        text = None
        if self.named:
            path = f"/api/v1/namespaces/openshift-config/configmaps/{self.named}"
            text = self.server.request("GET", path)["data"]["policy.cfg"]
        if not self._copy(text):
            # Nothing is new for the pods.
            return
        self.revision += 1
        before = CRASH if script == "lingering" else ""
        self._report(before)
        for node in NODES:
            if script == "crash":
                self._report(degraded=CRASH)
                return
            if script == "failed-revision":
                self.failed[node] = [INSTALLER]
                self._report()
                return
            self._end.wait(0.05)
            self.current[node] = self.revision
            self.failed.pop(node, None)
            self._pod(node)
            self._report(before if node != NODES[-1] else "")
            if script == "slow":
                return

    def _copy(self, text: str | None) -> bool:
        try:
            old = self.server.request("GET", f"{COPY}/policy-configmap")["data"]["policy.cfg"]
        except Refused:
            old = None
        if text == old:
            for node in NODES:
                self._pod(node)
            return False
        if text is None:
            self.server.request("DELETE", f"{COPY}/policy-configmap")
        else:
            body = {"metadata": {"name": "policy-configmap"}, "data": {"policy.cfg": text}}
            if old is None:
                self.server.request("POST", COPY, body)
            else:
                self.server.request("PATCH", f"{COPY}/policy-configmap", body, MERGE)
        return True

    def _pod(self, node: str) -> None:
        name = f"openshift-kube-scheduler-{node}"
        with contextlib.suppress(Refused):
            self.server.request("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
        flags = ["--config=/etc/kubernetes/static-pod-resources/configmaps/config/config.yaml"]
        if self.named:
            flags += ["--policy-configmap=policy-configmap", "--policy-configmap-namespace=openshift-kube-scheduler"]
        labels = {"app": "openshift-kube-scheduler", "revision": str(self.revision)}
        container = {"name": "kube-scheduler", "image": "i", "command": ["hyperkube", "kube-scheduler"], "args": flags}
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node, "containers": [container]}}
        self.server.request("POST", PODS, body)

    def _report(self, degraded: str = "") -> None:
        newest = [node for node in NODES if self.current[node] == self.revision]
        old = min(self.current.values())
        rolling = len(newest) < len(NODES)
        there = f"{len(NODES) - len(newest)} nodes are at revision {old}; " if rolling else ""
        message = f"NodeInstallerProgressing: {there}{len(newest)} nodes have achieved new revision {self.revision}"
        # One node at a time has a revision to go to.
        target = next((node for node in NODES if self.current[node] < self.revision), "")
        nodes = [
            {
                "nodeName": node,
                "currentRevision": self.current[node],
                "targetRevision": self.revision if node == target else 0,
                **({"lastFailedRevision": self.revision} if node in self.failed else {}),
                "lastFailedRevisionErrors": self.failed.get(node, []),
            }
            for node in NODES
        ]
        self._status("revisions", {"latestAvailableRevision": self.revision, "nodeStatuses": nodes, "readyReplicas": 0})
        report = conditions(
            Available=(True, f"StaticPodsAvailable: 3 nodes are active; {message}"),
            Progressing=(rolling, message),
            Degraded=(bool(degraded), degraded or "NodeControllerDegraded: All master nodes are ready"),
        )
        self._status("operator", {"conditions": report})

    def _status(self, what: str, status: dict[str, t.Any]) -> None:
        self.server.request("PATCH", STATUS[what], {"status": status}, MERGE)
