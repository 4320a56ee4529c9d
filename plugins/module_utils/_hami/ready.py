# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until a release of HAMi works: pods, webhook and registered nodes; module backend_objects."""

from __future__ import annotations

import functools
import typing as t

from .._contracts import hami
from .._contracts.hami_marks import PLUGIN_LABEL
from .._core.errors import NotInEffect, ShareError
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
    found = []
    for api_version, kind in WORKLOADS:
        found += kube.list_all(api_version, kind, namespace, label_selector=f"{INSTANCE}={release}")
    return found


def unready(kube: DryRun, params: JsonObject) -> list[str]:
    """Return what isn't ready now.

    :param params: the module's options.
    """
    there = workloads(kube, params["release"], params["namespace"])
    found = [not_ready_reason(one, min_nodes=0) or "" for one in there] or [_none(params)]
    found.append(not_on_nodes(there, params["nodes"]))
    if params["proof_namespace"]:
        found.append(webhook_problem(kube, params))
    return [reason for reason in (*found, unregistered(kube, params["nodes"])) if reason]


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
        one
        for one in there
        if one["kind"] == "DaemonSet" and (one["spec"]["template"]["metadata"].get("labels") or {}).get(key) == value
    ]
    reasons = [not_ready_reason(one, min_nodes=1) or "" for one in plugins]
    return "; ".join(filter(None, reasons)) if plugins else "the release has no DaemonSet of HAMi's device plugin"


def wait_rolled_out(kube: Kube, params: JsonObject, waiting: Waiting) -> None:
    """Wait until all pods of the release are ready.

    :param params: the module's options.
    :raises NotInEffect: they aren't at the timeout; with the reasons of the pods, their events and logs.
    """
    found = workloads(kube, params["release"], params["namespace"])
    if not found:
        raise NotInEffect(_none(params))
    watched = ClusterObjects(kube, [_name_only(one) for one in found], "present", min_nodes=0)
    watched.observe()
    watched.wait(waiting)


def _name_only(one: JsonObject) -> JsonObject:
    metadata = {key: one["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": one["apiVersion"], "kind": one["kind"], "metadata": metadata}


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


def ensure(kube: DryRun, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Wait; see module backend_objects.

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
