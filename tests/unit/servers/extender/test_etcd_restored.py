# SPDX-License-Identifier: GPL-3.0-or-later
"""An extender while a real etcd is restored to an older state, beneath a real API server."""

from __future__ import annotations

import shutil

import pytest
from api_double import make_node, make_pod
from extender_kit import eventually
from gpushare.api.client import connect
from gpushare.extender.command import Extender
from prometheus_client import CollectorRegistry
from real_apiserver import MERGE, ApiServer

PODS = "/api/v1/namespaces/default/pods"
SECONDS = 60.0
# More versions than an API server writes at its start, so that the restored state stays older for a while.
CHANGES = 400


def bound_pods(server: ApiServer) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in server.request("GET", PODS)["items"])


def create(server: ApiServer, name: str) -> None:
    pod = make_pod(name, 1, "a", 0)
    pod["spec"]["containers"][0]["image"] = "none"
    del pod["status"]
    server.request("POST", PODS, pod)


def shown(extender: Extender) -> list[str]:
    return sorted(row.name for row in extender.pods.items())


@pytest.mark.long
def test_etcd_is_restored_to_an_older_state(own_server: ApiServer) -> None:
    """Within a minute the extender has the API's state, or says that it isn't ready."""
    server = own_server
    server.service_account(server.folder / "account")
    node = make_node("a", 64)
    server.request("POST", "/api/v1/nodes", node)
    server.request("PATCH", "/api/v1/nodes/a/status", {"status": node["status"]}, MERGE)
    for name in ("kept", "deleted-later"):
        create(server, name)
    server.stop()
    shutil.copytree(server.folder / "etcd", server.folder / "snapshot")
    server.start()
    kube = connect(server.url, str(server.folder / "account"))
    extender = Extender(kube, port=0, registry=CollectorRegistry(), namespace="default")
    extender.start()
    try:
        eventually(lambda: extender.unready() is None, SECONDS)
        create(server, "created-later")
        server.request("DELETE", f"{PODS}/deleted-later?gracePeriodSeconds=0")
        for number in range(CHANGES):
            server.request("PATCH", f"{PODS}/kept", {"metadata": {"annotations": {"n": str(number)}}}, MERGE)
        eventually(lambda: shown(extender) == bound_pods(server) == ["created-later", "kept"], SECONDS)
        lists = extender.pods.lists
        server.stop()
        shutil.rmtree(server.folder / "etcd")
        (server.folder / "snapshot").rename(server.folder / "etcd")
        server.start()
        assert bound_pods(server) == ["deleted-later", "kept"]
        eventually(lambda: shown(extender) == bound_pods(server) or extender.unready() is not None, SECONDS)
        # And it recovers by itself.
        eventually(lambda: shown(extender) == bound_pods(server) and extender.unready() is None, SECONDS)
        assert extender.pods.lists > lists
        create(server, "after")
        eventually(lambda: shown(extender) == ["after", "deleted-later", "kept"], SECONDS)
    finally:
        extender.stop()
        kube.close()
