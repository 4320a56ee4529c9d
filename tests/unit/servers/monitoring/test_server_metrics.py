# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of cards, of requests to the API, and of the plugin."""

from __future__ import annotations

import tracemalloc
from unittest.mock import Mock, call

import pytest
from gpushare.api.client import KubeError
from gpushare.api.metrics import MeasuredKube
from gpushare.extender.metrics import Page, Work, cards_text
from gpushare.extender.state import NodeRow, State
from gpushare.http.service import Request
from gpushare.node.limits import Usage
from gpushare.plugin.metrics import Metrics
from gpushare.shared._contracts.gpushare import Card
from hypothesis import given
from hypothesis import strategies as st
from plugin_fakes import FakeKube
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Parse metrics with an independent parser, by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def state_of(*nodes: NodeRow) -> State:
    state = State()
    for node in nodes:
        state.node_changed(node.name, None, node)
    return state


def card(index: int, uuid: str, units: int = 16, healthy: bool = True) -> Card:
    return Card(index, uuid, index, units * 1024, units, healthy)


# Control characters and what reorders text are replaced: see tests/unit/sinks.
words = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cf", "Co", "Cn", "Zl", "Zp")) | st.just("\n"))


@given(st.dictionaries(words, st.dictionaries(words, st.integers(0, 10**6), max_size=4), max_size=4))
def test_any_names_and_sizes_round_trip(cluster: dict[str, dict[str, int]]) -> None:
    rows = [
        NodeRow(name, tuple(card(at, uuid, units) for at, (uuid, units) in enumerate(sizes.items())), "GiB")
        for name, sizes in cluster.items()
    ]
    found = parsed(cards_text(state_of(*rows).views()).decode())
    for name, sizes in cluster.items():
        for at, (uuid, units) in enumerate(sizes.items()):
            labels = (("card", str(at)), ("node", name), ("uuid", uuid))
            assert found["gpushare_card_capacity_units", labels] == units
            assert found["gpushare_card_booked_units", labels] == 0
            assert found["gpushare_card_healthy", labels] == 1
        if sizes:
            assert found["gpushare_node_largest_free_units", (("node", name),)] == max(sizes.values())
    cards = sum(len(sizes) for sizes in cluster.values())
    assert sum(1 for name, _labels in found if name == "gpushare_card_capacity_units") == cards


def test_the_page_has_the_registrys_numbers_and_the_cards() -> None:
    registry = CollectorRegistry()
    Work(registry).ledger.labels("conflict").inc(3)
    page = Page(registry, state_of(NodeRow("a", (card(0, "GPU-a"), card(1, "GPU-b", healthy=False)), "GiB")))
    ((method, path), handler) = next(iter(page.routes().items()))
    assert (method, path) == ("GET", "/metrics")
    answer = handler(Request("GET", "/metrics", "", b""))
    found = parsed(answer.body.decode())
    assert answer.status == 200 and answer.content_type.startswith("text/plain")
    assert found["gpushare_extender_ledger_writes_total", (("result", "conflict"),)] == 3
    assert found["gpushare_extender_evictions_total", (("result", "refused"),)] == 0
    assert found["gpushare_card_healthy", (("card", "1"), ("node", "a"), ("uuid", "GPU-b"))] == 0


def test_a_removed_node_leaves_no_metric() -> None:
    state = state_of(NodeRow("a", (card(0, "GPU-a"),), "GiB"))
    state.node_changed("a", NodeRow("a", (), ""), None)
    assert not parsed(cards_text(state.views()).decode())


def test_the_cards_of_a_large_cluster_take_little_more_memory_than_their_text() -> None:
    state = state_of(*(NodeRow(f"n{at}", tuple(card(no, f"GPU-{no}") for no in range(8)), "GiB") for at in range(500)))
    tracemalloc.start()
    size = len(cards_text(state.views()))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * size


# --------------------------------------------------------------------------- requests to the API


def test_requests_are_counted_by_method_and_status() -> None:
    registry, ticks = CollectorRegistry(), iter(range(100))
    double = FakeKube()
    kube = MeasuredKube(double, registry, clock=lambda: float(next(ticks)))
    node = {"metadata": {"name": "gpu1", "uid": "u"}}
    double.put(node)
    assert kube.get("/api/v1/nodes/gpu1")["metadata"]["name"] == "gpu1"
    kube.patch("/api/v1/nodes/gpu1/status", {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(KubeError) as missing:
        kube.get("/api/v1/nodes/none")
    assert missing.value.status == 404
    double.go_away()
    with pytest.raises(KubeError):
        kube.watch("/api/v1/nodes?watch=1&resourceVersion=1")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    for method, code in (("GET", "200"), ("GET", "404"), ("PATCH", "200"), ("WATCH", "0")):
        assert value("gpushare_api_requests_total", method=method, code=code) == 1
    # Each took one tick of the clock.
    assert value("gpushare_api_request_seconds_sum", method="GET") == 2
    assert value("gpushare_api_request_seconds_count", method="GET") == 2


def test_requests_are_forwarded_unchanged() -> None:
    recorder = Mock()
    kube = MeasuredKube(recorder, CollectorRegistry())
    kube.get("/a")
    kube.post("/b", {"x": 1})
    kube.put("/c", {"x": 2})
    kube.patch("/d", {"x": 3})
    kube.watch("/e")
    assert recorder.mock_calls == [
        call.get("/a"),
        call.post("/b", {"x": 1}),
        call.put("/c", {"x": 2}),
        call.patch("/d", {"x": 3}),
        call.watch("/e"),
    ]


# --------------------------------------------------------------------------- the plugin


def test_a_removed_card_and_one_that_does_not_respond() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, "gpu1")
    metrics.cards([card(0, "GPU-a"), card(1, "GPU-b")], {"GPU-a": 3})
    metrics.memory({"GPU-a": 2})
    labels = {"node": "gpu1", "card": "0", "uuid": "GPU-a", "model": ""}
    assert registry.get_sample_value("gpushare_plugin_card_held_units", labels) == 3
    assert registry.get_sample_value("gpushare_plugin_card_memory_used_bytes", labels) == 2 * 1024 * 1024
    second = {**labels, "card": "1", "uuid": "GPU-b"}
    assert registry.get_sample_value("gpushare_plugin_card_held_units", second) == 0
    assert registry.get_sample_value("gpushare_plugin_card_memory_used_bytes", second) is None
    metrics.cards([card(1, "GPU-b")], {})
    assert registry.get_sample_value("gpushare_plugin_card_units", labels) is None


@pytest.mark.parametrize("announced", ["enforced", "off", "unenforced: the driver is 580, limits need 615"])
def test_the_state_of_the_limits(announced: str) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, "gpu1")
    metrics.cards([card(0, "GPU-a")], {})
    metrics.limits(announced, {"GPU-a": Usage(2, 4096, 1024)}, 5)
    for state in ("enforced", "unenforced", "off"):
        value = registry.get_sample_value("gpushare_plugin_limit_state", {"node": "gpu1", "state": state})
        assert value == (state == announced.partition(":")[0])
    labels = {"node": "gpu1", "card": "0", "uuid": "GPU-a", "model": ""}
    assert registry.get_sample_value("gpushare_plugin_card_limited_bytes", labels) == 4 * 1024**3
    assert registry.get_sample_value("gpushare_plugin_card_limited_used_bytes", labels) == 1024**3
    assert registry.get_sample_value("gpushare_plugin_card_limited_containers", labels) == 2
    assert registry.get_sample_value("gpushare_plugin_limits_corrected_total") == 5
