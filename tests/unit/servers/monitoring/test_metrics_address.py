# SPDX-License-Identifier: GPL-3.0-or-later
"""The extender's metrics on an address of their own, by which nothing else of the extender can be reached."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from api_double import ApiDouble, make_node, make_pod
from extender_kit import Client, eventually
from gpushare.extender.command import Extender, parse
from gpushare.extender.metrics import METRICS_PORT, MetricsService, Page
from gpushare.extender.state import State
from prometheus_client import CollectorRegistry


def ask(port: int, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def extender() -> Iterator[Extender]:
    api = ApiDouble()
    api.put("nodes", make_node("a", 16))
    extender = Extender(api, port=0, registry=CollectorRegistry(), backoff=(0.01, 0.1), metrics=("127.0.0.1", 0))
    extender.start()
    eventually(lambda: extender.unsynced() is None)
    yield extender
    extender.stop()


def port_of(extender: Extender) -> int:
    assert extender.metrics is not None
    return extender.metrics.port


def test_the_same_numbers_as_on_its_own_port(extender: Extender) -> None:
    Client(extender).filter(make_pod("p", 5), "a")
    status, text = ask(port_of(extender), "/metrics")
    assert status == 200
    for line in (
        'gpushare_card_capacity_units{card="0",node="a",uuid="GPU-a-0"} 16',
        'gpushare_extender_requests_total{result="passed",verb="filter"} 1.0',
        'gpushare_mirror_synced{objects="claims"} 1.0',
    ):
        assert line in text.splitlines()
    assert ask(port_of(extender), "/healthz") == (200, "ok\n")


VERBS = ("inspect", "filter", "bind", "preempt")
PATHS = ("/", "/readyz", "/version", "/metricsx", "//metrics", "/metrics/../gpushare-scheduler/bind")


def test_no_other_path_is_served(extender: Extender) -> None:
    for path in (*PATHS, *(f"/gpushare-scheduler/{verb}" for verb in VERBS)):
        for method in ("GET", "POST"):
            status, text = ask(port_of(extender), path, method, b"{}")
            assert status in (404, 405) and "gpushare_" not in text, path
    assert not Client(extender).node("a")["usedGPU"]
    for path in ("/metrics", "/healthz"):
        assert ask(port_of(extender), path, "POST", b"x")[0] == 405


def test_a_page_is_rendered_once_a_second_for_any_number_of_requests() -> None:
    now, made = [100.0], []

    class Counting(Page):
        def page(self, request: Any) -> Any:
            made.append(now[0])
            return super().page(request)

    registry = CollectorRegistry()
    service = MetricsService("127.0.0.1", 0, registry, Counting(registry, State()), lambda: now[0])
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
    assert (parse([]).metrics_address, parse([]).metrics_port) == ("", METRICS_PORT)
    monkeypatch.setenv("GPUSHARE_METRICS_ADDRESS", "192.0.2.7")
    monkeypatch.setenv("GPUSHARE_METRICS_PORT", "9000")
    assert (parse([]).metrics_address, parse([]).metrics_port) == ("192.0.2.7", 9000)
    extender = Extender(ApiDouble(), port=0, registry=CollectorRegistry())
    assert extender.metrics is None


def test_an_address_that_cannot_be_bound_is_reported_and_releases_everything() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        extender = Extender(ApiDouble(), port=0, registry=CollectorRegistry(), metrics=("127.0.0.1", port))
        with pytest.raises(OSError):
            extender.start()
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", extender.service.port or 1), timeout=1):
            pass
