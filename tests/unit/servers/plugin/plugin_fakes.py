# SPDX-License-Identifier: GPL-3.0-or-later
"""Doubles around the device plugin: kubelet over real gRPC, an API server in memory, simulated cards."""

from __future__ import annotations

import copy
import itertools
import queue
import random
import re
import threading
import time
import typing as t
from concurrent import futures
from pathlib import Path

import grpc
from api_double import ApiDouble
from gpushare.api.client import KubeError
from gpushare.kubelet import wire
from gpushare.kubelet.pod_resources import Entry
from gpushare.nvml.library import NvmlCard, NvmlError, Xid
from gpushare.plugin import reconcile
from gpushare.plugin.command import Options, Plugin
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject
from limit_fakes import EveryFolder, FakeCgroups, FakeDriver
from pod_resources_messages import MESSAGES
from prometheus_client import CollectorRegistry
from unix_http import ask_socket

NODE = "gpu1"


def until(condition: t.Callable[[], t.Any], seconds: float = 20.0, what: str = "") -> t.Any:
    """Wait for a change by other threads."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what or condition}")


# --------------------------------------------------------------------------- cards


def card(index: int, units: int = 16, healthy: bool = True, model: str = "") -> contract.Card:
    return contract.Card(index, f"GPU-{index:08x}-aaaa", index, units * 1024, units, healthy, model)


def ids(index: int, *slots: int) -> tuple[str, ...]:
    """kubelet device IDs of a card."""
    return tuple(f"{index:08x}-{slot}" for slot in slots)


def seen(index: int, gib: int = 16, minor: int | None = None, model: str = "Simulated NVIDIA GPU") -> NvmlCard:
    uuid = f"GPU-{index:08x}-1111-2222-3333-444444444444"
    return NvmlCard(index, uuid, index if minor is None else minor, gib * 1024, model)


class FakeNvml:
    def __init__(self, *cards: NvmlCard) -> None:
        self.found = list(cards)
        self.left_out: frozenset[str] = frozenset()
        self.problem = ""
        self._xids: queue.Queue[Xid] = queue.Queue()

    def cards(self) -> list[NvmlCard]:
        if self.problem:
            raise NvmlError(self.problem)
        return list(self.found)

    def xids(self, seconds: float) -> list[Xid]:
        try:
            return [self._xids.get(timeout=seconds)]
        except queue.Empty:
            return []

    def fail(self, index: int, xid: int) -> None:
        """Report an error of a card, as the driver."""
        self._xids.put(Xid(seen(index).uuid, xid))


# --------------------------------------------------------------------------- the API server


class FakeKube(ApiDouble):
    """The API server as a node's plugin uses it, with errors that last until a test clears ``refuse``."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: dict[str, KubeError] = {}
        self.hooks.append(self._check)

    def put(self, kind: str | JsonObject, obj: JsonObject | None = None) -> JsonObject:
        if isinstance(kind, str):
            assert obj is not None
            return super().put(kind, obj)
        return super().put("pods" if "namespace" in kind["metadata"] else "nodes", kind)

    def remove(self, kind: str | JsonObject, name: str = "", namespace: str = "") -> None:
        if isinstance(kind, str):
            super().remove(kind, name, namespace)
        else:
            super().remove("pods", kind["metadata"]["name"], kind["metadata"]["namespace"])

    def pod(self, name: str, namespace: str = "default") -> JsonObject:
        return super().pod(name.rpartition("/")[2], name.rpartition("/")[0] or namespace)

    def node(self) -> JsonObject:
        with self.lock:
            return copy.deepcopy(self.objects["nodes", "", NODE])

    def go_away(self) -> None:
        self.down = True
        self.cut()

    @property
    def events(self) -> list[JsonObject]:
        with self.lock:
            return [one for (kind, _namespace, _name), one in self.objects.items() if kind == "events"]

    @property
    def patches(self) -> list[tuple[str, JsonObject]]:
        with self.lock:
            return [(path, body) for method, path, body in self.requests if method == "PATCH"]

    @property
    def gets(self) -> list[str]:
        with self.lock:
            return [path for method, path, _body in self.requests if method == "GET"]

    def reasons(self, key: str) -> list[str]:
        name = key.partition("/")[2]
        return [event["reason"] for event in self.events if event["involvedObject"]["name"] == name]

    def _check(self, method: str, path: str) -> None:
        assert method != "DELETE", "the plugin deletes nothing"
        for part, error in list(self.refuse.items()):
            if part in path:
                raise error


# --------------------------------------------------------------------------- pods

_serial = itertools.count(1)


def container(name: str, units: int, restart: str = "") -> JsonObject:
    one: JsonObject = {"name": name}
    if units:
        one["resources"] = {"limits": {contract.RESOURCE_MEMORY: str(units)}}
    if restart:
        one["restartPolicy"] = restart
    return one


def make_pod(
    name: str,
    *units: int,
    inits: t.Sequence[JsonObject] = (),
    booked: int | tuple[int, ...] | None = None,
    started: bool = False,
    node: str = NODE,
    assigned: bool = False,
    card_units: int = 16,
    requests: t.Mapping[str, str] | None = None,
) -> JsonObject:
    """A pod bound to the node; ``booked`` (cards) as the extender writes it; ``requests`` are its user's."""
    number = next(_serial)
    pod: JsonObject = {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}-{number}",
            "creationTimestamp": f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}Z",
            "annotations": {"kept": "as it is", **(requests or {})},
        },
        "spec": {"nodeName": node, "containers": [container(f"c{n}", unit) for n, unit in enumerate(units)]},
        "status": {"phase": "Pending"},
    }
    if inits:
        pod["spec"]["initContainers"] = list(inits)
    if booked is not None:
        cards = [
            contract.Card(one, "", one, 0, card_units) for one in ((booked,) if isinstance(booked, int) else booked)
        ]
        written = contract.booking_annotations(cards, pod, 1_000_000 + number, assigned)
        pod["metadata"]["annotations"].update({key: value for key, value in written.items() if value is not None})
    if started:
        pod["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    return pod


# --------------------------------------------------------------------------- kubelet


class Rejected(Exception):
    """kubelet failed the pod's admission."""


class FakeKubelet:
    """Registration, device accounting and PodResources as in kubelet 1.36; pods don't run.

    As the real one it chooses IDs at random without the plugin's preference, refuses messages above 4 MiB, empties the
    socket folder when it starts, and at the end of any list removes the client with the resource's name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder, self.podresources = root / "device-plugins", root / "pod-resources"
        for one in (self.folder, self.podresources):
            one.mkdir(parents=True, exist_ok=True)
        self.healthy: set[str] = set()
        self.unhealthy: set[str] = set()
        self.devices: dict[str, dict[str, tuple[str, ...]]] = {}
        self.envs: dict[str, dict[str, dict[str, str]]] = {}
        self.cdi: dict[str, dict[str, list[str]]] = {}
        self.pods: dict[str, JsonObject] = {}
        self.registrations = 0
        self.lists = 0
        self.steered = True
        self.podresources_fails = False
        self.before_allocate: t.Callable[[], None] = lambda: None
        self._endpoint = ""
        self._channel: grpc.Channel | None = None
        self._lock = threading.RLock()
        self._servers: list[grpc.Server] = []
        self._random = random.Random(1)

    # Start and stop.

    def start(self) -> None:
        for one in self.folder.iterdir():
            if one.is_socket():
                one.unlink()
        self.pods = {}
        registration = wire.handlers({wire.REGISTER: self._register})
        listing = wire.handlers({wire.POD_RESOURCES: self._list})
        for path, handler in (
            (self.folder / "kubelet.sock", registration),
            (self.podresources / "kubelet.sock", listing),
        ):
            path.unlink(missing_ok=True)
            server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=wire.CHANNEL)
            server.add_generic_rpc_handlers((handler,))
            server.add_insecure_port(f"unix:{path}")
            server.start()
            self._servers.append(server)

    def stop(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            self.healthy, self.unhealthy = set(), set()
        if channel is not None:
            channel.close()
        for server in self._servers:
            server.stop(0).wait(3)
        self._servers = []

    @property
    def registered(self) -> bool:
        return self._channel is not None and bool(self.healthy)

    def _register(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        assert request.version == "v1beta1" and request.resource_name == contract.RESOURCE_MEMORY
        assert request.options.get_preferred_allocation_available and not request.options.pre_start_required
        path = self.folder / request.endpoint
        # As kubelet, without another limit than gRPC's 4 MiB.
        channel = grpc.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)])
        options = self._unary(channel, wire.OPTIONS)(wire.message("v1beta1.Empty")(), timeout=5)
        assert options.get_preferred_allocation_available
        with self._lock:
            self._channel = channel
            self.registrations += 1
        threading.Thread(target=self._follow, args=(channel,), daemon=True).start()
        return wire.message("v1beta1.Empty")()

    def _follow(self, channel: grpc.Channel) -> None:
        call = channel.unary_stream(
            wire.LIST_AND_WATCH.path,
            request_serializer=wire.encode,
            response_deserializer=wire.decoder(wire.LIST_AND_WATCH.response),
        )
        try:
            for response in call(wire.message("v1beta1.Empty")()):
                with self._lock:
                    self.healthy = {device.ID for device in response.devices if device.health == contract.HEALTHY}
                    self.unhealthy = {device.ID for device in response.devices if device.health != contract.HEALTHY}
                    self.lists += 1
        except (grpc.RpcError, ValueError):
            pass
        with self._lock:
            current, self._channel = self._channel, None
            self.unhealthy |= self.healthy
            self.healthy = set()
        if current is not None:
            current.close()

    @staticmethod
    def _unary(channel: grpc.Channel, method: wire.Method) -> t.Any:
        return channel.unary_unary(
            method.path, request_serializer=wire.encode, response_deserializer=wire.decoder(method.response)
        )

    # Device accounting.

    def add(self, pod: JsonObject) -> None:
        """HandlePodAdditions of one pod: managed, then admitted, container by container.

        :raises Rejected: with the plugin's message.
        """
        uid = pod["metadata"]["uid"]
        with self._lock:
            self.pods[uid] = pod
        reusable: set[str] = set()
        try:
            for container in pod["spec"].get("initContainers") or []:
                ids = self._allocate(uid, container, reusable)
                reusable = reusable - set(ids) if container.get("restartPolicy") == "Always" else reusable | set(ids)
            for container in pod["spec"]["containers"]:
                reusable -= set(self._allocate(uid, container, reusable))
        except grpc.RpcError as error:
            self.remove(pod)
            raise Rejected(error.details()) from error
        except Rejected:
            self.remove(pod)
            raise

    def remove(self, pod: JsonObject) -> None:
        """The pod is no longer active; its IDs are free."""
        with self._lock:
            self.pods.pop(pod["metadata"]["uid"], None)
            self.devices.pop(pod["metadata"]["uid"], None)

    def readd(self, pod: JsonObject) -> None:
        """After a restart: the checkpoint still has the pod's devices, and nothing is asked."""
        assert pod["metadata"]["uid"] in self.devices
        with self._lock:
            self.pods[pod["metadata"]["uid"]] = pod

    def used(self) -> set[str]:
        return {one for pod in self.devices.values() for ids in pod.values() for one in ids}

    def _allocate(self, uid: str, container: JsonObject, reusable: set[str]) -> tuple[str, ...]:
        needed = contract.container_units(container)
        if not needed:
            return ()
        with self._lock:
            channel = self._channel
            available = self.healthy - self.used()
        taken = set(self._random.sample(sorted(reusable), min(needed, len(reusable))))
        if len(taken) < needed:
            if channel is None or len(available) < needed - len(taken):
                raise Rejected(f"requested number of devices unavailable: {needed}, available: {len(available)}")
            preferred: set[str] = set()
            if self.steered:
                request = wire.message(wire.PREFERRED.request)()
                ask = request.container_requests.add(allocation_size=needed)
                ask.available_deviceIDs.extend(self._random.sample(sorted(available | taken), len(available | taken)))
                ask.must_include_deviceIDs.extend(taken)
                response = self._unary(channel, wire.PREFERRED)(request, timeout=10)
                preferred = set(response.container_responses[0].deviceIDs)
            for pool in (preferred & available, available):
                rest = sorted(pool - taken)
                taken |= set(self._random.sample(rest, min(needed - len(taken), len(rest))))
        ids = tuple(sorted(taken, key=lambda _: self._random.random()))
        self.before_allocate()
        request = wire.message(wire.ALLOCATE.request)()
        request.container_requests.add(devices_ids=ids)
        response = self._unary(channel, wire.ALLOCATE)(request, timeout=10)
        with self._lock:
            self.devices.setdefault(uid, {})[container["name"]] = ids
            self.envs.setdefault(uid, {})[container["name"]] = dict(response.container_responses[0].envs)
            names = [device.name for device in response.container_responses[0].cdi_devices]
            self.cdi.setdefault(uid, {})[container["name"]] = names
        return ids

    def _list(self, request: t.Any, context: grpc.ServicerContext) -> t.Any:
        if self.podresources_fails:
            context.abort(grpc.StatusCode.UNAVAILABLE, "out of order")
        response = MESSAGES["v1.ListPodResourcesResponse"]()
        with self._lock:
            for uid, pod in self.pods.items():
                row = response.pod_resources.add(name=pod["metadata"]["name"], namespace=pod["metadata"]["namespace"])
                inits = [
                    container
                    for container in pod["spec"].get("initContainers") or []
                    if container.get("restartPolicy") == "Always"
                ]
                for one in inits + pod["spec"]["containers"]:
                    shown = row.containers.add(name=one["name"])
                    for identifier in self.devices.get(uid, {}).get(one["name"], ()):
                        shown.devices.add(resource_name=contract.RESOURCE_MEMORY, device_ids=[identifier])
        return response


# --------------------------------------------------------------------------- a node


class Node:
    """A GPU node: the real plugin between a kubelet, an API server and some cards."""

    def __init__(self, root: Path, *cards: NvmlCard, unit: str = "GiB", kube: FakeKube | None = None) -> None:
        self.kube = kube or FakeKube()
        self.kube.put(
            {
                "metadata": {"name": NODE, "uid": "uid-node"},
                "status": {
                    "capacity": {"cpu": "4"},
                    "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.4.0"},
                },
            }
        )
        self.kubelet = FakeKubelet(root)
        self.nvml = FakeNvml(*(cards or (seen(0), seen(1))))
        # Without limits until a test sets another version.
        self.limits = FakeDriver("580.95.05", {one.uuid: one.memory_mib for one in self.nvml.found})
        self.limits.folders = EveryFolder()
        # Cgroups whose processes go on without their pod.
        self.outlived: set[str] = set()
        self.unit = unit
        self.specifications = root / "cdi"
        self.plugin: Plugin | None = None

    def start_plugin(
        self, query_seconds: float = 0.1, resync: float = 1.0, registry: CollectorRegistry | None = None, **more: t.Any
    ) -> Plugin:
        options = Options(
            node=NODE,
            unit=self.unit,
            kubelet_dir=self.kubelet.root,
            status_socket=str(self.status_socket),
            resync=resync,
            query_seconds=query_seconds,
            cdi_folders=(self.specifications,),
            **more,
        )
        self.plugin = Plugin(
            options,
            self.kube,
            self.nvml,
            self.limits,
            registry or CollectorRegistry(),
            (0.05, 0.2),
            FakeCgroups(self.limits, self.outlived),
        )
        self.plugin.start()
        return self.plugin

    @property
    def status_socket(self) -> Path:
        return self.kubelet.root / "status.sock"

    @property
    def running(self) -> Plugin:
        assert self.plugin is not None
        return self.plugin

    def stop_plugin(self) -> None:
        self.running.stop()
        self.plugin = None

    def kill_plugin(self) -> None:
        """As SIGKILL: no shutdown message, and the socket stays."""
        stale = self.kubelet.folder / "kubegpu-gpushare.sock"
        self.stop_plugin()
        stale.touch()

    def up(self, resync: float = 1.0, **more: t.Any) -> t.Self:
        self.kubelet.start()
        self.start_plugin(resync=resync, **more)
        until(lambda: self.kubelet.registered, what="registered")
        return self

    def down(self) -> None:
        if self.plugin is not None:
            self.plugin.stop()
        self.kubelet.stop()

    # Pods.

    def run(self, pod: JsonObject) -> JsonObject:
        """Bound in the API, admitted by kubelet, reported as started."""
        self.kube.put(pod)
        self.admit(pod)
        return pod

    def admit(self, pod: JsonObject) -> None:
        self.kubelet.add(pod)
        self.report(pod)

    def report(self, pod: JsonObject) -> None:
        current = self.kube.pod(contract.pod_key(pod))
        current["status"] = {
            "phase": "Running",
            "startTime": "2026-01-01T00:00:00Z",
            "containerStatuses": [
                {
                    "name": container["name"],
                    "containerID": f"containerd://{pod['metadata']['uid']}-{container['name']}",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                }
                for container in pod["spec"]["containers"]
            ],
        }
        self.kube.put(current)

    def mirrored(self, count: int) -> None:
        """Wait until the plugin's mirror has so many pods."""
        until(lambda: len(self.running.pods.items()) == count)

    def cards_of(self, pod: JsonObject) -> set[str]:
        """The short UUIDs of the pod's IDs in kubelet's accounting."""
        ids = [one for ids in self.kubelet.devices[pod["metadata"]["uid"]].values() for one in ids]
        return {contract.card_of_device_id(one) for one in ids}

    def visible(self, pod: JsonObject) -> set[str]:
        """The cards that are visible to the pod's containers."""
        return {envs["NVIDIA_VISIBLE_DEVICES"] for envs in self.kubelet.envs[pod["metadata"]["uid"]].values()}

    def annotations(self, pod: JsonObject) -> dict[str, str]:
        return t.cast(dict[str, str], self.kube.pod(contract.pod_key(pod))["metadata"]["annotations"])

    def metric(self, name: str) -> float | None:
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.page("/metrics")[1], re.M)
        return float(match.group(1)) if match else None

    def page(self, path: str) -> tuple[int, str]:
        """HTTP status and text of a page of the plugin."""
        return ask_socket(self.status_socket, path)

    def ready(self) -> str:
        status, text = self.page("/readyz")
        assert status == (200 if text == "ok" else 503)
        return text

    def written(self) -> list[JsonObject]:
        """The annotations that the plugin has written on pods."""
        return [body["metadata"]["annotations"] for path, body in self.kube.patches if "/pods/" in path]

    def agrees(self, pod: JsonObject) -> bool:
        """Annotations, kubelet's accounting and the container's environment name the same cards."""
        annotations = self.annotations(pod)
        cards = {one.index: one.uuid for one in self.nvml.found}
        held = contract.booking(self.kube.pod(contract.pod_key(pod)))
        uuids = [cards.get(index, "nothing") for index in (held.indices if held else ())]
        return (
            self.visible(pod) == {",".join(uuids)}
            and {uuid[4:12] for uuid in uuids} == self.cards_of(pod)
            and annotations.get(contract.POD_ASSIGNED) == "true"
            and annotations.get(contract.POD_UNITS) == str(contract.pod_units(pod))
            and annotations["kept"] == "as it is"
        )


def environment(devices: str, card: int, pod: int, container: int) -> dict[str, str]:
    """The environment of a container: the visible devices, the first card's index, and units."""
    return {
        "NVIDIA_VISIBLE_DEVICES": devices,
        "ALIYUN_COM_GPU_MEM_IDX": str(card),
        "ALIYUN_COM_GPU_MEM_DEV": "16",
        "ALIYUN_COM_GPU_MEM_POD": str(pod),
        "ALIYUN_COM_GPU_MEM_CONTAINER": str(container),
    }


def refused_allocation(node: Node, *identifiers: str) -> str:
    """The plugin's message for an Allocate call that kubelet itself never makes."""
    request = wire.message(wire.ALLOCATE.request)()
    request.container_requests.add(devices_ids=identifiers)
    try:
        wire.call(str(node.kubelet.folder / "kubegpu-gpushare.sock"), wire.ALLOCATE, request, 5)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return str(error.details())
    raise AssertionError("the plugin has answered")


def fixes(pod: JsonObject, *entries: Entry, granted: t.Mapping[str, tuple[str, ...]] | None = None) -> t.Any:
    """The corrections of one pod on a node of three cards, at the time 42 ns."""
    cards = [card(n) for n in range(3)]
    return reconcile.corrections(cards, {contract.pod_key(pod): pod}, entries, granted or {}, 42)
