# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a suite's pod, as the API reports it. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import gpushare as contract
from .._core.errors import ShareError
from .._core.types import JsonObject
from .nodes import MALFORMED
from .result import shorten


@dataclasses.dataclass(frozen=True)
class PodState:
    """A pod at one moment.

    :param index: the card in its annotations; None without one.
    :param summary: its phase with the reasons of kubelet and the scheduler, in one line.
    :param waiting: why its containers aren't running, by kubelet.
    :param refusals: why the scheduler left it unbound.
    :param scheduler_error: the scheduler reports an error of its own.
    """

    name: str
    uid: str
    node: str
    phase: str
    running: bool
    ended: bool
    index: int | None
    annotations: JsonObject
    summary: str
    waiting: tuple[str, ...]
    refusals: tuple[str, ...]
    scheduler_error: bool
    priority: int
    preempts: bool

    @property
    def assigned(self) -> bool:
        return self.annotations.get(contract.POD_ASSIGNED) == "true"

    @property
    def booking(self) -> str:
        """The contract's annotations, as evidence."""
        found = [f"{key}={self.annotations[key]}" for key in contract.POD_ANNOTATIONS if key in self.annotations]
        return ", ".join(found) or "no annotation of gpushare"


def pod_state(pod: JsonObject, events: t.Iterable[JsonObject] = ()) -> PodState:
    """Read a pod's state.

    :param events: of its namespace.
    :raises ShareError: the object is malformed.
    """
    try:
        held = contract.booking(pod)
        status, spec = pod.get("status") or {}, pod.get("spec") or {}
        own = [one for one in events if _involved(one).get("uid") == contract.pod_uid(pod)]
        return PodState(
            name=str(pod["metadata"]["name"]),
            uid=contract.pod_uid(pod),
            node=contract.pod_node(pod),
            phase=str(status.get("phase") or "unknown"),
            running=is_running(pod),
            ended=contract.finished(pod),
            index=held.index if held else None,
            annotations=dict((pod.get("metadata") or {}).get("annotations") or {}),
            summary=_summary(status, own),
            waiting=tuple(str(state.get("reason") or "") for _prefix, state in _stopped(status)),
            refusals=tuple(_refusals(status, own)),
            scheduler_error=any(one.get("reason") == "SchedulerError" for one in _unscheduled(status)),
            priority=contract.pod_priority(pod),
            preempts=spec.get("preemptionPolicy") != "Never",
        )
    except MALFORMED as error:
        raise ShareError(f"a pod's object in the API is malformed: {type(error).__name__}") from error


def is_running(pod: JsonObject) -> bool:
    """Return whether all containers of a pod run."""
    status = pod.get("status") or {}
    up = [one for one in status.get("containerStatuses") or [] if (one.get("state") or {}).get("running") is not None]
    return status.get("phase") == "Running" and len(up) == len((pod.get("spec") or {}).get("containers") or [])


def _involved(event: JsonObject) -> JsonObject:
    return event.get("involvedObject") or event.get("regarding") or {}


def _message(event: JsonObject) -> str:
    return str(event.get("message") or event.get("note") or "")


def _unscheduled(status: JsonObject) -> t.Iterator[JsonObject]:
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            yield one


def _refusals(status: JsonObject, events: t.Iterable[JsonObject]) -> t.Iterator[str]:
    """Return why the scheduler left the pod unbound: its condition and its FailedScheduling events."""
    texts = [str(one.get("message", "")) for one in _unscheduled(status)]
    texts += [_message(one) for one in events if one.get("reason") == "FailedScheduling"]
    return (text for text in texts if text)


def _stopped(status: JsonObject) -> t.Iterator[tuple[str, JsonObject]]:
    for field, prefix in (("initContainerStatuses", "init:"), ("containerStatuses", "")):
        for one in status.get(field) or []:
            state = (one.get("state") or {}).get("waiting") or (one.get("state") or {}).get("terminated")
            if state:
                yield prefix, state


def _summary(status: JsonObject, events: t.Sequence[JsonObject]) -> str:
    """Return phase, kubelet's reasons, and the last warning: only events report why a container isn't created yet."""
    parts = [str(status.get("phase") or "unknown")]
    parts += [str(status[key]) for key in ("reason", "message") if status.get(key)]
    for prefix, state in _stopped(status):
        parts += [prefix + str(state[key]) for key in ("reason", "message") if state.get(key)]
    parts += [_message(one) for one in events if one.get("type") == "Warning"][-1:]
    return shorten("; ".join(dict.fromkeys(part for part in parts if part)))
