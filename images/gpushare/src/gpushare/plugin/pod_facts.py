# SPDX-License-Identifier: GPL-3.0-or-later
"""Values derived from a pod, computed once for each state of it that the mirror keeps.

kubelet's calls and the reconciler go over all pods of the node each time, and few of them have changed since.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

T = t.TypeVar("T")
P = t.ParamSpec("P")


class MirroredPod(dict[str, t.Any]):
    """A pod in the mirror: replaced by another object when it changes, never changed itself."""

    __slots__ = ("worked_out",)

    def __init__(self, pod: JsonObject) -> None:
        super().__init__(pod)
        self.worked_out: dict[str, tuple[t.Any, t.Any]] = {}


def kept(function: t.Callable[t.Concatenate[JsonObject, P], T]) -> t.Callable[t.Concatenate[JsonObject, P], T]:
    """Cache a function's result on a :class:`MirroredPod`; callers must not change it. Other pods aren't cached.

    Only the result for the last arguments is kept.
    """
    name = function.__name__

    @functools.wraps(function)
    def ask(pod: JsonObject, /, *more: P.args, **named: P.kwargs) -> T:
        if not isinstance(pod, MirroredPod) or named:
            return function(pod, *more, **named)
        asked, known = pod.worked_out.get(name, (None, None))
        answer: T = known if asked == more else function(pod, *more, **named)
        if asked != more:
            pod.worked_out[name] = (more, answer)
        return answer

    return ask


@dataclasses.dataclass(frozen=True)
class Step:
    """A container that wants units; plain init containers are hidden from PodResources."""

    name: str
    units: int
    hidden: bool


@kept
def steps(pod: JsonObject) -> tuple[Step, ...]:
    """Return the containers that want units, in the order in which kubelet serves them."""
    everything = (
        Step(str(container.get("name", "")), contract.container_units(container), hidden)
        for container, hidden in contract.containers_in_order(pod.get("spec") or {})
    )
    return tuple(step for step in everything if step.units > 0)


def privileged(container: JsonObject) -> bool:
    return bool((container.get("securityContext") or {}).get("privileged"))


@kept
def privileged_containers(pod: JsonObject) -> tuple[str, ...]:
    """Return the names of the privileged containers that may run; plain init containers have ended."""
    spec = pod.get("spec") or {}
    inits = [container for container in spec.get("initContainers") or [] if container.get("restartPolicy") == "Always"]
    everything = [*inits, *(spec.get("containers") or []), *(spec.get("ephemeralContainers") or [])]
    return tuple(str(container.get("name", "")) for container in everything if privileged(container))


@kept
def visible_units(pod: JsonObject) -> int:
    """Return the units of the containers that PodResources show."""
    return sum(step.units for step in steps(pod) if not step.hidden)


@kept
def recency(pod: JsonObject) -> tuple[str, int, str]:
    """Return a sort key: when kubelet can have received the pod."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    times = [str(metadata.get("creationTimestamp") or "")]
    times += [
        str(condition.get("lastTransitionTime") or "")
        for condition in status.get("conditions") or []
        if condition.get("type") == "PodScheduled"
    ]
    held = booking(pod)
    return max(times), held.assume_time if held else 0, contract.pod_uid(pod)


key = kept(contract.pod_key)
units = kept(contract.pod_units)
booking = kept(contract.booking)
shares = kept(contract.shares)
counts = kept(contract.counts)


def assigned(pod: JsonObject) -> bool:
    held = booking(pod)
    return held is not None and held.assigned


def started(pod: JsonObject) -> bool:
    """Return whether kubelet has admitted this very pod (by UID)."""
    return bool((pod.get("status") or {}).get("startTime"))


def by_key(pods: t.Iterable[JsonObject]) -> dict[str, JsonObject]:
    return {key(pod): pod for pod in pods}
