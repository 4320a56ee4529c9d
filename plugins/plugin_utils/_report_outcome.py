# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the action ``gpu_report`` prints and writes, made from its arguments."""

from __future__ import annotations

import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import (
    _report_html,
    _report_json,
    _report_junit,
    _report_prometheus,
    _report_text,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_files import Target
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_read import view
from ansible_collections.kubegpu.share.plugins.plugin_utils._report_values import Json

ARGUMENTS: dict[str, t.Any] = {
    "report": {"type": "dict"},
    "allocation": {"type": "dict"},
    "html": {"type": "path"},
    "json": {"type": "path"},
    "junit": {"type": "path"},
    "prometheus": {"type": "path"},
    "prometheus_mode": {"type": "raw", "default": "0644"},
    "quiet": {"type": "bool", "default": False},
}


def plain(params: Json) -> Json:
    """The arguments without the tags that Ansible's values carry.

    :raises BadInput: they hold what no JSON can.
    """
    try:
        copied: Json = json.loads(json.dumps(params, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"report, allocation: they aren't data of a report: {error}") from error
    return copied


def prepare(params: Json) -> tuple[str, str, list[Target]]:
    """The text to print, the result (empty where nothing was checked) and the files to write.

    :raises BadInput: an argument can't be served.
    """
    report, allocation = params["report"], params["allocation"]
    shown = view(report, allocation)
    mode = permissions(params["prometheus_mode"])
    if params["junit"] and report is None:
        raise BadInput("junit: its cases are those of the checks, so it needs report")
    render: dict[str, t.Callable[[], str]] = {
        "html": lambda: _report_html.render(shown),
        "json": lambda: _report_json.render(report, allocation),
        "junit": lambda: _report_junit.render(shown),
        "prometheus": lambda: _report_prometheus.render(shown),
    }
    targets = [
        Target(argument, params[argument], make(), mode if argument == "prometheus" else 0o600)
        for argument, make in render.items()
        if params[argument]
    ]
    return _report_text.render(shown), shown.result if shown.checked else "", targets


def permissions(value: t.Any) -> int:
    """Permissions as Ansible's ``mode`` takes them: octal digits as text, or the number that YAML makes of 0644."""
    mode = value if isinstance(value, int) and not isinstance(value, bool) else -1
    if isinstance(value, str) and 3 <= len(value) <= 4 and set(value) <= set("01234567"):
        mode = int(value, 8)
    if not 0o400 <= mode <= 0o777:
        raise BadInput(f"prometheus_mode: {value!r} isn't like '0644'")
    return mode
