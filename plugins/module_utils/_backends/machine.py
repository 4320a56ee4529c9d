# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remove what a back end left on a machine: module ``backend_files``."""

from __future__ import annotations

import typing as t

from .._contracts.backends import HAMI, KATA, NVIDIA
from .._core.types import JsonObject
from .._hami import files
from .._host.system import System
from .._kata import leftovers
from .._nvidia import files as nvidia_plugin

# By back end, how its remains are removed; gpushare's server removes its own.
REMOVED: t.Mapping[str, t.Callable[[System, JsonObject, bool], JsonObject]] = {
    HAMI: files.ensure,
    KATA: leftovers.work,
    NVIDIA: nvidia_plugin.work,
}
ARGUMENTS: JsonObject = {
    "backend": {"type": "str", "choices": list(REMOVED), "required": True},
    **files.ARGUMENTS,
    **nvidia_plugin.ARGUMENTS,
}


def ensure(system: System, params: JsonObject, check: bool) -> JsonObject:
    """Run the module.

    :param params: the module's options.
    :param check: predict the changes without applying them.
    :raises ShareError: something uses the files, or they can't be removed.
    """
    return REMOVED[params["backend"]](system, params, check)
