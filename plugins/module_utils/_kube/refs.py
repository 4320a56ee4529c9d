# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""References to objects of the Kubernetes API, the paths of their kinds, and reads by them. Pure."""

from __future__ import annotations

import abc
import dataclasses
import json
import typing as t

from .._contracts.virtual import CLASSES
from .._core import untrusted
from .._core.errors import BadInput
from .._core.types import JsonObject
from .errors import KubeError, not_kubernetes

FIELD_MANAGER = "kubegpu-share"
# The API server names the manager of a patch by it, which names none itself.
USER_AGENT = "kubegpu.share"
# Objects in a page of a list.
PAGE = 500

# (apiVersion, kind) to (name in the path, is namespaced). The client discovers other kinds.
KINDS: dict[tuple[str, str], tuple[str, bool]] = {
    ("v1", "Namespace"): ("namespaces", False),
    ("v1", "Node"): ("nodes", False),
    ("v1", "ConfigMap"): ("configmaps", True),
    ("v1", "Event"): ("events", True),
    ("v1", "Pod"): ("pods", True),
    ("v1", "Secret"): ("secrets", True),
    ("v1", "ResourceQuota"): ("resourcequotas", True),
    ("v1", "Service"): ("services", True),
    ("v1", "ServiceAccount"): ("serviceaccounts", True),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy"): ("mutatingadmissionpolicies", False),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding"): ("mutatingadmissionpolicybindings", False),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"): ("validatingadmissionpolicies", False),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"): (
        "validatingadmissionpolicybindings",
        False,
    ),
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration"): ("mutatingwebhookconfigurations", False),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition"): ("customresourcedefinitions", False),
    ("apps/v1", "DaemonSet"): ("daemonsets", True),
    ("apps/v1", "Deployment"): ("deployments", True),
    ("apps/v1", "StatefulSet"): ("statefulsets", True),
    ("batch/v1", "CronJob"): ("cronjobs", True),
    ("batch/v1", "Job"): ("jobs", True),
    ("coordination.k8s.io/v1", "Lease"): ("leases", True),
    ("networking.k8s.io/v1", "NetworkPolicy"): ("networkpolicies", True),
    CLASSES: ("runtimeclasses", False),
    ("policy/v1", "PodDisruptionBudget"): ("poddisruptionbudgets", True),
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): ("clusterroles", False),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): ("clusterrolebindings", False),
    ("rbac.authorization.k8s.io/v1", "Role"): ("roles", True),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): ("rolebindings", True),
    ("resource.k8s.io/v1", "DeviceClass"): ("deviceclasses", False),
    ("resource.k8s.io/v1", "ResourceClaim"): ("resourceclaims", True),
    ("resource.k8s.io/v1", "ResourceClaimTemplate"): ("resourceclaimtemplates", True),
    ("resource.k8s.io/v1", "ResourceSlice"): ("resourceslices", False),
    ("scheduling.k8s.io/v1", "PriorityClass"): ("priorityclasses", False),
}


@dataclasses.dataclass(frozen=True)
class Ref:
    """The identity of an object; ``namespace`` is empty for cluster-wide ones, ``name`` for lists."""

    api_version: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


def ref_of(definition: JsonObject) -> Ref:
    """Return the reference of a definition."""
    return Ref(str(definition.get("apiVersion", "")), str(definition.get("kind", "")), *key_of(definition))


class PagesSeen:
    """The pages of one list so far, by which a server that doesn't page is found: it would be asked for ever.

    ansible-operator's proxy answers each page with all objects and one token.
    """

    def __init__(self) -> None:
        self._tokens: set[str] = set()
        self._first: set[tuple[str, str]] | None = None

    def again(self, token: str, keys: t.Iterable[tuple[str, str]]) -> bool:
        """Return whether a page has a token of an earlier page, or an object of the first one.

        :param token: of the page that follows this one; empty where there is none.
        :param keys: namespace and name of this page's objects; a page may have none.
        """
        if self._first is None:
            # No list of one page pays for this.
            self._first = set(keys) if token else set()
            known = False
        else:
            known = any(key in self._first for key in keys)
        known = known or token in self._tokens
        if token:
            self._tokens.add(token)
        return known


def key_of(item: JsonObject) -> tuple[str, str]:
    """Return an object's namespace and name; the former is empty without one."""
    metadata = item.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


class Reads(abc.ABC):
    """The reads of ``Kube``, by whoever sends the requests."""

    server: str

    def __init__(self) -> None:
        self._kinds = dict(KINDS)
        self._asked: set[str] = set()

    @abc.abstractmethod
    def fetch(self, path: str, query: t.Sequence[tuple[str, str]]) -> str:
        """Return the answer to a GET as text, or raise ``KubeError``."""

    def get(self, ref: Ref) -> JsonObject | None:
        return self._found(self._object_path(ref)) if self._known(ref) else None

    def list_all(
        self, api_version: str, kind: str, namespace: str = "", field_selector: str = "", label_selector: str = ""
    ) -> list[JsonObject]:
        ref = Ref(api_version, kind, namespace, "")
        if not self._known(ref):
            return []
        query = [("limit", str(PAGE))]
        query += [("fieldSelector", field_selector)] if field_selector else []
        query += [("labelSelector", label_selector)] if label_selector else []
        items: list[JsonObject] = []
        seen, more = PagesSeen(), ""
        while True:
            page = self._answer(self._path(ref), query + ([("continue", more)] if more else []))
            more = str((page.get("metadata") or {}).get("continue") or "")
            objects = page.get("items") or []
            if seen.again(more, map(key_of, objects)):
                # It doesn't page; without a limit its answer is complete.
                items, more = self._answer(self._path(ref), query[1:]).get("items") or [], ""
            else:
                items += objects
            if not more:
                # The API omits both in the items of a list.
                return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    def version(self) -> JsonObject:
        return self._answer("/version")

    def _answer(self, path: str, query: t.Sequence[tuple[str, str]] = ()) -> JsonObject:
        return self._object(self.fetch(path, query))

    def _object(self, text: str) -> JsonObject:
        try:
            return t.cast(JsonObject, json.loads(text) or {})
        except ValueError as error:
            raise not_kubernetes(self.server) from error

    def _found(self, path: str) -> JsonObject | None:
        try:
            return self._answer(path)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def _known(self, ref: Ref, again: bool = False) -> bool:
        """Return whether the cluster serves a kind; ``again`` asks once more for an unknown API version."""
        key = (ref.api_version, ref.kind)
        if key not in self._kinds and (again or ref.api_version not in self._asked):
            self._asked.add(ref.api_version)
            for resource in (self._found(_group(ref.api_version)) or {}).get("resources") or []:
                plural = resource["name"]
                if "/" not in plural:
                    self._kinds.setdefault((ref.api_version, resource["kind"]), (plural, bool(resource["namespaced"])))
        return key in self._kinds

    def _demand(self, ref: Ref) -> None:
        if not self._known(ref) and not self._known(ref, True):
            message = f"the cluster doesn't know {ref.kind} in {ref.api_version}"
            raise KubeError(f"{ref}: {message}", 404, "NotFound", message)

    def _path(self, ref: Ref) -> str:
        plural, namespaced = self._kinds[(ref.api_version, ref.kind)]
        where = ["namespaces", ref.namespace] if namespaced and ref.namespace else []
        return _group(ref.api_version) + _url_path(ref, *where, plural, *([ref.name] if ref.name else []))

    def _object_path(self, ref: Ref) -> str:
        """Return the path of one object; without a name it would be that of all objects of its kind.

        :raises BadInput: the name is empty, or can't be a path's component.
        """
        if not ref.name:
            raise BadInput(f"{ref.kind}: the name of the object is empty")
        return self._path(ref)


def _url_path(about: object, *words: str) -> str:
    try:
        return untrusted.path(*words)
    except untrusted.Refused as error:
        raise BadInput(f"{about}: a part of its name {error}") from error


def _group(api_version: str) -> str:
    return _url_path(api_version, "apis" if "/" in api_version else "api", *api_version.split("/"))


def is_ready(item: JsonObject) -> bool:
    """Return whether a pod or a node of the API has the condition Ready."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return any((row.get("type"), row.get("status")) == ("Ready", "True") for row in conditions)
