# SPDX-License-Identifier: GPL-3.0-or-later
"""Determine whether the Binding of a booking has taken effect, or still can.

A Binding carries the resourceVersion of the pod that it was decided for, and the API server takes it as a precondition.
So a pod that is unbound at another version proves that this Binding can't take effect any more, however long its sender
was paused or the request delayed. Where that must be certain, the pod is changed: it is fenced.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable
from typing import NamedTuple

from gpushare.api import paths
from gpushare.api.client import Kube, KubeError
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

# How often a pod may change between reading it and fencing it.
TRIES = 4


class Entry(NamedTuple):
    """One booking of the ledger.

    :param cards: card index and units, by index.
    :param at: when it was decided, in milliseconds since 1970.
    :param version: the pod's resourceVersion that its Binding carries.
    :param by: the extender that decided it.
    """

    uid: str
    namespace: str
    name: str
    node: str
    cards: tuple[tuple[int, int], ...]
    at: int
    version: str
    by: str

    def to_json(self) -> JsonObject:
        """Return the value that stands in the ledger."""
        return {**self._asdict(), "cards": {str(index): units for index, units in self.cards}}

    def to_text(self) -> str:
        """Format as compact JSON."""
        return json.dumps(self.to_json(), separators=(",", ":"))


class BindingStatus(enum.Enum):
    """``BOUND``: the pod is bound, by this Binding or another one. ``VOID``: it isn't, and this Binding can't take
    effect. ``GONE``: the pod doesn't exist any more, or has finished. ``OPEN``: the Binding may still take effect."""

    BOUND = "bound"
    VOID = "void"
    GONE = "gone"
    OPEN = "open"


def now_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def patch_pod(kube: Kube, namespace: str, name: str, metadata: JsonObject) -> JsonObject:
    """Merge metadata into a pod, by its status: there the API server changes annotations, and no specification.

    :param metadata: a merge patch of the pod's metadata.
    :returns: the pod.
    :raises KubeError: the API server refuses, or the pod isn't the one of the UID or resourceVersion in ``metadata``.
    """
    return kube.patch(paths.pod(namespace, name) + "/status", {"metadata": metadata})


def binding_status(
    kube: Kube, entry: Entry, fence: bool = True, clock_ms: Callable[[], int] = now_ms
) -> tuple[BindingStatus, JsonObject]:
    """Determine the status of a booking's Binding.

    :param kube: the client of the API.
    :param entry: the booking.
    :param fence: change the pod where only that makes the status certain; without it the status may be ``OPEN``.
    :param clock_ms: the time in milliseconds since 1970.
    :returns: the status, and the pod as it is now (empty if it is gone).
    :raises KubeError: it can't be determined now.
    """
    path = paths.pod(entry.namespace, entry.name)
    for left in reversed(range(TRIES)):
        try:
            pod = kube.get(path)
            status = _status_of(pod, entry)
            if status is not BindingStatus.OPEN or not fence:
                return status, pod
            # The preconditions prove that the pod was unbound until this change.
            precondition = {"uid": entry.uid, "resourceVersion": entry.version}
            mark = {"annotations": {contract.POD_FENCED: str(clock_ms())}}
            return BindingStatus.VOID, patch_pod(kube, entry.namespace, entry.name, {**precondition, **mark})
        except KubeError as error:
            if error.status == 404:
                return BindingStatus.GONE, {}
            if error.status != 409 or not left:
                raise
    raise AssertionError("unreachable")


def _status_of(pod: JsonObject, entry: Entry) -> BindingStatus:
    metadata = pod.get("metadata") or {}
    if contract.pod_uid(pod) != entry.uid or contract.finished(pod):
        return BindingStatus.GONE
    if contract.pod_node(pod):
        return BindingStatus.BOUND
    if metadata.get("deletionTimestamp") or metadata.get("resourceVersion") != entry.version:
        return BindingStatus.VOID
    return BindingStatus.OPEN
