# SPDX-License-Identifier: GPL-3.0-or-later
"""The device plugin's numbers for Prometheus."""

from __future__ import annotations

import threading
import time
import typing as t

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gpushare import contract


class _Cards(Collector):
    """Gauges of the cards as they are at the moment: a card that is gone leaves no number behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cards: tuple[contract.Card, ...] = ()
        self._held: t.Mapping[str, int] = {}

    def set(self, cards: t.Sequence[contract.Card], held: t.Mapping[str, int]) -> None:
        with self._lock:
            self._cards, self._held = tuple(cards), dict(held)

    def collect(self) -> t.Iterator[GaugeMetricFamily]:
        with self._lock:
            cards, held = self._cards, self._held
        labels = ["card", "uuid", "model"]
        units = GaugeMetricFamily("gpushare_plugin_card_units", "Units of a card", labels=labels)
        used = GaugeMetricFamily("gpushare_plugin_card_held_units", "Units that containers hold", labels=labels)
        healthy = GaugeMetricFamily("gpushare_plugin_card_healthy", "1 while NVML answers for a card", labels=labels)
        for card in cards:
            values = [str(card.index), card.uuid, card.model]
            units.add_metric(values, card.units)
            used.add_metric(values, held.get(card.uuid, 0))
            healthy.add_metric(values, 1 if card.healthy else 0)
        yield from (units, used, healthy)


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._cards = _Cards()
        registry.register(self._cards)
        self._allocations = Counter("gpushare_plugin_allocations", "Containers given their units", registry=registry)
        self._refusals = Counter("gpushare_plugin_refusals", "Requests of kubelet that were refused", registry=registry)
        self._corrections = Counter(
            "gpushare_plugin_corrections",
            "Pods whose annotations were brought to the truth",
            ["kind"],
            registry=registry,
        )
        self._registrations = Gauge(
            "gpushare_plugin_registrations", "Registrations with kubelet since the start", registry=registry
        )
        self._last_error = Gauge(
            "gpushare_plugin_last_error_timestamp_seconds", "When something last failed", ["where"], registry=registry
        )

    def cards(self, cards: t.Sequence[contract.Card], held: t.Mapping[str, int]) -> None:
        self._cards.set(cards, held)

    def allocated(self) -> None:
        self._allocations.inc()

    def refused(self) -> None:
        self._refusals.inc()
        self.failed("admission")

    def corrected(self, kind: str) -> None:
        self._corrections.labels(kind).inc()

    def registered(self, times: int) -> None:
        self._registrations.set(times)

    def failed(self, where: str) -> None:
        self._last_error.labels(where).set(time.time())
