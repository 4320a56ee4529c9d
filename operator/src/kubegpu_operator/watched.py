# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run of site.yml depends on in the cluster, as one digest: where it is equal, a run would change nothing.

A run that changed nothing has the digest from before it remembered. Nodes are read as metadata alone, page by page, and
pods not at all. Of nodes only those count that have servers, that the resource names, or that are of the control plane:
in a large cluster others come and go all the time. What isn't among these (a node's capacity, the objects of
OpenShift's operators) is seen by the run that follows after ``FULL`` seconds at the latest.
"""

from __future__ import annotations

import hashlib
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError

from .resource import JsonObject

# Seconds after which a run follows whatever the digest is.
FULL = 1800.0
LABEL = "app.kubernetes.io/part-of=gpushare"
# The label that the roles give a node, and the beginning of their annotations.
NODE_LABEL, OWN = "gpushare", "kubegpu.share/"
CONTROL_PLANE = frozenset(("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"))
NODES = "/api/v1/nodes"
# Of these the status is read, too: a server that isn't ready is a step of a run.
WORKLOADS = ("daemonsets", "deployments")
# Where the operator deploys. In a namespace of his own, anybody may have objects with this label, as many and as large
# as he likes.
NAMESPACES = ("gpushare-system", "gpushare-scheduler")
# Here are the second scheduler's binding, and the record of who owns the set-up and whether its checks have passed.
SYSTEM = "/namespaces/kube-system/"
NAMESPACED = (
    *(("/apis/apps/v1", kind) for kind in WORKLOADS),
    ("/api/v1", "serviceaccounts"),
    ("/api/v1", "configmaps"),
    ("/api/v1", "resourcequotas"),
    ("/api/v1", "services"),
    ("/apis/policy/v1", "poddisruptionbudgets"),
    ("/apis/networking.k8s.io/v1", "networkpolicies"),
    ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
)
LISTS = (
    *(f"{api}/namespaces/{namespace}/{kind}" for namespace in NAMESPACES for api, kind in NAMESPACED),
    f"/api/v1{SYSTEM}configmaps",
    f"/apis/rbac.authorization.k8s.io/v1{SYSTEM}rolebindings",
    "/api/v1/namespaces",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings",
    "/apis/resource.k8s.io/v1/deviceclasses",
)


class Source(t.Protocol):
    """The reads that a digest needs."""

    def read(self, path: str) -> JsonObject | None:
        """Return an answer; None where there is no such object, or where the cluster doesn't serve its kind.

        :raises KubeError: the API server refuses or doesn't answer.
        """

    def pages(self, path: str, label: str = "", metadata: bool = False) -> t.Iterator[JsonObject]:
        """Yield the objects of a list; none where the cluster doesn't serve its kind.

        :param label: a label selector.
        :param metadata: only their metadata.
        :raises KubeError: the API server refuses or doesn't answer.
        """


class Watched(t.NamedTuple):
    """
    :param digest: of all that a run depends on.
    :param ours: names of the nodes that have the roles' label.
    :param nodes: how many nodes there are.
    """

    digest: str
    ours: list[str]
    nodes: int


def look(source: Source, given: t.Any, named: t.Container[str]) -> Watched:
    """Read the cluster.

    :param given: what a run is given beside the cluster: the resource's spec, versions.
    :param named: names of nodes that the resource has.
    :raises KubeError: the API server refuses or doesn't answer.
    """
    digest = hashlib.sha256(_bytes(given))
    version = source.read("/version") or {}
    digest.update(_bytes(version.get("gitVersion")))
    ours, number = [], 0
    for node in source.pages(NODES, metadata=True):
        metadata = node["metadata"]
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        number += 1
        is_ours = NODE_LABEL in labels
        if is_ours:
            ours.append(str(metadata["name"]))
        if not is_ours and metadata["name"] not in named and not CONTROL_PLANE & labels.keys():
            continue
        mine = {key: value for key, value in annotations.items() if key.startswith(OWN)}
        digest.update(_bytes([metadata["uid"], labels, mine]))
    for path in LISTS:
        for item in source.pages(path, LABEL):
            digest.update(_bytes([path, _wanted(item, path.endswith(WORKLOADS))]))
    return Watched(digest.hexdigest(), sorted(ours), number)


def _wanted(item: JsonObject, with_status: bool) -> JsonObject:
    """Return an object without what changes by itself."""
    metadata = {key: item["metadata"].get(key) for key in ("uid", "labels", "annotations", "deletionTimestamp")}
    kept = {key: value for key, value in item.items() if key not in ("metadata", "status")}
    status = dict(item.get("status") or {}) if with_status else {}
    # Its conditions have times.
    status.pop("conditions", None)
    return {**kept, "metadata": metadata, "status": status}


def _bytes(value: t.Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def still_there(source: Source, pods: t.Iterable[tuple[str, str]]) -> bool:
    """Return whether one of these pods exists and hasn't ended."""
    for namespace, name in pods:
        try:
            pod = source.read(f"/api/v1/namespaces/{namespace}/pods/{name}")
        except KubeError as error:
            if error.status == 0:
                raise
            return False
        except ShareError:
            # A name that no path can have: a run says what is wrong.
            return False
        if pod and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            return True
    return False
