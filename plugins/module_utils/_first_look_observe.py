# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""See the first look that was kept on a node: the section ``first_look``."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._first_look import PATH, parse
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

Json = t.Dict[str, t.Any]


def observe(system: System, content: bool = False) -> Json | None:
    """What was kept; None where nothing was.

    :param content: with all that was seen then.
    :returns: {path, taken, marks, error[, seen]}; ``error`` says why it can't be read.
    """
    text = system.read(PATH)
    if text is None:
        return None
    try:
        look = parse(text)
    except ShareError as error:
        found: Json = {"path": PATH, "taken": "", "marks": [], "error": str(error)}
        return {**found, "seen": None} if content else found
    found = {"path": PATH, "taken": look.taken, "marks": list(look.marks), "error": ""}
    return {**found, "seen": look.seen} if content else found
