# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Kubernetes objects as plain JSON: what they are called, in which order they go, and how a wish differs from what is.

No I/O. A wish (``desired``) names only the fields that are ours; the API server adds defaults and other people add
labels, sidecars and status. So a wish is fulfilled when the live object holds it, and when nothing that we once owned
and no longer wish for is left (``managedFields`` knows, and a digest on the object knows it for lists that the API
server treats as one value).
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import re
import typing as t
from fractions import Fraction

from ansible.module_utils.common.yaml import yaml_dump, yaml_load_all
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

Json = t.Dict[str, t.Any]

FIELD_MANAGER = "kubegpu-share"
DIGEST = "kubegpu.share/desired-sha256"

# (apiVersion, kind) to (name in the path, lives in a namespace). For other kinds the API server is asked.
KINDS: dict[tuple[str, str], tuple[str, bool]] = {
    ("v1", "Namespace"): ("namespaces", False),
    ("v1", "Node"): ("nodes", False),
    ("v1", "ConfigMap"): ("configmaps", True),
    ("v1", "Event"): ("events", True),
    ("v1", "Pod"): ("pods", True),
    ("v1", "Secret"): ("secrets", True),
    ("v1", "Service"): ("services", True),
    ("v1", "ServiceAccount"): ("serviceaccounts", True),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"): ("validatingadmissionpolicies", False),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"): (
        "validatingadmissionpolicybindings",
        False,
    ),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition"): ("customresourcedefinitions", False),
    ("apps/v1", "DaemonSet"): ("daemonsets", True),
    ("apps/v1", "Deployment"): ("deployments", True),
    ("apps/v1", "StatefulSet"): ("statefulsets", True),
    ("batch/v1", "CronJob"): ("cronjobs", True),
    ("batch/v1", "Job"): ("jobs", True),
    ("networking.k8s.io/v1", "NetworkPolicy"): ("networkpolicies", True),
    ("node.k8s.io/v1", "RuntimeClass"): ("runtimeclasses", False),
    ("policy/v1", "PodDisruptionBudget"): ("poddisruptionbudgets", True),
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): ("clusterroles", False),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): ("clusterrolebindings", False),
    ("rbac.authorization.k8s.io/v1", "Role"): ("roles", True),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): ("rolebindings", True),
    ("scheduling.k8s.io/v1", "PriorityClass"): ("priorityclasses", False),
}

# What others stand on comes first; nodes are touched only when everything else is there.
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

# Lists of maps that the API server merges by a key; the others are one value.
LIST_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "webhooks": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "ports": ("containerPort", "port", "protocol"),
}

# Below these keys "0.5" and "500m" are one amount.
QUANTITIES = frozenset({"limits", "requests", "capacity", "allocatable", "hard", "sizeLimit", "storage", "divisor"})

HIDDEN = "(hidden)"
HIDDEN_NEW = "(hidden, another value)"


class _Nothing:
    """There is no such field."""


NOTHING: t.Final = _Nothing()


@dataclasses.dataclass(frozen=True)
class Ref:
    """Which object."""

    api_version: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


def ref_of(definition: Json) -> Ref:
    metadata = definition.get("metadata") or {}
    return Ref(
        str(definition.get("apiVersion", "")),
        str(definition.get("kind", "")),
        str(metadata.get("namespace") or ""),
        str(metadata.get("name") or ""),
    )


# --------------------------------------------------------------------------- reading what the user gave


def read(definitions: t.Any, option: str = "definitions") -> list[Json]:
    """The objects in a list of maps and YAML texts, complete and in the order in which they are created.

    :raises BadInput: one sentence that names the option.
    """
    found = [_finished(one, option) for one in _flat(definitions, option)]
    refs = [ref_of(one) for one in found]
    for ref in refs:
        if refs.count(ref) > 1:
            raise BadInput(f"{option}: {ref} is there twice")
    return sorted(found, key=lambda one: _rank(one["kind"]))


def _rank(kind: str) -> int:
    if kind == "Node":
        return len(ORDER) + 1
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _flat(value: t.Any, option: str) -> t.Iterator[Json]:
    if value is None:
        return
    if isinstance(value, str):
        try:
            documents = list(yaml_load_all(value))
        except Exception as error:  # the parser's own family of errors isn't importable where it is missing
            raise BadInput(f"{option}: not YAML: {' '.join(str(error).split())}") from error
        for one in documents:
            if isinstance(one, str):
                raise BadInput(f"{option}: {one!r} is neither an object nor YAML text of some")
            yield from _flat(one, option)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one, option)
    elif isinstance(value, dict):
        if str(value.get("kind", "")).endswith("List") and isinstance(value.get("items"), list):
            yield from _flat(value["items"], option)
        else:
            yield value
    else:
        raise BadInput(f"{option}: {value!r} is neither an object nor YAML text of some")


def _finished(given: Json, option: str) -> Json:
    # A round trip through JSON drops what isn't plain data (Ansible's tags, for one) and copies.
    try:
        definition: Json = _without_nulls(json.loads(json.dumps(given)))
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
        # The API server never shows stringData, so that it couldn't be compared.
        text = definition.pop("stringData")
        encoded = {key: base64.b64encode(str(value).encode()).decode() for key, value in text.items()}
        definition["data"] = {**(definition.get("data") or {}), **encoded}
    return definition


def _without_nulls(value: t.Any) -> t.Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def stamped(definition: Json) -> Json:
    """The wish with its own digest on it, which tells when a later wish asks for less.

    Nodes aren't ours and get no mark: what we own there are single labels, which ``managedFields`` knows exactly.
    """
    if definition["kind"] == "Node":
        return definition
    digest = hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()
    result = copy.deepcopy(definition)
    result["metadata"].setdefault("annotations", {})[DIGEST] = digest
    return result


def bare(ref: Ref) -> Json:
    """A wish for nothing of an object but its name: applied, it takes back all that we own of it."""
    metadata = {"name": ref.name, **({"namespace": ref.namespace} if ref.namespace else {})}
    return {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata}


# --------------------------------------------------------------------------- comparing


def ours(live: Json, desired: Json, manager: str = FIELD_MANAGER) -> Json:
    """The part of a live object that a wish is about: equal to the wish exactly when nothing has to be done.

    It holds the fields that the wish names, as they are now, and those that we own and the wish no longer names.
    """
    now = _common(live, desired, False)
    kept = now if isinstance(now, dict) else {}
    left = _left_behind(live, _owned_fields(live, manager), desired)
    return t.cast(Json, _merged(kept, left)) if isinstance(left, dict) else kept


def _common(live: t.Any, desired: t.Any, amounts: bool, field: str = "") -> t.Any:
    """What a live value shows of a wished one; the wish's own spelling where they mean the same."""
    if isinstance(desired, dict) and isinstance(live, dict):
        result = {}
        for key, wanted in desired.items():
            if key in live:
                result[key] = _common(live[key], wanted, amounts or key in QUANTITIES, key)
            elif wanted in ({}, []):
                # The API server leaves empty maps and lists out.
                result[key] = wanted
        return result
    if isinstance(desired, list) and isinstance(live, list):
        if field in LIST_KEYS and all(isinstance(one, dict) for one in live + desired):
            pairs = [(_same(live, wanted, field), wanted) for wanted in desired]
            return [_common(found, wanted, amounts) for found, wanted in pairs if found is not None]
        if len(live) != len(desired):
            return live
        each = [_common(one, wanted, amounts) for one, wanted in zip(live, desired)]
        return desired if each == desired else live
    if _equal(live, desired, amounts):
        return desired
    return live


def _same(items: list[Json], wanted: Json, field: str) -> Json | None:
    """The item of a keyed list that a wished item is about."""
    keys = [key for key in LIST_KEYS[field] if key in wanted]
    for item in items:
        if keys and all(item.get(key) == wanted[key] for key in keys):
            return item
    return None


def _equal(live: t.Any, desired: t.Any, amounts: bool) -> bool:
    if live == desired:
        return True
    if not amounts or isinstance(live, (dict, list)) or isinstance(desired, (dict, list)):
        return False
    one, other = amount(live), amount(desired)
    return one is not None and one == other


def amount(value: t.Any) -> Fraction | None:
    """A quantity ("500m", "1Gi", "1e3", 2) as an exact number, or None where it isn't one."""
    found = re.fullmatch(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?", str(value))
    if not found:
        return None
    suffix = found.group(2) or ""
    if suffix.endswith("i"):
        factor = Fraction(1024) ** ("KMGTPE".index(suffix[0]) + 1)
    elif suffix in ("n", "u", "m"):
        factor = Fraction(1000) ** (-1 - "mun".index(suffix))
    elif suffix in tuple("kMGTPE"):
        factor = Fraction(1000) ** ("kMGTPE".index(suffix) + 1)
    else:
        factor = Fraction(10) ** int(suffix[1:] or 0)
    return Fraction(found.group(1).rstrip(".")) * factor


def _owned_fields(live: Json, manager: str) -> Json:
    for entry in (live.get("metadata") or {}).get("managedFields") or []:
        applied = entry.get("manager") == manager and entry.get("operation") == "Apply"
        if applied and not entry.get("subresource"):
            return entry.get("fieldsV1") or {}
    return {}


def _left_behind(live: t.Any, fields: Json, desired: t.Any) -> t.Any:
    """What of the fields that we own the wish doesn't name; ``fields`` is in the format of fieldsV1."""
    inner = {name: sub for name, sub in fields.items() if name != "."}
    if isinstance(live, dict):
        result = {}
        for name, sub in inner.items():
            key = name[2:]
            if not name.startswith("f:") or key not in live:
                continue
            if isinstance(desired, dict) and key in desired:
                left = _left_behind(live[key], sub, desired[key]) if sub else NOTHING
            else:
                left = _left_behind(live[key], sub, None) if sub else live[key]
            if left is not NOTHING:
                result[key] = left
        return result or NOTHING
    if isinstance(live, list):
        items = []
        for name, sub in inner.items():
            found = _item(live, name)
            if found is NOTHING:
                continue
            wanted = _item(desired if isinstance(desired, list) else [], name)
            if wanted is NOTHING and not isinstance(found, dict):
                items.append(found)
            elif isinstance(found, dict):
                left = _left_behind(found, sub, None if wanted is NOTHING else wanted)
                if left is not NOTHING:
                    # The key fields say which item it is.
                    items.append({**(json.loads(name[2:]) if name.startswith("k:") else {}), **left})
        return items or NOTHING
    return NOTHING


def _item(items: list[t.Any], name: str) -> t.Any:
    """The item of a list that a step of fieldsV1 (``k:{…}`` or ``v:…``) names."""
    wanted: t.Any = json.loads(name[2:]) if name[:2] in ("k:", "v:") else NOTHING
    for item in items:
        if name.startswith("v:") and item == wanted:
            return item
        # A key that the wish leaves to its default (the protocol of a port) is no difference.
        if name.startswith("k:") and isinstance(item, dict):
            known = {key: item[key] for key in wanted if key in item}
            if known and all(wanted[key] == value for key, value in known.items()):
                return item
    return NOTHING


def _merged(one: t.Any, other: t.Any, field: str = "") -> t.Any:
    if isinstance(one, dict) and isinstance(other, dict):
        shared = {key: _merged(one[key], other[key], key) if key in one else other[key] for key in other}
        return {**one, **shared}
    if isinstance(one, list) and isinstance(other, list):
        result = list(one)
        for item in other:
            found = _same(result, item, field) if field in LIST_KEYS and isinstance(item, dict) else None
            if found is None:
                result.append(item)
            else:
                result[result.index(found)] = _merged(found, item)
        return result
    return one


# --------------------------------------------------------------------------- showing


def shown(before: Json | None, after: Json | None) -> tuple[str, str]:
    """Both sides of an object's difference as YAML; a Secret's values are never shown, only that one is another."""
    one, other = copy.deepcopy(before), copy.deepcopy(after)
    if "Secret" in ((one or {}).get("kind"), (other or {}).get("kind")):
        old, new = (one or {}).get("data") or {}, (other or {}).get("data") or {}
        if one and one.get("data"):
            one["data"] = {key: HIDDEN for key in old}
        if other and other.get("data"):
            other["data"] = {
                key: HIDDEN_NEW if key in old and old[key] != value else HIDDEN for key, value in new.items()
            }
    return _text(one), _text(other)


def _text(definition: Json | None) -> str:
    return str(yaml_dump(definition, default_flow_style=False, sort_keys=True)) if definition else ""
