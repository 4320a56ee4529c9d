# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HAMi in the API: wait until a release works, and remove what it leaves; module ``backend_objects``."""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from .._contracts import backends, hami, hami_marks
from .._contracts.gpushare import finished, left_behind, pod_key, pod_node, terminating
from .._contracts.hami_marks import PLUGIN_LABEL
from .._core.errors import BadInput, NotInEffect, ShareError
from .._core.plan import Change, Plan, run
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.apply_set import ClusterObjects
from .._kube.refs import Ref
from .._kube.rollout import not_ready_reason

INSTANCE = "app.kubernetes.io/instance"
WORKLOADS = (("apps/v1", "Deployment"), ("apps/v1", "DaemonSet"))
# Every Pod Security Standard allows this pod. It is never stored, so its image is never pulled.
_CONTAINER: JsonObject = {
    "name": "proof",
    "image": "registry.k8s.io/pause:3.10",
    # HAMi's webhook adds the number of cards to it; NVIDIA's plugin has no such resource.
    "resources": {"limits": {hami.RESOURCE_MEMORY: "1"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65534,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}


class DryRun(Kube, t.Protocol):
    """A cluster that also answers what an object would become."""

    def try_create(self, definition: JsonObject) -> JsonObject: ...


def workloads(kube: Kube, release: str, namespace: str) -> list[JsonObject]:
    """Return the release's Deployments and DaemonSets."""
    listed = []
    for api_version, kind in WORKLOADS:
        listed += kube.list_all(api_version, kind, namespace, label_selector=f"{INSTANCE}={release}")
    return listed


def unready(kube: DryRun, params: JsonObject) -> list[str]:
    """Return what isn't ready now.

    :param params: the module's options.
    """
    there = workloads(kube, params["release"], params["namespace"])
    reasons = [not_ready_reason(workload, min_nodes=0) or "" for workload in there] or [_none(params)]
    reasons.append(not_on_nodes(there, params["nodes"]))
    if params["proof_namespace"]:
        reasons.append(webhook_problem(kube, params))
    return [reason for reason in (*reasons, unregistered(kube, params["nodes"])) if reason]


def _none(params: JsonObject) -> str:
    return f"the release {params['release']} has no Deployment and no DaemonSet in namespace {params['namespace']}"


def not_on_nodes(there: t.Sequence[JsonObject], nodes: t.Sequence[str]) -> str:
    """Return why the device plugin isn't ready, or runs on no node; empty where it is.

    :param there: the release's workloads. Its DaemonSets for cards of others may run on none.
    :param nodes: those with a label of HAMi; they get it after the release.
    """
    if not nodes or not there:
        return ""
    key, value = PLUGIN_LABEL
    plugins = [
        workload
        for workload in there
        if workload["kind"] == "DaemonSet"
        and (workload["spec"]["template"]["metadata"].get("labels") or {}).get(key) == value
    ]
    reasons = [not_ready_reason(plugin, min_nodes=1) or "" for plugin in plugins]
    return "; ".join(filter(None, reasons)) if plugins else "the release has no DaemonSet of HAMi's device plugin"


def wait_rolled_out(kube: Kube, params: JsonObject, waiting: Waiting) -> None:
    """Wait until all pods of the release are ready.

    :param params: the module's options.
    :raises NotInEffect: they aren't at the timeout; with the reasons of the pods, their events and logs.
    """
    there = workloads(kube, params["release"], params["namespace"])
    if not there:
        raise NotInEffect(_none(params))
    watched = ClusterObjects(kube, [_name_only(workload) for workload in there], "present", min_nodes=0)
    watched.observe()
    watched.wait(waiting)


def _name_only(workload: JsonObject) -> JsonObject:
    metadata = {key: workload["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "metadata": metadata}


def webhook_problem(kube: DryRun, params: JsonObject) -> str:
    """Return why the webhook doesn't change a new pod; empty where it does."""
    namespace, scheduler = params["proof_namespace"], params["scheduler_name"]
    spec: JsonObject = {"containers": [_CONTAINER]}
    if not params["overwrites"]:
        spec["schedulerName"] = scheduler
    metadata = {"generateName": "kubegpu-proof-", "namespace": namespace}
    try:
        pod = kube.try_create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    except ShareError as error:
        return f"a pod with {hami.RESOURCE_MEMORY} would be refused in namespace {namespace}: {error}"
    limits = (pod["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    named = str(pod["spec"].get("schedulerName") or "")
    if hami.RESOURCE_COUNT not in limits or named != scheduler:
        return (
            f"HAMi's webhook doesn't change a pod with {hami.RESOURCE_MEMORY} in namespace {namespace} (scheduler "
            f"{named or 'not named'}, limits {', '.join(sorted(limits))}): such pods go to another scheduler, "
            "which can't place them"
        )
    return ""


def unregistered(kube: Kube, nodes: t.Sequence[str]) -> str:
    """Return why HAMi's scheduler can't use one of the nodes yet; empty where it can use all."""
    for name in nodes:
        node = kube.get(Ref("v1", "Node", "", name))
        if node is None:
            return f"node {name} isn't in the cluster"
        text = (node["metadata"].get("annotations") or {}).get(hami.NODE_REGISTER)
        if text is None:
            return f"node {name}: HAMi's device plugin hasn't registered its cards ({hami.NODE_REGISTER})"
        try:
            cards = hami.registered(text)
        except hami.HamiError as error:
            return f"node {name}: {error}"
        if not any(card.healthy for card in cards):
            return f"node {name}: none of its {len(cards)} registered cards is healthy"
    return ""


def ensure_ready(kube: DryRun, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Wait until the release's pods are ready, the webhook changes a new pod, and the scheduler knows the nodes' cards.

    :param params: the module's options.
    :param check: change and wait for nothing; what isn't ready is in the result.
    :param waiting: the clock, for tests.
    :raises NotInEffect: something isn't ready at the timeout.
    """
    if check:
        return {"changed": False, "unready": unready(kube, params), "requests": dict(kube.requests)}
    waiting = waiting or Waiting(timeout=params["wait_timeout"])
    end = waiting.now() + waiting.timeout
    wait_rolled_out(kube, params, waiting)
    there = functools.partial(workloads, kube, params["release"], params["namespace"])
    problems: list[t.Callable[[], str]] = [
        lambda: not_on_nodes(there() if params["nodes"] else (), params["nodes"]),
        lambda: unregistered(kube, params["nodes"]),
    ]
    if params["proof_namespace"]:
        problems.insert(0, lambda: webhook_problem(kube, params))
    for problem_of in problems:
        problem = problem_of()
        while problem:
            if waiting.now() >= end:
                raise NotInEffect(f"not within {waiting.timeout:g} s: {problem}")
            waiting.sleep(waiting.pause)
            problem = problem_of()
    return {"changed": False, "requests": dict(kube.requests)}


RELEASE_NAME, RELEASE_NAMESPACE = "meta.helm.sh/release-name", "meta.helm.sh/release-namespace"
# The kinds that HAMi's chart may create, in the order in which they go: no webhook without its server.
KINDS = (
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", False),
    ("apps/v1", "Deployment", True),
    ("apps/v1", "DaemonSet", True),
    ("batch/v1", "Job", True),
    ("v1", "Service", True),
    ("v1", "ConfigMap", True),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", True),
    ("rbac.authorization.k8s.io/v1", "Role", True),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", False),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", False),
    ("v1", "ServiceAccount", True),
)
# On the nodes that role hami has given to HAMi; by the first and the last the device plugin runs there.
LABELS = (hami_marks.NODE_LABEL, (backends.LABEL, backends.HAMI), (backends.RESTRICTED, backends.HAMI))
# Its limit of a handshake's age, and two of its rounds.
FORGET_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class Observed:
    """The objects with something of HAMi's.

    :param objects: those of the release, and what helm and HAMi made beside it.
    """

    nodes: tuple[JsonObject, ...]
    pods: tuple[JsonObject, ...]
    objects: tuple[Ref, ...]


class Leftovers:
    """Reconciler: nothing of HAMi is left on some nodes, or in the cluster."""

    def __init__(self, kube: Kube, params: JsonObject) -> None:
        self._kube = kube
        self._params = params
        self._whole = params["scope"] == "cluster"

    def observe(self) -> Observed:
        if self._whole:
            nodes, pods = self._kube.list_all("v1", "Node"), self._kube.list_all("v1", "Pod")
        else:
            answers = [self._kube.get(Ref("v1", "Node", "", name)) for name in self._params["nodes"]]
            nodes = [node for node in answers if node is not None]
            pods = []
            for node in nodes:
                selector = f"spec.nodeName={node['metadata']['name']}"
                pods += self._kube.list_all("v1", "Pod", field_selector=selector)
        return Observed(tuple(nodes), tuple(pods), tuple(self._objects()) if self._whole else ())

    def _objects(self) -> t.Iterator[Ref]:
        """Yield what is left of the release, whatever state helm believes it to be in."""
        release, namespace = self._params["release"], self._params["namespace"]
        for api_version, kind, namespaced in KINDS:
            for listed in self._kube.list_all(api_version, kind, namespace if namespaced else ""):
                if self._of_release(listed["metadata"]):
                    yield _ref(api_version, kind, listed)
        for secret in self._kube.list_all("v1", "Secret", namespace):
            name, labels = str(secret["metadata"]["name"]), secret["metadata"].get("labels") or {}
            helms = labels.get("owner") == "helm" and labels.get("name") == release
            if helms or self._of_release(secret["metadata"]) or name == tls_secret(release):
                yield _ref("v1", "Secret", secret)
        lease = Ref("coordination.k8s.io/v1", "Lease", namespace, self._params["scheduler_name"])
        if self._kube.get(lease):
            yield lease

    def _of_release(self, metadata: JsonObject) -> bool:
        """Return whether helm created an object for the release; hooks have the label only."""
        annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
        release, namespace = self._params["release"], self._params["namespace"]
        created = (annotations.get(RELEASE_NAME), annotations.get(RELEASE_NAMESPACE)) == (release, namespace)
        return created or (labels.get(INSTANCE) == release and "helm.sh/hook" in annotations)

    def plan(self, observed: Observed) -> Plan:
        changes = [Change(str(ref), f"{ref}\n", "", ref) for ref in observed.objects]
        for node in observed.nodes:
            patch, status, before = _node_patches(node, self._whole)
            if before:
                ref = _ref("v1", "Node", node)
                changes.append(Change(str(ref), before, "", (ref, patch, status)))
        for pod in observed.pods:
            keys = hami_marks.pod_annotations(pod)
            if keys and not terminating(pod):
                ref = _ref("v1", "Pod", pod)
                before = "".join(f"annotation {key}\n" for key in keys)
                changes.append(Change(str(ref), before, "", (ref, _annotations(keys), {})))
        return Plan(tuple(changes))

    def apply(self, observed: Observed, plan: Plan) -> None:
        for change in plan.changes:
            if isinstance(change.step, Ref):
                self._kube.delete(change.step)
                continue
            ref, patch, status = change.step
            if patch:
                self._kube.patch(ref, patch)
            if status:
                self._kube.patch(ref, status, "status")


def tls_secret(release: str) -> str:
    """Return the name of the Secret with the webhook's certificate, as the chart has it."""
    return f"{release if 'hami' in release else f'{release}-hami'}-scheduler-tls"


def _ref(api_version: str, kind: str, listed: JsonObject) -> Ref:
    metadata = listed["metadata"]
    return Ref(api_version, kind, str(metadata.get("namespace") or ""), str(metadata["name"]))


def _annotations(keys: t.Iterable[str]) -> JsonObject:
    return {"metadata": {"annotations": dict.fromkeys(keys)}}


def _node_patches(node: JsonObject, whole: bool) -> tuple[JsonObject, JsonObject, str]:
    """Return the merge patches of a node and of its status, and what they remove as text.

    :param whole: HAMi's scheduler is gone, too.
    """
    keys = hami_marks.node_annotations(node, handshakes=whole)
    patch: JsonObject = _annotations(keys) if keys else {}
    lines = [f"annotation {key}" for key in keys]
    labels = _labels(node)
    labelled = hami_marks.NODE_LABEL in labels
    if labels and not whole:
        patch = {"metadata": {**patch.get("metadata", {}), "labels": {name: None for name, _value in labels}}}
        lines += ["label {}={}".format(*label) for label in labels]
    there = [] if whole or labelled else left_behind(node, [hami.RESOURCE_COUNT]).get(hami.RESOURCE_COUNT, [])
    lines += [f"{field} {hami.RESOURCE_COUNT}: 0" for field in there]
    status = {"status": {field: {hami.RESOURCE_COUNT: None} for field in there}} if there else {}
    return patch, status, "".join(f"{line}\n" for line in lines)


def _labels(node: JsonObject) -> list[tuple[str, str]]:
    labels = node["metadata"].get("labels") or {}
    return [label for label in LABELS if labels.get(label[0]) == label[1]]


# --------------------------------------------------------------------------- nodes


def holders(pods: t.Iterable[JsonObject]) -> list[str]:
    """Return the pods that hold, or are about to get, a part of a card by HAMi."""
    running = (pod for pod in pods if pod_node(pod) and not finished(pod))
    return sorted(pod_key(pod) for pod in running if hami.POD_ALLOCATED in (pod["metadata"].get("annotations") or {}))


def _plugins(kube: Kube, node: str, namespace: str) -> list[str]:
    """Return HAMi's device plugin on a node. Elsewhere a pod of anybody may have its label."""
    key, value = hami_marks.PLUGIN_LABEL
    selectors = {"field_selector": f"spec.nodeName={node}", "label_selector": f"{key}={value}"}
    pods = kube.list_all("v1", "Pod", namespace, **selectors)
    return list(map(pod_key, pods))


class _Labels:
    """Reconciler: HAMi's device plugin is on none of the nodes."""

    def __init__(self, kube: Kube, nodes: t.Sequence[str]) -> None:
        self._kube = kube
        self._refs = [Ref("v1", "Node", "", name) for name in nodes]

    def observe(self) -> dict[Ref, list[tuple[str, str]]]:
        answers = [(ref, self._kube.get(ref)) for ref in self._refs]
        return {ref: _labels(node) for ref, node in answers if node and _labels(node)}

    def plan(self, labelled: dict[Ref, list[tuple[str, str]]]) -> Plan:
        return Plan(
            tuple(
                Change(str(ref), "".join("label {}={}\n".format(*label) for label in labels), "", (ref, labels))
                for ref, labels in labelled.items()
            )
        )

    def apply(self, labelled: dict[Ref, list[tuple[str, str]]], plan: Plan) -> None:
        for change in plan.changes:
            ref, labels = change.step
            self._kube.patch(ref, {"metadata": {"labels": {name: None for name, _value in labels}}})


def _wait_for_plugins(kube: Kube, nodes: t.Sequence[str], namespace: str, waiting: Waiting) -> None:
    """Wait until no pod of the device plugin is left on the nodes: it writes its annotations again.

    :raises NotInEffect: one is there at the timeout.
    """
    left: list[str] = []
    for _poll in waiting.attempts():
        left = [pod for name in nodes for pod in _plugins(kube, name, namespace)]
        if not left:
            return
    raise NotInEffect(
        f"HAMi's device plugin still runs {waiting.timeout:g} s after the nodes' label was removed: {', '.join(left)}; "
        "check that kubelet runs on these nodes"
    )


def _wait_until_forgotten(kube: Kube, nodes: t.Sequence[str], namespace: str, waiting: Waiting) -> None:
    """Wait until HAMi's scheduler places no pod on the nodes any more, where it still runs.

    It forgets a node at the latest a minute after its last handshake, and removes or marks that then, for some seconds.
    """
    key, value = hami_marks.SCHEDULER_LABEL
    if not kube.list_all("v1", "Pod", namespace, label_selector=f"{key}={value}"):
        return
    left = set(nodes)
    for _poll in dataclasses.replace(waiting, timeout=min(FORGET_SECONDS, waiting.timeout)).attempts():
        for name in sorted(left):
            node = kube.get(Ref("v1", "Node", "", name)) or {"metadata": {}}
            handshake = (node["metadata"].get("annotations") or {}).get(hami.NODE_HANDSHAKE)
            if handshake is None or hami.is_abandoned(handshake):
                left.discard(name)
        if not left:
            return


def ensure_removed(kube: Kube, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Take the device plugin off nodes, with all that it wrote; or remove what the release left in the cluster.

    The latter is found by itself, whatever helm believes.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    :param waiting: the clock, for tests.
    :raises BadInput: pods hold parts of cards, or with the cluster's scope a node still has the device plugin.
    :raises NotInEffect: the device plugin still runs.
    """
    leftovers = Leftovers(kube, params)
    observed = leftovers.observe()
    holding = holders(observed.pods)
    if holding:
        shown = f"{', '.join(holding[:5])}{f' and {len(holding) - 5} more' if len(holding) > 5 else ''}"
        raise BadInput(f"pods hold parts of cards by HAMi: {shown}; delete them first", code="pods_hold", pods=holding)
    if params["scope"] == "cluster":
        key, value = hami_marks.NODE_LABEL
        labelled = [
            str(node["metadata"]["name"])
            for node in observed.nodes
            if hami.NODE_REGISTER in (node["metadata"].get("annotations") or {})
            and (node["metadata"].get("labels") or {}).get(key) == value
        ]
        if labelled:
            message = f"HAMi's device plugin is still on {', '.join(labelled)}; remove it from the nodes first"
            raise BadInput(f"{message} (hami_step: remove_nodes)", code="nodes_left", nodes=labelled)
        return {**run(leftovers, check), "requests": dict(kube.requests)}
    nodes = [str(node["metadata"]["name"]) for node in observed.nodes]
    if check:
        return {**run(leftovers, check), "requests": dict(kube.requests)}
    first = run(_Labels(kube, nodes), check)
    waiting = waiting or Waiting(timeout=params["wait_timeout"])
    _wait_for_plugins(kube, nodes, params["namespace"], waiting)
    second = run(leftovers, check)
    if first["changed"]:
        _wait_until_forgotten(kube, nodes, params["namespace"], waiting)
    result = {"changed": first["changed"] or second["changed"], "diff": first["diff"] + second["diff"]}
    return {**result, "requests": dict(kube.requests)}
