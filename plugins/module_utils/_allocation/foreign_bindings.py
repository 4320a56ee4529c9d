# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""RoleBindings of others in the servers' namespaces, with rights that give them what the servers have.

A tenant who made the namespace before the servers came, or who is its administrator by a project, can run a command in
a server's pod, change its DaemonSet, or take its account's token: he is root on the nodes then.
"""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject
from .._core.untrusted import line
from .._kube.errors import KubeError
from .._kube.refs import Ref

if t.TYPE_CHECKING:
    from .._kube.api import Kube

RBAC = "rbac.authorization.k8s.io/v1"
# The servers' accounts.
ACCOUNTS = frozenset(
    (
        "gpushare-device-plugin",
        "gpushare-dra-driver",
        "gpushare-dra-templates",
        "gpushare-extender",
        "gpushare-scheduler",
    )
)
# Of these a write gives a server's rights, or the node.
RESOURCES = frozenset(
    (
        *("pods", "pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "replicationcontrollers"),
        *("daemonsets", "deployments", "replicasets", "statefulsets", "jobs", "cronjobs"),
        *("serviceaccounts", "serviceaccounts/token", "secrets", "configmaps", "roles", "rolebindings"),
    )
)
READS = frozenset(("get", "list", "watch"))
# What is read of them is already too much: an account's token, or (with a WebSocket) the command in a container.
SECRET = frozenset(("secrets", "pods/exec", "pods/attach", "pods/portforward"))
EXEC = "pods/exec"
POWERS = frozenset(("bind", "escalate", "impersonate"))
# In every namespace of OpenShift, for accounts of that namespace.
OPENSHIFT = frozenset(("system:deployer", "system:image-builder", "system:image-puller"))
# Bindings of a namespace whose roles are read.
MOST = 200
UNKNOWN = "rights that weren't read"


class ForeignBinding(t.TypedDict):
    """A RoleBinding.

    :ivar subjects: others than the servers, as kind and name.
    :ivar rights: the resources that they may change, or read where that is enough.
    """

    namespace: str
    name: str
    subjects: list[str]
    rights: list[str]


class Bindings(t.TypedDict):
    """The bindings of others in several namespaces.

    :ivar refused: namespaces whose bindings the API server refuses this user to list: of these nothing is known.
    """

    found: list[ForeignBinding]
    refused: list[str]


def none() -> Bindings:
    """Return what there is where no namespace was asked about."""
    return {"found": [], "refused": []}


def foreign_bindings(kube: Kube, namespaces: t.Iterable[str], charts: t.Collection[str] = ()) -> Bindings:
    """Return the bindings of others.

    :param namespaces: of the servers.
    :param charts: those of them where a chart makes accounts of its own names.
    :raises KubeError: a request fails for another reason than missing rights.
    """
    ours = dict.fromkeys(namespaces)
    found: list[ForeignBinding] = []
    refused: list[str] = []
    for namespace in ours:
        try:
            bindings = kube.list_all(RBAC, "RoleBinding", namespace=namespace)
        except KubeError as error:
            if error.status != 403:
                raise
            refused.append(namespace)
            continue
        known: dict[str, list[str]] = {}
        for binding in bindings:
            subjects = [
                subject
                for subject in binding.get("subjects") or ()
                if not _is_own(subject, namespace, ours, namespace in charts)
            ]
            role = binding["roleRef"]
            if not subjects or _is_openshifts(role, subjects, namespace):
                continue
            key = f"{role['kind']}/{role['name']}"
            if key not in known:
                known[key] = _rights(kube, role, namespace) if len(known) < MOST else [UNKNOWN]
            if known[key] and not (known[key] == [EXEC] and _are_limited(kube, subjects)):
                names = [_shown(subject, namespace) for subject in subjects]
                name = str(line(binding["metadata"]["name"]))
                found.append({"namespace": namespace, "name": name, "subjects": names, "rights": known[key]})
    return {"found": found, "refused": refused}


def _is_own(subject: JsonObject, namespace: str, ours: t.Container[str], charts: bool) -> bool:
    if subject["kind"] != "ServiceAccount":
        return False
    where = subject.get("namespace") or namespace
    return (where in ours and subject["name"] in ACCOUNTS) or (charts and where == namespace)


def _is_openshifts(role: JsonObject, subjects: t.Iterable[JsonObject], namespace: str) -> bool:
    group = f"system:serviceaccounts:{namespace}"
    return role["name"] in OPENSHIFT and all(
        (subject["kind"] == "ServiceAccount" and subject.get("namespace") == namespace) or subject["name"] == group
        for subject in subjects
    )


def _shown(subject: JsonObject, namespace: str) -> str:
    account = subject["kind"] == "ServiceAccount"
    name = f"{subject.get('namespace') or namespace}/{subject['name']}" if account else subject["name"]
    return str(line(f"{subject['kind']} {name}"))


def _rights(kube: Kube, role: JsonObject, namespace: str) -> list[str]:
    """Return what a role lets somebody do to the servers; nothing for one that doesn't exist."""
    where = namespace if role["kind"] == "Role" else ""
    try:
        live = kube.get(Ref(RBAC, str(role["kind"]), where, str(role["name"])))
    except KubeError as error:
        if error.status != 403:
            raise
        return [UNKNOWN]
    return sorted({right for rule in (live or {}).get("rules") or () for right in _of_rule(rule)})


def _of_rule(rule: JsonObject) -> t.Iterator[str]:
    verbs = frozenset(rule.get("verbs") or ())
    resources = frozenset(rule.get("resources") or ())
    yield from POWERS & verbs
    if "*" in resources or "*/*" in resources:
        # With read alone he reads Secrets.
        yield "*"
        return
    writes = bool(verbs - READS - POWERS)
    yield from (RESOURCES if writes else SECRET) & resources


def _are_limited(kube: Kube, subjects: t.Iterable[JsonObject]) -> bool:
    """Return whether an admission policy of role readonly_access lets these accounts run one command only."""
    for subject in subjects:
        ref = Ref("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", str(subject["name"]))
        try:
            policy = kube.get(ref) or {}
        except KubeError as error:
            if error.status != 403:
                raise
            return False
        labels = (policy.get("metadata") or {}).get("labels") or {}
        user = f"system:serviceaccount:{subject.get('namespace')}:{subject['name']}"
        conditions = (policy.get("spec") or {}).get("matchConditions") or ()
        named = any(user in str(condition.get("expression")) for condition in conditions)
        if labels.get("app.kubernetes.io/component") != "readonly-access" or not named:
            return False
    return True
