# SPDX-License-Identifier: GPL-3.0-or-later
"""A real extender and a real device plugin in one process, and work that changes their metrics."""

from __future__ import annotations

import contextlib
import itertools
import urllib.request
from pathlib import Path

from api_double import make_pod
from extender_kit import Client
from gpushare.extender.command import Extender
from gpushare.http.server import Endpoint
from gpushare.shared._contracts import gpushare as contract
from metrics_reader import TOKEN, PluginReviewer, Reviewer
from plugin_fakes import NODE, Node, Rejected, container, seen, until
from plugin_fakes import make_pod as bound_pod
from prometheus_client import CollectorRegistry, ProcessCollector


class Both:
    """The plugin announces a node of two cards, whose driver has memory limits; the extender has the announced node."""

    def __init__(self, root: Path) -> None:
        self.node = Node(root, seen(0), seen(1), kube=PluginReviewer())
        self.node.limits.version = "615.71.05"
        self.node.kubelet.start()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.plugin = self.node.start_plugin(registry=registry, metrics=Endpoint())
        until(lambda: self.node.kubelet.registered and contract.node_cards(self.node.kube.node()), what="registered")
        # It stays, so that there is always a limit.
        self.node.run(bound_pod("resident", 4, booked=0))

        self.api = Reviewer()
        known = self.node.kube.node()
        known["status"] = {"capacity": {contract.RESOURCE_MEMORY: "32", contract.RESOURCE_COUNT: "2"}}
        self.api.put("nodes", known)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.extender = Extender(self.api, port=0, registry=registry, backoff=(0.01, 0.1), metrics=Endpoint())
        self.extender.start()
        until(lambda: self.extender.unsynced() is None, what="synced")
        self.client = Client(self.extender)
        self._numbers = itertools.count()

    @property
    def addresses(self) -> dict[str, str]:
        """Of the metrics, which are read with ``TOKEN``."""
        assert self.extender.metrics and self.plugin.metrics_service
        return {
            "extender": f"127.0.0.1:{self.extender.metrics.port}",
            "device-plugin": f"127.0.0.1:{self.plugin.metrics_service.port}",
        }

    def page(self, job: str) -> str:
        """A server's metrics."""
        request = urllib.request.Request(f"http://{self.addresses[job]}/metrics")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def work(self) -> None:
        """A pod that is bound, one that fits nowhere, one that the API refuses; the same on the node."""
        number = next(self._numbers)
        pod = self.api.put("pods", make_pod(f"small-{number}", 1))
        assert self.client.filter(pod, NODE)["NodeNames"] == [NODE]
        assert self.client.bind(pod, NODE) == ""
        large = self.api.put("pods", make_pod(f"large-{number}", 17))
        assert self.client.filter(large, NODE)["NodeNames"] == []
        assert "16 of 17" in self.client.bind(large, NODE)
        unlucky = self.api.put("pods", make_pod(f"unlucky-{number}", 1))
        self.api.fail("POST", f"/unlucky-{number}/binding$", 422)
        assert self.client.bind(unlucky, NODE)
        for name in ("small", "large", "unlucky"):
            self.api.remove("pods", f"{name}-{number}", "default")

        here = bound_pod(f"here-{number}", 1, booked=0)
        self.node.run(here)
        until(lambda: self.node.annotations(here).get(contract.POD_ASSIGNED) == "true", what="confirmed")
        self.node.kubelet.steered = False
        elsewhere = bound_pod(f"elsewhere-{number}", inits=[container("i", 17)], booked=0)
        self.node.kube.put(elsewhere)
        # More units than a card has, allocated without the plugin's preference, are of two cards.
        with contextlib.suppress(Rejected):
            self.node.kubelet.add(elsewhere)
        self.node.kubelet.steered = True
        self.node.nvml.fail(1, 31)
        for pod in (here, elsewhere):
            self.node.kubelet.remove(pod)
            self.node.kube.remove(self.node.kube.pod(contract.pod_key(pod)))

    def close(self) -> None:
        self.extender.stop()
        self.node.down()
