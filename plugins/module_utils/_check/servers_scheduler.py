# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which servers a cluster needs, and the checks S2 and S3 of schedulers that only the API shows. No I/O."""

from __future__ import annotations

import json
import re
import typing as t

from .._contracts import gpushare as contract
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kube.refs import Ref
from .._kube.rollout import not_ready_reason, ready
from .._openshift import cluster as openshift
from .._openshift import policy as own
from .._openshift import secondary
from .._scheduler import constants
from .common import allocation_of, backend_of, has_label
from .model import DRA, EXTENDER, Node, ObjectReader, Servers, Snapshot
from .result import CheckResult

COMPONENT = "app.kubernetes.io/component"
DRA_DRIVER, DRA_TEMPLATES = "dra-driver", "dra-templates"
# The dedicated one, with the extender in its pod.
SCHEDULER = "scheduler"


def has_labels(pod: JsonObject, key: str, value: str) -> bool:
    """Return whether a pod has a label of this value."""
    return ((pod.get("metadata") or {}).get("labels") or {}).get(key) == value


def is_server(pod: JsonObject, component: str, servers: Servers) -> bool:
    """Return whether a pod is one of this collection's servers: in another namespace anybody may have these labels."""
    namespace = servers.dedicated_namespace if component == SCHEDULER else servers.namespace
    own = (pod.get("metadata") or {}).get("namespace") == namespace
    return own and has_labels(pod, *constants.PART_OF) and has_labels(pod, COMPONENT, component)


def gpu_nodes(snapshot: Snapshot) -> list[Node]:
    """Return gpushare's nodes: those with its label, and observed GPU nodes that no other back end was given."""
    return [node for node in snapshot.nodes if has_label(node) or (node.observed and not backend_of(node))]


def allocations(snapshot: Snapshot) -> dict[str, str]:
    """Return who is to allocate the cards of each GPU node.

    A node that shows nothing of it is as the others, if they are all alike.
    """
    usual = _usual(snapshot)
    return {node.name: allocation_of(node) or usual for node in gpu_nodes(snapshot)}


def needed(snapshot: Snapshot) -> frozenset[str]:
    """Return the allocations whose servers the cluster needs; none where all nodes have other back ends."""
    needing = frozenset(allocations(snapshot).values())
    if needing or any(backend_of(node) for node in snapshot.nodes):
        return needing
    return frozenset((_usual(snapshot),))


def _usual(snapshot: Snapshot) -> str:
    known = {allocation_of(node) for node in gpu_nodes(snapshot)} - {""}
    servers = snapshot.servers
    if not known and servers is not None:
        known = {DRA for pod in servers.pods if is_server(pod, DRA_TEMPLATES, servers)}
    return DRA if known == {DRA} else EXTENDER


ADMISSION = "admissionregistration.k8s.io"
DENY, WARN, NONE = "deny", "warn", "none"


def is_openshift_scheduler(pod: JsonObject) -> bool:
    """Return whether a pod is OpenShift's kube-scheduler."""
    namespace, selector = own.PODS
    return (pod.get("metadata") or {}).get("namespace") == namespace and has_labels(pod, *selector.split("="))


def _attempt(cause: str, check: t.Callable[[], None], result: CheckResult) -> None:
    """Run a check; an object that can't be read makes it UNKNOWN, and the others still run."""
    result.count()
    try:
        check()
    except ShareError as error:
        result.unknown(cause, key=cause, why=str(error))


def _read(api: ObjectReader, ref: Ref) -> JsonObject:
    """Read an object that always exists.

    :raises ShareError: it doesn't exist, or this user can't see it.
    """
    live = api.get(ref)
    if live is None:
        raise ShareError(f"the API server has no {ref}")
    return live


# --------------------------------------------------------------------------- OpenShift


def check_openshift(servers: Servers, api: ObjectReader, result: CheckResult) -> None:
    """Check S2 on OpenShift: the policy up to 4.9, the secondary scheduler from 4.10 on."""
    try:
        version = openshift.version_of(_read(api, openshift.CLUSTER_VERSION))
        release = openshift.release(version)
    except ShareError as error:
        result.unknown("openshift_unknown", why=str(error))
        return
    if openshift.takes_policy(version):
        _attempt("policy_unknown", lambda: _check_policy(servers, api, release, result), result)
        return
    _attempt("policy_name_unknown", lambda: _check_no_policy(api, version, result), result)
    _attempt("secondary_unknown", lambda: _check_secondary(api, result), result)


def _policy_name(api: ObjectReader) -> str:
    spec = _read(api, openshift.SCHEDULER).get("spec") or {}
    return str((spec.get("policy") or {}).get("name") or "")


def _check_policy(servers: Servers, api: ObjectReader, release: tuple[int, int], result: CheckResult) -> None:
    name = _policy_name(api)
    if not name:
        result.fail("no_policy", key="policy")
        return
    live = api.get(own.ref(name))
    text = ((live or {}).get("data") or {}).get(own.KEY)
    if live is None or not _has_extender(text):
        cause = "policy_missing" if live is None else "no_extender"
        result.fail(cause, key="policy", policy=name, object=own.ref(name), resource=contract.RESOURCE_MEMORY)
        return
    notes = live["metadata"].get("annotations") or {}
    if own.USERS in notes and (notes.get(own.PROVEN) != "true" or notes.get(own.LEAVING)):
        result.unknown("run_interrupted", policy=name)
    if not own.takes_copy(release):
        result.unknown("policy_not_shown", release=f"{release[0]}.{release[1]}")
        return
    copy = api.get(own.COPY)
    if ((copy or {}).get("data") or {}).get(own.KEY) != text:
        result.fail("policy_not_rolled_out", key="copy", policy=name, object=own.COPY)
    _check_pods(servers, result)


def _has_extender(text: str | None) -> bool:
    try:
        extenders = json.loads(text or "").get("extenders") or []
        managed = [str(row.get("name")) for extender in extenders for row in extender.get("managedResources") or []]
    except (ValueError, AttributeError, TypeError):
        return False
    return contract.RESOURCE_MEMORY in managed


def _check_pods(servers: Servers, result: CheckResult) -> None:
    """Check each kube-scheduler, and the extender beside it."""
    mine = [pod for pod in servers.pods if is_openshift_scheduler(pod)]
    if not mine:
        result.fail("no_scheduler_in_namespace", key="pods", namespace=own.PODS[0])
    extenders = [pod for pod in servers.pods if is_server(pod, "extender", servers)]
    with_extender = {contract.pod_node(pod) for pod in extenders if ready(pod)}
    for pod in sorted(mine, key=contract.pod_node):
        node = contract.pod_node(pod)
        result.count()
        if not own.reads_policy(pod):
            result.fail("started_without_policy", node=node, key="policy")
        if node not in with_extender:
            result.fail("no_extender_on_node", node=node, key="extender")


def _check_no_policy(api: ObjectReader, version: str, result: CheckResult) -> None:
    name = _policy_name(api)
    if name:
        result.fail("policy_left", key="policy", policy=name, release=version)


def _check_secondary(api: ObjectReader, result: CheckResult) -> None:
    live = api.get(secondary.DEPLOYMENT)
    if live is None:
        result.fail("secondary_missing", key="secondary", object=secondary.DEPLOYMENT)
        return
    left = not_ready_reason(live)
    if left:
        result.fail("secondary_not_ready", key="secondary", why=left)
        return
    pod = ((live.get("spec") or {}).get("template") or {}).get("spec") or {}
    mounted = [str((volume.get("configMap") or {}).get("name") or "") for volume in pod.get("volumes") or []]
    texts = [((api.get(secondary.ref(name)) or {}).get("data") or {}).get(secondary.KEY) for name in mounted if name]
    if not [text for text in texts if contract.RESOURCE_MEMORY in str(text)]:
        result.fail("secondary_without_extender", key="secondary", resource=contract.RESOURCE_MEMORY)


# --------------------------------------------------------------------------- the admission policy


def admission_policy_exists(snapshot: Snapshot, result: CheckResult) -> None:
    """Check S3: beside a scheduler of its own, an admission policy covers GPU pods for other schedulers."""
    servers = snapshot.servers
    if servers is None or servers.problem or servers.api is None or servers.admission == NONE:
        return
    if EXTENDER not in needed(snapshot):
        return
    api = servers.api
    if servers.scheduler == constants.DEDICATED:
        _attempt("no_data", lambda: _check_admission(servers, api, _minor(api), result), result)
    elif servers.scheduler == constants.OPENSHIFT:
        try:
            version = openshift.version_of(_read(api, openshift.CLUSTER_VERSION))
            takes_policy = openshift.takes_policy(version)
        except ShareError:
            # Reported by S2.
            return
        # A release newer than those known here has at least what the newest known one has.
        minor = openshift.kubernetes_minor(version) or constants.ADMISSION_SINCE
        # OpenShift doesn't serve the beta.
        if not takes_policy and _is_stable(minor):
            _attempt("no_data", lambda: _check_admission(servers, api, minor, result), result)


def _minor(api: ObjectReader) -> int:
    version = str(api.version().get("gitVersion") or "")
    match = re.match(r"v?1\.(\d+)", version)
    if not match:
        raise ShareError(f"the API server reports version {version!r}, which isn't one of Kubernetes")
    return int(match.group(1))


def _is_stable(minor: int) -> bool:
    return minor >= constants.ADMISSION_SINCE


def _check_admission(servers: Servers, api: ObjectReader, minor: int, result: CheckResult) -> None:
    if not _is_served(api, minor):
        return
    version = f"{ADMISSION}/{'v1' if _is_stable(minor) else 'v1beta1'}"
    policy = Ref(version, "ValidatingAdmissionPolicy", "", constants.DEDICATED_NAME)
    binding = Ref(version, "ValidatingAdmissionPolicyBinding", "", constants.DEDICATED_NAME)
    if api.get(policy) is None:
        result.fail("missing", key="policy", object=policy)
        return
    live = api.get(binding)
    if live is None:
        result.fail("missing", key="binding", object=binding)
        return
    spec = live.get("spec") or {}
    if spec.get("policyName") != constants.DEDICATED_NAME or servers.admission.capitalize() not in (
        spec.get("validationActions") or []
    ):
        result.fail("other_action", key="binding", object=binding, action=servers.admission, policy=policy)


def _is_served(api: ObjectReader, minor: int) -> bool:
    """Return whether the API server has admission policies: stable ones always, the beta only where it was enabled."""
    if _is_stable(minor):
        return True
    beta = Ref("apiregistration.k8s.io/v1", "APIService", "", f"v1beta1.{ADMISSION}")
    return minor >= constants.ADMISSION_BETA_SINCE and api.get(beta) is not None
