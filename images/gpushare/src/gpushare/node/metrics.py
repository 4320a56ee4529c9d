# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics of a node's server for Prometheus. Memory is in bytes or in units of the cluster, as in each name."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import typing as t

import gpushare
from gpushare.node.limits import Usage, Violation
from gpushare.nvml.limits import MIB
from gpushare.shared._contracts import gpushare as contract
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

# kubelet admits one pod after the other and waits for these calls.
CALL_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LIMIT_STATES = ("enforced", "unenforced", "off")
EVICTION_RESULTS = ("evicted", "refused", "failed")
VIOLATION_CODES = sorted(code.value for code in (*contract.LIMIT_VIOLATIONS, contract.Reason.MEMORY_LIMIT_FAILED))


class _Cards(Collector):
    """Gauges of the present cards; a removed card has none."""

    def __init__(self, node: str, component: str) -> None:
        self._node, self._component = node, component
        self._lock = threading.Lock()
        self._cards: tuple[contract.Card, ...] = ()
        self._held: t.Mapping[str, int] = {}
        self._used_mib: t.Mapping[str, int] = {}
        self._unreleased: t.Mapping[str, int] = {}
        self._limits: tuple[str, t.Mapping[str, Usage], int] = ("", {}, 0)
        self._violations: collections.Counter[tuple[str, str]] = collections.Counter()

    def set(self, cards: t.Sequence[contract.Card], held: t.Mapping[str, int]) -> None:
        """Set the node's cards, and the units that containers hold by card (UUID)."""
        with self._lock:
            self._cards, self._held = tuple(cards), dict(held)

    def set_memory(self, used_mib: t.Mapping[str, int]) -> None:
        """Set the MiB in use by card (UUID) from NVML; a card that doesn't answer is omitted."""
        with self._lock:
            self._used_mib = dict(used_mib)

    def set_unreleased(self, units: t.Mapping[str, int]) -> None:
        """Set the units by card (UUID) of deleted pods whose processes haven't ended."""
        with self._lock:
            self._unreleased = dict(units)

    def set_limits(
        self, state: str, usage: t.Mapping[str, Usage], corrected: int, violations: t.Sequence[Violation] = ()
    ) -> None:
        """Set the state of the memory limits, as in the node's annotation.

        :param usage: by card (UUID).
        :param corrected: number of corrected limits since the start.
        :param violations: containers that aren't held to their memory.
        """
        with self._lock:
            self._limits = (state, dict(usage), corrected)
            self._violations = collections.Counter((violation.card, violation.code.value) for violation in violations)

    def describe(self) -> t.Iterator[Metric]:
        return iter(())

    def collect(self) -> t.Iterator[Metric]:
        with self._lock:
            cards, held, used_mib, unreleased = self._cards, self._held, self._used_mib, self._unreleased
            state, usage, corrected = self._limits
            violations = dict(self._violations)
        labels = ["node", "card", "uuid", "model"]

        def gauge(name: str, help_text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"gpushare_plugin_{name}", help_text, labels=labels)

        units = gauge("card_units", "Units of a card")
        held_units = gauge("card_held_units", "Units of a card that kubelet has given to containers")
        left = gauge("card_unreleased_units", "Units of a card of deleted pods whose processes haven't ended")
        healthy = gauge("card_healthy", "1 while a card may be given to pods")
        memory = gauge("card_memory_bytes", "Memory of a card")
        used = gauge("card_memory_used_bytes", "Memory of a card that is in use by any process")
        limit = gauge("card_limited_bytes", "Sum of the containers' memory limits that the driver enforces on a card")
        inside = gauge("card_limited_used_bytes", "Memory in use by the containers that have such a limit")
        containers = gauge("card_limited_containers", "Containers whose memory on a card the driver limits")
        violating = GaugeMetricFamily(
            "gpushare_plugin_limit_violations",
            "Containers that aren't held to their memory of a card, and memory of no container (1), by reason code",
            labels=[*labels, "reason"],
        )
        for card in cards:
            values = [self._node, str(card.index), card.uuid, card.model]
            units.add_metric(values, card.units)
            held_units.add_metric(values, held.get(card.uuid, 0))
            left.add_metric(values, unreleased.get(card.uuid, 0))
            healthy.add_metric(values, int(card.healthy))
            memory.add_metric(values, card.memory_mib * MIB)
            if card.uuid in used_mib:
                used.add_metric(values, used_mib[card.uuid] * MIB)
            here = usage.get(card.uuid, Usage())
            limit.add_metric(values, here.limited_mib * MIB)
            inside.add_metric(values, here.used_mib * MIB)
            containers.add_metric(values, here.containers)
            for code in VIOLATION_CODES:
                violating.add_metric([*values, code], violations.get((card.uuid, code), 0))
        yield from (units, held_units, left, healthy, memory, used, limit, inside, containers, violating)
        states = GaugeMetricFamily(
            "gpushare_plugin_limit_state", "1 for the state of this node's memory limits", labels=["node", "state"]
        )
        for limit_state in LIMIT_STATES:
            states.add_metric([self._node, limit_state], int(state.partition(":")[0] == limit_state))
        yield states
        yield CounterMetricFamily(
            "gpushare_plugin_limits_corrected",
            "Memory limits that differed from the share and were corrected by the plugin",
            corrected,
        )
        yield InfoMetricFamily(
            "gpushare_build", "Server and version", {"component": self._component, "version": gpushare.__version__}
        )


class NodeMetrics:
    """Metrics that the parts of a node's server report, from any thread.

    :param node: the label ``node`` of each card.
    :param component: the server's name in its build's metric.
    """

    def __init__(self, registry: CollectorRegistry, node: str, component: str) -> None:
        cards = _Cards(node, component)
        registry.register(cards)
        self.cards, self.memory, self.limits = cards.set, cards.set_memory, cards.set_limits
        self.unreleased = cards.set_unreleased
        self._calls = Histogram(
            "gpushare_plugin_call_seconds",
            "Seconds that kubelet waited for an answer",
            ["call"],
            buckets=CALL_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            "gpushare_plugin_refusals",
            "Requests of kubelet that were refused, by reason code",
            ["reason"],
            registry=registry,
        )
        self._xids = Counter(
            "gpushare_plugin_xids", "Errors that the driver reported for a card", ["uuid", "xid"], registry=registry
        )
        self._evictions = Counter(
            "gpushare_plugin_evictions",
            "Evictions of pods that hold memory of others, by result",
            ["result"],
            registry=registry,
        )
        for result in EVICTION_RESULTS:
            self._evictions.labels(result)
        self._injection = Gauge(
            "gpushare_plugin_device_injection",
            "1 for how devices are injected into containers",
            ["mode"],
            registry=registry,
        )
        self._registrations = Gauge(
            "gpushare_plugin_registrations", "Registrations with kubelet since the start", registry=registry
        )
        self._last_error = Gauge(
            "gpushare_plugin_last_error_timestamp_seconds",
            "Unix time of the last failure",
            ["where"],
            registry=registry,
        )

    def xid(self, uuid: str, number: int) -> None:
        """Count an XID error of a card."""
        self._xids.labels(uuid, str(number)).inc()

    @contextlib.contextmanager
    def timed(self, call: str) -> t.Iterator[None]:
        """Measure the answer to a call of kubelet, by its name in lower case."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._calls.labels(call).observe(time.perf_counter() - began)

    def injection(self, mode: str) -> None:
        """Set how devices are injected into containers: ``cdi`` or ``envvar``."""
        for name in ("cdi", "envvar"):
            self._injection.labels(name).set(int(name == mode))

    def refused(self, code: str) -> None:
        """Count a refused request by its reason code."""
        self._refusals.labels(str(code)).inc()
        self.failed("admission")

    def evicted(self, result: str) -> None:
        """Count an eviction: ``evicted``, ``refused`` (by a disruption budget) or ``failed``."""
        self._evictions.labels(result).inc()

    def registered(self, times: int) -> None:
        self._registrations.set(times)

    def failed(self, where: str) -> None:
        self._last_error.labels(where).set(time.time())
