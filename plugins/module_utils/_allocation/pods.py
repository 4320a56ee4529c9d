# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The units that pods hold or request, by the contract of each back end, and the types of an allocation. No I/O.

Memory in ``units`` has the unit of its node's back end; a count is one of GPUs, replicas or MIG devices.

Each pod is reduced to its entry at once: of a large cluster's pods nothing else stays in memory.
"""

from __future__ import annotations

import sys
import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts import hami
from .._contracts import nvidia_plugin as nvidia
from .._core.types import JsonObject
from .._core.untrusted import line


class ContainerUnits(t.TypedDict):
    """Units that one container requests."""

    name: str
    units: int


class PodEntry(t.TypedDict, total=False):
    """A pod that holds or requests units.

    ``cores`` and ``slots`` are HAMi's, ``resources`` are NVIDIA's, ``reason`` and ``backend`` those of Pending pods.
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
    """A resource of NVIDIA's device plugin."""

    name: str
    capacity: int
    allocatable: int
    used: int


class BackendTotals(t.TypedDict):
    """Units of one back end in the cluster."""

    backend: str
    unit: str | None
    total: int
    used: int


class BackendEntry(t.TypedDict, total=False):
    """One back end on a node; ``slots`` is HAMi's, ``gpus`` and ``resources`` are NVIDIA's."""

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
# One of these is in each pod that a backend has to do with.
MARKERS = (b"gpu-mem", b"nvidia.com", b"hami.io", b'"resourceClaims"')

# More than any cluster has of anything that is counted here.
MOST = 2**53
# What code that takes the API at its word does with other JSON.
MALFORMED = (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError)

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
    """

    node: str
    backend: str
    pending: bool
    shares: Shares
    entry: PodEntry
    reason: str = ""
    uses: tuple[dra.PodClaim, ...] = ()

    @property
    def units(self) -> int:
        return sum(share.mib for _card, share in self.shares)


# The containers that request gpushare's units, with these, and every requested resource.
Requests = tuple[list[tuple[str, int]], frozenset[str]]
# Lists of containers whose requests are kept at a time.
MOST_LISTS = 1000


class PodReader:
    """Parses pods one by one; equal lists of many pods are stored once."""

    def __init__(self) -> None:
        self._lists: dict[tuple[tuple[str, int], ...], list[ContainerUnits]] = {}
        self._shares: dict[tuple[tuple[int, ...], int], Shares] = {}
        self._requested: dict[int, tuple[t.Any, Requests]] = {}

    def __call__(self, pod: t.Any) -> list[Claim]:
        """Parse a pod's claims; none if it has ended or requests no GPU."""
        try:
            return list(self._claims(pod))
        except MALFORMED:
            return self._unreadable(pod)

    def _claims(self, pod: JsonObject) -> t.Iterator[Claim]:
        if contract.finished(pod):
            return
        shared, requested = self._requests(pod)
        if shared:
            yield self._gpushare(pod, shared)
        if uses := dra.pod_claims(pod):
            node = contract.pod_node(pod)
            entry = self.entry(pod, [], False, False, "")
            yield Claim(node, DRA, not node, ((None, hami.NOTHING),), entry, _unscheduled(pod, node), uses)
        annotations = pod["metadata"].get("annotations") or {}
        if annotations.get(hami.POD_NODE) or annotations.get(hami.POD_ALLOCATED):
            yield self._hami(pod, annotations)
        elif not requested.isdisjoint(hami.RESOURCES_OF_ITS_OWN) or (
            pod["spec"].get("schedulerName") == hami.SCHEDULER and hami.RESOURCE_COUNT in requested
        ):
            yield self._bare_hami(pod)
        elif any(map(nvidia.is_gpu_resource, requested)):
            counts, named = nvidia.pod_counts(pod)
            if counts:
                yield self._nvidia(pod, counts, named)

    def _requests(self, pod: JsonObject) -> Requests:
        """Return what a pod's containers request; computed once for pods that share one list of containers."""
        spec = pod["spec"]
        if spec.get("initContainers"):
            return contract.gpu_containers(pod), _requested(pod)
        containers = spec.get("containers")
        # The list is kept too, so that no other one gets its number.
        known = self._requested.get(id(containers))
        if known is None:
            if len(self._requested) >= MOST_LISTS:
                self._requested = {}
            known = self._requested[id(containers)] = containers, (contract.gpu_containers(pod), _requested(pod))
        return known[1]

    # ----------------------------------------------------------------- backends

    def _gpushare(self, pod: JsonObject, named: list[tuple[str, int]]) -> Claim:
        # The rule for init containers is the contract's; without them it is the sum.
        units = contract.pod_units(pod) if pod["spec"].get("initContainers") else sum(part for _name, part in named)
        booked = contract.booking(pod)
        node = contract.pod_node(pod)
        shares: Shares = ((None, _held(units)),)
        # Annotations of a pod that isn't bound don't count.
        if booked and node:
            key = (booked.indices, units // len(booked.indices))
            if key not in self._shares:
                self._shares[key] = tuple((index, _held(key[1])) for index in booked.indices)
            shares = self._shares[key]
        problem = _too_much(units)
        given = booked is not None and booked.assigned
        entry = self.entry(pod, named, given, bool(booked), problem)
        return Claim(
            node, GPUSHARE, not node, ((None, hami.NOTHING),) if problem else shares, entry, _unscheduled(pod, node)
        )

    def _hami(self, pod: JsonObject, annotations: JsonObject) -> Claim:
        node, chosen = contract.pod_node(pod), annotations.get(hami.POD_NODE)
        problem, named = "", []
        shares: Shares = ()
        try:
            given = hami.allocated(annotations.get(hami.POD_ALLOCATED, ""))
            shares = tuple(hami.held(pod, given).items())
            named = hami.containers(pod, given)
            if not shares:
                problem = f"its annotation {hami.POD_ALLOCATED} names no GPU"
            elif node and chosen != node:
                problem = f"it is on {node}, and HAMi selected GPUs of {chosen or 'no node'} for it"
        except hami.HamiError as error:
            problem = str(error)
        if problem:
            shares = ((None, hami.Held(_sane(sum(one.mib for _uuid, one in shares)), 0, 0)),)
        done = annotations.get(hami.POD_BIND_PHASE) == "success"
        entry = self.entry(pod, named, done, not problem, problem)
        # HAMi counts the GPUs that it selected before the pod is bound.
        place = node or (str(chosen or "") if not problem else "")
        return Claim(place, HAMI, not node, shares, entry, _unscheduled(pod, node))

    def _bare_hami(self, pod: JsonObject) -> Claim:
        """Parse a pod with HAMi's resources and without its annotations."""
        node, mib = contract.pod_node(pod), hami.requested_mib(pod)
        problem = _too_much(mib) or (f"it has no annotation {hami.POD_ALLOCATED}" if node else "")
        entry = self.entry(pod, [], False, False, problem)
        return Claim(node, HAMI, not node, ((None, _held(_sane(mib))),), entry, _unscheduled(pod, node))

    def _nvidia(self, pod: JsonObject, counts: t.Mapping[str, int], named: list[tuple[str, int]]) -> Claim:
        node = contract.pod_node(pod)
        problem = _too_much(sum(counts.values()))
        running = (pod.get("status") or {}).get("phase") == "Running"
        entry = self.entry(pod, named, running, bool(node), problem)
        entry["resources"] = {} if problem else dict(counts)
        held = hami.NOTHING if problem else _held(sum(counts.values()))
        return Claim(node, NVIDIA, not node, ((None, held),), entry, _unscheduled(pod, node))

    # ----------------------------------------------------------------- entries

    def entry(
        self, pod: JsonObject, named: t.Sequence[tuple[str, int]], given: bool, placed: bool, problem: str
    ) -> PodEntry:
        """Return a pod's entry without its units.

        :param named: units by container.
        :param given: kubelet has allocated its devices.
        :param placed: its cards are known, or only kubelet can know them.
        """
        metadata = pod["metadata"]
        phase = sys.intern(str((pod.get("status") or {}).get("phase", "Unknown")))
        leaving = bool(metadata.get("deletionTimestamp"))
        bound = bool(contract.pod_node(pod))
        if leaving:
            state = "terminating"
        elif not bound:
            state = "pending"
        else:
            # A running container has its devices, also if upstream's plugin didn't annotate it.
            state = "assigned" if placed and (given or phase == "Running") else "unassigned"
        return {
            "namespace": sys.intern(str(metadata.get("namespace", ""))),
            "name": str(metadata.get("name", "")),
            "units": 0,
            "phase": phase,
            "assigned": given,
            "terminating": leaving,
            "uid": str(metadata.get("uid", "")),
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

    def _unreadable(self, pod: t.Any) -> list[Claim]:
        """Return the claim of a malformed pod; none if not even its name can be read."""
        metadata = pod.get("metadata") if isinstance(pod, dict) else None
        if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
            return []
        spec = pod.get("spec")
        node = spec.get("nodeName") if isinstance(spec, dict) else None
        node = node if isinstance(node, str) else ""
        known = {key: metadata[key] for key in ("name", "namespace", "uid") if isinstance(metadata.get(key), str)}
        plain = {"metadata": known, "spec": {"nodeName": node}}
        entry = self.entry(plain, [], False, False, "its object in the API is malformed")
        return [Claim(node, "", not node, ((None, hami.NOTHING),), entry)]


def _held(units: int) -> hami.Held:
    return hami.Held(units, 0, 0)


def _requested(pod: JsonObject) -> frozenset[str]:
    """Return every resource that a container requests."""
    spec, found = pod["spec"], t.cast("set[str]", set())
    for field in ("containers", "initContainers"):
        for one in spec.get(field) or ():
            resources = one.get("resources")
            if resources:
                found.update(resources.get("limits") or ())
                found.update(resources.get("requests") or ())
    return frozenset(found)


def _too_much(units: int) -> str:
    return f"it requests more than {MOST}, which is implausible" if units > MOST else ""


def _sane(units: int) -> int:
    return units if 0 <= units <= MOST else 0


def _unscheduled(pod: JsonObject, node: str) -> str:
    if node:
        return ""
    for one in (pod.get("status") or {}).get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return line(one.get("message") or one.get("reason") or "")
    return ""
