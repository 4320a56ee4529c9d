# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find out whether a workload is rolled out, and why not, from objects of the API. Pure."""

from __future__ import annotations

import typing as t
from types import MappingProxyType

from .._contracts.gpushare import node_resource, terminating
from .._core.both_ends import both_ends
from .._core.types import JsonObject
from .refs import is_ready, ref_of

WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet")
# Events that only repeat the state of the container.
REPEATING = ("Failed", "BackOff", "ErrImageNeverPull", "InspectFailed", "FailedScheduling")
# Enough for a person.
MAX_REASONS = 6


def not_ready_reason(
    live: JsonObject, node_resources: t.Mapping[str, int] = MappingProxyType({}), min_nodes: int = 1
) -> str | None:
    """Return why an object isn't ready; None if it is.

    :param node_resources: of each resource, how many must be allocatable on each node; 0 for any number above 0.
    :param min_nodes: on how many nodes a DaemonSet has to run, at least; one that runs on fewer isn't ready.
    """
    kind, ref, status = live["kind"], ref_of(live), live.get("status") or {}
    if kind == "Node":
        there = {name: max(node_resource(live, name, "allocatable"), 0) for name in node_resources}
        missing = [name for name, number in there.items() if not number]
        if missing:
            return f"{ref} doesn't announce {' and '.join(missing)}"
        others = [
            f"{there[name]} {name}, not {number}"
            for name, number in node_resources.items()
            if number not in (0, there[name])
        ]
        return f"{ref} announces {' and '.join(others)}" if others else None
    if kind not in WORKLOADS:
        return None
    if int(status.get("observedGeneration") or 0) < int((live.get("metadata") or {}).get("generation") or 0):
        return f"{ref}: its controller hasn't processed the change yet"
    if kind == "DaemonSet":
        wanted = int(status.get("desiredNumberScheduled") or 0)
        if wanted < min_nodes:
            matching = f"only {wanted} of {min_nodes} nodes match" if wanted else "no node matches"
            return f"{ref}: {matching} its selectors and tolerations, and others get no pod of it"
        on_delete = ((live.get("spec") or {}).get("updateStrategy") or {}).get("type") == "OnDelete"
        counted = [] if on_delete else [("of the new revision", status.get("updatedNumberScheduled"))]
        counted += [("ready", status.get("numberReady")), ("available", status.get("numberAvailable"))]
    else:
        replicas = (live.get("spec") or {}).get("replicas")
        wanted = 1 if replicas is None else int(replicas)
        if not wanted:
            return f"{ref}: it is scaled to 0, so it has no pod"
        counted = [("of the new revision", status.get("updatedReplicas")), ("ready", status.get("readyReplicas"))]
        if kind == "Deployment":
            counted.append(("available", status.get("availableReplicas")))
        if int(status.get("replicas") or 0) > wanted:
            return f"{ref}: pods of the old revision still run"
    for word, value in counted:
        if int(value or 0) < wanted:
            return f"{ref}: {int(value or 0)} of {wanted} {'pod is' if wanted == 1 else 'pods are'} {word}"
    return None


def selector(live: JsonObject) -> str:
    """Return the label selector of a workload's pods for a request."""
    labels = (((live.get("spec") or {}).get("selector") or {}).get("matchLabels")) or {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def ready(pod: JsonObject) -> bool:
    """Return whether a pod is ready and not being deleted."""
    return not terminating(pod) and is_ready(pod)


def containers_with_logs(pod: JsonObject) -> list[str]:
    """Return the names of containers that aren't ready and have run, so that they may have logs."""
    return [
        str(status["name"])
        for status in (pod.get("status") or {}).get("containerStatuses") or []
        if not status.get("ready") and ("running" in (status.get("state") or {}) or status.get("lastState"))
    ]


def reasons(workload: JsonObject | None, pods: t.Iterable[JsonObject], events: t.Sequence[JsonObject]) -> list[str]:
    """Return why pods aren't ready, without duplicates.

    :param workload: the workload, if its own events are wanted.
    :param events: the Warning events of the namespace.
    """
    texts = []
    for pod in pods:
        if not ready(pod):
            texts += _pod_reasons(pod, _warnings(events, "Pod", pod))
    if workload is not None:
        # Without a pod, admission, a quota or a missing service account prevents it.
        warnings = _warnings(events, workload["kind"], workload)
        texts += [f"{ref_of(workload)}: {reason}: {text}" for reason, text in warnings]
    return list(dict.fromkeys(texts))[:MAX_REASONS]


def node_reasons(node: JsonObject) -> list[str]:
    """Return why pods may not run on a node: it isn't Ready, or has taints of its administrators."""
    conditions = (node.get("status") or {}).get("conditions") or []
    messages = [str(condition.get("message") or "") for condition in conditions if condition.get("type") == "Ready"]
    texts = []
    if not is_ready(node):
        texts.append(f"{ref_of(node)} isn't Ready: {_short(' '.join(messages) or 'it reports nothing')}")
    # DaemonSets tolerate Kubernetes' own.
    taints = [
        f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        for taint in (node.get("spec") or {}).get("taints") or []
        if taint.get("effect") != "PreferNoSchedule" and not str(taint.get("key")).startswith("node.kubernetes.io/")
    ]
    if taints:
        texts.append(f"{ref_of(node)} has the taints {', '.join(taints)}")
    return texts


def of_daemon_set(pod: JsonObject) -> bool:
    """Return whether a DaemonSet made a pod."""
    return any(owner.get("kind") == "DaemonSet" for owner in (pod.get("metadata") or {}).get("ownerReferences") or [])


def _pod_reasons(pod: JsonObject, warnings: list[tuple[str, str]]) -> list[str]:
    metadata, spec, status = (pod.get(field) or {} for field in ("metadata", "spec", "status"))
    where = f" on {spec['nodeName']}" if spec.get("nodeName") else ""
    name = f"pod {metadata.get('name', '')}{where}"
    if metadata.get("deletionTimestamp"):
        return [f"{name} is being deleted"]
    texts = []
    for container in list(status.get("initContainerStatuses") or []) + list(status.get("containerStatuses") or []):
        text = _container_reason(container)
        if text:
            texts.append(f"{name}: container {container.get('name')} {text}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            texts.append(f"{name} isn't scheduled: {_short(condition.get('message') or condition.get('reason'))}")
    if status.get("reason") or (status.get("phase") == "Failed" and status.get("message")):
        texts.append(f"{name}: {_short(' '.join(filter(None, [status.get('reason'), status.get('message')])))}")
    # An event has involved the container's state lacks: a failed mount, a probe's response.
    details = [f"{reason}: {text}" for reason, text in warnings if reason not in REPEATING]
    texts += [f"{name}: {text}" for text in details[-1:]]
    return texts or [f"{name} is {status.get('phase', 'unknown')} and not ready"]


def _container_reason(container: JsonObject) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = last.get("terminated") or {}
    before = ""
    if ended:
        before = f"; before that, it ended with code {ended.get('exitCode')} ({_short(ended.get('reason'))})"
        if ended.get("message"):
            before += f": {_short(ended['message'])}"
    if state.get("waiting"):
        waiting = state["waiting"]
        message = f" ({_short(waiting['message'])})" if waiting.get("message") else ""
        return f"is waiting: {waiting.get('reason', 'unknown reason')}{message}{before}"
    if state.get("terminated") and state["terminated"].get("exitCode"):
        now = state["terminated"]
        text = f": {_short(now['message'])}" if now.get("message") else ""
        return f"ended with code {now['exitCode']} ({_short(now.get('reason'))}){text}"
    if "running" in state and not container.get("ready"):
        return f"is running but not ready{before}"
    return ""


def _warnings(events: t.Sequence[JsonObject], kind: str, involved: JsonObject) -> list[tuple[str, str]]:
    """Return the reason and the text of each Warning event of an object, oldest first."""
    metadata = involved.get("metadata") or {}
    mine = []
    for event in events:
        involved = event.get("involvedObject") or {}
        same = involved.get("kind") == kind and involved.get("name") == metadata.get("name")
        if same and event.get("type") == "Warning" and involved.get("uid", metadata.get("uid")) == metadata.get("uid"):
            when = str(event.get("lastTimestamp") or event.get("eventTime") or "")
            mine.append((when, str(event.get("reason")), _short(event.get("message"))))
    return [(reason, text) for _when, reason, text in sorted(mine)]


def _short(value: t.Any) -> str:
    return both_ends(value, 300)
