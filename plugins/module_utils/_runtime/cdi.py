# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether containerd injects devices by CDI, from its facts. Pure; on the controller only."""

from __future__ import annotations

import re
import typing as t

from .containerd import release

# From this release on CDI is always on, and there is no setting for it any more: containerd's RELEASES.md.
ALWAYS_SINCE = (2, 4)
_SETTING = re.compile(r"^[ \t]*enable_cdi[ \t]*=[ \t]*(true|false)[ \t\r]*$", re.MULTILINE)


def injects_cdi(state: t.Mapping[str, t.Any]) -> bool:
    """Return whether a containerd injects devices by CDI.

    :param state: its facts, of which ``dump`` and ``version`` are read.
    """
    found = _SETTING.search(str(state.get("dump") or ""))
    return found[1] == "true" if found else release(str(state.get("version") or "")) >= ALWAYS_SINCE
