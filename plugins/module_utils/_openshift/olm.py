# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Have OLM install a package, and remove it again: what both operators of OpenShift need.

OLM installs a package for a Subscription, in a namespace with exactly one OperatorGroup. Existing ones belong to others
and stay. OLM doesn't remove what a Subscription has installed: its ClusterServiceVersion is deleted, too.
https://olm.operatorframework.io/docs/concepts/crds/
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.types import JsonObject
from .._kube.objects import CREATED
from .._kube.refs import Ref, ref_of
from . import cluster as openshift
from .objects import annotations_of

GROUPS = "operators.coreos.com/v1"
SUBSCRIPTIONS = "operators.coreos.com/v1alpha1"
# Conditions of a Subscription that say why nothing is installed.
FAILURES = ("CatalogSourcesUnhealthy", "ResolutionFailed", "InstallPlanFailed", "InstallPlanPending")


class Reader(t.Protocol):
    """The reads of a cluster."""

    def get(self, ref: Ref) -> JsonObject | None: ...

    def list_all(self, api_version: str, kind: str, namespace: str = "") -> list[JsonObject]: ...


@dataclasses.dataclass(frozen=True)
class OlmObject:
    """A Namespace, OperatorGroup (with its target namespaces) or Subscription (with its ClusterServiceVersion)."""

    ref: Ref
    ours: bool
    targets: t.Sequence[str]
    installed: str


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of a catalog.

    :param definition: name of the CustomResourceDefinition that it brings.
    :param namespace: where its operator runs; it watches this one alone.
    """

    name: str
    definition: str
    namespace: str
    channel: str
    source: str
    source_namespace: str
    labels: t.Mapping[str, str]
    starting_csv: str = ""

    @property
    def subscription(self) -> JsonObject:
        """The Subscription's specification."""
        return {
            "name": self.name,
            "channel": self.channel,
            "source": self.source,
            "sourceNamespace": self.source_namespace,
            "installPlanApproval": "Automatic",
            **({"startingCSV": self.starting_csv} if self.starting_csv else {}),
        }

    @property
    def space(self) -> Ref:
        """The namespace's reference."""
        return Ref("v1", "Namespace", "", self.namespace)


@dataclasses.dataclass(frozen=True)
class State:
    """What OLM has of a package.

    :param served: its definition is established.
    :param terminating: the namespace is being deleted.
    :param subscriptions: of this package in its namespace.
    :param versions: the package's ClusterServiceVersions there, as OLM labels them.
    """

    served: bool
    namespaces: t.Sequence[OlmObject]
    terminating: bool
    groups: t.Sequence[OlmObject]
    subscriptions: t.Sequence[OlmObject]
    versions: t.Sequence[str]


def definition_ref(name: str) -> Ref:
    """Return the reference of a CustomResourceDefinition."""
    return Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name)


def established(definition: JsonObject | None) -> bool:
    """Return whether the API server serves a definition."""
    return definition is not None and openshift.condition(definition, "Established")[0] == "True"


def installed(subscription: JsonObject) -> bool:
    """Return whether OLM has installed what a Subscription asks for: whoever has a namespace may ask there."""
    return bool((subscription.get("status") or {}).get("installedCSV"))


def observe(api: Reader, package: Package) -> State:
    """Read what OLM has of a package."""
    namespace = api.get(package.space)
    namespaces = olm_objects([namespace] if namespace else [])
    subscriptions = api.list_all(SUBSCRIPTIONS, "Subscription", package.namespace)
    label = f"operators.coreos.com/{package.name}.{package.namespace}"
    return State(
        served=established(api.get(definition_ref(package.definition))),
        namespaces=namespaces,
        terminating=bool(namespace) and not namespaces,
        groups=olm_objects(api.list_all(GROUPS, "OperatorGroup", package.namespace)),
        subscriptions=olm_objects(
            [item for item in subscriptions if (item.get("spec") or {}).get("name") == package.name]
        ),
        versions=[
            item["metadata"]["name"]
            for item in api.list_all(SUBSCRIPTIONS, "ClusterServiceVersion", package.namespace)
            if label in (item["metadata"].get("labels") or {}) and not item["metadata"].get("deletionTimestamp")
        ],
    )


def olm_objects(objects: t.Iterable[JsonObject]) -> list[OlmObject]:
    """Return those that aren't being deleted."""
    return [
        OlmObject(
            ref_of(item),
            CREATED in annotations_of(item),
            (item.get("spec") or {}).get("targetNamespaces") or [],
            str((item.get("status") or {}).get("installedCSV") or ""),
        )
        for item in objects
        if not item["metadata"].get("deletionTimestamp")
    ]


def missing(package: Package, state: State) -> list[JsonObject]:
    """Return the objects that OLM needs for a package and that don't exist."""
    needed = []
    if not state.namespaces:
        labels = {**package.labels, "openshift.io/cluster-monitoring": "true"}
        needed.append(made("v1", "Namespace", {"name": package.namespace, "labels": labels}))
    metadata = {"name": package.name, "namespace": package.namespace, "labels": dict(package.labels)}
    if not state.groups:
        # The operator watches its own namespace alone.
        needed.append(made(GROUPS, "OperatorGroup", metadata, {"targetNamespaces": [package.namespace]}))
    if not state.subscriptions:
        needed.append(made(SUBSCRIPTIONS, "Subscription", metadata, package.subscription))
    return needed


def made(api_version: str, kind: str, metadata: JsonObject, spec: JsonObject | None = None) -> JsonObject:
    """Return an object with the mark by which its removal knows it."""
    noted = {**metadata, "annotations": {**(metadata.get("annotations") or {}), CREATED: "true"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": noted, **({"spec": spec} if spec else {})}


def ours(state: State, package: Package, keep_namespace: bool) -> list[Ref]:
    """Return the objects that we had OLM install, in the order of removal.

    :param keep_namespace: others have objects in it.
    """
    removed: list[Ref] = []
    if not state.subscriptions and any(group.ours for group in state.groups):
        # A run that was killed has removed the Subscription.
        removed += [Ref(SUBSCRIPTIONS, "ClusterServiceVersion", package.namespace, name) for name in state.versions]
    for item in (*state.subscriptions, *state.groups, *([] if keep_namespace else state.namespaces)):
        if item.ours:
            removed.append(item.ref)
            if item.installed:
                removed.append(Ref(SUBSCRIPTIONS, "ClusterServiceVersion", package.namespace, item.installed))
    return removed


def not_served(api: Reader, package: Package) -> str:
    """Return why a package's definition isn't served, as its Subscription reports it; empty where it is."""
    name = package.definition
    if established(api.get(definition_ref(name))):
        return ""
    reason = []
    for subscription in api.list_all(SUBSCRIPTIONS, "Subscription", package.namespace):
        for kind in FAILURES:
            status, message = openshift.condition(subscription, kind)
            reason += [f"{kind}: {message}"] if status == "True" else []
    return "; ".join(reason) or f"{name} isn't served"
