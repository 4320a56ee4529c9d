# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-device-plugin``: shares of a node's GPU memory as kubelet's devices."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
import typing as t
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry

import gpushare
from gpushare import cleanup, contract, limits
from gpushare.admission import Admission, slim_pod
from gpushare.api_metrics import MeasuredKube
from gpushare.cgroups import Cgroups, NodeCgroups
from gpushare.events import Events
from gpushare.health import Health
from gpushare.injection import AUTO, FOLDERS, MODES, Injection
from gpushare.kube import Json, Kube, KubeError, Mirror, from_environment
from gpushare.kubelet import DevicePlugin, Registration
from gpushare.limit_keeper import LimitKeeper
from gpushare.metrics import Metrics
from gpushare.nvml import Inventory, NvidiaMl, Nvml
from gpushare.nvml_limits import LimitDoor, NvidiaLimits
from gpushare.podresources import Entry, KubeletPodResources
from gpushare.reconcile import Reconciler, slim_node
from gpushare.service import Response, Service, ending_signals, logger, text

COMPONENT = "gpushare-device-plugin"
PORT = 12346

# So long may one thread keep all others waiting; Python's own 5 ms would be most of what kubelet waits for us.
SWITCH_SECONDS = 0.0005

# So often is kubelet's socket looked at: after its restart pods are refused until we are registered again.
STEP_SECONDS = 0.2
# Registered before the API has spoken, we steer by kubelet's list alone and may number the cards anew; that is better
# than no registration after so long.
SYNC_SECONDS = 5.0
# Between two looks that errors of cards ask for.
BREATH_SECONDS = 0.2
# Containers' limits are read back this often, at the least.
LIMIT_SECONDS = 30.0
# After an Allocate the reconciler has many passes; the driver isn't asked about every container in each.
LIMIT_PAUSE = 1.0
# A part that hasn't moved for so long hangs, and only a new process helps.
HANG_SECONDS = 120.0
# A container gets the driver's files when it is made; a driver that came later, or another one, needs a new container.
BLIND_SECONDS = 120.0

log = logging.getLogger("gpushare.device_plugin")


@dataclasses.dataclass(frozen=True)
class Options:
    """
    :param unit: of the cluster's shares, GiB or MiB.
    :param resync: seconds after which everything is compared again, at the latest.
    :param look: seconds after which the cards are looked at again, at the latest.
    :param xid_quiet: seconds without a further error after which a card is given to pods again.
    :param ignored_xids: errors that say nothing of a card, besides those of applications.
    :param injection: ``auto``, ``cdi`` or ``envvar``.
    :param memory_limit: ``auto``, ``required`` or ``off``.
    :param cgroup_root: where the node's own /sys/fs/cgroup is seen.
    """

    node: str
    unit: str = "GiB"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    address: str = "0.0.0.0"
    port: int = PORT
    resync: float = 30.0
    look: float = 5.0
    xid_quiet: float = 300.0
    ignored_xids: tuple[int, ...] = ()
    injection: str = AUTO
    cdi_folders: tuple[Path, ...] = FOLDERS
    memory_limit: str = "auto"
    cgroup_root: str = "/sys/fs/cgroup"


class Plugin:
    """All parts of the device plugin, put together."""

    def __init__(
        self,
        options: Options,
        kube: Kube,
        nvml: Nvml,
        limit_door: LimitDoor,
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 3.0),
        cgroups: Cgroups | None = None,
    ) -> None:
        self.options = options
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._moved: dict[str, float] = {}
        self._started = 0.0
        self._recalled = False
        self._passed: tuple[list[Json], list[Entry]] | None = None
        self._pass = threading.Event()
        kube = MeasuredKube(kube, registry)
        self.metrics = Metrics(registry, options.node)
        self.inventory = Inventory(nvml, options.unit, Health(options.xid_quiet, options.ignored_xids))
        self.injection = Injection(options.injection, options.cdi_folders)
        self.keeper = LimitKeeper(
            options.memory_limit, options.unit, limit_door, cgroups or NodeCgroups(options.cgroup_root)
        )
        self.podresources = KubeletPodResources(str(options.kubelet_dir / "pod-resources" / "kubelet.sock"))
        self.pods: Mirror[Json] = Mirror(
            kube, "/api/v1/pods", {"fieldSelector": f"spec.nodeName={options.node}"}, slim_pod, backoff=backoff
        )
        self.node: Mirror[Json] = Mirror(
            kube, "/api/v1/nodes", {"fieldSelector": f"metadata.name={options.node}"}, slim_node, backoff=backoff
        )
        self.events = Events(kube, COMPONENT, options.node)
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
        )
        self.service = Service(
            COMPONENT, options.address, options.port, self.unready, {("GET", "/healthz"): self._healthz}, registry
        )
        self._wire()

    def _wire(self) -> None:
        """Who tells whom of what."""
        self.pods.on_change(lambda key, before, now: self.reconciler.wake())
        self.node.on_change(self._node_changed)
        self.injection.on_used = self.metrics.injection
        self.inventory.on_xid = self.metrics.xid
        self.inventory.on_look = self._try_limits
        self.inventory.guards += [lambda uuid: self.keeper.refusal or "", self.injection.refusal]
        self.admission.limits = self.keeper.environment
        self.admission.on_allocated = self._allocated
        self.admission.on_refused = lambda reason: self.metrics.refused()
        self.reconciler.limit = lambda: self.keeper.state
        self.reconciler.on_pass = self._have_passed

    def start(self) -> None:
        """
        :raises OSError: the address can't be had.
        """
        self.service.start()
        self._started = time.monotonic()
        for part in (self.pods, self.node, self.events):
            part.start()
        for name, work, pause in (
            ("cards", self._look, min(BREATH_SECONDS, self.options.look / 2)),
            ("kubelet", self._register, STEP_SECONDS),
            ("limits", self._limit, LIMIT_PAUSE),
        ):
            self._thread(name, functools.partial(self._repeat, name, work, pause))
        self._thread("reconcile", functools.partial(self.reconciler.run, self._stop))

    def stop(self) -> None:
        """Leave kubelet and everything it runs as they are; only our socket goes."""
        self._stop.set()
        self._pass.set()
        self.reconciler.wake()
        for thread in self._threads:
            thread.join(5)
        self.registration.stop()
        self.podresources.close()
        for part in (self.service, self.pods, self.node, self.events):
            part.stop()

    def unready(self) -> str | None:
        """Why the plugin can't do its work, in one sentence; None when it can."""
        if (hanging := self._hanging()) is not None:
            return hanging
        if self.inventory.reason is not None:
            return self.inventory.reason
        if self.registration.reason is not None:
            return self.registration.reason
        for what, mirror in (("pods", self.pods), ("node", self.node)):
            if not mirror.synced:
                return f"the {what} can't be read from the API yet" + (f": {mirror.error}" if mirror.error else "")
        return self.reconciler.error

    def _thread(self, name: str, work: t.Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _repeat(self, name: str, work: t.Callable[[], None], pause: float) -> None:
        while not self._stop.is_set():
            self._moved[name] = time.monotonic()
            try:
                work()
            except Exception:
                # The next look may find what it can work with; a thread that is gone never would.
                log.exception("unexpected failure of %s", name)
                self.metrics.failed(name)
                self._stop.wait(1.0)
            self._stop.wait(pause)

    def _hanging(self) -> str | None:
        now = time.monotonic()
        for name, when in list(self._moved.items()):
            if now - when > HANG_SECONDS:
                return f"{name}: no answer for {now - when:.0f} s"
        return None

    def _healthz(self, _request: object) -> Response:
        """Whether this container can still come to something; kubelet makes a new one otherwise."""
        reason = self._hanging()
        if reason is None and (blind := self.inventory.blind) > BLIND_SECONDS:
            reason = f"{self.inventory.reason}, for {blind:.0f} s; a new container may see it"
        return text("ok") if reason is None else text(reason, 500)

    def _look(self) -> None:
        if not self._recalled:
            self._recall()
        changed = self.inventory.look()
        self.metrics.memory(self.inventory.used_mib)
        self.injection.say([card.uuid for card in self.inventory.cards])
        if changed:
            self.reconciler.wake()
        self.inventory.watch(self.options.look, self._stop)

    def _recall(self) -> None:
        """What the plugin before us wrote on the node of its cards; before the first look, if it can be had."""
        end = self._started + SYNC_SECONDS
        for mirror in (self.node, self.pods):
            while not (mirror.synced or self._stop.is_set()) and time.monotonic() < end:
                mirror.wait_synced(0.1)
        self._recalled = True
        node = self.node.get(self.options.node)
        if node is None or not self.pods.synced:
            log.warning("the API hasn't said yet what this node told of its cards; they are numbered as NVML has them")
            return
        text = node["metadata"]["annotations"].get(contract.NODE_CARDS, "[]")
        try:
            cards = contract.cards_from_annotation(text)
        except contract.ContractError as error:
            log.warning("%s; the cards are numbered as NVML has them", error)
            return
        held = {index for pod in self.pods.items() if contract.counts(pod) for index in contract.shares(pod)}
        self.inventory.recall(cards, held)

    def _node_changed(self, key: str, before: Json | None, now: Json | None) -> None:
        self.injection.node(now or {})
        self.reconciler.wake()

    def _try_limits(self, cards: t.Sequence[contract.Card]) -> None:
        if self.keeper.look(cards):
            self.reconciler.wake()

    def _have_passed(self, pods: list[Json], listing: list[Entry]) -> None:
        self._passed = (pods, listing)
        self._pass.set()

    def _limit(self) -> None:
        """Read all limits back, after each pass of the reconciler: a driver that is slow holds up nothing else."""
        self._pass.wait(LIMIT_SECONDS)
        self._pass.clear()
        if self._passed is None or self._stop.is_set():
            return
        state = self.keeper.state
        for finding in self.keeper.once(self.inventory.cards, *self._passed):
            self.reconciler.post(finding.pod, finding.reason, finding.message, finding.warning)
        self.metrics.limits(self.keeper.state, self.keeper.usage, self.keeper.mended)
        if self.keeper.state != state:
            self.reconciler.wake()

    def _register(self) -> None:
        waited = time.monotonic() - self._started
        if self.registration.registrations == 0 and not self.pods.synced and waited < SYNC_SECONDS:
            return
        before = self.registration.registrations
        self.registration.step()
        if self.registration.registrations != before:
            self.metrics.registered(self.registration.registrations)
            # kubelet may have put the node's status back when it started.
            self.reconciler.expect()

    def _allocated(self) -> None:
        self.metrics.allocated()
        self.reconciler.expect()


def parse(arguments: t.Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what isn't on it comes from the environment, then from the defaults."""
    env = os.environ.get
    parser = argparse.ArgumentParser(prog=COMPONENT, description=__doc__)
    parser.add_argument("--node-name", default=env("NODE_NAME", ""), help="this node's name in the API")
    parser.add_argument(
        "--memory-unit", default=env("GPUSHARE_MEMORY_UNIT", "GiB"), help="GiB or MiB, the same in the whole cluster"
    )
    parser.add_argument(
        "--kubelet-dir",
        default=env("GPUSHARE_KUBELET_DIR", "/var/lib/kubelet"),
        help="kubelet's folder; device-plugins/ and pod-resources/ are in it",
    )
    parser.add_argument(
        "--address", default=env("GPUSHARE_ADDRESS", "0.0.0.0"), help="address of health checks and metrics"
    )
    parser.add_argument("--port", type=int, default=env("GPUSHARE_PORT", str(PORT)))
    parser.add_argument(
        "--resync",
        type=float,
        default=env("GPUSHARE_RESYNC", "30"),
        help="seconds after which everything is compared again, at the latest",
    )
    parser.add_argument(
        "--look",
        type=float,
        default=env("GPUSHARE_LOOK", "5"),
        help="seconds after which the cards are looked at again",
    )
    parser.add_argument(
        "--xid-quiet",
        type=float,
        default=env("GPUSHARE_XID_QUIET", "300"),
        help="seconds without a further error after which a card is given to pods again",
    )
    parser.add_argument(
        "--ignore-xids",
        default=env("GPUSHARE_IGNORE_XIDS", ""),
        help="XID errors that say nothing of a card, besides those of applications; numbers separated by commas",
    )
    parser.add_argument(
        "--device-injection",
        default=env("GPUSHARE_DEVICE_INJECTION", AUTO),
        help="how containers get their cards: cdi, envvar, or auto for cdi where kubelet and runtime can",
    )
    parser.add_argument(
        "--cdi-folders",
        default=env("GPUSHARE_CDI_FOLDERS", ",".join(map(str, FOLDERS))),
        help="where the node's CDI specifications are, separated by commas; the later one wins",
    )
    parser.add_argument(
        "--memory-limit",
        default=env("GPUSHARE_MEMORY_LIMIT", "auto"),
        help="whether the driver holds containers to their shares: auto, required or off",
    )
    parser.add_argument(
        "--cgroup-root",
        default=env("GPUSHARE_CGROUP_ROOT", "/sys/fs/cgroup"),
        help="where the node's own control groups are seen",
    )
    parser.add_argument(
        "--cleanup",
        action="store_true",
        help="take away what the plugin told of this node, and its limits, and end; the plugin must not run any more",
    )
    parser.add_argument("--log-format", default=env("GPUSHARE_LOG_FORMAT", "text"), help="text or json")
    parser.add_argument("--log-level", default=env("GPUSHARE_LOG_LEVEL", "info"), help="debug, info, warning or error")
    parser.add_argument("--kubeconfig", default=env("GPUSHARE_KUBECONFIG", ""), help="unset: the pod's service account")
    parser.add_argument("--version", action="version", version=gpushare.__version__)
    options = parser.parse_args(arguments)
    # Not by argparse's choices, which don't look at what came from the environment.
    for name, allowed in (
        ("memory_unit", tuple(contract.MIB_PER_UNIT)),
        ("device_injection", MODES),
        ("memory_limit", limits.MODES),
        ("log_format", ("text", "json")),
        ("log_level", ("debug", "info", "warning", "error")),
    ):
        if getattr(options, name) not in allowed:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: {getattr(options, name)!r} is none of {', '.join(allowed)}")
    if not options.node_name:
        parser.error("--node-name or the environment variable NODE_NAME must name this node")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port: {options.port} is no port")
    for name, least, most in (("resync", 1, 3600), ("look", 0.1, 60), ("xid_quiet", 1, 10**9)):
        if not least <= getattr(options, name) <= most:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: {getattr(options, name):g} isn't between {least:g} and {most:g} seconds")
    if not re.fullmatch(r"([0-9]{1,9}(,[0-9]{1,9})*)?", options.ignore_xids):
        parser.error(f"--ignore-xids: {options.ignore_xids!r} is no list of numbers, separated by commas")
    folders = options.cdi_folders.split(",")
    if not all(one.startswith("/") for one in folders):
        parser.error(f"--cdi-folders: {options.cdi_folders!r} is no list of absolute paths, separated by commas")
    return options


def clean(options: Options, kube: Kube, nvml: Nvml, limit_door: LimitDoor, cgroups: Cgroups | None = None) -> int:
    """``--cleanup``: the exit status."""
    keeper = LimitKeeper("off", options.unit, limit_door, cgroups or NodeCgroups(options.cgroup_root))
    socket = options.kubelet_dir / "pod-resources" / "kubelet.sock"
    try:
        cleanup.clean(
            options.node,
            kube,
            nvml,
            options.unit,
            KubeletPodResources(str(socket)),
            keeper,
            options.kubelet_dir / "device-plugins",
        )
    except cleanup.NotClean as error:
        log.error("%s", error)
        return 1
    return 0


def main(arguments: t.Sequence[str] | None = None) -> int:
    given = parse(arguments)
    logger("gpushare", given.log_format, given.log_level)
    options = Options(
        node=given.node_name,
        unit=given.memory_unit,
        kubelet_dir=Path(given.kubelet_dir),
        address=given.address,
        port=given.port,
        resync=given.resync,
        look=given.look,
        xid_quiet=given.xid_quiet,
        ignored_xids=tuple(int(one) for one in given.ignore_xids.split(",") if one),
        injection=given.device_injection,
        cdi_folders=tuple(Path(one) for one in given.cdi_folders.split(",")),
        memory_limit=given.memory_limit,
        cgroup_root=given.cgroup_root,
    )
    try:
        kube = from_environment(given.kubeconfig)
    except KubeError as error:
        log.error("%s", error)
        return 1
    if given.cleanup:
        return clean(options, kube, NvidiaMl(), NvidiaLimits())
    sys.setswitchinterval(SWITCH_SECONDS)
    signals = ending_signals()
    plugin = Plugin(options, kube, NvidiaMl(), NvidiaLimits())
    # What is there by now stays; looking through all of it for what has gone would keep kubelet waiting now and then.
    gc.collect()
    gc.freeze()
    try:
        plugin.start()
    except OSError as error:
        log.error("can't listen on %s:%s: %s", options.address, options.port, error)
        return 1
    log.info("started", extra={"data": {"node": options.node, "unit": options.unit, "port": plugin.service.port}})
    signal.sigwait(signals)
    log.info("stopping")
    plugin.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
