# SPDX-License-Identifier: GPL-3.0-or-later
"""The DRA driver's metrics for Prometheus: those of the node's cards, as the device plugin's, and of claims."""

from __future__ import annotations

from gpushare.node.metrics import NodeMetrics
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class Metrics(NodeMetrics):
    """Metrics that the parts of the driver report, from any thread.

    :param node: the label ``node`` of each card.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, node: str = "") -> None:
        super().__init__(registry, node, "dra-driver")
        self._claims = Gauge("gpushare_dra_prepared_claims", "Claims that are prepared on this node", registry=registry)
        self._forgotten = Counter(
            "gpushare_dra_forgotten_claims",
            "Prepared claims that kubelet had forgotten and that were undone",
            registry=registry,
        )
        self._unbooked = Gauge(
            "gpushare_dra_unbooked_cards",
            "Cards of which pods hold memory that their claims don't have in the API",
            registry=registry,
        )
        self._generation = Gauge(
            "gpushare_dra_pool_generation", "Generation of the node's ResourceSlices", registry=registry
        )

    def claims(self, number: int, unbooked_cards: int) -> None:
        self._claims.set(number)
        self._unbooked.set(unbooked_cards)

    def forgotten(self, number: int) -> None:
        self._forgotten.inc(number)

    def generation(self, number: int) -> None:
        self._generation.set(number)
