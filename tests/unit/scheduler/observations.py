# SPDX-License-Identifier: GPL-3.0-or-later
"""A control plane as ``control_plane_info`` returns it, without a machine."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp


def process(**values: t.Any) -> dict[str, t.Any]:
    facts = {"fresh": True, "loaded": {}, "extender": None}
    return {"pid": 1, "config": "", "policy": "", "version": "", "stamp": "", **facts, **values}


def static_pod(manifest: str | None, **changes: t.Any) -> t.Any:
    """A machine with this manifest whose kube-scheduler runs with it and is healthy."""
    named, policy = (cp.flag(manifest or "", flag) for flag in ("config", "policy-config-file"))
    return {
        "kind": "static_pod" if manifest is not None else "",
        "version": "",
        "folder": "/etc/kubernetes/manifests",
        "manifest_path": cp.MANIFEST,
        "manifest": manifest,
        "link": "",
        "others": {},
        "config_path": named,
        "config": None,
        "policy_path": policy,
        "policy": None,
        "ours": None,
        "ours_policy": None,
        "merged": None,
        "patches_dir": "",
        "patches": {},
        "running": [process(config=named, policy=policy)],
        "health": 200,
        "pending": False,
        "hostname": "cp1",
        "embedded": "",
        "server": None,
        **changes,
    }
