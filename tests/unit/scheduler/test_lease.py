# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's lease after a change."""

from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import kubernetes  # type: ignore[import-untyped,unused-ignore]
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.lease import Lease, SchedulerLease
from kube_api import SECRET, Api, kubeconfig

LEASE = Ref("coordination.k8s.io/v1", "Lease", "kube-system", "kube-scheduler")


class Cluster:
    """A cluster with a sequence of leases, the last of which stays."""

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
        return SchedulerLease("", self.ref, t.cast(t.Any, self), self._sleep, lambda: self.time)

    def _sleep(self, seconds: float) -> None:
        self.time += seconds


BEFORE = Lease("cp1_old", "10")


PATH = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler"


@pytest.fixture
def api() -> t.Iterator[Api]:
    server = Api()
    leases = [{"kind": "Lease", "name": "leases", "namespaced": True}]
    server.answers["/apis/coordination.k8s.io/v1"] = (200, {"resources": leases})
    server.answers[PATH] = (200, {"spec": {"holderIdentity": "cp1_x", "renewTime": "1"}})
    yield server
    server.close()


@pytest.mark.parametrize("given", ["content", "path", "home", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_HOST"])
def test_sources_of_the_kubeconfig(api: Api, given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [variable for variable in os.environ if variable.startswith("K8S_AUTH_")]:
        monkeypatch.delenv(name)
    # What an earlier test has loaded is the client library's default until its process ends.
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "config"
    path.write_text(json.dumps(kubeconfig(api.url)))
    named: dict[str, t.Any] = {"content": kubeconfig(api.url), "path": str(path), "home": "$HOME/config"}
    if given == "K8S_AUTH_KUBECONFIG":
        monkeypatch.setenv(given, str(path))
    if given == "K8S_AUTH_HOST":
        monkeypatch.setenv(given, api.url)
        monkeypatch.setenv("K8S_AUTH_API_KEY", SECRET)
    lease = SchedulerLease(named.get(given), LEASE)
    assert lease.read() == Lease("cp1_x", "1")
    # The clients write the header's name differently.
    sent = [{name.lower(): value for name, value in headers.items()} for _verb, _path, headers, _body in api.received]
    assert {headers["authorization"] for headers in sent} == {f"Bearer {SECRET}"}


def test_credentials_in_error_messages_are_masked(api: Api) -> None:
    api.answers[PATH] = (403, {"message": f"who is Bearer {SECRET}?"})
    lease = SchedulerLease(kubeconfig(api.url), LEASE)
    with pytest.raises(ShareError) as caught:
        lease.read()
    assert SECRET not in str(caught.value) and "********" in str(caught.value)
    with pytest.raises(NotInEffect) as late:
        lease.wait_for_renewal(BEFORE, "cp1", 0)
    assert SECRET not in str(late.value)


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
def test_renewed_lease_ends_the_wait(leases: list[tuple[str, str]], hostname: str, holder: str) -> None:
    assert Cluster(*leases).lease().wait_for_renewal(BEFORE, hostname, 30) == holder


@pytest.mark.parametrize(
    ("leases", "reason"),
    [
        ([("cp1_old", "10")], "its last holder is cp1_old"),
        ([("cp1_old", "10"), ("cp1_old", "12")], "its last holder is cp1_old"),
        ([("", "")], "its last holder is nobody"),
        ([("away", "")], "the API server at x can't be reached: refused"),
    ],
)
def test_lease_not_renewed_in_time(leases: list[tuple[str, str]], reason: str) -> None:
    cluster = Cluster(*leases)
    words = rf"its lease kube-system/kube-scheduler isn't renewed after 30 s \({reason}\)"
    with pytest.raises(NotInEffect, match=words):
        cluster.lease().wait_for_renewal(BEFORE, "cp1", 30)
    assert 30 <= cluster.time < 33


def test_another_lease() -> None:
    cluster = Cluster(("", ""))
    cluster.ref = Ref("coordination.k8s.io/v1", "Lease", "a", "b")
    with pytest.raises(NotInEffect, match=r"its lease a/b isn't renewed "):
        cluster.lease().wait_for_renewal(BEFORE, "cp1", 30)
