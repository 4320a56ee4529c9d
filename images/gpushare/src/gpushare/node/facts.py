# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-node-facts``: print once, as JSON, what NVML and kubelet know of this node.

It is what the modules nvml_info and kubelet_devices_info return of a machine, by the same code, for nodes that are
reached by no login: gpu_allocation_check runs it in the container of the device plugin or of the DRA driver. Nothing
listens for it, and the server has no part in it: a card that hangs blocks a process that is killed at the time limit.

Only with the node's own process IDs (``hostPID``) does the driver list the processes of others, and does /proc show
whose they are. Without them both would be empty lists, and nothing would tell that from a card that nobody uses: so
they are null then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import typing as t

from gpushare.shared._contracts import card_exclusion
from gpushare.shared._core.errors import BadInput
from gpushare.shared._core.types import JsonObject
from gpushare.shared._kubelet.devices import RESOURCES, collect
from gpushare.shared._kubelet.source import KubeletSource, NodeKubelet
from gpushare.shared._nvml.binding import Library, load
from gpushare.shared._nvml.facts import Host, Request, Send, Worker, facts, read, valid_timeout
from gpushare.shared._nvml.host import NodeHost
from gpushare.shared._nvml.worker import ForkedWorker

COMMAND = "gpushare-node-facts"
# Of the answer's form.
VERSION = 1


def answer(
    node: str,
    worker: Worker,
    kubelet: KubeletSource,
    kubelet_dir: str,
    exclude: card_exclusion.Exclusion,
    host_pid: bool,
    timeout: int,
) -> JsonObject:
    """Return what is known of this node.

    :param node: its name in the API.
    :param worker: calls NVML.
    :param kubelet_dir: kubelet's folder.
    :param exclude: cards of which only the identity is read.
    :param host_pid: whether this process is in the node's own PID namespace.
    :param timeout: of NVML, in seconds.
    :returns: ``nvml`` and ``kubelet`` as the modules have them.
    """
    nvml = facts(worker, time.monotonic, timeout, exclude)
    devices = collect(kubelet, kubelet_dir, RESOURCES)
    if not host_pid:
        for card in nvml["cards"]:
            card["processes"] = None
        devices["device_nodes"] = None
    return {"version": VERSION, "node": node, "nvml": nvml, "kubelet": devices}


def parse(arguments: t.Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; wrong options end the process."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--node-name", default=os.environ.get("NODE_NAME", ""), help="this node's name in the API")
    parser.add_argument("--kubelet-dir", default="/var/lib/kubelet", help="kubelet's folder")
    parser.add_argument(
        "--exclude-cards", action="append", default=[], help="cards that are left alone, as the servers have them"
    )
    parser.add_argument("--host-pid", action="store_true", help="the pod has the node's own process IDs")
    parser.add_argument("--timeout", type=int, default=30, help="seconds that NVML has, 1 to 600")
    options = parser.parse_args(arguments)
    if not options.node_name:
        parser.error("--node-name or the environment variable NODE_NAME must name this node")
    if not options.kubelet_dir.startswith("/"):
        parser.error(f"--kubelet-dir: {options.kubelet_dir!r} is no absolute path")
    try:
        options.exclude = card_exclusion.of_node(options.node_name, options.exclude_cards)
        valid_timeout(options.timeout)
    except BadInput as error:
        parser.error(str(error))
    return options


def main(arguments: t.Sequence[str] | None = None) -> int:
    given = parse(arguments)
    host: Host = NodeHost()

    def work(request: Request, send: Send) -> None:
        read(lambda: Library(load(None)), host, request, send)

    shown = answer(
        given.node_name,
        ForkedWorker(work),
        NodeKubelet(),
        given.kubelet_dir,
        given.exclude,
        given.host_pid,
        given.timeout,
    )
    json.dump(shown, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
