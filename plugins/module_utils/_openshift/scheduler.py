# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module ``openshift_scheduler``: the Policy of OpenShift up to 4.9, or a secondary scheduler from 4.10 on."""

from __future__ import annotations

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.options import auth_arguments
from . import policy, secondary
from .client import LIBRARIES
from .objects import PAUSE, Api

POLICY, SECONDARY = "policy", "secondary"

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "method": {"type": "str", "choices": [POLICY, SECONDARY], "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "config_map": {"type": "str"},
    "timeout": {"type": "int", "default": 1800},
    "library": {"type": "str", "choices": list(LIBRARIES), "default": "auto"},
    "extender_url": {"type": "str", "default": "http://127.0.0.1:12345/gpushare-scheduler"},
    "extender_timeout": {"type": "int", "default": 30},
    "extender_preemption": {"type": "bool", "default": False},
    # It contains a private key.
    "config": {"type": "str", "no_log": True},
    "image": {"type": "str"},
    "channel": {"type": "str", "default": "stable"},
    "source": {"type": "str", "default": "redhat-operators"},
    "source_namespace": {"type": "str", "default": "openshift-marketplace"},
    "topology": {"type": "str", "choices": ["", "SingleReplica", "HighlyAvailable"], "default": ""},
    "plan": {"type": "dict"},
}


def work(api: Api, params: JsonObject, check: bool, waiting: Waiting | None = None) -> JsonObject:
    """Run the module.

    :param params: the module's options.
    :param check: only return what would change.
    :param waiting: for the operators, in seconds.
    :raises ShareError: with ``changed`` in its details where something was changed.
    """
    waiting = waiting or Waiting(params["timeout"], PAUSE)
    if params["method"] == POLICY:
        return policy.work(api, params, check, waiting)
    if params["state"] == "present" and not (params["config"] and params["image"]):
        raise BadInput("config, image: both are required to install a secondary scheduler")
    return secondary.work(api, params, check, waiting)
