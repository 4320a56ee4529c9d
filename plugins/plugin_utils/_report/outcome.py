# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action ``gpu_report`` prints and writes, computed from its arguments."""

from __future__ import annotations

import json
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from . import html, json_output, junit, prometheus, text_output
from .parse import view
from .write import Target

ARGUMENTS: JsonObject = {
    "text": {"type": "str"},
    "report": {"type": "dict"},
    "allocation": {"type": "dict"},
    "html": {"type": "path"},
    "json": {"type": "path"},
    "junit": {"type": "path"},
    "prometheus": {"type": "path"},
    "prometheus_mode": {"type": "raw", "default": "0644"},
    "quiet": {"type": "bool", "default": False},
}
REQUIRED_ONE_OF = [["report", "allocation", "text"]]
MUTUALLY_EXCLUSIVE = [["text", other] for other in ("report", "allocation", "html", "json", "junit", "prometheus")]


class Rendered(t.NamedTuple):
    """
    :param text: to print.
    :param result: a level; empty if nothing was checked.
    :param targets: files to write.
    """

    text: str
    result: str
    targets: list[Target]


def untagged(params: JsonObject) -> JsonObject:
    """Copy the arguments without the tags of Ansible's values.

    :raises BadInput: they contain what JSON can't.
    """
    try:
        copied: JsonObject = json.loads(json.dumps(params, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"report, allocation: they aren't data of a report: {error}") from error
    return copied


def render(params: JsonObject) -> Rendered:
    """Render everything that the arguments request.

    :raises BadInput: an argument is invalid.
    """
    if params["text"] is not None:
        return Rendered(params["text"], "", [])
    report, allocation = params["report"], params["allocation"]
    shown = view(report, allocation)
    mode = permissions(params["prometheus_mode"])
    if params["junit"] and report is None:
        raise BadInput("junit: its cases are those of the checks, so it needs report")
    renderers: dict[str, t.Callable[[], str]] = {
        "html": lambda: html.render(shown),
        "json": lambda: json_output.render(report, allocation),
        "junit": lambda: junit.render(shown),
        "prometheus": lambda: prometheus.render(shown),
    }
    targets = [
        Target(argument, params[argument], make(), mode if argument == "prometheus" else 0o600)
        for argument, make in renderers.items()
        if params[argument]
    ]
    return Rendered(text_output.render(shown), shown.result if shown.checked else "", targets)


def permissions(value: t.Any) -> int:
    """Parse permissions as Ansible's ``mode`` accepts them: octal digits as text, or YAML's number for 0644.

    :raises BadInput: they are invalid.
    """
    mode = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if isinstance(value, str) and 3 <= len(value) <= 4 and set(value) <= set("01234567"):
        mode = int(value, 8)
    if not 0o400 <= mode <= 0o777:
        raise BadInput(f"prometheus_mode: {value!r} isn't like '0644'")
    return mode
