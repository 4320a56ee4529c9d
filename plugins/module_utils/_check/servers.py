# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks S1, S4, S5 and D10 of this collection's servers, on machines and nodes. No I/O."""

from __future__ import annotations

import typing as t

from .._allocation.allocators import ALLOCATORS, lacks_restricted
from .._contracts import backends
from .._contracts import gpushare as contract
from .._contracts.claim_templates import API_VERSION, DRIVER
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kube import tolerations
from .._kube.refs import FIELD_MANAGER, Ref, ref_of
from .._kube.rollout import not_ready_reason, ready, reasons
from .._scheduler import constants
from .._scheduler.constants import ANNOTATION, FOLDER
from .._scheduler.pods import runs_scheduler
from .common import has_label, label_of
from .model import DRA, Node, ObjectReader, Servers, Snapshot
from .parse import join
from .result import CheckResult
from .servers_scheduler import (
    DRA_DRIVER,
    DRA_TEMPLATES,
    SCHEDULER,
    allocations,
    check_openshift,
    gpu_nodes,
    has_labels,
    is_openshift_scheduler,
    is_server,
    needed,
)

ADMISSION = "admissionregistration.k8s.io/v1"
CLAIMS, ALLOCATED = "gpushare-claims", "gpushare-allocated-claims"
SLICES, OF_DRIVER, OF_TEMPLATES = "gpushare-slices", "gpushare-dra-driver", "gpushare-dra-templates"
DENY = "Deny"
# Each policy with the kind of its binding, which has its name.
POLICIES = (
    *(("ValidatingAdmissionPolicy", name) for name in (CLAIMS, ALLOCATED, SLICES, OF_DRIVER, OF_TEMPLATES)),
    ("MutatingAdmissionPolicy", CLAIMS),
)


def objects_are_unchanged(snapshot: Snapshot, result: CheckResult) -> None:
    """Check D10: what turns pods into claims, keeps these, and ties the servers' accounts, is as site.yml wrote it."""
    servers = snapshot.servers
    if servers is None or servers.api is None or DRA not in needed(snapshot):
        return
    api = servers.api
    _check_object(api, Ref(API_VERSION, "DeviceClass", "", DRIVER), result)
    for kind, name in POLICIES:
        _check_object(api, Ref(ADMISSION, kind, "", name), result)
        binding = Ref(ADMISSION, f"{kind}Binding", "", name)
        live = _check_object(api, binding, result)
        if live is None:
            continue
        spec = live.get("spec") or {}
        if spec.get("policyName") != name:
            named = str(spec.get("policyName"))
            shown = {"policy": named, "expected": name, "api": f"policyName {named}"}
            result.fail("other_policy", key=str(binding), object=binding, **shown)
        elif kind.startswith("Validating") and DENY not in (spec.get("validationActions") or []):
            shown = {"api": f"validationActions {join(spec.get('validationActions') or ['-'])}"}
            result.fail("other_action", key=str(binding), object=binding, **shown)


def _check_object(api: ObjectReader, ref: Ref, result: CheckResult) -> JsonObject | None:
    """Check that an object is there and that nobody else has written its specification; return it."""
    result.count()
    try:
        live = api.get(ref)
    except ShareError as error:
        result.unknown("no_data", key=str(ref), object=ref, why=str(error))
        return None
    if live is None:
        result.fail("missing", key=str(ref), object=ref, api="not found")
        return None
    others = _other_writers(live)
    if others:
        result.fail("changed", key=str(ref), object=ref, managers=join(others), api=f"managedFields: {join(others)}")
    return live


def _other_writers(live: JsonObject) -> list[str]:
    """Return who else has written the specification: a field's last writer owns it, by managedFields."""
    managers = []
    own = False
    for entry in (live.get("metadata") or {}).get("managedFields") or []:
        fields = entry.get("fieldsV1") or {}
        if "f:spec" not in fields or entry.get("subresource"):
            continue
        if entry.get("manager") == FIELD_MANAGER:
            own = True
        else:
            managers.append(str(entry.get("manager")))
    return sorted(set(managers)) or ([] if own else ["somebody else"])


def nodes_offer_cards(node: Node, result: CheckResult) -> None:
    """Check S4 on a node: the driver offers cards in slices."""
    if not node.devices:
        result.fail("not_offered", node=node.name, driver=DRIVER, key="slices", api="no device in a ResourceSlice")


def unenforced(node: Node, violations: frozenset[str] | set[str], result: CheckResult) -> set[str]:
    """Check S5 on a node: return why limits aren't enforced, and report what pods hold beyond their claims."""
    reasons = set()
    for device in node.devices:
        if device.limit in violations:
            kind = "unaccounted" if device.limit == contract.Reason.UNACCOUNTED_MEMORY_HELD.value else "violated"
            why = "the driver's log names who"
            result.warn(kind, node=node.name, card=device.index, uuid=device.uuid, code=device.limit, why=why)
        elif device.limit not in ("", contract.LIMIT_ENFORCED, contract.LIMIT_OFF):
            reasons.add(device.limit)
    return reasons


EXTENDER = "extender"
DEVICE_PLUGIN = "device-plugin"
# Those that a Deployment runs.
DEPLOYMENTS = {
    SCHEDULER: constants.DEDICATED_NAME,
    EXTENDER: "gpushare-extender",
    DRA_TEMPLATES: "gpushare-dra-templates",
}


def is_server_pod(pod: JsonObject) -> bool:
    """Return whether the checks of the servers need a pod: it is one of the servers, or a kube-scheduler."""
    return has_labels(pod, *constants.PART_OF) or _is_kube_scheduler(pod) or is_openshift_scheduler(pod)


def _is_kube_scheduler(pod: JsonObject) -> bool:
    in_kube_system = (pod.get("metadata") or {}).get("namespace") == "kube-system"
    return in_kube_system and (has_labels(pod, *constants.SCHEDULER_LABEL.split("=")) or runs_scheduler(pod))


def servers_are_ready(snapshot: Snapshot, result: CheckResult) -> None:
    """Check S1: the extender is ready beside each scheduler, and the device plugin, or the DRA driver, on each node."""
    servers = snapshot.servers
    if servers is None:
        return
    kinds = needed(snapshot)
    nodes = {node.name: node for node in snapshot.nodes}
    if EXTENDER in kinds and servers.problem:
        result.unknown("not_checked", why=servers.problem)
    elif EXTENDER in kinds and servers.scheduler in constants.ON_MACHINES:
        if not servers.control_plane:
            result.unknown("no_control_plane", mode=servers.scheduler)
        for name in servers.control_plane:
            _check_server(servers, EXTENDER, name, result, nodes)
    elif EXTENDER in kinds:
        _check_anywhere(servers, SCHEDULER if servers.scheduler == constants.DEDICATED else EXTENDER, result)
    if DRA in kinds:
        _check_anywhere(servers, DRA_TEMPLATES, result)
    for node, allocation in _checked(snapshot):
        _check_server(servers, DRA_DRIVER if allocation == DRA else DEVICE_PLUGIN, node.name, result, nodes)


def _check_anywhere(servers: Servers, component: str, result: CheckResult) -> None:
    """Check a server that is bound to no node: FAIL without a ready pod, WARN where it has fewer than it should."""
    mine = [pod for pod in servers.pods if is_server(pod, component, servers)]
    result.count()
    place = {"key": component, "server": component}
    live, unread = None, ""
    # One of a DaemonSet, as the extender beside OpenShift's schedulers up to 4.9, shows what is missing by itself.
    if servers.api is not None and (not mine or any(_of_replica_set(pod) for pod in mine)):
        namespace = str(mine[0]["metadata"].get("namespace") or "") if mine else servers.namespace
        ref = Ref("apps/v1", "Deployment", namespace, DEPLOYMENTS[component])
        try:
            live = servers.api.get(ref)
            unread = "" if live else f"{ref} doesn't exist"
        except ShareError as error:
            unread = str(error)
    waiting = [*reasons(None, mine, []), *(_refusals(live) if live else ())]
    why = "; ".join(waiting)
    if not any(ready(pod) for pod in mine):
        result.fail("not_ready_anywhere" if waiting else "not_running_anywhere", why=why, **place)
    elif unread:
        result.unknown("wanted_unknown", why=unread, **place)
    else:
        missing = not_ready_reason(live) if live else why
        if missing:
            result.warn("fewer_ready", why="; ".join(dict.fromkeys([missing, *waiting])), **place)


def _of_replica_set(pod: JsonObject) -> bool:
    owners = (pod.get("metadata") or {}).get("ownerReferences") or []
    return any(owner.get("kind") == "ReplicaSet" for owner in owners)


def _refusals(deployment: JsonObject) -> list[str]:
    """Return why the API server creates no pods of a Deployment, such as a quota."""
    return [
        f"{ref_of(deployment)}: {condition.get('message')}"
        for condition in (deployment.get("status") or {}).get("conditions") or []
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
    ]


def _kept_away(servers: Servers, component: str, node: Node | None) -> list[JsonObject]:
    """Return the taints of a node that the server's pods on other nodes don't tolerate; all, where it has no pod."""
    pods = [pod for pod in servers.pods if is_server(pod, component, servers)]
    tolerated = [toleration for pod in pods[:1] for toleration in (pod.get("spec") or {}).get("tolerations") or []]
    return tolerations.untolerated(tolerations.lasting(node.taints), tolerated) if node else []


def _check_server(
    servers: Servers, component: str, node: str, result: CheckResult, nodes: t.Mapping[str, Node]
) -> None:
    result.count()
    mine = [pod for pod in servers.pods if is_server(pod, component, servers) and contract.pod_node(pod) == node]
    if any(ready(pod) for pod in mine):
        return
    taints = _kept_away(servers, component, nodes.get(node)) if not mine else []
    cause = "not_ready" if mine else "kept_away" if taints else "not_running"
    why = ", ".join(tolerations.shown(taints)) if taints else "; ".join(reasons(None, mine, []))
    result.fail(cause, node=node, key=component, server=component, why=why)


def _checked(snapshot: Snapshot) -> list[tuple[Node, str]]:
    """Return the GPU nodes that can be checked, and who allocates the cards of each.

    Claims need nothing of what is unknown where the servers have a problem.
    """
    servers = snapshot.servers
    if servers is None:
        return []
    by_node = allocations(snapshot)
    return [
        (node, by_node[node.name]) for node in gpu_nodes(snapshot) if not servers.problem or by_node[node.name] == DRA
    ]


def schedulers_call_extender(snapshot: Snapshot, result: CheckResult) -> None:
    """Check S2: each scheduler has loaded the configuration with the extender, which an upgrade may have removed."""
    servers = snapshot.servers
    if servers is None or servers.problem or EXTENDER not in needed(snapshot):
        return
    if servers.scheduler == constants.OPENSHIFT and servers.api is not None:
        check_openshift(servers, servers.api, result)
    if servers.scheduler in constants.ON_MACHINES and not servers.control_plane:
        result.unknown("no_control_plane", mode=servers.scheduler)
    for node in servers.control_plane if servers.scheduler in constants.ON_MACHINES else ():
        result.count()
        if _check_processes(servers.running.get(node), node, result):
            continue
        if servers.scheduler == constants.K3S:
            result.unknown("k3s_arguments", node=node)
            continue
        mine = [pod for pod in servers.pods if _is_kube_scheduler(pod) and contract.pod_node(pod) == node]
        if not mine:
            result.fail("no_scheduler", node=node)
        for pod in mine:
            _check_arguments(pod, node, result)


def _check_processes(observed: t.Any, node: str, result: CheckResult) -> bool:
    """Check what a machine's kube-scheduler has loaded, and return whether that is known.

    :param observed: its processes as ``control_plane_info`` reports them, or JSON of any shape.
    """
    running = [process for process in observed if isinstance(process, dict)] if isinstance(observed, list) else []
    if any(process.get("extender") is True and process.get("fresh") is not False for process in running):
        return True
    for process in running:
        config = str(process.get("config") or process.get("policy") or "")
        if process.get("extender") is False and not config:
            result.fail("configuration_lost", node=node)
        elif process.get("extender") is False:
            result.fail("loaded_without_extender", node=node, config=config, resource=contract.RESOURCE_MEMORY)
        elif process.get("fresh") is False:
            result.fail("older_than_configuration", node=node, config=config)
        else:
            continue
        return True
    return False


def _check_arguments(pod: JsonObject, node: str, result: CheckResult) -> None:
    arguments = [
        str(text) for each in pod["spec"]["containers"] for text in each.get("command", []) + each.get("args", [])
    ]
    annotated = ANNOTATION in (pod["metadata"].get("annotations") or {})
    if annotated or any(f"={FOLDER}/" in argument or argument.startswith(f"{FOLDER}/") for argument in arguments):
        return
    if any(argument.startswith(("--config", "--policy-config")) for argument in arguments):
        result.unknown("own_configuration", node=node)
    else:
        result.fail("configuration_lost", node=node)


def gpu_nodes_announce_gpus(snapshot: Snapshot, result: CheckResult) -> None:
    """Check S4: every GPU node is in the cluster, has the label and announces GPUs."""
    servers = snapshot.servers
    for name in snapshot.unknown_nodes if servers is not None and not servers.problem else ():
        result.count()
        result.fail("not_in_cluster", node=name)
    for node in snapshot.nodes if servers is not None else ():
        _check_restricted(node, result)
    checked = _checked(snapshot)
    if servers is not None and not servers.problem and not (checked or snapshot.unknown_nodes) and needed(snapshot):
        result.unknown("no_gpu_node")
    for node, allocation in checked:
        result.count()
        if not has_label(node):
            result.fail("no_label", node=node.name, label=label_of(allocation), key="label")
        if allocation == DRA:
            nodes_offer_cards(node, result)
            continue
        memory = node.capacity.get(contract.RESOURCE_MEMORY, 0)
        if not node.cards or memory <= 0:
            api = f"{contract.RESOURCE_MEMORY} {memory}"
            result.fail("not_announced", node=node.name, resource=contract.RESOURCE_MEMORY, key="resource", api=api)


def _check_restricted(node: Node, result: CheckResult) -> None:
    """Check that a node has both labels of its allocator, or none: kubelet may set the one, and not the other."""
    given = [name for name, allocator in ALLOCATORS.items() if allocator.labels(node.labels)]
    marked = node.labels.get(backends.RESTRICTED, "")
    for name in given:
        key, value = ALLOCATORS[name].restricted
        if lacks_restricted(node.labels, name):
            label = "=".join(ALLOCATORS[name].label)
            result.fail("not_restricted", node=node.name, label=label, restricted=f"{key}={value}", key="restricted")
    if marked and marked not in given:
        result.warn("restricted_alone", node=node.name, restricted=f"{backends.RESTRICTED}={marked}", key="restricted")


def shares_are_enforced(snapshot: Snapshot, result: CheckResult) -> None:
    """Check S5: the driver enforces memory limits. One finding for all nodes of the same reason."""
    nodes = [node for node, _allocation in _checked(snapshot) if has_label(node)]
    result.count(len(nodes))
    by_reason: dict[str, list[str]] = {}
    violations = {code.value for code in contract.LIMIT_VIOLATIONS}
    for node in nodes:
        for reason in unenforced(node, violations, result):
            by_reason.setdefault(reason, []).append(node.name)
        # Memory of no share is found where memory isn't limited, too.
        for card in node.cards:
            if card.limit in violations:
                kind = "unaccounted" if card.limit == contract.Reason.UNACCOUNTED_MEMORY_HELD.value else "violated"
                why = card.limit_reason
                result.warn(kind, node=node.name, card=card.index, uuid=card.uuid, code=card.limit, why=why)
        limit = node.annotations.get(contract.NODE_LIMIT, "")
        reason = limit.removeprefix(contract.LIMIT_UNENFORCED)
        # A violation's code comes before its text; any other reason concerns the node.
        if reason != limit and reason.partition(":")[0] not in violations:
            by_reason.setdefault(reason, []).append(node.name)
    for reason, names in by_reason.items():
        shown = f"node{'s' if len(names) > 1 else ''} {join(names, 10)}"
        result.warn("not_enforced", key=reason, nodes=shown, why=reason)
