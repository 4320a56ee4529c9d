# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-dra-driver``: offer shares of a node's GPU memory to the scheduler, and prepare claims."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fcntl
import logging
import sys
import threading
import time
import typing as t
from pathlib import Path

from gpushare.api.account import FOLDER
from gpushare.api.client import Kube, KubeError, connect
from gpushare.api.events import Events
from gpushare.api.flags import Flags, check_choice
from gpushare.api.metrics import MeasuredKube
from gpushare.api.reviews import Reviews
from gpushare.dra import slices
from gpushare.dra.claims import DRIVER, ClaimRefused, Code, Pod, device_name
from gpushare.dra.metrics import Metrics
from gpushare.dra.owner import Owner
from gpushare.dra.pod_limits import FolderCgroups, PodLimits, mib_by_card
from gpushare.dra.preparation import Preparation
from gpushare.dra.publisher import Publisher
from gpushare.dra.records import Records
from gpushare.dra.specifications import Specifications
from gpushare.dra.topology import pcie_root
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
from gpushare.kubelet.dra import HEALTH_SECONDS, ClaimListing, DeviceHealth, PodClaims
from gpushare.kubelet.plugin_sockets import PluginSockets
from gpushare.kubelet.pod_resources import Unreadable
from gpushare.node import flags
from gpushare.node.cgroups import NodeCgroups, PodCgroups
from gpushare.node.evictions import Evictions
from gpushare.node.injection import FOLDERS, Injection
from gpushare.node.limit_enforcer import Enforcer
from gpushare.node.limits import Violation
from gpushare.node.metrics_server import serve_metrics
from gpushare.node.serving import NodeOptions, serve, settings
from gpushare.node.usage import Usage
from gpushare.node.workers import NO_CARDS_SECONDS, Workers
from gpushare.nvml.health import Health
from gpushare.nvml.inventory import Inventory
from gpushare.nvml.library import NvidiaMl, Nvml
from gpushare.nvml.limits import LimitBackend, NvidiaLimits, Refusal
from gpushare.nvml.processes import NvidiaProcesses, ProcessReader
from gpushare.shared._contracts import gpushare as contract
from prometheus_client import REGISTRY, CollectorRegistry

COMPONENT = "gpushare-dra-driver"
METRICS_PORT = 9446

# Interval of checking our sockets, and for the lock of a process before us.
STEP_SECONDS = 0.5
# The slices are compared with the cards this often, at the least, and limits and kubelet's list with the claims.
SLICES_SECONDS = 30.0
LIMIT_SECONDS = 30.0
# A container's cgroup appears within seconds after its claim is prepared.
PREPARED_SECONDS = 3.0
LISTING_SECONDS = 15.0
# Between two reads of what pods hold, for metrics.
USAGE_SECONDS = 15.0
# Between two prepared claims that are read again from the API: 5 a second of one node at the most.
READ_PAUSE_SECONDS = 0.2
# Without the API's answer after this time, the cards are numbered in NVML's order.
SYNC_SECONDS = 5.0
# Between two refreshes that are caused by errors of cards.
REFRESH_PAUSE_SECONDS = 0.2

log = logging.getLogger("gpushare.dra")


@dataclasses.dataclass(frozen=True)
class Options(NodeOptions):
    """The driver's settings.

    :param claim_folder: of the claims' CDI specifications.
    :param placement: ``binpack`` for the cards in the order of their index, ``spread`` for the emptiest first.
    :param sysfs: where sysfs is mounted.
    :param token: the file of the account's token.
    """

    claim_folder: Path = FOLDERS[-1]
    placement: str = contract.PLACEMENTS[0]
    sysfs: Path = Path("/sys")
    token: Path = FOLDER / "token"


def check_unique(cards: t.Sequence[contract.Card], unit: str) -> None:
    """Refuse cards that would be one device.

    :raises ContractError: two have the same UUID.
    """
    count = collections.Counter(device_name(card.uuid) for card in cards)
    if twice := [name for name, number in count.items() if number > 1]:
        raise contract.ContractError(f"two cards of one node have the same UUID: {', '.join(twice)}")


class Driver:
    """All parts of the DRA driver."""

    def __init__(
        self,
        options: Options,
        kube: Kube,
        nvml: Nvml,
        limit_backend: LimitBackend,
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 3.0),
        cgroups: PodCgroups | None = None,
        processes: ProcessReader | None = None,
    ) -> None:
        """
        :param options: the driver's settings.
        :param kube: the client of the API.
        :param nvml: reads the cards.
        :param processes: reads who uses them; None without the node's own process IDs.
        :param limit_backend: sets and clears the driver's memory limits.
        :param registry: receives the metrics.
        :param backoff: shortest and longest pause before the API is asked again, in seconds.
        :param cgroups: finds the pods' control groups; the node's own by default.
        """
        self.options = options
        self._stop = threading.Event()
        self._work = threading.Event()
        self._backend = limit_backend
        self._roots: dict[str, str] = {}
        # What is announced, without an order: None until the cards are known.
        self._announced: tuple[t.Sequence[contract.Card], slices.Facts] | None = None
        # Threads announce in the order in which they read the claims.
        self._announcing = threading.Lock()
        self._folder = options.kubelet_dir / "plugins" / DRIVER
        self._lock_file: t.IO[str] | None = None
        self._started = 0.0
        # Whether the cards of the process before are restored, and whether kubelet's list can't be read.
        self._recalled = self._unlisted = False
        self._problem: str | None = "the prepared claims haven't been read yet"
        kube = MeasuredKube(kube, registry)
        self.metrics = Metrics(registry, options.node)
        self.usage = Usage(options.node, processes)
        registry.register(self.usage)
        self.workers = Workers(self._stop, self.metrics.failed)
        health = Health(options.xid_quiet, options.ignored_xids)
        self.inventory = Inventory(nvml, options.unit, health, options.reserve_mib, check_unique)
        # The runtime supports CDI, or no claim could be given to a container.
        self.injection = Injection(options.injection, options.cdi_folders, unfit="")
        cgroups = cgroups or NodeCgroups(options.cgroup_root)
        self.enforcer = Enforcer(options.memory_limit, options.unit, limit_backend, FolderCgroups(cgroups))
        self.preparation = Preparation(
            options.node,
            options.unit,
            kube,
            Records(self._folder / "claims"),
            Specifications(options.claim_folder),
        )
        # Only with evictions does the account have the right to write Events.
        self.events = Events(kube, COMPONENT, options.node)
        self.evictions = Evictions(kube, self.events, self.metrics.evicted)
        self.limits = PodLimits(self.enforcer, cgroups, lambda: self.inventory.cards, self.preparation.prepared)
        self.sockets = PluginSockets(
            DRIVER,
            options.kubelet_dir / "plugins_registry",
            self._folder,
            self.preparation,
            self._watch_health,
            self.metrics.timed,
        )
        listing = options.kubelet_dir / "pod-resources" / "kubelet.sock"
        self.listing = ClaimListing(str(listing), DRIVER)
        self.publisher = Publisher(kube, options.node, Owner(kube, options.node, options.token), backoff)
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
        self.injection.on_used = self.metrics.injection
        self.inventory.on_xid = self.metrics.xid
        self.inventory.on_refresh = self._probe
        self.inventory.in_use = lambda card: card.uuid in mib_by_card([card], self.preparation.prepared())
        self.inventory.guards += [self.enforcer.refusal, self.injection.refusal]
        self.preparation.cards = self._known_cards
        self.preparation.injected = self._injected
        self.preparation.limits = self.enforcer.variables
        self.preparation.hold = self.limits.hold
        self.preparation.on_refused = self.metrics.refused
        self.preparation.on_changed = self._claims_changed

    def start(self) -> None:
        """Start all threads.

        :raises OSError: the socket or the address of the metrics can't be bound.
        """
        start_all(self.servers)
        self._started = time.monotonic()
        if self.options.evict:
            self.events.start()
        self.publisher.mirror.start()
        for name, work, pause in (
            ("cards", self._refresh_cards, min(REFRESH_PAUSE_SECONDS, self.options.query_seconds / 2)),
            ("kubelet", self._serve, STEP_SECONDS),
            ("slices", self._publish, 0.05),
            ("limits", self._enforce_limits, 1.0),
            ("claims", self._observe, LISTING_SECONDS),
            ("bookings", self.preparation.check_booking, READ_PAUSE_SECONDS),
            ("usage", self._read_usage, USAGE_SECONDS),
        ):
            self.workers.repeat(name, work, pause)

    def stop(self) -> bool:
        """Stop all threads and remove the sockets, within ``STOP_SECONDS``; claims, slices and pods stay as they are.

        :returns: whether all have ended.
        """
        self._stop.set()
        self._work.set()
        self.publisher.wake()
        working = [*(server.stop for server in self.servers), self.events.stop, *self.workers.joins()]
        return stop_within(
            (STOP_SECONDS - 4, [self.publisher.mirror.stop, *working]),
            (STOP_SECONDS, [self._leave, self.listing.close]),
        )

    def _leave(self) -> None:
        self.sockets.stop()
        # Only now may another process serve kubelet.
        if self._lock_file is not None:
            self._lock_file.close()

    def unready(self) -> str | None:
        """Return why the driver isn't ready; None if it is."""
        return (
            self.workers.stuck()
            or self._problem
            or self.inventory.reason
            or self.sockets.reason
            or self.publisher.reason
            or self.preparation.problem
        )

    def _healthz(self, _request: object) -> Response:
        """Report whether kubelet should restart this container."""
        reason = self.workers.stuck()
        if reason is None and (seconds := self.inventory.seconds_without_cards) > NO_CARDS_SECONDS:
            reason = f"{self.inventory.reason}, for {seconds:.0f} s; a new container may see it"
        reason = reason or self.preparation.removed or None
        return text("ok") if reason is None else text(reason, 500)

    # The threads' work.

    def _probe(self, cards: t.Sequence[contract.Card]) -> None:
        self.enforcer.probe(cards)

    def _refresh_cards(self) -> None:
        if not self._recalled and not self._recall():
            return
        self.inventory.refresh()
        cards = self.inventory.cards
        self._announced = cards, self._facts(cards)
        self._announce()
        self.metrics.memory(self.inventory.used_mib)
        self._count()
        self.injection.report([card.uuid for card in cards])
        self.inventory.watch(self.options.query_seconds, self._stop)

    def _announce(self) -> None:
        with self._announcing:
            if self._announced is None:
                return
            cards, facts = self._announced
            is_spread = self.options.placement == "spread"
            held = mib_by_card(cards, self.preparation.prepared()) if is_spread else None
            self.publisher.publish(slices.devices(cards, self.options.unit, facts, held, self._unbooked()))

    def _unbooked(self) -> dict[str, str]:
        """Return codes by the devices of which pods hold memory that their claims don't have in the API."""
        return {device: lost.code for _claim, lost in self.preparation.unbooked() for device in lost.mib}

    def _claims_changed(self) -> None:
        self._work.set()
        self._announce()

    def _recall(self) -> bool:
        """Restore the cards that the process before announced; return false while that can't be done yet.

        A card keeps its index, and one that is lost stays, with its taint, while a claim has a part of it.
        """
        mirror, is_late = self.publisher.mirror, time.monotonic() - self._started > SYNC_SECONDS
        if not self.preparation.restored or not (mirror.synced or is_late):
            return False
        if not mirror.synced:
            log.warning("the node's slices can't be read from the API; the cards are numbered in NVML's order")
        cards = slices.announced_cards(mirror.items(), self.options.unit)
        held = mib_by_card(cards, self.preparation.prepared())
        self.inventory.restore(cards, {card.index for card in cards if card.uuid in held})
        self._recalled = True
        return True

    def _facts(self, cards: t.Sequence[contract.Card]) -> slices.Facts:
        try:
            driver = self._backend.driver()
        except Refusal as refusal:
            log.debug("the driver's version: %s", refusal)
            driver = ""
        buses = self.inventory.buses
        for uuid, bus in buses.items():
            if uuid not in self._roots:
                self._roots[uuid] = pcie_root(self.options.sysfs, bus)
        limits = {card.uuid: self.enforcer.card_limit(card.uuid)[0] for card in cards}
        return slices.Facts(driver, buses, self._roots, limits)

    def _serve(self) -> None:
        """Serve kubelet, once no other process of the driver does, and the claims are read."""
        if self._lock_file is None and not self._lock():
            return
        if not self.preparation.restored:
            try:
                self.preparation.restore()
            except OSError as error:
                self._fail(f"the prepared claims can't be read: {error}")
                return
        self._problem = None
        self.sockets.step()
        self.metrics.registered(self.sockets.registrations)

    def _lock(self) -> bool:
        path = self._folder / "lock"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8")
        except OSError as error:
            self._fail(f"{path} can't be opened: {error}")
            return False
        try:
            # It ends with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            self._fail(f"another process of the driver still runs on this node and holds {path}")
            return False
        self._lock_file = file
        return True

    def _fail(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def _publish(self) -> None:
        if self._lock_file is None:
            # The slices are the other process's.
            self._stop.wait(STEP_SECONDS)
            return
        self.publisher.step(SLICES_SECONDS)
        self.metrics.generation(self.publisher.generation)

    def _enforce_limits(self) -> None:
        """Enforce the limits now and then, and soon after a claim was prepared."""
        if self._work.wait(LIMIT_SECONDS):
            self._work.clear()
            self._stop.wait(PREPARED_SECONDS)
        if self._stop.is_set() or not self.preparation.restored:
            return
        usage = self.limits.once(self._listing() or [])
        violations = self.enforcer.violations
        self.metrics.limits(self.enforcer.state, usage, self.enforcer.corrected, violations)
        if self.options.evict:
            holders = [violation for violation in violations if violation.holds]
            self.evictions.once([*holders, *self._without_claims()], self.limits.pods())

    def _read_usage(self) -> None:
        """Read what pods hold of their claims, for metrics."""
        if not self.preparation.prepared():
            self.usage.refresh((), {})
        elif (listing := self._listing()) is not None:
            self.usage.refresh(self.limits.shares(listing), self.enforcer.held)

    def _without_claims(self) -> list[Violation]:
        code = contract.Reason.MEMORY_WITHOUT_CLAIM
        return [
            Violation(
                code, f"it holds {mib} MiB of card {device}, and its claim {claim.key} is gone", pod.uid, "", device
            )
            for claim, lost in self.preparation.unbooked()
            for device, mib in lost.mib.items()
            for pod in claim.pods
        ]

    def _observe(self) -> None:
        if not self.preparation.restored:
            return
        listing = self._listing()
        if listing is not None:
            undone = self.preparation.observe(listing, self._is_alive, self.limits.has_processes)
            self.metrics.forgotten(len(undone))

    def _listing(self) -> list[PodClaims] | None:
        try:
            pods = self.listing.list()
        except Unreadable as error:
            if not self._unlisted:
                log.warning("%s; claims aren't compared with it now", error)
            self._unlisted = True
            return None
        self._unlisted = False
        return pods

    def _is_alive(self, pod: Pod) -> bool:
        return self.limits.is_alive(pod.uid)

    def _watch_health(self, is_wanted: t.Callable[[], bool]) -> t.Iterator[list[DeviceHealth]]:
        """Yield the cards with their health for one of kubelet's streams."""
        changed = self.inventory.changed
        sent: tuple[contract.Card, ...] | None = None
        while is_wanted() and not self._stop.is_set():
            end = time.monotonic() + HEALTH_SECONDS
            with changed:
                while (now := self.inventory.cards) == sent and time.monotonic() < end:
                    # Nobody notifies of the stream's end.
                    changed.wait(1.0)
                    if self._stop.is_set() or not is_wanted():
                        return
            sent = now
            yield [
                DeviceHealth(
                    self.options.node,
                    device_name(card.uuid),
                    "" if card.healthy else f"{card.code}: card {card.index} ({card.uuid}) {card.reason}",
                )
                for card in now
            ]

    def _known_cards(self) -> tuple[contract.Card, ...]:
        cards = self.inventory.cards
        if not cards:
            text = f"the cards of node {self.options.node} aren't known: {self.inventory.reason}; kubelet tries again"
            raise ClaimRefused(Code.NOT_READY, text)
        return cards

    def _injected(self, uuids: t.Sequence[str]) -> dict[str, str]:
        return dict(zip(uuids, self.injection.devices(uuids), strict=False))

    def _count(self) -> None:
        cards, prepared = self.inventory.cards, self.preparation.prepared()
        unit = contract.MIB_PER_UNIT[self.options.unit]
        held = {uuid: mib // unit for uuid, mib in mib_by_card(cards, prepared).items()}
        self.metrics.cards(cards, held)
        self.metrics.claims(len(prepared), len(self._unbooked()))


FLAGS: Flags = {
    "claim-cdi-folder": (
        str,
        str(FOLDERS[-1]),
        "folder of the claims' CDI specifications, which the container runtime reads",
    ),
    "placement": (
        str,
        contract.PLACEMENTS[0],
        "which card the scheduler is offered first: binpack for the first by index, spread for the emptiest",
    ),
    "sysfs": (str, "/sys", "where sysfs is mounted"),
}


def parse(arguments: t.Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; missing options come from the environment, then from the defaults."""
    parser = flags.parser(COMPONENT, __doc__, METRICS_PORT, FLAGS)
    options = parser.parse_args(arguments)
    flags.check(parser, options)
    check_choice(parser, options, "placement", contract.PLACEMENTS)
    for name in ("claim_cdi_folder", "sysfs"):
        if not getattr(options, name).startswith("/"):
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: {getattr(options, name)!r} is no absolute path")
    return options


def main(arguments: t.Sequence[str] | None = None) -> int:
    given = parse(arguments)
    logger("gpushare", given.log_format, given.log_level)
    options = settings(
        Options,
        given,
        claim_folder=Path(given.claim_cdi_folder),
        placement=given.placement,
        sysfs=Path(given.sysfs),
        token=Path(given.service_account or FOLDER) / "token",
    )
    try:
        kube = connect(given.api_server, given.service_account)
    except KubeError as error:
        log.error("%s", error)
        return 1
    if given.serve_metrics:
        return serve_metrics(COMPONENT, given.metrics, given.status_socket, kube)
    processes = NvidiaProcesses() if options.host_pid else None
    return serve(
        lambda: Driver(options, kube, NvidiaMl(options.exclude), NvidiaLimits(), processes=processes), options, log
    )


if __name__ == "__main__":
    sys.exit(main())
