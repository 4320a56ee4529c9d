# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's lease after a change."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref
from ansible_collections.kubegpu.share.plugins.plugin_utils._lease import LEASE, Lease, SchedulerLease


class Cluster:
    """A cluster whose lease says one thing after the other, the last one for ever."""

    def __init__(self, *leases: tuple[str, str]) -> None:
        self._leases = list(leases)
        self.time = 0.0
        self.ref = LEASE

    def get(self, ref: t.Any) -> dict[str, t.Any] | None:
        assert ref == self.ref
        holder, renewed = self._leases.pop(0) if len(self._leases) > 1 else self._leases[0]
        if holder == "away":
            raise ShareError("the API server at x can't be reached: refused")
        return {"spec": {"holderIdentity": holder, "renewTime": renewed}} if holder or renewed else None

    def lease(self) -> SchedulerLease:
        return SchedulerLease("", t.cast(t.Any, self), self._sleep, lambda: self.time, self.ref)

    def _sleep(self, seconds: float) -> None:
        self.time += seconds


BEFORE = Lease("cp1_old", "10")


@pytest.mark.parametrize(
    ("leases", "hostname", "holder"),
    [
        ([("cp1_old", "10"), ("cp1_old", "11"), ("cp1_new", "26"), ("cp1_new", "28")], "cp1", "cp1_new"),
        ([("cp2_x", "10"), ("cp2_x", "12")], "cp1", "cp2_x"),
        # Another machine held it and still does.
        ([("cp1_old", "10"), ("cp1_old", "12")], "cp2", "cp1_old"),
        ([("", ""), ("cp1_new", "12")], "cp1", "cp1_new"),
        # The API server was started again as well.
        ([("away", ""), ("away", ""), ("cp1_old", "10"), ("cp1_new", "12")], "cp1", "cp1_new"),
    ],
)
def test_taken(leases: list[tuple[str, str]], hostname: str, holder: str) -> None:
    assert Cluster(*leases).lease().taken(BEFORE, hostname, 30) == holder


@pytest.mark.parametrize("leases", [[("cp1_old", "10")], [("cp1_old", "10"), ("cp1_old", "12")], [("", "")]])
def test_not_taken(leases: list[tuple[str, str]]) -> None:
    cluster = Cluster(*leases)
    with pytest.raises(NotInEffect, match=r"its lease kube-system/kube-scheduler isn't renewed after 30 s"):
        cluster.lease().taken(BEFORE, "cp1", 30)
    assert 30 <= cluster.time < 33


def test_an_api_server_that_stays_away_is_named() -> None:
    with pytest.raises(
        NotInEffect, match=r"isn't renewed after 30 s \(the API server at x can't be reached: refused\)"
    ):
        Cluster(("away", "")).lease().taken(BEFORE, "cp1", 30)


def test_another_lease() -> None:
    cluster = Cluster(("cp1_old", "10"), ("cp1_new", "12"))
    cluster.ref = Ref("coordination.k8s.io/v1", "Lease", "a", "b")
    assert cluster.lease().taken(BEFORE, "cp1", 30) == "cp1_new"
    cluster = Cluster(("", ""))
    cluster.ref = Ref("coordination.k8s.io/v1", "Lease", "a", "b")
    with pytest.raises(NotInEffect, match=r"its lease a/b isn't renewed .*its last holder is nobody"):
        cluster.lease().taken(BEFORE, "cp1", 30)
