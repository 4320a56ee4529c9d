# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""kubeadm's own configuration in the cluster: read it, and replace it where nobody else changed it meanwhile."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube, auth_arguments
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref

CONFIG_MAP = Ref("v1", "ConfigMap", "kube-system", "kubeadm-config")
NAME = "ConfigMap kube-system/kubeadm-config"
KEY = "ClusterConfiguration"

ARGUMENTS: Json = {
    **auth_arguments(),
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "configuration": {"type": "str", "choices": ["auto", "config", "policy"], "default": "auto"},
    "version": {"type": "str"},
    "machines": {"type": "dict"},
    "plan": {"type": "dict"},
}


def read(kube: Kube) -> Json:
    """The configuration as it is; ``text`` is None where there is none."""
    found = kube.get(CONFIG_MAP)
    if found is None:
        return {"text": None, "resource_version": ""}
    return {
        "text": (found.get("data") or {}).get(KEY),
        "resource_version": str(found["metadata"]["resourceVersion"]),
    }


def work(params: t.Mapping[str, t.Any], kube: Kube) -> Json:
    """The module's whole work: without a plan it looks, with one it writes.

    :raises ShareError: the cluster refuses it.
    """
    plan = params["plan"]
    if not plan:
        return {"changed": False, "seen": read(kube)}
    body = {"metadata": {"resourceVersion": plan["resource_version"]}, "data": {KEY: plan["text"]}}
    try:
        kube.patch(CONFIG_MAP, body)
    except ShareError:
        if read(kube)["resource_version"] == plan["resource_version"]:
            raise
        # Somebody else was quicker; what they wrote has to be read first.
        return {"changed": False, "conflict": True}
    if read(kube)["text"] != plan["text"]:
        raise NotInEffect(f"{NAME} was changed, but doesn't hold what was written")
    return {"changed": True}
