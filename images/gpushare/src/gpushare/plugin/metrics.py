# SPDX-License-Identifier: GPL-3.0-or-later
"""The device plugin's metrics for Prometheus."""

from __future__ import annotations

from gpushare.node.metrics import NodeMetrics
from prometheus_client import REGISTRY, CollectorRegistry, Counter


class Metrics(NodeMetrics):
    """Metrics that the parts of the plugin report, from any thread.

    :param node: the label ``node`` of each card.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, node: str = "") -> None:
        super().__init__(registry, node, "device-plugin")
        self._allocations = Counter("gpushare_plugin_allocations", "Containers given their units", registry=registry)
        self._corrections = Counter(
            "gpushare_plugin_corrections",
            "Pods whose annotations were corrected",
            ["kind"],
            registry=registry,
        )

    def allocated(self) -> None:
        self._allocations.inc()

    def corrected(self, kind: str) -> None:
        self._corrections.labels(kind).inc()
