# SPDX-License-Identifier: GPL-3.0-or-later
"""A recorded cluster through all checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils import _check_cluster as cluster
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Options
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader
from ansible_collections.kubegpu.share.plugins.module_utils._check_run import report
from ansible_collections.kubegpu.share.plugins.module_utils._check_snapshot import read_pods, snapshot

Json = dict[str, Any]
SNAPSHOTS = Path(__file__).parent / "snapshots"


def recorded(name: str) -> Json:
    return json.loads((SNAPSHOTS / f"{name}.json").read_text())


def checked(world: Json, before: Json | None = None, **options: Any) -> Json:
    """The report of a cluster, as JSON brings it back."""
    given = Options(
        **{
            "processes": cluster.PROCESSES,
            "schedulers": cluster.SCHEDULERS,
            "hami_schedulers": cluster.HAMI_SCHEDULERS,
            "extender": world.get("extender"),
            "story": world.get("story"),
            **options,
        }
    )
    reader = Reader()
    pods = read_pods(world["pods"], reader)
    seen = snapshot(world["nodes"], pods, world["evidence"], given, world["now"], reader, world["configmaps"])
    return json.loads(json.dumps(report(seen, "https://192.0.2.1:6443", before), allow_nan=False))


def found(told: Json, *levels: str) -> list[str]:
    """Check, level and sentence of the findings of these levels."""
    return [f"{one['check']} {one['level']}: {one['what']}" for one in told["findings"] if one["level"] in levels]


def failing(told: Json, level: str = "FAIL") -> set[str]:
    return {one["check"] for one in told["findings"] if one["level"] == level}
