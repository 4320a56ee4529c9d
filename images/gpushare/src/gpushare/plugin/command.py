# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-device-plugin``: announce shares of a node's GPU memory to kubelet as devices."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import logging
import sys
import threading
import time
import typing as t

from gpushare.api.client import Kube, KubeError, connect
from gpushare.api.events import Events
from gpushare.api.flags import Flags
from gpushare.api.metrics import MeasuredKube
from gpushare.api.mirror import Mirror
from gpushare.api.paths import of_node
from gpushare.api.reviews import Reviews
from gpushare.http.server import Endpoint
from gpushare.http.service import (
    STOP_SECONDS,
    Response,
    Service,
    common,
    logger,
    metrics_service,
    start_all,
    stop_within,
    text,
)
from gpushare.kubelet.pod_resources import Entry, KubeletPodResources, Unreadable
from gpushare.kubelet.server import DevicePlugin, Registration
from gpushare.node import flags
from gpushare.node.cgroups import Cgroups, NodeCgroups
from gpushare.node.evictions import Evictions
from gpushare.node.injection import Injection
from gpushare.node.metrics_server import serve_metrics
from gpushare.node.serving import NodeOptions, serve, settings
from gpushare.node.usage import Usage
from gpushare.node.workers import NO_CARDS_SECONDS, Workers
from gpushare.nvml.health import Health
from gpushare.nvml.inventory import Inventory
from gpushare.nvml.library import NvidiaMl, Nvml
from gpushare.nvml.limits import LimitBackend, NvidiaLimits
from gpushare.nvml.processes import NvidiaProcesses, ProcessReader
from gpushare.plugin import cleanup, limits, pod_facts, steering
from gpushare.plugin.admission import MOST_PODS, Admission, trim_pod
from gpushare.plugin.leftovers import Holder, Leftovers
from gpushare.plugin.limit_enforcer import LimitEnforcer
from gpushare.plugin.metrics import Metrics
from gpushare.plugin.reconcile import Reconciler, trim_node
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from prometheus_client import REGISTRY, CollectorRegistry

COMPONENT = "gpushare-device-plugin"
METRICS_PORT = 9445

# Interval of checking kubelet's socket: after its restart pods are refused until we are registered again.
STEP_SECONDS = 0.2
# Without the API's answer the plugin chooses by kubelet's list alone and may renumber the cards; after this time it
# registers nevertheless.
SYNC_SECONDS = 5.0
# Between two refreshes that are caused by errors of cards.
REFRESH_PAUSE_SECONDS = 0.2
# Containers' limits are read back this often, at the least.
LIMIT_SECONDS = 30.0
# After an Allocate the reconciler runs many passes; limits aren't read in each of them.
LIMIT_PAUSE = 1.0
# Memory of no share has to be seen in two passes, so the second one follows soon.
SUSPICIOUS_SECONDS = 5.0
# Between two reads of what containers hold, for metrics.
USAGE_SECONDS = 15.0

# The plugin's own namespace, and one that tenants don't write to.
EXEMPT = "gpushare-system,kube-system"

log = logging.getLogger("gpushare.device_plugin")


@dataclasses.dataclass(frozen=True)
class Options(NodeOptions):
    """The plugin's settings.

    :param resync: seconds after which everything is compared again, at the latest.
    :param exempt: namespaces whose pods without a share aren't limited, and whose privileged pods aren't reported.
    """

    resync: float = 30.0
    exempt: frozenset[str] = frozenset()


class Plugin:
    """All parts of the device plugin."""

    def __init__(
        self,
        options: Options,
        kube: Kube,
        nvml: Nvml,
        limit_backend: LimitBackend,
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 3.0),
        cgroups: Cgroups | None = None,
        processes: ProcessReader | None = None,
    ) -> None:
        """
        :param options: the plugin's settings.
        :param kube: the client of the API.
        :param nvml: reads the cards.
        :param processes: reads who uses them; None without the node's own process IDs.
        :param limit_backend: sets and clears the driver's memory limits.
        :param registry: receives the metrics.
        :param backoff: shortest and longest pause before the API is asked again, in seconds.
        :param cgroups: finds the containers' control groups; the node's own by default.
        """
        self.options = options
        self._stop = threading.Event()
        self._started = 0.0
        self._restored = False
        self._last_pass: tuple[list[JsonObject], list[Entry]] | None = None
        self._pass_done = threading.Event()
        # The containers that outlived their pod, and their units by card (UUID).
        self._left: tuple[Holder, ...] = ()
        self._unreleased: collections.Counter[str] = collections.Counter()
        self._left_reported: set[Holder] = set()
        kube = MeasuredKube(kube, registry)
        self.metrics = Metrics(registry, options.node)
        self.usage = Usage(options.node, processes)
        registry.register(self.usage)
        self.workers = Workers(self._stop, self.metrics.failed)
        self.inventory = Inventory(
            nvml, options.unit, Health(options.xid_quiet, options.ignored_xids), options.reserve_mib
        )
        self.injection = Injection(options.injection, options.cdi_folders)
        cgroups = cgroups or NodeCgroups(options.cgroup_root)
        self.leftovers = Leftovers(cgroups)
        self.enforcer = LimitEnforcer(
            options.memory_limit,
            options.unit,
            limit_backend,
            cgroups,
            exempt=options.exempt,
        )
        self.podresources = KubeletPodResources(str(options.kubelet_dir / "pod-resources" / "kubelet.sock"))
        self.pods: Mirror[JsonObject] = Mirror(
            kube,
            "/api/v1/pods",
            of_node(options.node),
            trim_pod,
            backoff=backoff,
            most=MOST_PODS,
        )
        self.node: Mirror[JsonObject] = Mirror(
            kube, "/api/v1/nodes", {"fieldSelector": f"metadata.name={options.node}"}, trim_node, backoff=backoff
        )
        self.events = Events(kube, COMPONENT, options.node)
        self.evictions = Evictions(kube, self.events, self.metrics.evicted)
        self.admission = Admission(options.node, self.inventory, kube, self.pods, self.podresources, self.injection)
        self.registration = Registration(
            options.kubelet_dir / "device-plugins",
            lambda: DevicePlugin(self.inventory, self.admission, self.metrics.timed),
            self.inventory,
        )
        self.reconciler = Reconciler(
            options.node,
            kube,
            self.inventory,
            self.podresources,
            self.pods,
            self.node,
            self.admission.granted,
            self.events,
            self.metrics,
            options.resync,
            options.exempt,
        )
        status = {**common(self.unready, registry), ("GET", "/healthz"): self._healthz}
        self.servers: list[Service] = []
        if options.status_socket:
            self.servers.append(Service(f"{COMPONENT}-status", Endpoint(path=options.status_socket), status))
        self.metrics_service: Service | None = None
        if options.metrics is not None:
            page = status["GET", "/metrics"]
            self.metrics_service = metrics_service(f"{COMPONENT}-metrics", options.metrics, page, Reviews(kube))
            self.servers.append(self.metrics_service)
        self._wire()

    def _wire(self) -> None:
        """Connect the parts' callbacks."""
        self.pods.on_change(lambda key, before, now: self.reconciler.wake())
        self.node.on_change(self._node_changed)
        self.injection.on_used = self.metrics.injection
        self.inventory.on_xid = self.metrics.xid
        self.inventory.on_refresh = self._probe_limits
        self.inventory.held_slots = self._held_slots
        self.inventory.in_use = lambda card: self._held_slots(card) != 0
        self.inventory.guards += [self.enforcer.refusal, self.injection.refusal]
        self.admission.limits = self.enforcer.environment
        self.admission.taken = self.leftovers.taken
        self.admission.on_allocated = self._allocated
        self.admission.on_refused = self.metrics.refused
        self.reconciler.limit = lambda: self.enforcer.state
        self.reconciler.card_limit = self.enforcer.card_limit
        self.reconciler.unreleased = lambda uuid: self._unreleased[uuid]
        self.reconciler.on_reconciled = self._on_reconciled

    def start(self) -> None:
        """Start all threads.

        :raises OSError: the socket or the address of the metrics can't be bound.
        """
        start_all(self.servers)
        self._started = time.monotonic()
        for part in (self.pods, self.node, self.events):
            part.start()
        for name, work, pause in (
            ("cards", self._refresh_cards, min(REFRESH_PAUSE_SECONDS, self.options.query_seconds / 2)),
            ("kubelet", self._register, STEP_SECONDS),
            ("limits", self._enforce_limits, LIMIT_PAUSE),
            ("usage", self._read_usage, USAGE_SECONDS),
        ):
            self.workers.repeat(name, work, pause)
        self.workers.run("reconcile", functools.partial(self.reconciler.run, self._stop))

    def stop(self) -> bool:
        """Stop all threads and remove the plugin's socket, within ``STOP_SECONDS``; running containers aren't affected.

        :returns: whether all have ended.
        """
        self._stop.set()
        self._pass_done.set()
        self.reconciler.wake()
        reading = [self.pods.stop, self.node.stop, self.events.stop]
        working = [*(server.stop for server in self.servers), *self.workers.joins()]
        return stop_within(
            (STOP_SECONDS - 4, [*reading, *working]),
            (STOP_SECONDS, [self.registration.stop, self.podresources.close]),
        )

    def unready(self) -> str | None:
        """Return why the plugin isn't ready; None if it is."""
        if (hanging := self.workers.stuck()) is not None:
            return hanging
        if self.inventory.reason is not None:
            return self.inventory.reason
        if self.registration.reason is not None:
            return self.registration.reason
        for what, mirror in (("pods", self.pods), ("node", self.node)):
            if not mirror.synced:
                return f"the {what} can't be read from the API yet" + (f": {mirror.error}" if mirror.error else "")
            if reason := mirror.stale:
                return f"what is known of the {what} may be outdated, since {reason}"
        return self.reconciler.error

    def _healthz(self, _request: object) -> Response:
        """Report whether kubelet should restart this container."""
        reason = self.workers.stuck()
        if reason is None and (seconds := self.inventory.seconds_without_cards) > NO_CARDS_SECONDS:
            reason = f"{self.inventory.reason}, for {seconds:.0f} s; a new container may see it"
        return text("ok") if reason is None else text(reason, 500)

    def _refresh_cards(self) -> None:
        if not self._restored:
            self._restore()
        changed = self.inventory.refresh()
        self.metrics.memory(self.inventory.used_mib)
        self.injection.report([card.uuid for card in self.inventory.cards])
        if changed:
            self.reconciler.wake()
        self.inventory.watch(self.options.query_seconds, self._stop)

    def _restore(self) -> None:
        """Restore the cards that the plugin announced before its restart, if the API can be read."""
        end = self._started + SYNC_SECONDS
        for mirror in (self.node, self.pods):
            while not (mirror.synced or self._stop.is_set()) and time.monotonic() < end:
                mirror.wait_synced(0.1)
        self._restored = True
        node = self.node.get(self.options.node)
        if node is None or not self.pods.synced:
            log.warning("the node's announced cards can't be read from the API; the cards are numbered in NVML's order")
            return
        text = node["metadata"]["annotations"].get(contract.NODE_CARDS, "[]")
        try:
            cards = contract.cards_from_annotation(text)
        except contract.ContractError as error:
            log.warning("%s; the cards are numbered in NVML's order", error)
            return
        held = {index for pod in self.pods.items() if contract.counts(pod) for index in contract.shares(pod)}
        self.inventory.restore(cards, held)

    def _held_slots(self, card: contract.Card) -> int | None:
        """Return how many slots of a card have to stay, by kubelet's list and by bookings; None if that is unknown."""
        if not self.pods.synced:
            return None
        booked = sum(pod_facts.shares(pod).get(card.index, 0) for pod in self.pods.items() if pod_facts.counts(pod))
        try:
            return max(booked, steering.held_slots(card, self.podresources.list()))
        except Unreadable:
            return None

    def _node_changed(self, key: str, before: JsonObject | None, now: JsonObject | None) -> None:
        self.injection.node(now or {})
        self.reconciler.wake()

    def _probe_limits(self, cards: t.Sequence[contract.Card]) -> None:
        if self.enforcer.probe(cards):
            self.reconciler.wake()

    def _on_reconciled(self, pods: list[JsonObject], listing: list[Entry]) -> None:
        self._last_pass = (pods, listing)
        self._pass_done.set()

    def _enforce_limits(self) -> None:
        """Enforce the limits after each pass of the reconciler; a slow driver delays only this thread."""
        self._pass_done.wait(SUSPICIOUS_SECONDS if self.enforcer.suspicious or self._left else LIMIT_SECONDS)
        self._pass_done.clear()
        if self._last_pass is None or self._stop.is_set():
            return
        self._withhold_left(*self._last_pass)
        before = self.enforcer.state, self.enforcer.violations
        for finding in self.enforcer.once(self.inventory.cards, *self._last_pass, self._left):
            if finding.pod is not None:
                accepted = self.reconciler.post(finding.pod, finding.reason, finding.message)
            else:
                accepted = self.events.node(self.options.node, finding.reason, finding.message)
            if not accepted:
                self.enforcer.unsent(finding)
        violations = self.enforcer.violations
        self.metrics.limits(self.enforcer.state, self.enforcer.usage, self.enforcer.corrected, violations)
        if self.options.evict:
            self.evictions.once([violation for violation in violations if violation.holds], self._last_pass[0])
        if before != (self.enforcer.state, violations):
            self.reconciler.wake()

    def _read_usage(self) -> None:
        """Read what containers with a share hold, for metrics."""
        if self._last_pass is not None:
            shares = limits.shares(self.inventory.cards, *self._last_pass, self.options.unit)
            self.usage.refresh(shares, self.enforcer.held)

    def _withhold_left(self, pods: list[JsonObject], listing: list[Entry]) -> None:
        """Keep kubelet from giving away the units of containers that outlived their pod, and report them."""
        cards, self._left = self.inventory.cards, self.leftovers.observe(pods, listing)
        changed = self.inventory.withhold(frozenset(slot for holder in self._left for slot in holder.ids))
        unreleased: collections.Counter[str] = collections.Counter()
        for holder in self._left:
            unreleased.update(holder.units(cards))
        self._unreleased = unreleased
        self._left_reported &= set(self._left)
        for holder in self._left:
            if holder not in self._left_reported and self._report_left(holder, cards):
                self._left_reported.add(holder)
        if changed:
            self.metrics.unreleased(unreleased)
            self.reconciler.wake()

    def _report_left(self, holder: Holder, cards: t.Sequence[contract.Card]) -> bool:
        by_uuid, units = {card.uuid: card.index for card in cards}, holder.units(cards)
        what = ", ".join(f"{number} units of card {by_uuid[uuid]}" for uuid, number in units.items())
        text = (
            f"pod {holder.pod} is deleted, and processes of its container {holder.container} still run: {what} aren't "
            "given to pods until they have ended"
        )
        log.warning("%s", text)
        return self.events.node(self.options.node, "GpuMemoryNotReleased", text)

    def _register(self) -> None:
        waited = time.monotonic() - self._started
        if self.registration.registrations == 0 and not self.pods.synced and waited < SYNC_SECONDS:
            return
        before = self.registration.registrations
        self.registration.step()
        if self.registration.registrations != before:
            self.metrics.registered(self.registration.registrations)
            # kubelet may have replaced the node's status at its start.
            self.reconciler.expect_allocation()

    def _allocated(self) -> None:
        self.metrics.allocated()
        self.reconciler.expect_allocation()


# Beside those that the servers of a node have in common.
FLAGS: Flags = {
    "resync": (float, "30", "seconds after which everything is compared again, at the latest"),
    "exempt-namespaces": (
        str,
        EXEMPT,
        "namespaces, with commas, whose pods without a share aren't limited, as NVIDIA's own mustn't be, and whose "
        "privileged pods aren't reported",
    ),
}


def parse(arguments: t.Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; missing options come from the environment, then from the defaults."""
    parser = flags.parser(COMPONENT, __doc__, METRICS_PORT, FLAGS)
    parser.add_argument(
        "--cleanup",
        action="store_true",
        help="remove the plugin's annotations, resources and limits from this node, and exit; the plugin must not run",
    )
    options = parser.parse_args(arguments)
    flags.check(parser, options)
    flags.check_seconds(parser, options, "resync", 1, 3600)
    return options


def clean(options: Options, kube: Kube, nvml: Nvml, limit_backend: LimitBackend, cgroups: Cgroups | None = None) -> int:
    """Run ``--cleanup``.

    :param limit_backend: sets and clears the driver's memory limits.
    :param cgroups: finds the containers' control groups; the node's own by default.
    :returns: the exit status.
    """
    enforcer = LimitEnforcer("off", options.unit, limit_backend, cgroups or NodeCgroups(options.cgroup_root))
    socket = options.kubelet_dir / "pod-resources" / "kubelet.sock"
    try:
        cleanup.clean(
            options.node,
            kube,
            nvml,
            options.unit,
            KubeletPodResources(str(socket)),
            enforcer,
            options.kubelet_dir / "device-plugins",
        )
    except cleanup.CleanupError as error:
        log.error("%s", error)
        return 1
    return 0


def main(arguments: t.Sequence[str] | None = None) -> int:
    given = parse(arguments)
    logger("gpushare", given.log_format, given.log_level)
    options = settings(
        Options,
        given,
        resync=given.resync,
        exempt=frozenset(given.exempt_namespaces.split(",")),
    )
    try:
        kube = connect(given.api_server, given.service_account)
    except KubeError as error:
        log.error("%s", error)
        return 1
    if given.serve_metrics:
        return serve_metrics(COMPONENT, given.metrics, given.status_socket, kube)
    if given.cleanup:
        return clean(options, kube, NvidiaMl(options.exclude), NvidiaLimits())
    processes = NvidiaProcesses() if options.host_pid else None
    return serve(
        lambda: Plugin(options, kube, NvidiaMl(options.exclude), NvidiaLimits(), processes=processes), options, log
    )


if __name__ == "__main__":
    sys.exit(main())
