# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a back end has in the cluster beside its definitions: module ``backend_objects``."""

from __future__ import annotations

import typing as t

from .._allocation import device_resources, stale_status
from .._contracts import hami
from .._contracts.backends import GPUSHARE, HAMI, NVIDIA
from .._core.errors import BadInput
from .._core.types import JsonObject
from .._hami import leftovers, ready
from .._kube.api import Kube
from .._kube.options import auth_arguments
from . import release

# Its servers answer; its server has left the nodes, with all that it wrote; nothing of it is in the cluster.
COMPLETE, READY, OFF_NODES, ABSENT = "complete", "ready", "off_nodes", "absent"
STATES = (COMPLETE, READY, OFF_NODES, ABSENT)
ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "backend": {"type": "str", "choices": [GPUSHARE, HAMI, NVIDIA], "required": True},
    "state": {"type": "str", "choices": list(STATES), "required": True},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "resources": {"type": "list", "elements": "str", "default": []},
    "release": {"type": "str", "default": "hami"},
    "rendered": {"type": "str", "default": ""},
    "namespace": {"type": "str", "default": "hami-system"},
    "scheduler_name": {"type": "str", "default": hami.SCHEDULER},
    "overwrites": {"type": "bool", "default": True},
    "proof_namespace": {"type": "str", "default": ""},
    "wait_timeout": {"type": "int", "default": 300},
    "kubelet_timeout": {"type": "int", "default": 420},
}
Work = t.Callable[[t.Any, JsonObject, bool], JsonObject]
TABLE: t.Mapping[tuple[str, str], Work] = {
    (GPUSHARE, OFF_NODES): stale_status.remove_stale,
    (HAMI, COMPLETE): release.ensure,
    (HAMI, READY): ready.ensure,
    (HAMI, OFF_NODES): leftovers.ensure,
    (HAMI, ABSENT): leftovers.ensure,
    (NVIDIA, COMPLETE): release.ensure,
    (NVIDIA, OFF_NODES): device_resources.remove,
}


def ensure(kube: Kube, params: JsonObject, check: bool) -> JsonObject:
    """Run the module.

    :param params: as ``ARGUMENTS``.
    :param check: predict the changes without applying them or waiting.
    :raises BadInput: the back end has no such state, or pods hold cards.
    :raises NotInEffect: a server still runs, or isn't ready.
    """
    backend, state = params["backend"], params["state"]
    if (backend, state) not in TABLE:
        known = [one for one in STATES if (backend, one) in TABLE]
        raise BadInput(f"state: {state} isn't one of {backend}'s, which are {', '.join(known)}")
    scope = "cluster" if state == ABSENT else "nodes"
    return TABLE[backend, state](kube, {**params, "scope": scope, "plugin_timeout": params["wait_timeout"]}, check)
