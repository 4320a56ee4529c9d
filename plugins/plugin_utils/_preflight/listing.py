# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print preflight's findings once, as a list as wide as the terminal, and return them as data."""

from __future__ import annotations

import shutil

from ansible import constants

from ...module_utils._core.types import JsonObject
from ...module_utils._preflight.findings import PROBLEM, WARNING, Findings
from .._actions.terminal import Display, show

COLOURS = {PROBLEM: constants.COLOR_ERROR, WARNING: constants.COLOR_WARN}


def report(display: Display, findings: Findings) -> JsonObject:
    """Print the findings and return the task's result, which doesn't fail: the role ends with one short sentence."""
    # A worker has no terminal; the display has measured that of ansible-playbook.
    width = shutil.get_terminal_size((display.columns, 24)).columns
    entries = list(findings.entries(width))
    for severity, text in entries:
        show(display, text, color=COLOURS.get(severity))
    problems = sum(severity == PROBLEM for severity, _text in entries)
    return {"changed": False, "problems": problems, "findings": [finding.result() for finding in findings]}
