# SPDX-License-Identifier: GPL-3.0-or-later
"""Doubles around the DRA driver: claims in memory, a tree of cgroups, and kubelet's plugin and DRA managers over gRPC.

The double of kubelet does what pkg/kubelet/pluginmanager and pkg/kubelet/cm/dra do in v1.36.3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
import time
import typing as t
from concurrent import futures
from pathlib import Path

import grpc
from dra_cluster import Cluster
from gpushare.api.client import KubeApi, KubeError, connect
from gpushare.dra.claims import DRIVER, device_name
from gpushare.dra.command import Driver, Options
from gpushare.kubelet import dra, wire
from gpushare.nvml.library import NvmlCard
from gpushare.nvml.limits import Limit
from gpushare.shared._core.types import JsonObject
from limit_fakes import EveryFolder, FakeDriver
from plugin_fakes import FakeNvml, seen
from prometheus_client import CollectorRegistry
from unix_http import ask_socket

NODE = "gpu1"


def uid(number: int) -> str:
    """The UID of an object in the API."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def result(device: str, memory: str, **more: t.Any) -> JsonObject:
    """One allocated device of a claim."""
    return {
        "request": "gpu",
        "driver": DRIVER,
        "pool": NODE,
        "device": device,
        "shareID": uid(0xFFFF),
        "consumedCapacity": {"memory": memory},
        **more,
    }


def make_claim(number: int, *results: JsonObject, pods: t.Sequence[int] = (), **devices: t.Any) -> JsonObject:
    """A claim with a number as the API has it, reserved for pods; by default for the one of its own number."""
    return {
        "metadata": {"namespace": "default", "name": f"claim{number}", "uid": uid(number)},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": list(results), **devices}},
            "reservedFor": [
                {"resource": "pods", "name": f"pod{pod}", "uid": uid(0x1000 + pod)} for pod in pods or (number,)
            ],
        },
    }


def ref(number: int) -> dra.ClaimRef:
    return dra.ClaimRef("default", uid(number), f"claim{number}")


class ClaimKube:
    """The claims in the API; other requests fail."""

    def __init__(self) -> None:
        self.claims: dict[str, JsonObject] = {}
        self.error: KubeError | None = None
        self.reads = 0
        self.before: t.Callable[[], None] = lambda: None

    def put(self, claim: JsonObject) -> None:
        self.claims[claim["metadata"]["name"]] = claim

    def get(self, path: str) -> JsonObject:
        self.before()
        self.reads += 1
        if self.error is not None:
            raise self.error
        start, _slash, name = path.partition("?")[0].rpartition("/")
        assert start == "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
        if name not in self.claims:
            raise KubeError(404, "NotFound", f'resourceclaims "{name}" not found', name=name)
        return self.claims[name]

    def _refuse(self, *given: t.Any) -> t.Any:
        raise AssertionError(f"the driver has no right to this: {given}")

    post = put_object = patch = delete = watch = _refuse


class CgroupTree:
    """A folder like /sys/fs/cgroup, with systemd's names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kubepods.slice").mkdir(parents=True)
        (root / "cgroup.controllers").write_text("memory misc\n")

    def pod(self, number: int) -> Path:
        """Create the cgroup of a pod, as kubelet does before it prepares claims."""
        name = uid(0x1000 + number).replace("-", "_")
        folder = self.root / "kubepods.slice" / f"kubepods-pod{name}.slice"
        folder.mkdir(exist_ok=True)
        return folder

    def container(self, number: int, identifier: int) -> Path:
        """Create the cgroup of a container in a pod."""
        folder = self.pod(number) / f"cri-containerd-{identifier:064x}.scope"
        folder.mkdir()
        (folder / "cgroup.procs").write_text("1\n")
        return folder


# --------------------------------------------------------------------------- kubelet


class Refused(Exception):
    """kubelet couldn't prepare or unprepare a pod's claims."""


class Kubelet:
    """The plugin watcher and the DRA manager; ``claims`` is its checkpoint, which outlives ``stop``.

    :param root: kubelet's folder.
    :param wipe: deletes the node's slices, as kubelet does when it starts.
    """

    def __init__(self, root: Path, wipe: t.Callable[[], None] = lambda: None) -> None:
        self.root, self._wipe = root, wipe
        self.registry = root / "plugins_registry"
        self.registry.mkdir(parents=True, exist_ok=True)
        # The devices of each claim (UID), and whether this process has prepared it.
        self.claims: dict[str, tuple[dra.ClaimRef, list[t.Any]]] = {}
        self._prepared: set[str] = set()
        # The plugin's endpoint by its registration socket.
        self._plugins: dict[tuple[str, int], str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.registrations = 0
        self.refusals: list[str] = []
        self._pod_resources: grpc.Server | None = None
        # Of PodResources: the pods that are active, with the claims (UIDs) of each container.
        self.pods: dict[str, list[list[str]]] = {}

    def start(self) -> None:
        self._wipe()
        self._prepared, self._plugins = set(), {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stop,), daemon=True)
        self._thread.start()
        folder = self.root / "pod-resources"
        folder.mkdir(exist_ok=True)
        (folder / "kubelet.sock").unlink(missing_ok=True)
        self._pod_resources = grpc.server(futures.ThreadPoolExecutor(2))
        self._pod_resources.add_generic_rpc_handlers((wire.handlers({dra.PODS: self._list}),))
        self._pod_resources.add_insecure_port(f"unix:{folder / 'kubelet.sock'}")
        self._pod_resources.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
        if self._pod_resources is not None:
            self._pod_resources.stop(0).wait(3)
            self._pod_resources = None

    @property
    def endpoints(self) -> list[str]:
        with self._lock:
            return list(self._plugins.values())

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(0.05):
            there = {(str(path), path.stat().st_ino) for path in self.registry.iterdir() if path.is_socket()}
            with self._lock:
                known = set(self._plugins)
                for gone in known - there:
                    del self._plugins[gone]
            for found in there - known:
                self._register(found)

    def _register(self, found: tuple[str, int]) -> None:
        path = found[0]
        try:
            # kubelet's own time limit.
            info = wire.call(path, dra.INFO, b"", 1.0)
            assert (info.type, info.name) == ("DRAPlugin", DRIVER) and "v1.DRAPlugin" in info.supported_versions
            status = dra.CLASSES[dra.NOTIFY.request](plugin_registered=True)
            with self._lock:
                if info.endpoint in self._plugins.values():
                    status = dra.CLASSES[dra.NOTIFY.request](
                        error=f"endpoint {info.endpoint} already registered for DRA driver plugin {info.name}"
                    )
                    self.refusals.append(status.error)
                else:
                    self._plugins[found] = info.endpoint
                    self.registrations += 1
            wire.call(path, dra.NOTIFY, status, 5.0)
        except grpc.RpcError:
            # kubelet tries again.
            with self._lock:
                self._plugins.pop(found, None)

    def call(self, method: wire.Method, *refs: dra.ClaimRef, timeout: float = 20.0) -> t.Any:
        """Call the newest plugin.

        :raises Refused: there is none, or it doesn't answer.
        """
        endpoints = self.endpoints
        if not endpoints:
            raise Refused(f"DRA driver {DRIVER} is not registered")
        request = dra.CLASSES[method.request](
            claims=[dra.CLASSES["k8s.io.kubelet.pkg.apis.dra.v1.Claim"](**ref._asdict()) for ref in refs]
        )
        try:
            return wire.call(endpoints[-1], method, request, timeout)
        except grpc.RpcError as error:
            raise Refused(str(error)) from error

    def prepare(self, *refs: dra.ClaimRef) -> list[str]:
        """Prepare a pod's claims.

        :returns: the CDI names of a container that uses all of them.
        :raises Refused: with the driver's message.
        """
        for ref in refs:
            # It is checkpointed before the call.
            self.claims.setdefault(ref.uid, (ref, []))
        todo = [ref for ref in refs if ref.uid not in self._prepared]
        if todo:
            response = self.call(dra.PREPARE, *todo)
            for one in todo:
                assert one.uid in response.claims, "NodePrepareResources skipped a claim"
                answer = response.claims[one.uid]
                if answer.error:
                    raise Refused(answer.error)
                self.claims[one.uid][1].extend(answer.devices)
            assert len(response.claims) == len(todo)
            self._prepared |= {one.uid for one in todo}
        return [name for ref in refs for device in self.claims[ref.uid][1] for name in device.cdi_device_ids]

    def unprepare(self, *refs: dra.ClaimRef) -> None:
        """Unprepare the claims of a pod that has ended.

        :raises Refused: with the driver's message.
        """
        known = [ref for ref in refs if ref.uid in self.claims]
        if not known:
            return
        response = self.call(dra.UNPREPARE, *known)
        for one in known:
            assert one.uid in response.claims, "NodeUnprepareResources skipped a claim"
            if response.claims[one.uid].error:
                raise Refused(response.claims[one.uid].error)
        for one in known:
            del self.claims[one.uid]
            self._prepared.discard(one.uid)

    @contextlib.contextmanager
    def watching(self, watch: wire.Method = dra.WATCHES[-1]) -> t.Iterator[list[dict[str, tuple[int, str]]]]:
        """Follow the health of the newest plugin's devices: each answer's status and message by device."""
        found: list[dict[str, tuple[int, str]]] = []
        with wire.connect(self.endpoints[-1]) as channel:
            stream = channel.unary_stream(watch.path, wire.encode, wire.decoder(watch.response, watch.classes))(b"")

            def follow() -> None:
                with contextlib.suppress(grpc.RpcError):
                    for answer in stream:
                        found.append(
                            {device.device.device_name: (device.health, device.message) for device in answer.devices}
                        )

            threading.Thread(target=follow, daemon=True).start()
            yield found
            stream.cancel()

    def _list(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        response = dra.CLASSES[dra.PODS.response]()
        for name, containers in list(self.pods.items()):
            row = response.pod_resources.add(name=name)
            for uids in containers:
                container = row.containers.add(name="c")
                for uid in uids:
                    known, devices = self.claims[uid]
                    row.namespace = known.namespace
                    resource = container.dynamic_resources.add(claim_name=known.name, claim_namespace=known.namespace)
                    part = resource.claim_resources.add(driver_name=DRIVER)
                    for device in devices:
                        for cdi in device.cdi_device_ids:
                            part.cdi_devices.add(name=cdi)
        return response


def tried(call: t.Callable[[], object]) -> bool:
    """Return whether kubelet's call succeeds; it tries again otherwise."""
    try:
        call()
    except Refused as refused:
        assert "CardFull" not in str(refused), refused
        return False
    return True


def until(
    condition: t.Callable[[], t.Any], seconds: float = 20.0, what: t.Callable[[], str] = str, pause: float = 0.02
) -> t.Any:
    """Wait for a change by other threads.

    :param what: says what is there instead.
    :param pause: seconds between two looks; longer where a look takes processor time that the change needs.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s: {what()}")


# --------------------------------------------------------------------------- the driver


class MiscDriver(FakeDriver):
    """The driver's own accounting (``misc``): a cgroup without a limit has that of the nearest one above it."""

    def get(self, uuid: str, folder: str) -> Limit | None:
        for place in (Path(folder), *Path(folder).parents):
            if kept := self.kept.get((uuid, str(place))):
                return dataclasses.replace(kept, used=self.held.get((uuid, folder), 0))
        return None

    def mib_of(self, folder: Path) -> dict[str, int]:
        """The hard limits of one folder in MiB, by card."""
        return self.mib(str(folder))


class DriverNode:
    """A GPU node: the real driver between a kubelet, a real API server and simulated cards."""

    def __init__(self, root: Path, cluster: Cluster, *cards: NvmlCard, driver: str = "615.71.09") -> None:
        self.root, self.cluster = root, cluster
        self.cgroups = CgroupTree(root / "cgroup")
        own = root / "cgroup" / "system.slice" / "own"
        own.mkdir(parents=True)
        (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
        self.kubelet = Kubelet(root / "kubelet", cluster.wipe)
        self.nvml = FakeNvml(*(cards or (seen(0), seen(1))))
        self.limits = MiscDriver(driver, {one.uuid: one.memory_mib for one in self.nvml.found})
        self.limits.folders = EveryFolder()
        self.cdi = root / "cdi"
        # The newest one; a test may have two.
        self.driver: Driver | None = None
        self._started: list[tuple[Driver, KubeApi]] = []

    def options(self, **more: t.Any) -> Options:
        return Options(
            **{
                "node": self.cluster.node,
                "kubelet_dir": self.root / "kubelet",
                "status_socket": str(self.root / "status.sock"),
                "query_seconds": 0.1,
                "cdi_folders": (self.root / "nvidia",),
                "claim_folder": self.cdi,
                "cgroup_root": str(self.cgroups.root),
                "sysfs": self.root / "sys",
                "token": self.cluster.account / "token",
                **more,
            }
        )

    def start(self, **more: t.Any) -> Driver:
        kube = connect(self.cluster.server.url, str(self.cluster.account))
        self.driver = Driver(self.options(**more), kube, self.nvml, self.limits, CollectorRegistry(), (0.05, 0.2))
        self._started.append((self.driver, kube))
        self.driver.start()
        return self.driver

    def up(self, **more: t.Any) -> Driver:
        """Start kubelet and the driver, and wait until it is ready."""
        self.kubelet.start()
        driver = self.start(**more)
        until(lambda: self.page("/readyz")[1] == "ok", what=lambda: self.page("/readyz")[1])
        return driver

    def stop(self) -> None:
        for driver, kube in self._started:
            driver.stop()
            kube.close()
        self._started = []

    def down(self) -> None:
        self.stop()
        self.kubelet.stop()

    def page(self, path: str) -> tuple[int, str]:
        return ask_socket(self.root / "status.sock", path)

    def metric(self, name: str) -> float | None:
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.page("/metrics")[1], re.M)
        return float(match.group(1)) if match else None

    def devices(self) -> list[t.Any]:
        return [device for each in self.cluster.slices() for device in each["spec"].get("devices", [])]

    def claim(
        self, number: int, *shares: tuple[int, str], pods: t.Sequence[int] = (), requests: t.Sequence[str] = ()
    ) -> dra.ClaimRef:
        """Create an allocated claim: numbers of cards and quantities; by default for the pod of its own number.

        :param requests: of each share; by default they are of one request.
        """
        results = [
            {
                **result(device_name(seen(card).uuid), memory),
                "pool": self.cluster.node,
                "request": requests[at] if requests else "gpu",
            }
            for at, (card, memory) in enumerate(shares)
        ]
        named = [(f"pod{pod}", uid(0x1000 + pod)) for pod in pods or (number,)]
        found = self.cluster.claim(f"claim{number}", *results, pods=named)
        return dra.ClaimRef(self.cluster.namespace, found, f"claim{number}")

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a CDI device, as the container runtime finds them."""
        found = [
            entry["containerEdits"]["env"]
            for file in self.cdi.glob("*.json")
            for entry in json.loads(file.read_text())["devices"]
            if f"gpu.kubegpu.share/claim={entry['name']}" == name
        ]
        assert len(found) == 1
        return dict(one.split("=", 1) for one in found[0])
