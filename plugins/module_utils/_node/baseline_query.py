# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe the baseline that is kept on a node: the section ``baseline``."""

from __future__ import annotations

from .._core.errors import ShareError
from .._host.system import System
from .baseline_record import PATH, parse
from .types import BaselineSection


def observe(system: System, content: bool = False) -> BaselineSection | None:
    """Return the section; None where nothing is kept.

    :param content: include the snapshot, None where it can't be read.
    """
    text = system.read(PATH)
    if text is None:
        return None
    found: BaselineSection = {"path": PATH, "taken": "", "own_files": [], "error": ""}
    snapshot = None
    try:
        baseline = parse(text)
    except ShareError as error:
        found["error"] = str(error)
    else:
        found["taken"], found["own_files"], snapshot = baseline.taken, list(baseline.own_files), baseline.snapshot
    if content:
        found["snapshot"] = snapshot
    return found
