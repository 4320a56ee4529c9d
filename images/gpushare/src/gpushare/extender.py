# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-extender``: kube-scheduler's extender for shares of GPU memory."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import gpushare
from gpushare import contract
from gpushare.events import Events
from gpushare.extender_bind import Binder
from gpushare.extender_http import Api, Metrics
from gpushare.extender_state import NodeRow, PodRow, State, node_row, pod_row
from gpushare.kube import Kube, KubeError, Mirror, from_environment
from gpushare.placement import STRATEGIES
from gpushare.service import Service, logger

COMPONENT = "gpushare-extender"
# Only these can hold memory; the API server sends a pod that finishes as deleted.
PODS = ("/api/v1/pods", {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"})
NODES = ("/api/v1/nodes", dict[str, str]())
# A watch is heard of every minute; longer than this, and what is known may be wrong.
STALE_SECONDS = 300.0

log = logging.getLogger("gpushare.extender")


class Extender:
    """All parts of the extender, put together; it serves as soon as it is started and is ready when it knows enough."""

    def __init__(
        self,
        kube: Kube,
        address: str = "127.0.0.1",
        port: int = contract.EXTENDER_PORT,
        placement: str = "binpack",
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 10.0),
        threads: int = 16,
    ) -> None:
        self.state = State()
        self.nodes: Mirror[NodeRow] = Mirror(kube, *NODES, node_row, self.state.node_changed, backoff)
        self.pods: Mirror[PodRow] = Mirror(kube, *PODS, pod_row, self.state.pod_changed, backoff)
        self.events = Events(kube, COMPONENT, socket.gethostname())
        self.binder = Binder(kube, self.state, placement, self.events)
        api = Api(self.state, self.binder.bind, self.unsynced, Metrics(registry))
        self.service = Service(COMPONENT, address, port, self.unready, api.routes(), registry, threads)
        registry.register(_Cards(self))

    def start(self) -> None:
        """
        :raises OSError: the address can't be had.
        """
        self.service.start()
        for part in (self.nodes, self.pods, self.events, self.binder):
            part.start()

    def stop(self) -> None:
        for part in (self.service, self.nodes, self.pods, self.binder, self.events):
            part.stop()

    def unsynced(self) -> str | None:
        """Why nothing can be answered yet: without all nodes and pods, memory in use would look free."""
        for what, mirror in (("nodes", self.nodes), ("pods", self.pods)):
            if not mirror.synced:
                return f"the {what} haven't been read from the API yet" + (f": {mirror.error}" if mirror.error else "")
        return None

    def unready(self) -> str | None:
        reason = self.unsynced()
        if reason is not None:
            return reason
        for what, mirror in (("nodes", self.nodes), ("pods", self.pods)):
            if mirror.fresh > STALE_SECONDS:
                return f"nothing was heard of the {what} for {mirror.fresh:.0f} s: {mirror.error or 'no answer'}"
        return None


class _Cards(Collector):
    """The gauges, taken from the state at the moment of the scrape."""

    def __init__(self, extender: Extender) -> None:
        self._extender = extender

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        extender, labels = self._extender, ["node", "card", "uuid"]
        capacity = GaugeMetricFamily("gpushare_card_capacity_units", "Size of a card in units", labels=labels)
        booked = GaugeMetricFamily("gpushare_card_booked_units", "Units booked; may exceed the size", labels=labels)
        healthy = GaugeMetricFamily("gpushare_card_healthy", "Whether a card may be given to pods", labels=labels)
        unplaced = GaugeMetricFamily(
            "gpushare_node_unplaced_units", "Units of bound pods whose card isn't known", labels=["node"]
        )
        for view in extender.state.views():
            for at, card in enumerate(view.cards):
                values = [view.name, str(card.index), card.uuid]
                capacity.add_metric(values, card.units)
                booked.add_metric(values, view.used[at])
                healthy.add_metric(values, int(card.healthy))
            if view.cards or view.unplaced:
                unplaced.add_metric([view.name], view.unplaced)
        age = GaugeMetricFamily(
            "gpushare_mirror_age_seconds", "Since the API was last heard of these objects", labels=["objects"]
        )
        kept = GaugeMetricFamily("gpushare_mirror_objects", "Objects kept in memory", labels=["objects"])
        for what, size, mirror_age in (
            ("nodes", len(extender.nodes), extender.nodes.fresh),
            ("pods", len(extender.pods), extender.pods.fresh),
        ):
            age.add_metric([what], mirror_age)
            kept.add_metric([what], size)
        holds = GaugeMetricFamily(
            "gpushare_extender_holds", "Bookings that the watch hasn't shown yet", extender.state.holds
        )
        yield from (capacity, booked, healthy, unplaced, age, kept, holds)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what isn't on it comes from the environment, then from the defaults."""
    env = os.environ.get
    parser = argparse.ArgumentParser(prog="gpushare-extender", description=__doc__)
    parser.add_argument("--address", default=env("GPUSHARE_ADDRESS", "127.0.0.1"), help="address to listen on")
    parser.add_argument("--port", type=int, default=env("GPUSHARE_PORT", str(contract.EXTENDER_PORT)))
    parser.add_argument("--placement", default=env("GPUSHARE_PLACEMENT", "binpack"), help=" or ".join(STRATEGIES))
    parser.add_argument("--log-format", default=env("GPUSHARE_LOG_FORMAT", "text"), help="text or json")
    parser.add_argument("--log-level", default=env("GPUSHARE_LOG_LEVEL", "info"), help="debug, info, warning or error")
    parser.add_argument("--kubeconfig", default=env("GPUSHARE_KUBECONFIG", ""), help="unset: the pod's service account")
    parser.add_argument("--version", action="version", version=gpushare.__version__)
    options = parser.parse_args(arguments)
    # Not by argparse's choices, which don't look at what came from the environment.
    for name, allowed in (
        ("placement", tuple(STRATEGIES)),
        ("log_format", ("text", "json")),
        ("log_level", ("debug", "info", "warning", "error")),
    ):
        if getattr(options, name) not in allowed:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: {getattr(options, name)!r} is none of {', '.join(allowed)}")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port: {options.port} is no port")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logger("gpushare", options.log_format, options.log_level)
    # Blocked before there are threads, so that they come to the sigwait below and to nobody else.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        extender = Extender(from_environment(options.kubeconfig), options.address, options.port, options.placement)
        extender.start()
    except KubeError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("can't listen on %s:%s: %s", options.address, options.port, error)
        return 1
    facts = {"address": options.address, "port": extender.service.port, "placement": options.placement}
    log.info("serving", extra={"data": facts})
    while extender.unsynced() is not None:
        if signal.sigtimedwait(signals, 0.1) is not None:
            break
    else:
        log.info("ready", extra={"data": {"nodes": len(extender.nodes), "pods": len(extender.pods)}})
        # What was read now mostly stays; looking at it in every collection would be seen in the slowest requests.
        gc.collect()
        gc.freeze()
        signal.sigwait(signals)
    log.info("stopping")
    extender.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
