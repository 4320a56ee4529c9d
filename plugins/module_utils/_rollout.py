# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Is a workload rolled out, and if not, why: in words, from the API's objects. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import node_resource
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, ref_of

WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet")
# Events that only repeat what the state of the container says.
REPEATING = ("Failed:", "BackOff:", "ErrImageNeverPull:", "InspectFailed:", "FailedScheduling:")
# A reason is for a person: the first few say it.
MOST_REASONS = 6


def unfinished(live: Json, node_resources: t.Sequence[str] = ()) -> str | None:
    """What an object still waits for, or None where it is as it should be.

    :param node_resources: what each node must announce more than 0 of.
    """
    kind, status = live["kind"], live.get("status") or {}
    if kind == "Node":
        lacking = [name for name in node_resources if node_resource(live, name, "allocatable") <= 0]
        return f"{ref_of(live)} doesn't announce {' and '.join(lacking)}" if lacking else None
    if kind not in WORKLOADS:
        return None
    if int(status.get("observedGeneration") or 0) < int((live.get("metadata") or {}).get("generation") or 0):
        return f"{ref_of(live)}: its controller hasn't seen the change yet"
    if kind == "DaemonSet":
        wanted = int(status.get("desiredNumberScheduled") or 0)
        on_delete = ((live.get("spec") or {}).get("updateStrategy") or {}).get("type") == "OnDelete"
        counted = [] if on_delete else [("of the new revision", status.get("updatedNumberScheduled"))]
        counted += [("ready", status.get("numberReady")), ("available", status.get("numberAvailable"))]
    else:
        replicas = (live.get("spec") or {}).get("replicas")
        wanted = 1 if replicas is None else int(replicas)
        counted = [("of the new revision", status.get("updatedReplicas")), ("ready", status.get("readyReplicas"))]
        if kind == "Deployment":
            counted.append(("available", status.get("availableReplicas")))
        if int(status.get("replicas") or 0) > wanted:
            return f"{ref_of(live)}: pods of the old revision still run"
    for word, value in counted:
        if int(value or 0) < wanted:
            return f"{ref_of(live)}: {int(value or 0)} of {wanted} {'pod is' if wanted == 1 else 'pods are'} {word}"
    return None


def selector(live: Json) -> str:
    """The label selector of a workload's pods, as a query."""
    labels = (((live.get("spec") or {}).get("selector") or {}).get("matchLabels")) or {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def ready(pod: Json) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return False
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def unready(pod: Json) -> list[str]:
    """Names of containers that have something to say: they ran, or run, and aren't ready."""
    return [
        str(one["name"])
        for one in (pod.get("status") or {}).get("containerStatuses") or []
        if not one.get("ready") and ("running" in (one.get("state") or {}) or one.get("lastState"))
    ]


def reasons(workload: Json | None, pods: t.Iterable[Json], events: t.Sequence[Json]) -> list[str]:
    """Why pods aren't ready, most telling first, without repetitions."""
    found = []
    for pod in pods:
        if not ready(pod):
            found += _pod_reasons(pod, _warnings(events, "Pod", pod))
    if workload is not None:
        # No pod at all: admission, a quota or a missing service account stands in the way.
        found += [f"{ref_of(workload)}: {text}" for text in _warnings(events, workload["kind"], workload)]
    return list(dict.fromkeys(found))[:MOST_REASONS]


def _pod_reasons(pod: Json, warnings: list[str]) -> list[str]:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    where = f" on {spec['nodeName']}" if spec.get("nodeName") else ""
    name = f"pod {(pod.get('metadata') or {}).get('name', '')}{where}"
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return [f"{name} is being deleted"]
    said = []
    for one in list(status.get("initContainerStatuses") or []) + list(status.get("containerStatuses") or []):
        text = _container_reason(one)
        if text:
            said.append(f"{name}: container {one.get('name')} {text}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said.append(f"{name} isn't scheduled: {_short(condition.get('message') or condition.get('reason'))}")
    if status.get("reason") or (status.get("phase") == "Failed" and status.get("message")):
        said.append(f"{name}: {_short(' '.join(filter(None, [status.get('reason'), status.get('message')])))}")
    # An event says what the container's own state doesn't: a mount that fails, a probe's answer.
    telling = [text for text in warnings if not text.startswith(REPEATING)]
    said += [f"{name}: {text}" for text in telling[-1:]]
    return said or [f"{name} is {status.get('phase', 'unknown')} and not ready"]


def _container_reason(container: Json) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ended = last.get("terminated") or {}
    before = ""
    if ended:
        before = f"; before, it ended with code {ended.get('exitCode')} ({_short(ended.get('reason'))})"
        if ended.get("message"):
            before += f": {_short(ended['message'])}"
    if state.get("waiting"):
        waiting = state["waiting"]
        message = f" ({_short(waiting['message'])})" if waiting.get("message") else ""
        return f"waits: {waiting.get('reason', 'unknown reason')}{message}{before}"
    if state.get("terminated") and state["terminated"].get("exitCode"):
        now = state["terminated"]
        text = f": {_short(now['message'])}" if now.get("message") else ""
        return f"ended with code {now['exitCode']} ({_short(now.get('reason'))}){text}"
    if "running" in state and not container.get("ready"):
        return f"runs and isn't ready{before}"
    return ""


def _warnings(events: t.Sequence[Json], kind: str, involved: Json) -> list[str]:
    """The Warning events of one object, oldest first."""
    metadata = involved.get("metadata") or {}
    mine = []
    for event in events:
        what = event.get("involvedObject") or {}
        same = what.get("kind") == kind and what.get("name") == metadata.get("name")
        if same and event.get("type") == "Warning" and what.get("uid", metadata.get("uid")) == metadata.get("uid"):
            when = str(event.get("lastTimestamp") or event.get("eventTime") or "")
            mine.append((when, f"{event.get('reason')}: {_short(event.get('message'))}"))
    return [text for _when, text in sorted(mine)]


def _short(value: t.Any) -> str:
    text = " ".join(str(value or "").split())
    return text if len(text) <= 300 else text[:300] + "…"
