# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""One look at a pod of the canary, read from what the API says of it. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as workloads
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._canary import NONSENSE
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import short
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json


@dataclasses.dataclass(frozen=True)
class Seen:
    """One look at a pod of the canary.

    :param says: what kubelet and the scheduler say of it.
    :param refusals: why the scheduler left it unbound.
    :param scheduler_broken: the scheduler calls it an error of its own.
    """

    name: str
    uid: str
    node: str
    phase: str
    running: bool
    ended: bool
    index: int | None
    annotations: Json
    says: str
    waits: tuple[str, ...]
    refusals: tuple[str, ...]
    scheduler_broken: bool
    priority: int
    preempts: bool

    @property
    def assigned(self) -> bool:
        return self.annotations.get(contract.POD_ASSIGNED) == "true"

    @property
    def booked(self) -> str:
        """Its annotations of the contract, as evidence."""
        told = [f"{key}={self.annotations[key]}" for key in contract.POD_ANNOTATIONS if key in self.annotations]
        return ", ".join(told) or "no annotation of gpushare"


def read(pod: Json, events: t.Sequence[Json] = ()) -> Seen:
    """
    :raises ShareError: the API's answer can't be read.
    """
    try:
        held = contract.booking(pod)
        status, spec = pod.get("status") or {}, pod.get("spec") or {}
        annotations = (pod.get("metadata") or {}).get("annotations") or {}
        return Seen(
            name=str(pod["metadata"]["name"]),
            uid=contract.pod_uid(pod),
            node=contract.pod_node(pod),
            phase=str(status.get("phase") or "unknown"),
            running=workloads.running(pod),
            ended=contract.finished(pod),
            index=held.index if held else None,
            annotations=dict(annotations),
            says=_says(pod, events),
            waits=tuple(_reasons(status)),
            refusals=tuple(one for one in workloads.refusals(pod, events) if one),
            scheduler_broken=any(
                one.get("type") == "PodScheduled" and one.get("reason") == "SchedulerError"
                for one in status.get("conditions") or []
            ),
            priority=contract.pod_priority(pod),
            preempts=spec.get("preemptionPolicy") != "Never",
        )
    except NONSENSE as error:
        raise ShareError(f"what the API says of a pod of the canary can't be read: {type(error).__name__}") from error


def _states(status: Json) -> t.Iterator[tuple[str, Json]]:
    for field, prefix in (("initContainerStatuses", "init:"), ("containerStatuses", "")):
        for one in status.get(field) or []:
            state = (one.get("state") or {}).get("waiting") or (one.get("state") or {}).get("terminated")
            if state:
                yield prefix, state


def _reasons(status: Json) -> t.Iterator[str]:
    for _prefix, state in _states(status):
        yield str(state.get("reason") or "")


def _says(pod: Json, events: t.Sequence[Json]) -> str:
    """Phase, kubelet's reasons, and the last warning: why a container isn't made yet is only told by events."""
    status = pod.get("status") or {}
    words = [str(status.get("phase") or "unknown")]
    words += [str(status[key]) for key in ("reason", "message") if status.get(key)]
    for prefix, state in _states(status):
        words += [prefix + str(state[key]) for key in ("reason", "message") if state.get(key)]
    warnings = [
        str(one.get("message") or one.get("note") or "")
        for one in events
        if one.get("type") == "Warning"
        and (one.get("involvedObject") or one.get("regarding") or {}).get("uid") == contract.pod_uid(pod)
    ]
    words += warnings[-1:]
    return short("; ".join(dict.fromkeys(word for word in words if word)))
