# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-runner reported of a run, as an outcome: from codes and fields of results, never from text. Pure."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line

from .conditions import MOST_MESSAGE, Outcome
from .resource import JsonObject

PREFLIGHT = frozenset(("kubegpu.share.preflight", "kubegpu.share.preflight_variables"))
PROBLEM = "problem"
# The results of verify.yml that say that something doesn't work.
BROKEN = "FAIL"
# Of a run that was ended, and of one that left nothing.
KILLED, NO_RESULT, TOO_LONG, TOO_LARGE = "killed", "no-result", "time-limit", "output-limit"
NO_END = (KILLED, NO_RESULT, TOO_LONG, TOO_LARGE)
HOLDERS = "pods-hold-shares"
# How many pods a message names.
MOST_NAMED = 10
# How many findings a message has.
MOST_FINDINGS = 3


def outcome_of(events: t.Iterable[JsonObject], rc: int | None, removing: bool) -> Outcome:
    """Return how a run ended.

    :param events: ansible-runner's job events, in their order.
    :param rc: the exit status of ansible-playbook; None where it was killed.
    :param removing: it was an uninstall.
    """
    problems: list[JsonObject] = []
    failures: list[JsonObject] = []
    stats: JsonObject = {}
    for event in events:
        kind, data = event.get("event"), event.get("event_data") or {}
        if kind in ("runner_on_ok", "runner_on_failed") and _action(data) in PREFLIGHT:
            found = (data.get("res") or {}).get("findings") or []
            problems += [
                finding for finding in found if isinstance(finding, dict) and finding.get("severity") == PROBLEM
            ]
        if kind in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            failures.append(data)
        if kind == "playbook_on_stats":
            stats = data
    changed = sum((stats.get("changed") or {}).values())
    told = stats.get("artifact_data") or {}
    if rc == 0 and stats:
        return _succeeded(changed, removing)
    held = told.get("gpu_uninstall") or {}
    if held.get("refused") == HOLDERS:
        return _waiting(held, changed)
    if problems:
        # Nothing was changed; what was deployed before goes on as it did.
        return Outcome(str(problems[0].get("id")), _finding(problems), True, None, changed)
    broken = told.get("gpu_verify") or {}
    if broken.get("result") == BROKEN and broken.get("findings"):
        first = broken["findings"][0]
        return Outcome(str(first.get("cause") or first.get("check")), _check(broken["findings"]), True, False, changed)
    if failures:
        return _failed(failures[-1], changed)
    code = KILLED if rc is None else NO_RESULT
    return Outcome(code, "the run ended without a result; it is repeated", True, None, changed)


def cut_short(events: t.Iterable[JsonObject], code: str, limit: str) -> Outcome:
    """Return the outcome of a run that was ended by a limit.

    :param events: as for ``outcome_of``.
    :param code: ``TOO_LONG`` or ``TOO_LARGE``.
    :param limit: as people read it.
    """
    begun = [event.get("event_data") or {} for event in events if event.get("event") == "playbook_on_task_start"]
    task = begun[-1].get("task") if begun else None
    what = "took longer than" if code == TOO_LONG else "left output of more than"
    text = f"the run {what} {limit} and was ended in the task: {task or 'none'}. It is repeated; read the pod's log"
    return Outcome(code, line(text, MOST_MESSAGE), True)


def _action(data: JsonObject) -> str:
    return str(data.get("resolved_action") or data.get("task_action") or "")


def _succeeded(changed: int, removing: bool) -> Outcome:
    if removing:
        return Outcome("uninstalled", f"everything was removed ({changed} tasks changed something)", changed=changed)
    if changed:
        return Outcome(
            "applied", f"{changed} tasks changed something, and all checks passed", works=True, changed=changed
        )
    return Outcome("unchanged", "everything is as the resource asks for", works=True)


def _waiting(held: JsonObject, changed: int) -> Outcome:
    parts = [str(pod).partition("/") for pod in held.get("pods") or ()]
    pods = [(namespace, name) for namespace, _slash, name in parts if name]
    left_out = len(pods) - MOST_NAMED + int(held.get("pods_left_out") or 0)
    named = ", ".join(f"{namespace}/{name}" for namespace, name in pods[:MOST_NAMED])
    more = f" and {left_out} more" if left_out > 0 else ""
    nodes = ", ".join(map(str, held.get("nodes") or ()))
    # Of claims the API has the node, and the pods are named where they could be read.
    what = f"pods hold shares of cards on {nodes}: {named}{more}" if named else f"pods hold shares of cards on {nodes}"
    text = line(f"{what}; delete them, and the uninstall goes on", MOST_MESSAGE)
    return Outcome(HOLDERS, text, True, None, changed, tuple(pods[:MOST_NAMED]))


def _finding(problems: list[JsonObject]) -> str:
    texts = [
        f"{problem.get('found') or ''}; {problem.get('do') or ''}".strip("; ") for problem in problems[:MOST_FINDINGS]
    ]
    more = f" ({len(problems) - MOST_FINDINGS} more)" if len(problems) > MOST_FINDINGS else ""
    return line(f"{'. Also: '.join(texts)}{more}", MOST_MESSAGE)


def _check(findings: list[JsonObject]) -> str:
    first = findings[0]
    more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
    return line(
        f"check {first.get('check')} on {first.get('node') or 'the cluster'}: {first.get('text')}{more}", MOST_MESSAGE
    )


def _failed(failure: JsonObject, changed: int) -> Outcome:
    result = failure.get("res") or {}
    code = result.get("cause") if isinstance(result.get("cause"), str) else "task-failed"
    text = f"{failure.get('task')}: {result.get('msg') or 'it failed without a message'}"
    return Outcome(code or "task-failed", line(text, MOST_MESSAGE), True, None, changed)
