# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings that the servers of a node have in common, and their run until a signal ends it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import signal
import sys
import typing as t
from pathlib import Path

from gpushare.http.server import Endpoint
from gpushare.http.service import SWITCH_SECONDS, Service, end_process, termination_signals
from gpushare.node.injection import AUTO, FOLDERS
from gpushare.shared._contracts.card_exclusion import NOTHING, Exclusion
from gpushare.shared._core.types import JsonObject


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """A server's settings.

    :param unit: of the cluster's shares, GiB or MiB.
    :param metrics: where others read the metrics, with a token; None: nowhere.
    :param status_socket: path of a Unix socket for probes; empty for none.
    :param query_seconds: seconds after which the cards are queried again, at the latest.
    :param reserve_mib: MiB of each card that pods aren't given, besides those of driver and firmware.
    :param xid_quiet: seconds without a further error after which a card is given to pods again.
    :param ignored_xids: errors that don't concern the card, in addition to those of applications.
    :param injection: ``auto``, ``cdi`` or ``envvar``.
    :param cdi_folders: of NVIDIA's specification.
    :param memory_limit: ``auto``, ``required`` or ``off``.
    :param evict: whether a pod is evicted that holds memory of others and can't be limited.
    :param cgroup_root: where the node's own /sys/fs/cgroup is mounted.
    :param exclude: cards that are left alone.
    :param host_pid: whether this process has the node's own process IDs.
    """

    node: str
    unit: str = "GiB"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    metrics: Endpoint | None = None
    status_socket: str = ""
    query_seconds: float = 5.0
    reserve_mib: int = 0
    xid_quiet: float = 300.0
    ignored_xids: tuple[int, ...] = ()
    injection: str = AUTO
    cdi_folders: tuple[Path, ...] = FOLDERS
    memory_limit: str = "auto"
    evict: bool = False
    cgroup_root: str = "/sys/fs/cgroup"
    exclude: Exclusion = NOTHING
    host_pid: bool = False


Settings = t.TypeVar("Settings", bound=NodeOptions)


def settings(kind: type[Settings], given: argparse.Namespace, **more: t.Any) -> Settings:
    """Return a server's settings.

    :param given: its checked command line.
    :param more: its own settings.
    """
    return kind(
        node=given.node_name,
        unit=given.memory_unit,
        kubelet_dir=Path(given.kubelet_dir),
        metrics=given.metrics,
        status_socket=given.status_socket,
        query_seconds=given.query_interval,
        reserve_mib=given.reserved_memory,
        xid_quiet=given.xid_quiet,
        ignored_xids=tuple(int(xid) for xid in given.ignore_xids.split(",") if xid),
        injection=given.device_injection,
        cdi_folders=tuple(Path(folder) for folder in given.cdi_folders.split(",")),
        memory_limit=given.memory_limit,
        evict=given.memory_limit_violation == "evict",
        cgroup_root=given.cgroup_root,
        exclude=given.exclude,
        host_pid=given.host_pid,
        **more,
    )


class Server(t.Protocol):
    """A server of a node. ``start`` raises :class:`OSError` if a socket or an address can't be bound."""

    metrics_service: Service | None

    def start(self) -> None: ...

    def stop(self) -> bool: ...


def serve(make: t.Callable[[], Server], options: NodeOptions, log: logging.Logger) -> int:
    """Run a server until a signal ends it, and return the exit status.

    :param make: makes the server, when signals are already held back.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    signals = termination_signals()
    server = make()
    # The objects so far are permanent; collecting garbage among them would delay answers to kubelet.
    gc.collect()
    gc.freeze()
    try:
        server.start()
    except OSError as error:
        log.error("can't serve: %s", error)
        return 1
    facts: JsonObject = {"node": options.node, "unit": options.unit}
    if server.metrics_service is not None:
        facts["metrics"] = server.metrics_service.port
    log.info("started", extra={"data": facts})
    signal.sigwait(signals)
    log.info("stopping")
    return end_process(server.stop())
