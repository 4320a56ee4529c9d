# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Definitions of Kubernetes objects: parse, order and compare them; and what others have in a namespace. Pure."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import typing as t

from ansible.module_utils.common.yaml import yaml_dump, yaml_load_all

from .._core.errors import BadInput
from .._core.types import JsonObject
from .refs import KINDS, Ref, ref_of

# Marks objects that this collection created; only those are deleted.
CREATED = "kubegpu.share/created"

CONTENT_KINDS = (
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
# API groups of owners that are in CONTENT_KINDS themselves, or whose objects this collection has had installed and
# removes: OLM's, OpenShift's, NVIDIA's and node feature discovery's. What another owner has made is that one's.
OWNERS = (
    *("", "apps", "batch"),
    *("operators.coreos.com", "operator.openshift.io", "nfd.openshift.io", "nfd.k8s-sigs.io", "nvidia.com"),
)
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
        f"{kind} {item['metadata']['name']}"
        for api_version, kind in CONTENT_KINDS
        for item in kube.list_all(api_version, kind, namespace)
        if Ref(api_version, kind, namespace, item["metadata"]["name"]) not in ours and not _dependent(kind, item)
    ]


def _dependent(kind: str, item: JsonObject) -> bool:
    metadata = item["metadata"]
    owners = [str(owner.get("apiVersion")).rpartition("/")[0] for owner in metadata.get("ownerReferences") or ()]
    return bool(
        (owners and set(owners) <= set(OWNERS))
        or metadata.get("deletionTimestamp")
        or (kind, metadata["name"]) in DEFAULT_OBJECTS
        or LEADER in (metadata.get("annotations") or {})
        or (kind == "Secret" and item.get("type") in TOKENS)
    )


DIGEST = "kubegpu.share/desired-sha256"

# Objects that others need come first; nodes are changed after everything else.
ORDER = (
    "Namespace",
    "CustomResourceDefinition",
    "PriorityClass",
    "RuntimeClass",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "Service",
)

HIDDEN = "(hidden)"
HIDDEN_NEW = "(hidden, another value)"


def parse(definitions: t.Any, option: str = "definitions") -> list[JsonObject]:
    """Parse a list of mappings and YAML texts; returns the objects in the order of their creation.

    :param option: the module's option, for messages.
    :raises BadInput: an object is invalid or defined twice.
    """
    objects = [_normalized(definition, option) for definition in _flatten(definitions, option)]
    refs = [ref_of(item) for item in objects]
    for ref in refs:
        if refs.count(ref) > 1:
            raise BadInput(f"{option}: {ref} is defined twice")
    return sorted(objects, key=lambda item: _order_of(item["kind"]))


def _order_of(kind: str) -> int:
    if kind == "Node":
        return len(ORDER) + 1
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _flatten(value: t.Any, option: str) -> t.Iterator[JsonObject]:
    if value is None:
        return
    if isinstance(value, str):
        try:
            documents = list(yaml_load_all(value))
        except Exception as error:  # the parser's exceptions can't be imported where it is missing
            raise BadInput(f"{option}: not YAML: {' '.join(str(error).split())}") from error
        for document in documents:
            if isinstance(document, str):
                raise BadInput(f"{option}: {document!r} is neither an object nor YAML text with objects")
            yield from _flatten(document, option)
    elif isinstance(value, (list, tuple)):
        for document in value:
            yield from _flatten(document, option)
    elif isinstance(value, dict):
        if str(value.get("kind", "")).endswith("List") and isinstance(value.get("items"), list):
            yield from _flatten(value["items"], option)
        else:
            yield value
    else:
        raise BadInput(f"{option}: {value!r} is neither an object nor YAML text with objects")


def _normalized(given: JsonObject, option: str) -> JsonObject:
    # A round trip through JSON copies, and drops Ansible's tags.
    try:
        definition: JsonObject = _without_nulls(json.loads(json.dumps(given)))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{option}: an object isn't plain data: {error}") from error
    ref = ref_of(definition)
    if not (ref.api_version and ref.kind and ref.name):
        raise BadInput(f"{option}: an object lacks apiVersion, kind or metadata.name: {json.dumps(definition)[:120]}")
    plural_namespaced = KINDS.get((ref.api_version, ref.kind))
    if plural_namespaced:
        if plural_namespaced[1] and not ref.namespace:
            definition["metadata"]["namespace"] = "default"
        elif not plural_namespaced[1]:
            definition["metadata"].pop("namespace", None)
    if (ref.api_version, ref.kind) == ("v1", "Secret") and isinstance(definition.get("stringData"), dict):
        # The API server never returns stringData.
        text = definition.pop("stringData")
        encoded = {key: base64.b64encode(str(value).encode()).decode() for key, value in text.items()}
        definition["data"] = {**(definition.get("data") or {}), **encoded}
    return definition


def _without_nulls(value: t.Any) -> t.Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def with_digest(definition: JsonObject) -> JsonObject:
    """Add the digest of a definition, by which a later run detects that a definition has fewer fields.

    Nodes get none: this collection owns only single labels of theirs, which ``managedFields`` shows exactly.
    """
    if definition["kind"] == "Node":
        return definition
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
    result = copy.deepcopy(definition)
    result["metadata"].setdefault("annotations", {})[DIGEST] = digest
    return result


def name_only(ref: Ref) -> JsonObject:
    """Return a definition with nothing but the name; applying it removes all fields that this collection owns."""
    metadata = {"name": ref.name, **({"namespace": ref.namespace} if ref.namespace else {})}
    return {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata}


def diff_texts(before: JsonObject | None, after: JsonObject | None) -> tuple[str, str]:
    """Return an object before and after a change as YAML; a Secret's values are hidden."""
    if "Secret" in ((before or {}).get("kind"), (after or {}).get("kind")):
        old, new = (before or {}).get("data") or {}, (after or {}).get("data") or {}
        if before and old:
            before = {**before, "data": dict.fromkeys(old, HIDDEN)}
        if after and new:
            data = {key: HIDDEN_NEW if key in old and old[key] != value else HIDDEN for key, value in new.items()}
            after = {**after, "data": data}
    return _text(before), _text(after)


def _text(definition: JsonObject | None) -> str:
    return str(yaml_dump(definition, default_flow_style=False, sort_keys=True)) if definition else ""
