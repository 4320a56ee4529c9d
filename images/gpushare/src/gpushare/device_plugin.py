# SPDX-License-Identifier: GPL-3.0-or-later
"""The command ``gpushare-device-plugin``: shares of a node's GPU memory as kubelet's devices."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
import typing as t
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry

import gpushare
from gpushare import contract
from gpushare.admission import Admission, slim_pod
from gpushare.events import Events
from gpushare.kube import Json, Kube, KubeError, Mirror, from_environment
from gpushare.kubelet import DevicePlugin, Registration
from gpushare.metrics import Metrics
from gpushare.nvml import Inventory, NvidiaMl, Nvml
from gpushare.podresources import KubeletPodResources
from gpushare.reconcile import Reconciler, slim_node
from gpushare.service import Response, Service, logger, text

COMPONENT = "gpushare-device-plugin"
PORT = 12346

# So often is kubelet's socket looked at: after its restart pods are refused until we are registered again.
STEP_SECONDS = 0.2
# A registration before the pods are known steers by kubelet's list alone; that is better than none after so long.
SYNC_SECONDS = 5.0
# A part that hasn't moved for so long hangs, and only a new process helps.
HANG_SECONDS = 120.0
# A container gets the driver's files when it is made; a driver that came later, or another one, needs a new container.
BLIND_SECONDS = 120.0

log = logging.getLogger("gpushare.device_plugin")


@dataclasses.dataclass(frozen=True)
class Options:
    node: str
    unit: str = "GiB"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    address: str = "0.0.0.0"
    port: int = PORT
    resync: float = 30.0
    look: float = 5.0


class Plugin:
    """All parts of the device plugin, put together."""

    def __init__(
        self,
        options: Options,
        kube: Kube,
        nvml: Nvml,
        registry: CollectorRegistry = REGISTRY,
        backoff: tuple[float, float] = (0.2, 3.0),
    ) -> None:
        self.options = options
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._moved: dict[str, float] = {}
        self._started = 0.0
        self.metrics = Metrics(registry)
        self.inventory = Inventory(nvml, options.unit)
        self.podresources = KubeletPodResources(str(options.kubelet_dir / "pod-resources" / "kubelet.sock"))
        self.pods: Mirror[Json] = Mirror(
            kube, "/api/v1/pods", {"fieldSelector": f"spec.nodeName={options.node}"}, slim_pod, backoff=backoff
        )
        self.node: Mirror[Json] = Mirror(
            kube, "/api/v1/nodes", {"fieldSelector": f"metadata.name={options.node}"}, slim_node, backoff=backoff
        )
        self.events = Events(kube, COMPONENT, options.node)
        self.admission = Admission(options.node, self.inventory, kube, self.pods, self.podresources)
        self.registration = Registration(
            options.kubelet_dir / "device-plugins",
            lambda: DevicePlugin(self.inventory, self.admission),
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
        self.pods.on_change(lambda key, before, now: self.reconciler.wake())
        self.node.on_change(lambda key, before, now: self.reconciler.wake())
        self.admission.on_allocated = self._allocated
        self.admission.on_refused = lambda reason: self.metrics.refused()

    def start(self) -> None:
        """
        :raises OSError: the address can't be had.
        """
        self.service.start()
        self._started = time.monotonic()
        for part in (self.pods, self.node, self.events):
            part.start()
        for name, work, pause in (
            ("cards", self._look, self.options.look),
            ("kubelet", self._register, STEP_SECONDS),
        ):
            self._thread(name, functools.partial(self._repeat, name, work, pause))
        self._thread("reconcile", functools.partial(self.reconciler.run, self._stop))

    def stop(self) -> None:
        """Leave kubelet and everything it runs as they are; only our socket goes."""
        self._stop.set()
        self.reconciler.wake()
        for thread in self._threads:
            thread.join(5)
        self.registration.stop()
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
        if self.inventory.look():
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
    parser.add_argument("--log-format", default=env("GPUSHARE_LOG_FORMAT", "text"), help="text or json")
    parser.add_argument("--log-level", default=env("GPUSHARE_LOG_LEVEL", "info"), help="debug, info, warning or error")
    parser.add_argument("--kubeconfig", default=env("GPUSHARE_KUBECONFIG", ""), help="unset: the pod's service account")
    parser.add_argument("--version", action="version", version=gpushare.__version__)
    options = parser.parse_args(arguments)
    # Not by argparse's choices, which don't look at what came from the environment.
    for name, allowed in (
        ("memory_unit", tuple(contract.MIB_PER_UNIT)),
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
    for name, least in (("resync", 1), ("look", 0.1)):
        if not least <= getattr(options, name) <= 3600:
            parser.error(f"--{name}: {getattr(options, name):g} isn't between {least:g} and 3600 seconds")
    return options


def main(arguments: t.Sequence[str] | None = None) -> int:
    given = parse(arguments)
    logger("gpushare", given.log_format, given.log_level)
    options = Options(
        given.node_name,
        given.memory_unit,
        Path(given.kubelet_dir),
        given.address,
        given.port,
        given.resync,
        given.look,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        plugin = Plugin(options, from_environment(given.kubeconfig), NvidiaMl())
        plugin.start()
    except KubeError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("can't listen on %s:%s: %s", options.address, options.port, error)
        return 1
    log.info("started", extra={"data": {"node": options.node, "unit": options.unit, "port": plugin.service.port}})
    stopped.wait()
    log.info("stopping")
    plugin.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
