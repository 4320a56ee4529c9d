# SPDX-License-Identifier: GPL-3.0-or-later
"""Options that the servers of a node have in common: the command line, the environment, and the checks."""

from __future__ import annotations

import argparse
import re

from gpushare.api.flags import Flags, add, add_common, check_choice, check_common
from gpushare.http.server import Endpoint
from gpushare.http.tls import metrics_tls
from gpushare.node import limits
from gpushare.node.injection import AUTO, FOLDERS, MODES
from gpushare.shared._contracts import card_exclusion
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.errors import BadInput

FLAGS: Flags = {
    "node-name": (str, "", "this node's name in the API"),
    "memory-unit": (str, "GiB", "GiB or MiB, the same in the whole cluster"),
    "kubelet-dir": (str, "/var/lib/kubelet", "kubelet's folder, with the folders of its plugins' sockets"),
    "metrics-address": (
        str,
        "",
        "where those read /metrics, and nothing else, whose token the API server allows it; unset: nowhere",
    ),
    "metrics-tls-cert": (str, "", "its certificate chain, in PEM"),
    "metrics-tls-key": (str, "", "its private key"),
    "query-interval": (float, "5", "seconds after which the cards are queried again"),
    "reserved-memory": (int, "0", "MiB of each card that pods aren't given, besides those of driver and firmware"),
    "xid-quiet": (float, "300", "seconds without a further error after which a card is given to pods again"),
    "ignore-xids": (
        str,
        "",
        "XID errors that don't concern the card, besides those of applications; numbers with commas",
    ),
    "device-injection": (
        str,
        AUTO,
        "how containers get their cards: cdi, envvar, or auto for cdi if kubelet and runtime can",
    ),
    "cdi-folders": (str, ",".join(map(str, FOLDERS)), "folders of CDI specifications, with commas; the last one wins"),
    "memory-limit": (str, "auto", "whether the driver limits containers to their shares: auto, required or off"),
    "memory-limit-violation": (
        str,
        "report",
        "what happens to a pod that holds memory of others and can't be limited: report or evict",
    ),
    "cgroup-root": (str, "/sys/fs/cgroup", "where the node's own control groups are mounted"),
}


def parser(command: str, description: str | None, metrics_port: int, more: Flags) -> argparse.ArgumentParser:
    """Make the parser of a command; missing options come from the environment, then from the defaults.

    :param command: its name.
    :param metrics_port: the default of ``--metrics-port``.
    :param more: the command's own options.
    """
    made = argparse.ArgumentParser(prog=command, description=description)
    port: Flags = {"metrics-port": (int, str(metrics_port), "its port")}
    add(made, {**FLAGS, **port, **more})
    made.add_argument(
        "--exclude-cards",
        action="append",
        default=[],
        help="cards that are left alone, as a JSON object with lists: nodes, and cards by PCI address, UUID or model; "
        "may be given several times",
    )
    made.add_argument(
        "--host-pid",
        action="store_true",
        help="this process has the node's own process IDs, so that metrics tell which container uses how much",
    )
    made.add_argument(
        "--serve-metrics",
        action="store_true",
        help="only serve the metrics of the server that has --status-socket, at --metrics-address",
    )
    add_common(made)
    return made


def check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check the common options, and set ``options.metrics`` to an endpoint or None; a wrong one ends the process."""
    check_common(made, options)
    check_choice(made, options, "memory-unit", tuple(contract.MIB_PER_UNIT))
    check_choice(made, options, "device-injection", MODES)
    check_choice(made, options, "memory-limit", limits.MODES)
    check_choice(made, options, "memory-limit-violation", ("report", "evict"))
    if not options.node_name:
        made.error("--node-name or the environment variable NODE_NAME must name this node")
    if not 0 <= options.metrics_port <= 65535:
        made.error(f"--metrics-port: {options.metrics_port} is no port")
    where = options.metrics_address
    try:
        tls = metrics_tls(where, options.metrics_tls_cert, options.metrics_tls_key)
    except ValueError as error:
        made.error(str(error))
    options.metrics = Endpoint(where, options.metrics_port, tls=tls) if where else None
    if options.serve_metrics and not (options.metrics and options.status_socket):
        made.error("--serve-metrics needs --metrics-address and --status-socket")
    try:
        options.exclude = card_exclusion.of_node(options.node_name, options.exclude_cards)
    except BadInput as error:
        made.error(f"--exclude-cards: {error}")
    if options.reserved_memory < 0:
        made.error(f"--reserved-memory: {options.reserved_memory} MiB isn't an amount of memory")
    check_seconds(made, options, "query-interval", 0.1, 60)
    check_seconds(made, options, "xid-quiet", 1, 10**9)
    if not re.fullmatch(r"([0-9]{1,9}(,[0-9]{1,9})*)?", options.ignore_xids):
        made.error(f"--ignore-xids: {options.ignore_xids!r} is no list of numbers, separated by commas")
    if not all(folder.startswith("/") for folder in options.cdi_folders.split(",")):
        made.error(f"--cdi-folders: {options.cdi_folders!r} is no list of absolute paths, separated by commas")


def check_seconds(
    made: argparse.ArgumentParser, options: argparse.Namespace, name: str, least: float, most: float
) -> None:
    """End the process if an option's seconds aren't in a range.

    :param made: the parser.
    :param options: what it parsed.
    :param name: the option's, without its dashes.
    """
    value = getattr(options, name.replace("-", "_"))
    if not least <= value <= most:
        made.error(f"--{name}: {value:g} isn't between {least:g} and {most:g} seconds")
