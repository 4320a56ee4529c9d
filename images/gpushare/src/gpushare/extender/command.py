# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-extender``: kube-scheduler's extender for shares of GPU memory."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gpushare.api.account import default_namespace
from gpushare.api.client import Kube, KubeError, connect
from gpushare.api.events import Events
from gpushare.api.flags import Flags, add, add_common, check_choice, check_common
from gpushare.api.metrics import MeasuredKube
from gpushare.api.mirror import PAGE, Mirror
from gpushare.api.reviews import Reviews
from gpushare.extender.bind import Binder
from gpushare.extender.claims import Claims
from gpushare.extender.ledger import Ledger
from gpushare.extender.metrics import METRICS_PORT, Page, StateMetrics, Work
from gpushare.extender.placement import STRATEGIES
from gpushare.extender.preemption import Preemption
from gpushare.extender.retry import RetryQueue
from gpushare.extender.routes import Api, Metrics
from gpushare.extender.state import NodeRow, PodRow, State, node_row, pod_row
from gpushare.http.limits import Limits
from gpushare.http.server import Endpoint
from gpushare.http.service import (
    STOP_SECONDS,
    SWITCH_SECONDS,
    Service,
    common,
    end_process,
    logger,
    metrics_service,
    start_all,
    stop_within,
    termination_signals,
)
from gpushare.http.tls import Tls, metrics_tls, tls_options
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason, Refusal
from gpushare.shared._core.types import JsonObject
from prometheus_client import REGISTRY, CollectorRegistry

COMPONENT = "gpushare-extender"
# Only these can hold memory; a pod that finishes is a deletion for this watch.
PODS = ("/api/v1/pods", {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"})
NODES = ("/api/v1/nodes", dict[str, str]())
# They take 4 KB each; 150,000 pods take 1 KB each at the most.
MOST_NODES = 20_000
# If the namespace of the service account isn't known.
LEDGER_NAMESPACE = "kube-system"

log = logging.getLogger("gpushare.extender")


class _Part(Protocol):
    """A part with threads of its own."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Extender:
    """All parts of the extender; it serves immediately, and is ready when it has read all nodes and pods."""

    def __init__(
        self,
        kube: Kube,
        address: str = "127.0.0.1",
        port: int = contract.EXTENDER_PORT,
        placement: str = "binpack",
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 10.0),
        limits: Limits | None = None,
        preemption: bool = True,
        namespace: str = LEDGER_NAMESPACE,
        tls: Tls | None = None,
        metrics: Endpoint | None = None,
        status_socket: str = "",
    ) -> None:
        """
        :param kube: the client of the API.
        :param placement: the strategy, a key of ``STRATEGIES``.
        :param backoff: the first and the longest pause of a watch after errors, in seconds.
        :param limits: of schedulers.
        :param preemption: whether pods are evicted for pods of a higher priority.
        :param namespace: where the ledger of bookings is; the same for all extenders of a cluster.
        :param tls: the certificates' files; None for plain HTTP.
        :param metrics: where others read the metrics, with a token; None: nowhere.
        :param status_socket: path of a Unix socket for probes; empty for none.
        """
        kube, work = MeasuredKube(kube, registry), Work(registry)
        self.state = State()
        self.nodes: Mirror[NodeRow] = Mirror(
            kube, *NODES, node_row, self.state.node_changed, backoff, page=PAGE, most=MOST_NODES
        )
        self.pods: Mirror[PodRow] = Mirror(kube, *PODS, pod_row, self.state.pod_changed, backoff, page=PAGE)
        self.ledger = Ledger(
            kube, self.state, self.pods, namespace, count=lambda result: work.ledger.labels(result).inc()
        )
        self.events = Events(kube, COMPONENT, socket.gethostname())
        self.binder = Binder(kube, self.state, placement, self.events, self.ledger)
        self.claims = Claims(kube, self.state, backoff)
        self.preemption = Preemption(
            kube,
            self.state,
            self.events,
            lambda result: work.evictions.labels(result).inc(),
            preemption,
            claims=self.claims,
        )
        self.retries = RetryQueue(kube, self.state)
        self.api = Api(
            self.state,
            self.binder.bind,
            self.refusal,
            Metrics(registry),
            preemption=self.preemption,
            refused=(self.preemption.refused, self.retries.refused),
            passed=self.binder.keep_filtered,
        )
        page = Page(registry, self.state)
        status = {**common(self.unready, registry), **page.routes()}
        self.service = Service(
            COMPONENT, Endpoint(address, port, tls=tls), {**status, **self.api.routes()}, limits=limits
        )
        self.servers = [self.service]
        if status_socket:
            self.servers.append(Service(f"{COMPONENT}-status", Endpoint(path=status_socket), status))
        self.metrics: Service | None = None
        if metrics is not None:
            self.metrics = metrics_service(f"{COMPONENT}-metrics", metrics, page.page, Reviews(kube))
            self.servers.append(self.metrics)
        self._mirrors: dict[str, Mirror[Any]] = {"nodes": self.nodes, "pods": self.pods}
        if preemption:
            self._mirrors["claims"] = self.claims.mirror
        registry.register(StateMetrics(self.state, self._mirrors))

    def start(self) -> None:
        """Start the servers and the threads of all parts.

        :raises OSError: an address can't be had, or the certificates can't be read.
        """
        start_all(self.servers)
        parts: list[_Part] = [*self._mirrors.values(), self.events, self.binder, self.preemption, self.retries]
        for part in parts:
            part.start()

    def stop(self) -> bool:
        """Stop all parts, after answering running requests, if the API allows it within ``STOP_SECONDS``.

        :returns: whether all have ended.
        """
        # The binder's last write waits for the watch of pods.
        working: list[_Part] = [self.retries, self.preemption, self.binder]
        reading: list[_Part] = [*self._mirrors.values(), self.events]
        return stop_within(
            (STOP_SECONDS - 3, [server.stop for server in self.servers]),
            (STOP_SECONDS - 1, [part.stop for part in working]),
            (STOP_SECONDS, [part.stop for part in reading]),
        )

    def unsynced(self) -> str | None:
        """Return why requests can't be answered yet: without all nodes and pods, used memory would count as free."""
        for what, mirror in self._mirrors.items():
            if not mirror.synced:
                return f"the {what} haven't been read from the API yet" + (f": {mirror.error}" if mirror.error else "")
        return None

    def refusal(self) -> Refusal | None:
        """Return why no pod may be scheduled by the state now; None if it is complete and follows the API."""
        reason = self.unsynced()
        if reason is not None:
            return Refusal(Reason.NOT_READY, f"the gpushare extender isn't ready: {reason}")
        for what, mirror in self._mirrors.items():
            if reason := mirror.stale:
                text = (
                    f"the gpushare extender's {what} may be outdated, since {reason}; it tries again by itself, and so"
                )
                advice = "check the API server and the extender's rights if this stays"
                return Refusal(Reason.STALE_STATE, f"{text} does kube-scheduler; {advice}")
        return None

    def unready(self) -> str | None:
        """Return why the extender isn't ready; None if it is."""
        refusal = self.refusal()
        return refusal.text if refusal else self.ledger.problem


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; other options come from the environment, then from the defaults."""
    parser = argparse.ArgumentParser(prog="gpushare-extender", description=__doc__)
    own: Flags = {
        "address": (str, "127.0.0.1", "address to listen on"),
        "port": (int, str(contract.EXTENDER_PORT), "its port"),
        "metrics-address": (
            str,
            "",
            "where those read /metrics, and nothing else, whose token the API server allows it; unset: nowhere",
        ),
        "metrics-port": (int, str(METRICS_PORT), "its port"),
        "placement": (str, "binpack", " or ".join(STRATEGIES)),
        "preemption": (
            str,
            "on",
            "on or off: pods of a higher priority may have others evicted for memory of one card",
        ),
        "ledger-namespace": (
            str,
            "",
            "where the Lease is in which bookings are written, the same for all extenders of a cluster; "
            f"unset: the service account's namespace, else {LEDGER_NAMESPACE}",
        ),
        "tls-cert": (str, "", "the server's certificate chain, in PEM"),
        "tls-key": (str, "", "its private key"),
        "tls-client-ca": (str, "", "the authority of the certificates that clients must have"),
        "metrics-tls-cert": (str, "", "the certificate chain of --metrics-address, in PEM"),
        "metrics-tls-key": (str, "", "its private key"),
    }
    add(parser, own)
    add_common(parser)
    options = parser.parse_args(arguments)
    check_common(parser, options)
    check_choice(parser, options, "placement", tuple(STRATEGIES))
    check_choice(parser, options, "preemption", ("on", "off"))
    for flag, port in (("--port", options.port), ("--metrics-port", options.metrics_port)):
        if not 0 <= port <= 65535:
            parser.error(f"{flag}: {port} is no port")
    try:
        options.tls = tls_options(options.address, options.tls_cert, options.tls_key, options.tls_client_ca)
        tls = metrics_tls(options.metrics_address, options.metrics_tls_cert, options.metrics_tls_key)
    except ValueError as error:
        parser.error(str(error))
    where = options.metrics_address
    options.metrics = Endpoint(where, options.metrics_port, tls=tls) if where else None
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logger("gpushare", options.log_format, options.log_level)
    sys.setswitchinterval(SWITCH_SECONDS)
    signals = termination_signals()
    try:
        extender = Extender(
            connect(options.api_server, options.service_account),
            options.address,
            options.port,
            options.placement,
            preemption=options.preemption == "on",
            namespace=options.ledger_namespace or default_namespace() or LEDGER_NAMESPACE,
            tls=options.tls,
            metrics=options.metrics,
            status_socket=options.status_socket,
        )
        extender.start()
    except KubeError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("can't serve: %s", error)
        return 1
    facts: JsonObject = {"address": options.address, "port": extender.service.port, "placement": options.placement}
    if extender.metrics is not None:
        facts["metrics"] = extender.metrics.port
    log.info("serving", extra={"data": facts})
    # Not by sigtimedwait, which returns a signal that nobody sent after the process was stopped (CPython 3.13).
    while extender.unsynced() is not None and not signals & signal.sigpending():
        time.sleep(0.1)
    if extender.unsynced() is None:
        log.info("ready", extra={"data": {"nodes": len(extender.nodes), "pods": len(extender.pods)}})
        # Most of these objects stay; checking them in every collection would slow down requests.
        gc.collect()
        gc.freeze()
    signal.sigwait(signals)
    log.info("stopping")
    return end_process(extender.stop())


if __name__ == "__main__":
    sys.exit(main())
