# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The units that pods hold or request, by the contract of each back end, and the types of an allocation. No I/O.

Memory in ``units`` has the unit of its node's back end; a count is one of GPUs, replicas or MIG devices.

Each pod is reduced to its entry at once: of a large cluster's pods nothing else stays in memory.
"""

from __future__ import annotations

import typing as t

from .._contracts import claims as dra
from .._contracts import hami, virtual
from .._contracts import nvidia_plugin as nvidia
from .._contracts.model import INIT, MAIN, Container, Pod, PodParser


class ContainerUnits(t.TypedDict):
    """Units that one container requests."""

    name: str
    units: int


class PodEntry(t.TypedDict, total=False):
    """A pod that holds or requests units.

    ``cores`` and ``slots`` are HAMi's, ``resources`` are NVIDIA's, ``reason`` and ``backend`` those of Pending pods.
    ``kind``, ``machine`` and ``runtime_class`` are there with cards of virtual machines: who holds them (see
    ``_contracts/virtual``), and the VirtualMachineInstance.
    """

    namespace: str
    name: str
    units: int
    phase: str
    assigned: bool
    terminating: bool
    uid: str
    containers: list[ContainerUnits]
    state: str
    problem: str
    cores: int
    slots: int
    resources: dict[str, int]
    reason: str
    backend: str
    kind: str
    machine: str
    runtime_class: str


class CardEntry(t.TypedDict, total=False):
    """A card with its pods; slots, cores and mode are HAMi's."""

    index: int
    uuid: str
    model: str
    memory_mib: int
    healthy: bool
    reason: str
    total: int
    used: int
    pods: list[PodEntry]
    slots: int
    slots_used: int
    cores: int
    cores_used: int
    mode: str


class ResourceEntry(t.TypedDict):
    """A resource of NVIDIA's device plugin, or of cards for virtual machines."""

    name: str
    capacity: int
    allocatable: int
    used: int


class DeviceEntry(t.TypedDict):
    """A card or a vGPU for virtual machines.

    :ivar kind: ``card`` or ``vgpu``.
    :ivar card: address of the card on PCI, and ``address`` of the function that a machine gets.
    :ivar uuid: of a mediated device; empty for others.
    :ivar type: of a vGPU, as A10-4Q.
    :ivar device: vendor and device, as 10de:2236.
    :ivar resource: by which it is announced; empty where nobody does, or that isn't known.
    :ivar state: ``held``, ``free`` or ``unknown``.
    :ivar reason: code of the reason why it is unknown; see ``virtual.REASONS``.
    """

    kind: str
    card: str
    address: str
    uuid: str
    type: str
    device: str
    model: str
    driver: str
    iommu_group: int | None
    resource: str
    state: str
    reason: str
    pods: list[PodEntry]


class BackendTotals(t.TypedDict):
    """Units of one back end in the cluster."""

    backend: str
    unit: str | None
    total: int
    used: int


class BackendEntry(t.TypedDict, total=False):
    """One back end on a node; ``slots`` is HAMi's, ``gpus`` and ``resources`` are NVIDIA's.

    Cards for virtual machines have ``resources`` and ``devices``.
    """

    backend: str
    unit: str | None
    capacity: int
    allocatable: int
    total: int
    used: int
    cards: list[CardEntry]
    pending: list[PodEntry]
    slots: dict[str, int]
    gpus: dict[str, t.Any]
    resources: list[ResourceEntry]
    devices: list[DeviceEntry]


class NodeEntry(BackendEntry, total=False):
    """A node with its first back end; the others are in ``also``."""

    name: str
    address: str
    backends: list[str]
    problem: str
    memory_limit: str
    also: list[BackendEntry]


class Allocation(t.TypedDict):
    """The allocation of a cluster."""

    unit: str | None
    nodes: list[NodeEntry]
    waiting: list[PodEntry]
    total: int
    used: int
    totals: list[BackendTotals]


GPUSHARE, DRA, HAMI, NVIDIA = "gpushare", "dra", "hami", "nvidia"
# Cards for virtual machines, by whatever back end or driver.
VIRTUAL = "virtual"
# One of these is in each pod that a backend has to do with.
MARKERS = (b"gpu-mem", b"nvidia.com", b"hami.io", b'"resourceClaims"')

# More than any cluster has of anything that is counted here.
MOST = 2**53

Card = t.Union[int, str, None]
Shares = tuple[tuple[Card, hami.Held], ...]


class Claim(t.NamedTuple):
    """The units of one back end that a pod holds or requests.

    :param node: its node; empty without one.
    :param pending: the pod isn't bound.
    :param shares: units by card (index, or HAMi's UUID; None if unknown).
    :param entry: the pod's entry, without ``units``.
    :param reason: the scheduler's reason if it isn't bound.
    :param uses: its ResourceClaims, whose cards are to be added; they may be another driver's.
    :param holder: who the pod is, with claims that may be for cards for virtual machines.
    :param addresses: of cards for virtual machines that it has by its claims.
    """

    node: str
    backend: str
    pending: bool
    shares: Shares
    entry: PodEntry
    reason: str = ""
    uses: tuple[dra.PodClaim, ...] = ()
    holder: PodEntry = t.cast(PodEntry, {})
    addresses: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return sum(share.mib for _card, share in self.shares)


class PodReader:
    """Reads what pods hold one by one; equal lists of many pods are stored once."""

    def __init__(self) -> None:
        self._parse = PodParser()
        self._lists: dict[tuple[tuple[str, int], ...], list[ContainerUnits]] = {}
        self._shares: dict[tuple[tuple[int, ...], int], Shares] = {}

    def __call__(self, raw: t.Any) -> list[Claim]:
        """Return a pod's claims; none if it has ended, requests no GPU or has no name."""
        pod = self._parse(raw)
        return [] if pod is None or pod.finished else list(self._claims(pod))

    def _claims(self, pod: Pod) -> t.Iterator[Claim]:
        if pod.problem:
            yield Claim(
                pod.node, "", not pod.node, ((None, hami.NOTHING),), self.entry(pod, [], False, False, pod.problem)
            )
        if pod.sharing:
            yield self._gpushare(pod)
        if pod.uses:
            claim = self._claim(pod, DRA, ((None, hami.NOTHING),), self.entry(pod, [], False, False, ""))
            yield claim._replace(holder=holder(pod))
        requested = {resource for container in pod.containers for resource in container.requests}
        if pod.annotations.get(hami.POD_NODE) or pod.annotations.get(hami.POD_ALLOCATED):
            yield self._hami(pod)
        elif not requested.isdisjoint(hami.RESOURCES_OF_ITS_OWN) or (
            pod.scheduler == hami.SCHEDULER and hami.RESOURCE_COUNT in requested
        ):
            yield self._bare_hami(pod)
        elif any(map(nvidia.is_gpu_resource, requested)):
            counts, named = nvidia_counts(pod)
            if counts:
                yield self._nvidia(pod, counts, named)
        if any(map(virtual.is_resource, requested)):
            counts, named = nvidia_counts(pod, virtual.is_resource)
            if counts:
                claim = self._nvidia(pod, counts, named)
                entry = t.cast(PodEntry, {**claim.entry, **holder(pod)})
                yield claim._replace(backend=VIRTUAL, entry=entry)

    def _claim(self, pod: Pod, backend: str, shares: Shares, entry: PodEntry) -> Claim:
        return Claim(
            pod.node, backend, not pod.node, shares, entry, pod.unscheduled, pod.uses if backend == DRA else ()
        )

    # ----------------------------------------------------------------- backends

    def _gpushare(self, pod: Pod) -> Claim:
        shares: Shares = ((None, held_units(pod.units)),)
        # Annotations of a pod that isn't bound don't count.
        if pod.booking and pod.node:
            key = (pod.booking.indices, pod.units // len(pod.booking.indices))
            if key not in self._shares:
                self._shares[key] = tuple((index, held_units(key[1])) for index in key[0])
            shares = self._shares[key]
        problem = _too_much(pod.units)
        given = pod.booking is not None and pod.booking.assigned
        entry = self.entry(pod, pod.sharing, given, bool(pod.booking), problem)
        return self._claim(pod, GPUSHARE, ((None, hami.NOTHING),) if problem else shares, entry)

    def _hami(self, pod: Pod) -> Claim:
        chosen = pod.annotations.get(hami.POD_NODE, "")
        problem, named = "", t.cast("list[tuple[str, int]]", [])
        shares: Shares = ()
        try:
            given = hami.allocated(pod.annotations.get(hami.POD_ALLOCATED, ""))
            shares = tuple(held_by_hami(pod, given).items())
            named = _hami_containers(pod, given)
            if not shares:
                problem = f"its annotation {hami.POD_ALLOCATED} names no GPU"
            elif pod.node and chosen != pod.node:
                problem = f"it is on {pod.node}, and HAMi selected GPUs of {chosen or 'no node'} for it"
        except hami.HamiError as error:
            problem = str(error)
        if problem:
            shares = ((None, hami.Held(_sane(sum(part.mib for _uuid, part in shares)), 0, 0)),)
        done = pod.annotations.get(hami.POD_BIND_PHASE) == "success"
        claim = self._claim(pod, HAMI, shares, self.entry(pod, named, done, not problem, problem))
        # HAMi counts the GPUs that it selected before the pod is bound.
        return claim if pod.node or problem else claim._replace(node=chosen)

    def _bare_hami(self, pod: Pod) -> Claim:
        """Return what a pod with HAMi's resources and without its annotations holds."""
        mib = _requested_mib(pod)
        problem = _too_much(mib) or (f"it has no annotation {hami.POD_ALLOCATED}" if pod.node else "")
        return self._claim(pod, HAMI, ((None, held_units(_sane(mib))),), self.entry(pod, [], False, False, problem))

    def _nvidia(self, pod: Pod, counts: t.Mapping[str, int], named: list[tuple[str, int]]) -> Claim:
        problem = _too_much(sum(counts.values()))
        entry = self.entry(pod, named, pod.phase == "Running", bool(pod.node), problem)
        entry["resources"] = {} if problem else dict(counts)
        held = hami.NOTHING if problem else held_units(sum(counts.values()))
        return self._claim(pod, NVIDIA, ((None, held),), entry)

    # ----------------------------------------------------------------- entries

    def entry(self, pod: Pod, named: t.Sequence[tuple[str, int]], given: bool, placed: bool, problem: str) -> PodEntry:
        """Return a pod's entry without its units.

        :param named: units by container.
        :param given: kubelet has allocated its devices.
        :param placed: its cards are known, or only kubelet can know them.
        """
        if pod.terminating:
            state = "terminating"
        elif not pod.node:
            state = "pending"
        else:
            # A running container has its devices, also if upstream's plugin didn't annotate it.
            state = "assigned" if placed and (given or pod.phase == "Running") else "unassigned"
        return {
            "namespace": pod.namespace,
            "name": pod.name,
            "units": 0,
            "phase": pod.phase or "Unknown",
            "assigned": given,
            "terminating": pod.terminating,
            "uid": pod.uid,
            "containers": self._list(named),
            "state": state,
            "problem": problem,
        }

    def _list(self, named: t.Sequence[tuple[str, int]]) -> list[ContainerUnits]:
        key = tuple(named)
        if key not in self._lists:
            plausible = all(units <= MOST for _name, units in named)
            self._lists[key] = [{"name": name, "units": units} for name, units in named] if plausible else []
        return self._lists[key]


def holder(pod: Pod) -> PodEntry:
    """Return who a pod is, with cards for virtual machines; without a kind where its RuntimeClass decides."""
    kind = virtual.MACHINE if pod.machine else "" if pod.runtime_class else virtual.CONTAINER
    return {"kind": kind, "machine": pod.machine, "runtime_class": pod.runtime_class}


def held_units(units: int) -> hami.Held:
    """Return what a pod holds of a card where only units are counted."""
    return hami.Held(units, 0, 0)


def _too_much(units: int) -> str:
    return f"it requests more than {MOST}, which is implausible" if units > MOST else ""


def _sane(units: int) -> int:
    return units if 0 <= units <= MOST else 0


# --------------------------------------------------------------------------- by the rules of other back ends


def nvidia_counts(
    pod: Pod, counted: t.Callable[[str], bool] = nvidia.is_gpu_resource
) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Count what a pod holds of NVIDIA's plugin, by Kubernetes' rule for init and sidecar containers.

    :param counted: which resources, where they are others than the plugin's.
    :returns: counts by resource, and by container.
    """
    staying: dict[str, int] = {}
    most: dict[str, int] = {}
    named = []
    for container in pod.containers:
        counts = {name: count for name, count in container.requests.items() if count > 0 and counted(name)}
        if not counts:
            continue
        named.append((container.name, sum(counts.values())))
        now = dict(staying)
        for name, count in counts.items():
            now[name] = now.get(name, 0) + count
            most[name] = max(most.get(name, 0), now[name])
        if not container.init:
            staying = now
    return most, named


def annotated_containers(pod: Pod, given: t.Sequence[hami.Parts]) -> list[Container]:
    """Return the containers that an annotation is about, in its order; older versions leave init containers out.

    :param given: the result of ``hami.allocated``.
    """
    others = pod.of_kind(MAIN)
    return others if len(given) <= len(others) else pod.of_kind(INIT) + others


def held_by_hami(pod: Pod, given: t.Sequence[hami.Parts]) -> dict[str, hami.Held]:
    """Return a pod's part of each GPU (by UUID), by the rule of HAMi's scheduler.

    Init containers run one after the other, sidecars from their start on, the others together when all init containers
    have ended. Counted is the maximum at any time; once the init containers have ended, what is held from then on.

    :param given: the result of ``hami.allocated``, init containers first.
    """
    staying: dict[str, hami.Held] = {}
    most: dict[str, hami.Held] = {}
    named: list[Container | None] = [*annotated_containers(pod, given), *([None] * len(given))]
    for container, parts in zip(named, given):
        passing = container is not None and container.init
        if passing and pod.init_ended:
            continue
        # One container may have several parts of one GPU.
        now = dict(staying)
        for uuid, mib, cores in parts:
            before = now.get(uuid, hami.NOTHING)
            now[uuid] = hami.Held(before.mib + mib, before.cores + cores, before.slots + 1)
        for uuid, part in now.items():
            most[uuid] = hami.Held(*map(max, part, most.get(uuid, hami.NOTHING)))
        if not passing:
            staying = now
    return most


def _hami_containers(pod: Pod, given: t.Sequence[hami.Parts]) -> list[tuple[str, int]]:
    """Return name and MiB of each container that has any GPU, init containers first."""
    names = [container.name for container in annotated_containers(pod, given)] + [""] * len(given)
    return [(name, sum(mib for _uuid, mib, _cores in parts)) for name, parts in zip(names, given) if parts]


def _requested_mib(pod: Pod) -> int:
    """Return the MiB that a pod's containers request; 0 if they request a percentage, or a whole GPU."""
    return sum(
        # The memory is requested of each GPU.
        container.requests.get(hami.RESOURCE_MEMORY, 0) * max(1, container.requests.get(hami.RESOURCE_COUNT, 1))
        for container in pod.of_kind(MAIN)
    )
