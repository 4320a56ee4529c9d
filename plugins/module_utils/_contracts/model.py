# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one model of nodes and pods, each parsed once where the API's answer comes in. No I/O.

The API server holds an object to its schema. So fields aren't examined one by one: an object of another form has a
``problem`` and nothing but its name, node and UID. Annotations and labels, which nodes and tenants write, are text;
what they mean is said by the contracts, whose types are in this model: cards, bookings and claims.
"""

from __future__ import annotations

import calendar
import dataclasses
import re
import sys
import types
import typing as t

from .._core.errors import ShareError
from .._core.types import JsonObject
from .._core.untrusted import line
from . import gpushare
from .claims import MALFORMED, Claim, PodClaim, pod_claims
from .gpushare import Booking, Card, ContractError
from .nvidia_plugin import mount_names_cards
from .virtual import instance_of

# The API's selector of pods that haven't ended.
UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"
# On a static pod: its second UID, which is that of its control groups.
STATIC_HASH = "kubernetes.io/config.hash"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
# NVIDIA's container toolkit gives every card to a container with this variable and without the other one.
LEGACY = "CUDA_VERSION"
# No other environment variables are read.
VARIABLES = (VISIBLE, LEGACY, "CUDA_DISABLE_CONTROL", "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_GPU_MEMORY_LIMIT")
# A pod's lists of containers.
INIT, MAIN, EPHEMERAL = "initContainers", "containers", "ephemeralContainers"
# A quantity of the API has fewer characters, and Python refuses to convert thousands of digits.
MOST_DIGITS = 64
IS_MALFORMED = "its object in the API is malformed"
# Without the cards' own sizes, kubectl inspect's guess: more than so many units on a card are MiB.
MOST_GIB_ON_A_CARD = 100

_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]{1,9})?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of a pod.

    :param kind: its list: ``INIT``, ``MAIN`` or ``EPHEMERAL``.
    :param sidecar: an init container that runs as long as the pod.
    :param requests: of extended resources, whose names have a domain; limits before requests.
    :param env: of ``VARIABLES``; None for a value from elsewhere, which only the container has.
    :param device_mounts: mount paths that name cards to NVIDIA's container toolkit.
    :param claims: the pod's claims (their names in the pod) that it uses.
    """

    name: str
    kind: str
    sidecar: bool
    requests: t.Mapping[str, int]
    env: t.Mapping[str, str | None]
    device_mounts: tuple[str, ...]
    privileged: bool
    claims: frozenset[str]

    @property
    def init(self) -> bool:
        """It ends before the pod's own containers start; kubelet no longer lists it then."""
        return self.kind == INIT and not self.sidecar


class Pod(t.NamedTuple):
    """A pod. It is a tuple because a large cluster has 100,000, and to make a frozen dataclass takes six times as long.

    :param uids: its UID; static pods have a second one in their control groups.
    :param node: that it is bound to; empty before.
    :param phase: empty as long as it has none.
    :param unscheduled: the scheduler's reason if it isn't bound.
    :param created_at: as the API writes times.
    :param started: kubelet has admitted it.
    :param init_ended: its init containers have ended successfully, but for sidecars.
    :param bypassed_scheduler: its creator set spec.nodeName, so no scheduler placed it.
    :param units: gpushare's, by Kubernetes' rule for init and sidecar containers.
    :param sharing: name and units of the containers that request these, in the order in which kubelet allocates.
    :param booking: its cards by gpushare's annotations; None without any.
    :param machine: KubeVirt's VirtualMachineInstance whose pod it says it is; empty for any other pod.
    :param uses: its resource claims (DRA), of any driver.
    :param claims: those of them that are for cards of this collection's driver, as far as they exist.
    :param problem: why nothing else is known of it; empty where it is known.
    """

    namespace: str
    name: str
    uid: str
    uids: frozenset[str]
    node: str
    phase: str = ""
    unscheduled: str = ""
    created_at: str = ""
    terminating: bool = False
    started: bool = False
    init_ended: bool = True
    bypassed_scheduler: bool = False
    priority: int = 0
    scheduler: str = ""
    runtime_class: str = ""
    annotations: t.Mapping[str, str] = types.MappingProxyType({})
    labels: t.Mapping[str, str] = types.MappingProxyType({})
    containers: tuple[Container, ...] = ()
    units: int = 0
    sharing: tuple[tuple[str, int], ...] = ()
    booking: Booking | None = None
    uses: tuple[PodClaim, ...] = ()
    claims: tuple[Claim, ...] = ()
    machine: str = ""
    problem: str = ""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def unique_key(self) -> str:
        return f"{self.key} {self.uid}"

    @property
    def created(self) -> int | None:
        """Seconds since 1970; None where it can't be read."""
        return parse_time(self.created_at)

    @property
    def finished(self) -> bool:
        """All of its containers have ended."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def active(self) -> bool:
        return bool(self.node) and not self.finished

    @property
    def steady(self) -> bool:
        """kubelet has admitted it and it isn't terminating, so all sources must agree about it."""
        return self.active and self.started and not self.terminating

    @property
    def holds_units(self) -> bool:
        """It holds, or will hold, gpushare's memory of its node. Annotations of a pod that isn't bound don't count."""
        return self.active and self.units > 0

    @property
    def booked(self) -> dict[int, int]:
        """Its booked units by the card's index; empty without a booking."""
        if self.booking is None:
            return {}
        return dict.fromkeys(self.booking.indices, self.units // len(self.booking.indices))

    @property
    def has_foreign_claim(self) -> bool:
        """It has a claim of which is unknown that it is for cards of this collection's driver."""
        known = {claim.name for claim in self.claims}
        return any(use.claim not in known and not use.units() for use in self.uses)

    @property
    def asks_by_claim(self) -> bool:
        """It asks for a share of a card by a claim."""
        return bool(self.claims) or any(use.units() for use in self.uses)

    def claimed(self, apart: bool = False) -> dict[tuple[str, str], int]:
        """Return the MiB that its claims give it, by pool and device.

        :param apart: of a claim that several pods share, only the equal part that each may use where memory is limited.
        """
        held: dict[tuple[str, str], int] = {}
        for claim in self.claims:
            if not claim.users or any(user.uid in self.uids for user in claim.users):
                users = max(1, len(claim.users)) if apart else 1
                for place, mib in claim.mib().items():
                    held[place] = held.get(place, 0) + mib // users
        return held

    def of_kind(self, kind: str) -> list[Container]:
        """Return its containers of a kind: ``INIT``, ``MAIN`` or ``EPHEMERAL``."""
        return [container for container in self.containers if container.kind == kind]

    def requests_of(self, *prefixes: str) -> dict[str, int]:
        """Return what its containers request of the resources with these prefixes, by resource."""
        requested: dict[str, int] = {}
        for container in self.containers:
            for resource, number in container.requests.items():
                if number > 0 and resource.startswith(prefixes):
                    requested[resource] = requested.get(resource, 0) + number
        return requested


class PodParser:
    """Parses pods one by one; a list of containers that many pods have in common (``_kube/stream``) only once."""

    # Lists of containers that are kept at a time.
    MOST_LISTS = 1000

    def __init__(self) -> None:
        self._lists: dict[int, tuple[t.Any, tuple[Container, ...], int, tuple[tuple[str, int], ...]]] = {}

    def __call__(self, raw: t.Any) -> Pod | None:
        """Parse a pod; None where it has no name."""
        metadata = raw.get("metadata") if isinstance(raw, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(metadata, dict) or not isinstance(name, str) or not name:
            return None
        try:
            return self._parse(raw, metadata, name)
        except MALFORMED:
            spec = raw.get("spec")
            node = spec.get("nodeName") if isinstance(spec, dict) else ""
            known = [text if isinstance(text, str) else "" for text in (metadata.get("namespace"), metadata.get("uid"))]
            uids = frozenset(known[1:]) - {""}
            return Pod(known[0], name, known[1], uids, node if isinstance(node, str) else "", problem=IS_MALFORMED)

    def _parse(self, raw: JsonObject, metadata: JsonObject, name: str) -> Pod:
        spec, status = raw["spec"], raw.get("status") or {}
        annotations = _texts(metadata.get("annotations"))
        uid = str(metadata.get("uid") or "")
        node = str(spec.get("nodeName") or "")
        containers, units, sharing = self._containers(raw, spec)
        priority = spec.get("priority")
        return Pod(
            namespace=sys.intern(str(metadata.get("namespace") or "")),
            name=name,
            uid=uid,
            uids=frozenset((uid, annotations.get(STATIC_HASH, ""))) - {""},
            node=node,
            phase=sys.intern(str(status.get("phase") or "")),
            unscheduled="" if node else _unscheduled(status),
            created_at=str(metadata.get("creationTimestamp") or ""),
            terminating=bool(metadata.get("deletionTimestamp")),
            started=bool(status.get("startTime")),
            init_ended=not spec.get(INIT) or _init_ended(status, containers),
            bypassed_scheduler="managedFields" in metadata and _bypassed_scheduler(metadata["managedFields"]),
            priority=priority if isinstance(priority, int) else 0,
            scheduler=str(spec.get("schedulerName") or ""),
            runtime_class=str(spec.get("runtimeClassName") or ""),
            annotations=annotations,
            labels=_texts(metadata.get("labels")),
            containers=containers,
            units=units,
            sharing=sharing,
            booking=gpushare.booking(raw) if gpushare.POD_INDEX in annotations else None,
            machine=instance_of(metadata) if metadata.get("ownerReferences") else "",
            uses=pod_claims(raw) if spec.get("resourceClaims") or status.get("extendedResourceClaimStatus") else (),
        )

    def _containers(
        self, raw: JsonObject, spec: JsonObject
    ) -> tuple[tuple[Container, ...], int, tuple[tuple[str, int], ...]]:
        """Return the containers, the pod's units, and which containers have these."""
        if spec.get(INIT) or spec.get(EPHEMERAL):
            every = tuple(_container(row, kind) for kind in (INIT, MAIN, EPHEMERAL) for row in spec.get(kind) or ())
            return every, gpushare.pod_units(raw), tuple(gpushare.gpu_containers(raw))
        listed = spec.get(MAIN) or ()
        known = self._lists.get(id(listed))
        if known is None:
            if len(self._lists) >= self.MOST_LISTS:
                self._lists = {}
            containers = tuple(_container(row, MAIN) for row in listed)
            # The list is kept too, so that no other one gets its number.
            known = listed, containers, gpushare.pod_units(raw), tuple(gpushare.gpu_containers(raw))
            self._lists[id(listed)] = known
        return known[1:]


def _container(raw: JsonObject, kind: str) -> Container:
    resources = raw.get("resources") or {}
    env: dict[str, str | None] = {}
    for variable in raw.get("env") or ():
        if variable.get("name") in VARIABLES:
            value = variable.get("value")
            env[variable["name"]] = None if variable.get("valueFrom") and value is None else str(value or "")
    mounts = (str(mount.get("mountPath") or "") for mount in raw.get("volumeMounts") or ())
    return Container(
        name=str(raw.get("name") or ""),
        kind=kind,
        sidecar=kind == INIT and raw.get("restartPolicy") == "Always",
        requests={**_extended(resources.get("requests")), **_extended(resources.get("limits"))},
        env=env,
        device_mounts=tuple(path for path in mounts if mount_names_cards(path)),
        privileged=(raw.get("securityContext") or {}).get("privileged") is True,
        claims=frozenset(str(use["name"]) for use in resources.get("claims") or ()),
    )


def _init_ended(status: JsonObject, containers: t.Iterable[Container]) -> bool:
    passing = {container.name for container in containers if container.init}
    ended = {
        container.get("name")
        for container in status.get("initContainerStatuses") or ()
        if ((container.get("state") or {}).get("terminated") or {}).get("exitCode", 1) == 0
    }
    return passing <= ended


def _bypassed_scheduler(managed: t.Iterable[JsonObject] | None) -> bool:
    """Return whether a client owns spec.nodeName, as its creator does; a binding leaves no owner."""
    return any("f:nodeName" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}) for entry in managed or ())


def _unscheduled(status: JsonObject) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return line(condition.get("message") or condition.get("reason") or "")
    return ""


def _texts(raw: JsonObject | None) -> t.Mapping[str, str]:
    """Return annotations or labels.

    :raises TypeError: one of them isn't text.
    """
    texts = raw or {}
    for value in texts.values():
        if value is None:
            return _texts({key: text for key, text in texts.items() if text is not None})
        if not isinstance(value, str):
            raise TypeError("a value isn't text")
    return texts


def _extended(raw: JsonObject | None) -> dict[str, int]:
    """Return the amounts of extended resources, of a longer one its first digits, which are more than anything has."""
    return {name: gpushare.quantity(str(value)[:MOST_DIGITS]) for name, value in (raw or {}).items() if "/" in name}


@dataclasses.dataclass(frozen=True)
class Node:
    """A node.

    :param address: its first InternalIP; empty without one.
    :param ready: its condition Ready: True, False or Unknown; empty where it has none.
    :param taints: key, value and effect of each.
    :param capacity: amounts of extended resources, whose names have a domain, by name.
    :param allocatable: the same of what pods may have.
    :param cards: those of its annotation, or else as upstream divides its units; none for other back ends.
    :param cards_problem: why its annotation can't be read; empty where it can.
    :param runtime: its container runtime with the version, as ``containerd://2.1.4``.
    :param kernel: the running kernel's release.
    :param hostnames: its addresses of type Hostname.
    :param problem: why nothing else is known of it; empty where it is known.
    """

    name: str
    address: str = ""
    labels: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    annotations: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    ready: str = ""
    schedulable: bool = True
    taints: tuple[JsonObject, ...] = ()
    capacity: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    allocatable: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    cards: tuple[Card, ...] = ()
    cards_problem: str = ""
    runtime: str = ""
    kubelet_version: str = ""
    os: str = ""
    arch: str = ""
    kernel: str = ""
    hostnames: tuple[str, ...] = ()
    problem: str = ""

    @property
    def announced(self) -> bool:
        """A device plugin of this collection lists its cards."""
        return bool(self.annotations.get(gpushare.NODE_CARDS))

    @property
    def announced_limit(self) -> str:
        """What its device plugin announces about memory limits; empty if nothing, as upstream's."""
        return line(self.annotations.get(gpushare.NODE_LIMIT, ""))


def node_of(raw: t.Any) -> Node | None:
    """Parse a node; None where it has no name."""
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(name, str) or not name:
        return None
    try:
        return _node(raw, metadata, name)
    except MALFORMED:
        return Node(name, problem=IS_MALFORMED)


def _node(raw: JsonObject, metadata: JsonObject, name: str) -> Node:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    info = status.get("nodeInfo") or {}
    annotations = _texts(metadata.get("annotations"))
    capacity = _extended(status.get("capacity"))
    addresses = [(row.get("type"), str(row.get("address") or "")) for row in status.get("addresses") or ()]
    conditions = [row.get("status") for row in status.get("conditions") or () if row.get("type") == "Ready"]
    cards, problem = announced_cards(annotations, capacity)
    return Node(
        name=name,
        # Whoever connects to it parses it: ``untrusted.other_machine``.
        address=next((line(address) for kind, address in addresses if kind == "InternalIP"), ""),
        labels=_texts(metadata.get("labels")),
        annotations=annotations,
        ready=str(next(iter(conditions), None) or ""),
        schedulable=not spec.get("unschedulable"),
        taints=tuple(
            {key: str(taint.get(key) or "") for key in ("key", "value", "effect")} for taint in spec.get("taints") or ()
        ),
        capacity=capacity,
        allocatable=_extended(status.get("allocatable")),
        cards=cards,
        cards_problem=problem,
        runtime=line(info.get("containerRuntimeVersion")),
        kubelet_version=line(info.get("kubeletVersion")),
        os=line(info.get("osImage")),
        arch=line(info.get("architecture")),
        kernel=line(info.get("kernelVersion")),
        hostnames=tuple(address for kind, address in addresses if kind == "Hostname" and address),
    )


_Parsed = t.TypeVar("_Parsed", Node, Pod)


def well_formed(kind: str, objects: t.Iterable[_Parsed | None]) -> list[_Parsed]:
    """Return nodes or pods, of which nothing may be unknown.

    :raises ShareError: one of them is malformed.
    """
    parsed = [item for item in objects if item is not None]
    for item in parsed:
        if item.problem:
            raise ShareError(f"{kind} {item.name}: {item.problem}")
    return parsed


def announced_cards(annotations: t.Mapping[str, str], capacity: t.Mapping[str, int]) -> tuple[tuple[Card, ...], str]:
    """Return a node's cards as in ``Node``, and why its annotation can't be read."""
    problem = ""
    if text := annotations.get(gpushare.NODE_CARDS):
        try:
            return tuple(gpushare.cards_from_annotation(text)), ""
        except ContractError as error:
            problem = str(error)
    units, count = (capacity.get(name, 0) for name in (gpushare.RESOURCE_MEMORY, gpushare.RESOURCE_COUNT))
    return tuple(gpushare.equal_cards(units, count)), problem


def card_unit(units: int, shared_mib: int) -> str | None:
    """Return the memory unit in which a card is announced; None if its size is unknown.

    :param shared_mib: its memory without the reserve.
    """
    if shared_mib <= 0 or units <= 0:
        return None
    return next((unit for unit in gpushare.MIB_PER_UNIT if gpushare.units_of(shared_mib, unit) == units), None)


def node_unit(cards: t.Sequence[Card]) -> str | None:
    """Return the memory unit of a node, by its cards' sizes, or estimated without these."""
    units = {unit for unit in (card_unit(card.units, card.shared_mib) for card in cards) if unit}
    if units:
        return units.pop() if len(units) == 1 else None
    largest = max((card.units for card in cards), default=0)
    if largest <= 0:
        return None
    return "MiB" if largest > MOST_GIB_ON_A_CARD else "GiB"


def parse_time(text: str) -> int | None:
    """Parse a time of RFC 3339 into seconds since 1970; None where it can't be read."""
    matched = _TIME.fullmatch(text)
    if not matched:
        return None
    parts = [int(part) for part in matched.groups()[:6]]
    if not (1 <= parts[1] <= 12 and 1 <= parts[2] <= 31 and parts[3] < 24 and parts[4] < 60 and parts[5] <= 60):
        return None
    sign, hours, minutes = matched.groups()[6:]
    ahead = (int(hours) * 3600 + int(minutes) * 60) * (-1 if sign == "-" else 1) if sign else 0
    return calendar.timegm((*parts, 0, 0, 0)) - ahead if parts[0] > 0 else None
