# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse what the API has of dynamic resource allocation (``resource.k8s.io/v1``): slices, claims, and who uses them.

Standard library and ``_core`` only, no I/O. Memory is in MiB.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.types import JsonObject
from .._core.untrusted import line
from . import virtual
from .claim_templates import CAPACITY, DRIVER, container_of, shape_of
from .gpushare import MOST_CHARACTERS, ContractError, quantity

# The driver's taint on a card that isn't given to pods; its value is the reason's code.
UNHEALTHY = f"{DRIVER}/unhealthy"
# Its taint on a card of which a pod holds memory that its claim doesn't have in the API; the value is a code.
UNBOOKED = f"{DRIVER}/memory-without-claim"
# In place of a name in the pod, of the claim for its extended resources.
EXTENDED = "extended resources"
BYTES_PER_MIB = 1024 * 1024
# What code that takes JSON at its word does with JSON of another shape.
MALFORMED = (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Device:
    """A card in a ResourceSlice.

    :param index: None if the slice has none.
    :param memory_mib: what claims can have of it.
    :param step_mib: a claim has a multiple of so much; 0 where it has all or nothing.
    :param limit: whether the driver limits memory: ``enforced``, ``off``, or the code of the reason why not.
    :param unhealthy: code of the reason why pods don't get it; None if they do.
    :param unbooked: what became of a claim whose pod still holds memory of it; None if there is no such pod.
    """

    name: str
    uuid: str
    index: int | None
    model: str
    memory_mib: int
    step_mib: int
    limit: str
    unhealthy: str | None
    unbooked: str | None = None

    @property
    def unit(self) -> str:
        """The memory unit of its shares: GiB or MiB."""
        return "GiB" if (self.step_mib or self.memory_mib) % 1024 == 0 else "MiB"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A ResourceSlice of any driver; ``devices`` only of this collection's, ``cards`` only of NVIDIA's."""

    name: str
    driver: str
    node: str
    pool: str
    generation: int
    count: int
    devices: tuple[Device, ...]
    cards: tuple[virtual.Device, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """What a claim has of a card of this collection's driver.

    :param request: the claim's request, without a subrequest's name.
    :param share: the ID of this part; empty if the scheduler gave none.
    :param mib: None where the allocation has no amount.
    """

    request: str
    pool: str
    device: str
    share: str
    mib: int | None


@dataclasses.dataclass(frozen=True)
class User:
    """A pod that a claim is reserved for."""

    name: str
    uid: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A ResourceClaim.

    :param created: as the API writes times.
    :param drivers: of which it has devices.
    :param owner: the pod for which Kubernetes made it from a template; None for any other claim.
    :param ours: it asks for, or has, cards of this collection's driver.
    :param wanted_mib: what its requests name.
    :param parts: empty where it isn't allocated.
    :param cards: pool and device of each card of NVIDIA's driver that it has.
    """

    namespace: str
    name: str
    uid: str
    created: str
    terminating: bool
    drivers: frozenset[str]
    owner: User | None
    ours: bool
    wanted_mib: int
    parts: tuple[Part, ...]
    users: tuple[User, ...]
    cards: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def mib(self, request: str = "") -> dict[tuple[str, str], int]:
        """Return its MiB by pool and device.

        :param request: of a container, which has all of that container's; empty for all.
        """
        held: dict[tuple[str, str], int] = {}
        for part in self.parts:
            if not request or container_of(request) == container_of(part.request):
                place = (part.pool, part.device)
                held[place] = held.get(place, 0) + (part.mib or 0)
        return held


@dataclasses.dataclass(frozen=True)
class PodClaim:
    """A claim of a pod.

    :param name: in the pod.
    :param claim: the ResourceClaim's name; empty as long as there is none.
    :param template: the template's name; empty for a claim of its own.
    :param containers: that use it, each with the request that it uses; empty for all requests.
    """

    name: str
    claim: str
    template: str
    containers: tuple[tuple[str, str], ...]

    def units(self) -> int:
        """Return the units that its template's name stands for; 0 for a name of somebody else's."""
        shape = shape_of(self.template)
        return sum(shape.shares) if shape else 0


def slice_of(raw: t.Any) -> Slice:
    """Parse a ResourceSlice.

    :raises ContractError: it is malformed.
    """
    try:
        spec, pool = raw["spec"], raw["spec"]["pool"]
        driver = str(spec["driver"])
        devices = spec.get("devices") or [] if driver == DRIVER else []
        return Slice(
            str(raw["metadata"]["name"]),
            driver,
            str(spec.get("nodeName") or ""),
            str(pool["name"]),
            int(pool["generation"]),
            int(pool["resourceSliceCount"]),
            tuple(_device(device) for device in devices),
            tuple(map(virtual.device_of, (spec.get("devices") or []) if driver == virtual.DRIVER else ())),
        )
    except MALFORMED as error:
        raise ContractError(f"a ResourceSlice is malformed: {error!r}"[:300]) from error


def _device(raw: t.Any) -> Device:
    attributes = raw.get("attributes") or {}
    capacity = raw["capacity"][CAPACITY]
    step = ((capacity.get("requestPolicy") or {}).get("validRange") or {}).get("step")
    taints = {taint["key"]: line(taint.get("value") or "Unknown") for taint in raw.get("taints") or []}
    index = (attributes.get("index") or {}).get("int")
    return Device(
        name=str(raw["name"]),
        uuid=_string(attributes, "uuid"),
        index=index if isinstance(index, int) and 0 <= index < 2**31 else None,
        model=_string(attributes, "model"),
        memory_mib=quantity(capacity["value"]) // BYTES_PER_MIB,
        step_mib=quantity(step) // BYTES_PER_MIB,
        limit=_string(attributes, "memoryLimit"),
        unhealthy=taints.get(UNHEALTHY),
        unbooked=taints.get(UNBOOKED),
    )


def _string(attributes: JsonObject, name: str) -> str:
    return line((attributes.get(name) or {}).get("string") or "", MOST_CHARACTERS)


def claim_of(raw: t.Any) -> Claim:
    """Parse a ResourceClaim.

    :raises ContractError: it is malformed.
    """
    try:
        metadata, status = raw["metadata"], raw.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        parts = tuple(_part(result) for result in results if result["driver"] == DRIVER)
        # The claim of another driver may have none.
        asked = (raw["spec"].get("devices") or {}).get("requests") or []
        requests = [
            exact
            for request in asked
            for exact in (request.get("exactly"), *(request.get("firstAvailable") or ()))
            if exact and exact.get("deviceClassName") == DRIVER
        ]
        prioritized = any(request.get("firstAvailable") for request in asked)
        owners = [owner for owner in metadata.get("ownerReferences") or [] if owner.get("kind") == "Pod"]
        return Claim(
            namespace=str(metadata["namespace"]),
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            created=str(metadata.get("creationTimestamp") or ""),
            terminating=bool(metadata.get("deletionTimestamp")),
            drivers=frozenset(str(result["driver"]) for result in results),
            owner=User(str(owners[0]["name"]), str(owners[0]["uid"])) if owners else None,
            ours=bool(parts or requests),
            wanted_mib=sum(map(_wanted, requests[:1] if prioritized else requests)),
            parts=parts,
            users=tuple(
                User(str(user["name"]), str(user["uid"]))
                for user in status.get("reservedFor") or []
                if user.get("resource") == "pods" and not user.get("apiGroup")
            ),
            cards=tuple((str(row["pool"]), str(row["device"])) for row in results if row["driver"] == virtual.DRIVER),
        )
    except MALFORMED as error:
        raise ContractError(f"a ResourceClaim is malformed: {error!r}"[:300]) from error


def _wanted(request: JsonObject) -> int:
    named = ((request.get("capacity") or {}).get("requests") or {}).get(CAPACITY)
    return quantity(named) // BYTES_PER_MIB * int(request.get("count") or 1)


def _part(raw: JsonObject) -> Part:
    memory = (raw.get("consumedCapacity") or {}).get(CAPACITY)
    return Part(
        request=str(raw.get("request") or "").partition("/")[0],
        pool=str(raw["pool"]),
        device=str(raw["device"]),
        share=str(raw.get("shareID") or ""),
        mib=None if memory is None else quantity(memory) // BYTES_PER_MIB,
    )


def pod_claims(pod: JsonObject) -> tuple[PodClaim, ...]:
    """Return the claims that a pod has or names, whoever's cards they are for.

    One of them may be what kube-scheduler made of an extended resource that a DeviceClass stands for, as
    ``deviceclass.resource.kubernetes.io/<class>``.

    :raises ContractError: they are malformed.
    """
    try:
        spec, status = pod.get("spec") or {}, pod.get("status") or {}
        named, extended = spec.get("resourceClaims") or [], status.get("extendedResourceClaimStatus")
        if not (named or extended):
            return ()
        statuses = status.get("resourceClaimStatuses") or []
        made = {row["name"]: str(row.get("resourceClaimName") or "") for row in statuses}
        users = [
            (str(container["name"]), str(use["name"]), str(use.get("request") or ""))
            for field in ("initContainers", "containers")
            for container in spec.get(field) or []
            for use in (container.get("resources") or {}).get("claims") or []
        ]
        claims = [
            PodClaim(
                str(claim["name"]),
                str(claim.get("resourceClaimName") or made.get(claim["name"]) or ""),
                str(claim.get("resourceClaimTemplateName") or ""),
                tuple((container, request) for container, name, request in users if name == claim["name"]),
            )
            for claim in named
        ]
        if extended:
            mappings = extended.get("requestMappings") or []
            uses = tuple((str(row["containerName"]), str(row["requestName"])) for row in mappings)
            claims.append(PodClaim(EXTENDED, str(extended["resourceClaimName"]), "", uses))
        return tuple(claims)
    except MALFORMED as error:
        raise ContractError(f"the pod's resourceClaims are malformed: {error!r}"[:300]) from error


def newest(slices: t.Iterable[Slice], driver: str = DRIVER) -> dict[str, list[Slice]]:
    """Return a driver's slices by node, each node's newest generation only, which is what the scheduler uses."""
    by_node: dict[str, list[Slice]] = {}
    ours = (item for item in slices if item.driver == driver)
    for item in sorted(ours, key=lambda item: item.name):
        before = by_node.get(item.node, [])
        if not before or item.generation > before[0].generation:
            by_node[item.node] = [item]
        elif item.generation == before[0].generation:
            before.append(item)
    return by_node
