# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of cards, mirrors, the ledger and evictions for Prometheus; those of HTTP requests are in ``routes``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gpushare
from gpushare.api.mirror import Mirror
from gpushare.extender.state import NodeView, State
from gpushare.http.service import Handler, Request, Response
from gpushare.shared._core.untrusted import lines
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

# For clients without the right to bind pods; 9445 is the device plugin's, the next ones are used on OpenShift.
METRICS_PORT = 9456
# Characters of a label's value.
LONGEST_LABEL = 256


class Work:
    """Counts of the extender's writes besides bindings.

    ``ledger``: writes of the bookings' Lease, by ``written``, ``conflict`` (another extender wrote before) and
    ``failed``. ``evictions``: evictions for pods of a higher priority, by ``evicted``, ``refused`` (by a disruption
    budget) and ``failed``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ledger = Counter(
            "gpushare_extender_ledger_writes",
            "Writes of the bookings' Lease by result",
            ["result"],
            registry=registry,
        )
        self.evictions = Counter(
            "gpushare_extender_evictions",
            "Evictions for pods of higher priority by result",
            ["result"],
            registry=registry,
        )
        # A missing counter can't be distinguished from one that was never scraped.
        for counter, results in (
            (self.ledger, ("written", "conflict", "failed")),
            (self.evictions, ("evicted", "refused", "failed")),
        ):
            for result in results:
                counter.labels(result)


class StateMetrics(Collector):
    """Gauges of the extender's state at the moment of the scrape."""

    def __init__(self, state: State, mirrors: Mapping[str, Mirror[Any]]) -> None:
        """
        :param mirrors: by the kind of their objects, which is the label.
        """
        self._state, self._mirrors = state, mirrors

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "gpushare_mirror_age_seconds",
            "Seconds since the API last sent these objects",
            labels=["objects"],
        )
        objects = GaugeMetricFamily("gpushare_mirror_objects", "Objects kept in memory", labels=["objects"])
        synced = GaugeMetricFamily(
            "gpushare_mirror_synced", "1 since all of these objects were read for the first time", labels=["objects"]
        )
        for what, mirror in self._mirrors.items():
            age.add_metric([what], mirror.age)
            objects.add_metric([what], len(mirror))
            synced.add_metric([what], int(mirror.synced))
        yield from (age, objects, synced)
        yield GaugeMetricFamily(
            "gpushare_extender_holds", "Bookings whose pod the watch hasn't delivered yet", self._state.holds
        )
        yield InfoMetricFamily(
            "gpushare_build", "Server and version", {"component": "extender", "version": gpushare.__version__}
        )


class Page:
    """``GET /metrics``: the registry's numbers and those of the cards.

    The cards are formatted here: with the registry, thousands of them take a third of a second of a processor for each
    scrape, and every filter request would wait for that.
    """

    def __init__(self, registry: CollectorRegistry, state: State) -> None:
        self._registry, self._state = registry, state

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {("GET", "/metrics"): self.page}

    def page(self, _request: Request) -> Response:
        # Unlike OpenMetrics, the text format 1.0.0 has no end marker, so more may follow.
        body = cards_text(self._state.views())
        body[:0] = generate_latest(self._registry)
        return Response(200, body, CONTENT_TYPE_LATEST)


def cards_text(views: Iterable[NodeView]) -> bytearray:
    """Format the gauges of cards and nodes as Prometheus' text.

    As bytes node by node: the strings of 40,000 cards would take six times as much.
    """
    capacity = _head("gpushare_card_capacity_units", "Size of a card in units")
    booked = _head("gpushare_card_booked_units", "Units booked; may exceed the size")
    healthy = _head("gpushare_card_healthy", "Whether a card may be given to pods")
    unplaced = _head("gpushare_node_unplaced_units", "Units of bound pods whose card isn't known")
    largest = _head("gpushare_node_largest_free_units", "The largest free share on one card of a node")
    for view in views:
        name = _escaped(view.name)
        for at, card in enumerate(view.cards):
            labels = f'{{card="{card.index}",node="{name}",uuid="{_escaped(card.uuid)}"}}'
            capacity += f"gpushare_card_capacity_units{labels} {card.units}\n".encode()
            booked += f"gpushare_card_booked_units{labels} {view.used[at]}\n".encode()
            healthy += f"gpushare_card_healthy{labels} {int(card.healthy)}\n".encode()
        if view.cards or view.unplaced:
            unplaced += f'gpushare_node_unplaced_units{{node="{name}"}} {view.unplaced}\n'.encode()
            largest += f'gpushare_node_largest_free_units{{node="{name}"}} {max(0, view.largest)}\n'.encode()
    for other in (booked, healthy, unplaced, largest):
        capacity += other
        other.clear()
    return capacity


def _head(name: str, help_text: str) -> bytearray:
    return bytearray(f"# HELP {name} {help_text}\n# TYPE {name} gauge\n".encode())


def _escaped(text: str) -> str:
    """Escape a label's value: names and UUIDs come from the API, so they may contain anything."""
    return lines(text, LONGEST_LABEL).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
