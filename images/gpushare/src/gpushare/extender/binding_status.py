# SPDX-License-Identifier: GPL-3.0-or-later
"""Determine whether the Binding of a booking has taken effect, or still can.

A Binding carries the resourceVersion of the pod that it was decided on, and the API server takes it as a precondition.
So a pod that is unbound at another version proves that this Binding can't take effect any more, however long its sender
was paused and wherever the request is. Where that must be certain, the pod is changed: it is fenced.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from gpushare.api.client import Kube, KubeError
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

# How often a pod may change between looking at it and fencing it.
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


class BindingStatus(enum.Enum):
    """``BOUND``: the pod is bound, by this Binding or another one. ``VOID``: it isn't, and this Binding never will.
    ``GONE``: there is no such pod any more, or it has finished. ``OPEN``: it may still come true."""

    BOUND = "bound"
    VOID = "void"
    GONE = "gone"
    OPEN = "open"


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def fate(
    kube: Kube, entry: Entry, fence: bool = True, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
) -> tuple[BindingStatus, JsonObject]:
    """Determine the status of a booking's Binding, and the pod as it is now (empty if it is gone).

    :param fence: change the pod if that is what it takes to be sure; without it the answer may be ``OPEN``.
    :raises KubeError: it can't be determined now.
    """
    path = pod_path(entry.namespace, entry.name)
    for left in reversed(range(TRIES)):
        try:
            pod = kube.get(path)
            found = _seen(pod, entry)
            if found is not BindingStatus.OPEN or not fence:
                return found, pod
            # The precondition makes this the last moment at which the pod was unbound.
            precondition = {"uid": entry.uid, "resourceVersion": entry.version}
            mark = {"annotations": {contract.POD_FENCED: str(now_ms())}}
            return BindingStatus.VOID, kube.patch(path, {"metadata": {**precondition, **mark}})
        except KubeError as error:
            if error.status == 404:
                return BindingStatus.GONE, {}
            if error.status != 409 or not left:
                raise
    raise AssertionError("unreachable")


def _seen(pod: JsonObject, entry: Entry) -> BindingStatus:
    metadata = pod.get("metadata") or {}
    if contract.pod_uid(pod) != entry.uid or contract.finished(pod):
        return BindingStatus.GONE
    if contract.pod_node(pod):
        return BindingStatus.BOUND
    if metadata.get("deletionTimestamp") or metadata.get("resourceVersion") != entry.version:
        return BindingStatus.VOID
    return BindingStatus.OPEN
