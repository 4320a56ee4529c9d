# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the extender as kube-scheduler does, before kube-scheduler is changed: without it no pod gets a share. Pure."""

from __future__ import annotations

import json
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._core.untrusted import line
from .._host.http_probe import TIMEOUT, Answer, Post

# Its pod was ready a moment ago. A machine that has just started, or its API server, may need some time again.
PROOF_SECONDS, PAUSE_SECONDS = 60.0, 2.0
# A pod that asks for no share, and no node for it: nothing is booked. Keys as Go writes an ExtenderArgs.
_POD: JsonObject = {
    "metadata": {"name": "gpushare-proof", "namespace": "default", "uid": "gpushare-proof"},
    "spec": {"containers": [{"name": "proof", "image": "none"}]},
}
REQUEST = json.dumps({"Pod": _POD, "Nodes": None, "NodeNames": []})

# By code: why it isn't an answer of the extender, and the way out.
_POD_OF_IT = "kubectl get pods -A -o wide -l app.kubernetes.io/name=gpushare-extender shows whether its pod is here"
_TAKEN = "another program has this address: stop it, or set scheduler_extender_url"
REASONS: t.Mapping[str, tuple[str, str]] = {
    "refused": ("nothing listens there (connection refused)", _POD_OF_IT),
    "timeout": (f"it doesn't answer within {TIMEOUT} s", f"{_POD_OF_IT}, and a firewall may be between"),
    "unreachable": ("it can't be reached ({text})", f"set scheduler_extender_url to its address; {_POD_OF_IT}"),
    "tls": (
        "TLS fails ({text})",
        "its certificate has to be valid for this name, by an authority that is trusted here",
    ),
    "no_http": ("what listens there doesn't speak HTTP ({text})", _TAKEN),
    "http_status": ("it answers with HTTP status {text}", _TAKEN),
    "not_an_extender": ("what answers there is no extender of kube-scheduler", _TAKEN),
    "not_ready": ("it isn't ready: {text}", "read the log of its pod gpushare-extender on this node"),
}


def problem(answer: Answer) -> tuple[str, str]:
    """Return why this isn't the answer of a working extender: a code of ``REASONS`` and its text; empty for none."""
    if answer.failure:
        return answer.failure, answer.text
    if answer.status != 200:
        return "http_status", str(answer.status)
    try:
        result = json.loads(answer.text)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        return "not_an_extender", ""
    # Go reads keys in any case, and older releases write them in lower case.
    found = {str(key).lower(): value for key, value in result.items()}
    if found.get("error"):
        return "not_ready", str(found["error"])
    return ("", "") if found.get("nodenames", "") in ([], None) else ("not_an_extender", "")


def parsed(text: str) -> Answer:
    """Return an answer that a pod has received and written as JSON; one of its own where it wrote something else."""
    try:
        found = json.loads(text)
        answer = Answer(int(found["status"]), str(found["failure"]), str(found["text"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Answer(0, "unreachable", text or "the pod that asked has written nothing")
    return answer if answer.failure in ("", *REASONS) else Answer(0, "unreachable", answer.text)


def require_answer(
    url: str, host: str, post: Post, sleep: t.Callable[[float], None], now: t.Callable[[], float]
) -> None:
    """Ask the extender until it answers.

    :param url: its URL, as kube-scheduler has it.
    :param host: the machine on which this runs, for the message.
    :raises ShareError: it doesn't answer in time; the details have ``code``, ``reason``, ``url`` and ``host``.
    """
    asked = f"{url.rstrip('/')}/filter"
    end = now() + PROOF_SECONDS
    while True:
        code, text = problem(post(asked, REQUEST))
        if not code:
            return
        if now() >= end:
            raise unanswered(f"kube-scheduler on {host}", asked, code, text, host)
        sleep(PAUSE_SECONDS)


def unanswered(scheduler: str, asked: str, code: str, text: str, host: str = "") -> ShareError:
    """Return the error of an extender that doesn't answer.

    :param scheduler: what isn't changed therefore, for the message.
    :param asked: the URL.
    :param code: of ``REASONS``, and ``text`` its text.
    :param host: from where; empty for a pod.
    """
    why, way_out = REASONS[code]
    return ShareError(
        f"{scheduler} isn't changed, because the extender doesn't answer {asked} from there within "
        f"{PROOF_SECONDS:g} s: {why.format(text=line(text))}. {way_out[0].upper()}{way_out[1:]}.",
        code="extender_unanswered",
        reason=code,
        url=asked,
        host=host,
    )
