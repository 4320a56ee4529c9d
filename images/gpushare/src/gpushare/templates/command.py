# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-dra-templates``: makes the claim templates that pods with shares of GPU memory name."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import uuid
from collections.abc import Sequence

import gpushare
from gpushare.api.account import default_namespace
from gpushare.api.client import Kube, KubeError, connect
from gpushare.api.events import Events
from gpushare.api.flags import Flags, add, add_common, check_choice, check_common
from gpushare.api.leader import LEASE_SECONDS, Leader
from gpushare.api.metrics import MeasuredKube
from gpushare.http.server import Endpoint
from gpushare.http.service import (
    STOP_SECONDS,
    Service,
    common,
    end_process,
    logger,
    start_all,
    stop_within,
    termination_signals,
)
from gpushare.shared._contracts.gpushare import MIB_PER_UNIT
from gpushare.templates.keeper import Keeper
from gpushare.templates.state import MOST_TEMPLATES, PER_NAMESPACE, UNUSED_SECONDS
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Info

COMPONENT = LEASE = "gpushare-dra-templates"
# If the namespace of the service account isn't known.
NAMESPACE = "kube-system"
# The API server keeps Events for an hour, and so many a second take 4 MB by then.
EVENT_RATE = 1.0

log = logging.getLogger("gpushare.templates")


class Templates:
    """All parts of the server; of several only the leader writes."""

    def __init__(
        self,
        kube: Kube,
        unit: str = "GiB",
        namespace: str = NAMESPACE,
        identity: str = "",
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 10.0),
        status_socket: str = "",
        unused: float = UNUSED_SECONDS,
        lease_seconds: int = LEASE_SECONDS,
        per_namespace: int = PER_NAMESPACE,
    ) -> None:
        """
        :param kube: the client of the API.
        :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
        :param namespace: of the Lease by which one of several servers leads.
        :param identity: this server's name in it; by default made of the host's name.
        :param backoff: the first and the longest pause of a watch after errors, in seconds.
        :param status_socket: path of a Unix socket for probes and metrics; empty for none.
        :param unused: seconds after which a template that no waiting pod names is deleted.
        :param lease_seconds: after which another server takes the place of a leader that is gone.
        :param per_namespace: how many templates a namespace has at most.
        """
        kube, host = MeasuredKube(kube, registry), socket.gethostname()
        done = Counter("gpushare_templates", "Claim templates that were made, by result", ["result"], registry=registry)
        build = {"component": "dra-templates", "version": gpushare.__version__}
        Info("gpushare_build", "Server and version", registry=registry).info(build)
        leads = Gauge("gpushare_templates_leader", "1 while this server leads", registry=registry)
        leads.set_function(lambda: float(self.leader.leading))
        self.events = Events(kube, COMPONENT, host, rate=EVENT_RATE)
        self.keeper = Keeper(
            kube,
            unit,
            lambda: self.leader.leading,
            self.events,
            lambda result: done.labels(result).inc(),
            backoff,
            unused,
            per_namespace,
        )
        for name, text, value in (
            ("existing", "Claim templates of this server that exist", lambda: self.keeper.state.existing),
            ("missing", "Claim templates that are still to be made", lambda: self.keeper.state.missing),
            ("overlooked", "Times that a pod or template wasn't kept in memory", lambda: self.keeper.state.overlooked),
        ):
            Gauge(f"gpushare_templates_{name}", text, registry=registry).set_function(value)
        identity = identity or f"{host}_{uuid.uuid4().hex[:12]}"
        self.leader = Leader(kube, namespace, LEASE, identity, lease_seconds, self.keeper.wake)
        self.servers = []
        if status_socket:
            status = common(self.unready, registry)
            self.servers.append(Service(f"{COMPONENT}-status", Endpoint(path=status_socket), status))

    def start(self) -> None:
        """Start the server and the threads of all parts.

        :raises OSError: the socket can't be had.
        """
        start_all(self.servers)
        for part in (self.events, self.leader, self.keeper):
            part.start()

    def stop(self) -> bool:
        """Stop all parts; the Lease is given back when nothing is written any more.

        :returns: whether all have ended.
        """
        return stop_within(
            (STOP_SECONDS - 2, [self.keeper.stop, *(server.stop for server in self.servers)]),
            (STOP_SECONDS, [self.leader.stop, self.events.stop]),
        )

    def unready(self) -> str | None:
        """Return why waiting pods may get no template; None if they get one from this server or from the leader."""
        return self.keeper.unready() or self.leader.problem or None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; other options come from the environment, then from the defaults."""
    parser = argparse.ArgumentParser(prog=COMPONENT, description=__doc__)
    own: Flags = {
        "memory-unit": (str, "GiB", " or ".join(MIB_PER_UNIT)),
        "lease-namespace": (
            str,
            "",
            "where the Lease is by which one of several servers leads; "
            f"unset: the service account's namespace, else {NAMESPACE}",
        ),
        "templates-per-namespace": (
            int,
            str(PER_NAMESPACE),
            f"the most that a namespace has at one time, from 1 to {MOST_TEMPLATES}",
        ),
    }
    add(parser, own)
    add_common(parser)
    options = parser.parse_args(arguments)
    check_common(parser, options)
    check_choice(parser, options, "memory-unit", tuple(MIB_PER_UNIT))
    if not 1 <= options.templates_per_namespace <= MOST_TEMPLATES:
        parser.error(f"--templates-per-namespace: {options.templates_per_namespace} isn't from 1 to {MOST_TEMPLATES}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logger("gpushare", options.log_format, options.log_level)
    signals = termination_signals()
    try:
        server = Templates(
            connect(options.api_server, options.service_account),
            options.memory_unit,
            options.lease_namespace or default_namespace() or NAMESPACE,
            status_socket=options.status_socket,
            per_namespace=options.templates_per_namespace,
        )
        server.start()
    except KubeError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("can't serve: %s", error)
        return 1
    log.info("serving", extra={"data": {"identity": server.leader.identity}})
    signal.sigwait(signals)
    log.info("stopping")
    return end_process(server.stop())


if __name__ == "__main__":
    sys.exit(main())
