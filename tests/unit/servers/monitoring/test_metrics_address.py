# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics on an address of their own, for readers whom the Kubernetes API allows it, and nothing else there."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare.api import reviews
from gpushare.api.client import connect
from gpushare.api.reviews import Reviews
from gpushare.extender.command import Extender, parse
from gpushare.extender.metrics import METRICS_PORT
from gpushare.http.server import Endpoint
from gpushare.http.service import Request, metrics_service, text
from metrics_reader import TOKEN, Reviewer
from prometheus_client import CollectorRegistry
from real_apiserver import ApiServer, api_server

__all__ = ["api_server"]


def ask(port: int, path: str, method: str = "GET", body: bytes = b"", token: str = TOKEN) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def extender() -> Iterator[Extender]:
    api = Reviewer()
    api.put("nodes", make_node("a", 16))
    extender = Extender(api, port=0, registry=CollectorRegistry(), backoff=(0.01, 0.1), metrics=Endpoint())
    extender.start()
    eventually(lambda: extender.unsynced() is None)
    yield extender
    extender.stop()


def port_of(extender: Extender) -> int:
    assert extender.metrics is not None
    return extender.metrics.port


def test_the_same_numbers_as_on_its_own_port(extender: Extender) -> None:
    Client(extender).filter(make_pod("p", 5), "a")
    status, page = ask(port_of(extender), "/metrics")
    assert status == 200
    for line in (
        'gpushare_card_capacity_units{card="0",node="a",uuid="GPU-a-0"} 16',
        'gpushare_extender_requests_total{result="passed",verb="filter"} 1.0',
        'gpushare_mirror_synced{objects="claims"} 1.0',
    ):
        assert line in page.splitlines()


@pytest.mark.parametrize(("token", "status"), [("", 401), ("unknown", 401), ("another", 403)])
def test_nobody_else_reads_them(extender: Extender, token: str, status: int) -> None:
    found, page = ask(port_of(extender), "/metrics", token=token)
    assert (found, "gpushare_card" in page) == (status, False)


VERBS = ("inspect", "filter", "bind", "preempt")
PATHS = ("/", "/healthz", "/readyz", "/version", "/metricsx", "//metrics", "/metrics/../gpushare-scheduler/bind")


def test_no_other_path_is_served(extender: Extender) -> None:
    for path in (*PATHS, *(f"/gpushare-scheduler/{verb}" for verb in VERBS)):
        for method in ("GET", "POST"):
            status, page = ask(port_of(extender), path, method, b"{}")
            assert status == 404 and "gpushare_" not in page, path
    assert not Client(extender).node("a")["usedGPU"]
    assert ask(port_of(extender), "/metrics", "POST", b"x")[0] == 405


def test_a_page_is_rendered_once_a_second_for_any_number_of_requests() -> None:
    now, made = [100.0], []

    def page(_request: Request) -> Any:
        made.append(now[0])
        return text("numbers")

    service = metrics_service("t", Endpoint(), page, lambda _request: None, lambda: now[0])
    service.start()
    try:
        for _again in range(3):
            assert ask(service.port, "/metrics")[0] == 200
        assert made == [100.0]
        now[0] += 1
        assert ask(service.port, "/metrics")[0] == 200
        assert made == [100.0, 101.0]
    finally:
        service.stop()


def test_the_metrics_address_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse([]).metrics, parse([]).metrics_port) == (None, METRICS_PORT)
    monkeypatch.setenv("GPUSHARE_METRICS_ADDRESS", "127.0.0.2")
    monkeypatch.setenv("GPUSHARE_METRICS_PORT", "9000")
    assert (parse([]).metrics.address, parse([]).metrics.port) == ("127.0.0.2", 9000)
    extender = Extender(ApiDouble(), port=0, registry=CollectorRegistry())
    assert extender.metrics is None


def test_an_address_that_cannot_be_bound_is_reported_and_releases_everything() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        extender = Extender(ApiDouble(), port=0, registry=CollectorRegistry(), metrics=Endpoint(port=port))
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: "):
            extender.start()
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", extender.service.port or 1), timeout=1):
            pass


# ----------------------------------------------------------------- reviews


class Guarded:
    """Reviews with a clock that only the test moves."""

    def __init__(self, kube: Any) -> None:
        self.now, self.kube = 1000.0, kube
        self.reviews = Reviews(kube, lambda: self.now)

    def status(self, token: str, peer: str = "10.0.0.1") -> int:
        refusal = self.reviews(Request("GET", "/metrics", "", b"", f"Bearer {token}", peer))
        return 200 if refusal is None else refusal.status


def asked(api: ApiDouble) -> int:
    """The number of TokenReviews."""
    return len(api.asked("POST", "tokenreviews$"))


def test_answers_are_kept_for_some_time() -> None:
    guarded = Guarded(api := Reviewer())
    for _again in range(5):
        assert [guarded.status(token) for token in (TOKEN, "another", "unknown")] == [200, 403, 401]
    assert asked(api) == 3
    guarded.now += reviews.REFUSED_SECONDS
    assert [guarded.status(token) for token in (TOKEN, "another")] == [200, 403]
    assert asked(api) == 4
    guarded.now += reviews.ALLOWED_SECONDS
    api.readers.clear()
    assert guarded.status(TOKEN) == 403, "a right that was taken away ends"


def test_random_tokens_do_not_reach_the_api_server() -> None:
    guarded = Guarded(api := Reviewer())
    assert guarded.status(TOKEN, "10.9.9.8") == 200
    before = asked(api)
    for number in range(1000):
        assert guarded.status(f"random-{number}", f"10.0.{number % 7}.1") in (401, 429)
    assert asked(api) - before <= reviews.BURST
    # One address is stopped before all of them, so a new token of a Prometheus elsewhere is still reviewed.
    guarded.now += 60
    before = asked(api)
    for number in range(1000):
        guarded.status(f"more-{number}", "10.0.0.1")
    assert asked(api) - before == reviews.PEER_BURST
    assert guarded.status("another", "10.9.9.9") == 403
    # A known one is reviewed again whatever others do.
    guarded.now += reviews.ALLOWED_SECONDS
    while guarded.status(f"last-{guarded.now}-{asked(api)}", f"10.1.{asked(api)}.1") != 429:
        pass
    assert guarded.status(TOKEN) == 200


def test_a_reader_whose_token_was_renewed_is_reviewed_whatever_others_do() -> None:
    guarded = Guarded(api := Reviewer())
    assert guarded.status(TOKEN, "10.0.0.1") == 200
    anonymous = [guarded.status(f"random-{number}", f"10.1.0.{number}") for number in range(100)]
    assert anonymous.count(401) == reviews.BURST - 1 and anonymous[-1] == 429
    api.readers.add("another")
    assert guarded.status("another", "10.0.0.1") == 200


def test_without_an_answer_nobody_reads_them() -> None:
    guarded = Guarded(api := Reviewer())
    api.fail("POST", "tokenreviews$", 0)
    assert guarded.status(TOKEN) == 503
    assert guarded.status(TOKEN) == 200
    assert guarded.status("x" * 10_000) == 401 and asked(api) == 2, "no token is that long"


def test_a_real_api_server_decides(api_server: ApiServer, tmp_path: Any) -> None:
    """The rights of system:auth-delegator suffice, and a token is needed that may get /metrics."""
    namespace, rbac = api_server.namespace("metrics"), "/apis/rbac.authorization.k8s.io/v1"
    for name in ("server", "reader", "tenant"):
        api_server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
    rules = [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    api_server.request("POST", f"{rbac}/clusterroles", {"metadata": {"name": namespace}, "rules": rules})
    for role, name in (("system:auth-delegator", "server"), (namespace, "reader")):
        subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        binding = {"metadata": {"generateName": "metrics-"}, "roleRef": reference, "subjects": [subject]}
        api_server.request("POST", f"{rbac}/clusterrolebindings", binding)
    folders = {name: api_server.token(tmp_path / name, namespace, name) for name in ("server", "reader", "tenant")}
    tokens = {name: (folder / "token").read_text() for name, folder in folders.items()}
    kube = connect(api_server.url, str(folders["server"]))
    service = metrics_service("t", Endpoint(), lambda _request: text("numbers"), Reviews(kube))
    service.start()
    try:
        assert ask(service.port, "/metrics", token=tokens["reader"]) == (200, "numbers\n")
        assert ask(service.port, "/metrics", token=tokens["tenant"])[0] == 403
        assert ask(service.port, "/metrics", token="no token")[0] == 401
    finally:
        service.stop()
        kube.close()
    # Without these rights it refuses everybody.
    powerless = Reviews(connect(api_server.url, str(folders["tenant"])))
    refusal = powerless(Request("GET", "/metrics", "", b"", f"Bearer {tokens['reader']}"))
    assert refusal is not None and refusal.status == 503
