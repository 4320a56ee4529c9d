# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read kubeadm's ConfigMap, and replace it if it is unchanged since then."""

from __future__ import annotations

import typing as t

from .._core.errors import NotInEffect, ShareError
from .._core.types import JsonObject
from .._kube.api import Kube
from .._kube.options import auth_arguments
from .._kube.refs import Ref

CONFIG_MAP = Ref("v1", "ConfigMap", "kube-system", "kubeadm-config")
NAME = "ConfigMap kube-system/kubeadm-config"
KEY = "ClusterConfiguration"

ARGUMENTS: JsonObject = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "configuration": {"type": "str", "choices": ["auto", "config", "policy"], "default": "auto"},
    "version": {"type": "str"},
    "machines": {"type": "dict"},
    "plan": {"type": "dict"},
}


def read(kube: Kube) -> JsonObject:
    """Return the configuration's text, None where there is none, and its resource version."""
    config_map = kube.get(CONFIG_MAP)
    if config_map is None:
        return {"text": None, "resource_version": ""}
    return {
        "text": (config_map.get("data") or {}).get(KEY),
        "resource_version": str(config_map["metadata"]["resourceVersion"]),
    }


def work(params: t.Mapping[str, t.Any], kube: Kube) -> JsonObject:
    """Run the module: read without a plan, write with one.

    :raises ShareError: the cluster refuses it.
    """
    plan = params["plan"]
    if not plan:
        return {"changed": False, "config_map": read(kube)}
    body = {"metadata": {"resourceVersion": plan["resource_version"]}, "data": {KEY: plan["text"]}}
    try:
        kube.patch(CONFIG_MAP, body)
    except ShareError:
        if read(kube)["resource_version"] == plan["resource_version"]:
            raise
        # Another client changed it meanwhile; the action reads it again.
        return {"changed": False, "conflict": True}
    if read(kube)["text"] != plan["text"]:
        raise NotInEffect(f"{NAME} was changed, but doesn't have the text that was written")
    return {"changed": True}
