# SPDX-License-Identifier: GPL-3.0-or-later
"""A run's outcome as the conditions and the Event of a GPUShare. Pure."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

from .resource import JsonObject

AVAILABLE, PROGRESSING, DEGRADED = "Available", "Progressing", "Degraded"
TYPES = (AVAILABLE, PROGRESSING, DEGRADED)
# Characters; the API's limit of a condition's message is 32768, and of an Event's 1024.
MOST_MESSAGE = 1000
_REASON = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :param id: of the finding, or of the cause, that it ended with; of a run that succeeded, what it did.
    :param message: the sentence.
    :param failed: whether it did not reach what the resource asks for.
    :param works: whether what is deployed was proven to work, or not to; None where the run can't tell.
    :param changed: how many tasks changed something.
    :param holders: of an uninstall that waits for pods: their namespaces and names.
    """

    id: str
    message: str
    failed: bool = False
    works: bool | None = None
    changed: int = 0
    holders: tuple[tuple[str, str], ...] = ()


def reason_of(id: str) -> str:
    """Return an id as a condition's reason, in which the API allows no hyphen: ``wrong-value`` is ``wrong_value``."""
    reason = _REASON.sub("_", id).strip("_")
    return reason if reason[:1].isalpha() else f"id_{reason}"


def _condition(kind: str, state: bool | None, reason: str, message: str) -> JsonObject:
    status = "Unknown" if state is None else str(state)
    return {"type": kind, "status": status, "reason": reason_of(reason), "message": message[:MOST_MESSAGE]}


def begun(generation: int, status: JsonObject, deleting: bool, now: str) -> JsonObject:
    """Return the status while a run is under way that may change something."""
    before = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    what = ("uninstalling", "what was deployed is being removed") if deleting else ("reconciling", "a run is under way")
    wanted = [_condition(PROGRESSING, True, *what)]
    if AVAILABLE not in before:
        wanted.append(_condition(AVAILABLE, None, "never_verified", "no run has verified it yet"))
    if DEGRADED not in before:
        wanted.append(_condition(DEGRADED, False, "no_finding", "no run has ended yet"))
    made = merged(status, wanted, generation, now)
    # That of the last run that ended.
    former = status.get("observedGeneration")
    return {key: value for key, value in {**made, "observedGeneration": former}.items() if value is not None}


def ended(generation: int, status: JsonObject, outcome: Outcome, now: str) -> JsonObject:
    """Return the status after a run."""
    before = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    wanted = [_condition(PROGRESSING, False, outcome.id, outcome.message)]
    if outcome.works is not None:
        wanted.append(_condition(AVAILABLE, outcome.works, outcome.id, outcome.message))
    elif AVAILABLE not in before:
        wanted.append(_condition(AVAILABLE, None, "never_verified", "no run has verified it yet"))
    wanted.append(
        _condition(DEGRADED, True, outcome.id, outcome.message)
        if outcome.failed
        else _condition(DEGRADED, False, "no_finding", "the last run ended without a finding that stops it")
    )
    return merged(status, wanted, generation, now)


def merged(status: JsonObject, wanted: t.Iterable[JsonObject], generation: int, now: str) -> JsonObject:
    """Return a status with conditions replaced; a time changes only where a condition's status does.

    :param status: as it is stored, which isn't changed.
    :param now: as the API writes times.
    """
    before = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if isinstance(condition, dict) and "type" in condition
    }
    after = dict(before)
    for condition in wanted:
        old = before.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        since = old.get("lastTransitionTime") if same else now
        after[condition["type"]] = {**condition, "observedGeneration": generation, "lastTransitionTime": since or now}
    return {
        "observedGeneration": generation,
        "conditions": [after[kind] for kind in TYPES if kind in after],
    }


def differs(before: JsonObject, after: JsonObject) -> bool:
    """Return whether a status has to be written."""
    return any(before.get(key) != value for key, value in after.items())


def event(resource_name: str, uid: str, outcome: Outcome, now: str, name: str, version: str) -> JsonObject:
    """Return an Event of the API. Those of objects outside namespaces are in the namespace default."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {
            "apiVersion": version,
            "kind": "GPUShare",
            "name": resource_name,
            "uid": uid,
        },
        "type": "Warning" if outcome.failed else "Normal",
        "reason": reason_of(outcome.id),
        "message": outcome.message[:MOST_MESSAGE],
        "source": {"component": "kubegpu-operator"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
