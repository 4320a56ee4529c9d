# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""gpushare's contract: names and meaning of its resources, annotations and device IDs, and how memory is counted.

The servers' image contains this very file, so that server and verifier can't drift apart. It imports only the standard
library and two files of ``_core``, and does no I/O.

Objects are Kubernetes objects as plain JSON (``dict``). Memory of a card is in MiB; a share is in units, and a unit is
1 GiB or 1 MiB for the whole cluster. The names are those of AliyunContainerService/gpushare-scheduler-extender, kept so
that workloads, ``kubectl inspect gpushare`` and dashboards continue to work.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import typing as t

from .._core.types import JsonObject
from .._core.untrusted import exact

RESOURCE_MEMORY = "aliyun.com/gpu-mem"
RESOURCE_COUNT = "aliyun.com/gpu-count"

NODE_LABEL = "gpushare"
NODE_LABEL_VALUE = "true"
# Its value where a node's cards are divided by claims; a DaemonSet selects nodes with either.
NODE_LABEL_CLAIMS = "dra"
NODE_LABEL_VALUES = frozenset((NODE_LABEL_VALUE, NODE_LABEL_CLAIMS))

# On the pod; the very same strings are the environment variables of the container.
POD_INDEX = "ALIYUN_COM_GPU_MEM_IDX"
POD_CARD_UNITS = "ALIYUN_COM_GPU_MEM_DEV"
POD_UNITS = "ALIYUN_COM_GPU_MEM_POD"
POD_ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
POD_ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
CONTAINER_UNITS = "ALIYUN_COM_GPU_MEM_CONTAINER"
# Only on a pod of several cards: their indices, as "0,2" (ours); and the units by container and card, for upstream's
# kubectl plugin.
POD_INDICES = "kubegpu.share/card-indices"
POD_ALLOCATION = "scheduler.framework.gpushare.allocation"
# All annotations of a pod that has a card.
POD_ANNOTATIONS = (
    POD_INDEX,
    POD_CARD_UNITS,
    POD_UNITS,
    POD_ASSIGNED,
    POD_ASSUME_TIME,
    POD_INDICES,
    POD_ALLOCATION,
)

# On the pod, set by its user.
POD_PLACEMENT = "kubegpu.share/placement"
POD_CARD_COUNT = "kubegpu.share/card-count"
POD_MODELS = "kubegpu.share/models"
POD_EXCLUDE_MODELS = "kubegpu.share/exclude-models"
POD_DEMANDS = (POD_PLACEMENT, POD_CARD_COUNT, POD_MODELS, POD_EXCLUDE_MODELS)
PLACEMENTS = ("binpack", "spread")
# Limits of a list of models: an annotation may have 256 KiB, and other pods wait during the comparison.
MAX_PATTERNS, PATTERN_LENGTH, PATTERNS_LENGTH = 16, 128, 2200

# Most containers of a pod with a share, and most with units. Servers keep what these ask for.
MOST_CONTAINERS, MOST_SHARES = 1000, 32

# A node's most cards, the length of their annotation, and the largest number in it.
MOST_CARDS, CARDS_LENGTH, MOST_UNITS = 128, 64 * 1024, 1 << 31

# On the node, ours: its cards. Upstream's plugin doesn't write it.
NODE_CARDS = "kubegpu.share/cards"
# On the node, ours: whether containerd there has CDI on ("true", "false").
NODE_RUNTIME_CDI = "kubegpu.share/runtime-cdi"
# On the node, ours: whether the driver limits pods to their shares on all of its cards: one of these; a reason follows
# the last.
NODE_LIMIT = "kubegpu.share/memory-limit"
LIMIT_ENFORCED = "enforced"
LIMIT_OFF = "off"
LIMIT_UNENFORCED = "unenforced: "

# On the Lease gpushare-ledger in the extenders' namespace: the bookings of all nodes that may not be bound yet.
LEDGER = "kubegpu.share/bookings"
# On a pod: changed so that an earlier request to bind it fails.
POD_FENCED = "kubegpu.share/fenced"
# On a pod that others were evicted for: the reserved memory as an annotation (JSON), and a label for watches.
POD_CLAIM = "kubegpu.share/claim"
# On a waiting pod: changed so that the scheduler tries it again.
POD_RETRY = "kubegpu.share/retry"

# The admission policy (its binding has the same name) by which only the servers write their annotations.
ANNOTATIONS_POLICY = "gpushare-annotations"

MIB_PER_UNIT = {"GiB": 1024, "MiB": 1}

# Most characters of a card's UUID, model or code.
MOST_CHARACTERS = 256

# kubelet receives gRPC messages of at most this many bytes from a device plugin.
KUBELET_MESSAGE_BYTES = 4 * 1024 * 1024
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

EXTENDER_PREFIX = "/gpushare-scheduler"
EXTENDER_PORT = 12345


class Reason(str, enum.Enum):
    """The codes of refusals; docs/gpushare.md explains each.

    kube-scheduler's and kubelet's interfaces transport strings only, which begin with the code and ``: ``.
    """

    # Nodes and their cards, by filter and bind.
    NODE_UNKNOWN = "NodeUnknown"
    NO_GPU_MEMORY = "NoGPUMemory"
    NO_HEALTHY_CARD = "NoHealthyCard"
    NO_MATCHING_MODEL = "NoMatchingModel"
    CARD_TOO_SMALL = "CardTooSmall"
    INSUFFICIENT_GPU_MEMORY = "InsufficientGPUMemory"
    # The pod.
    INVALID_ANNOTATION = "InvalidAnnotation"
    POD_NOT_FOUND = "PodNotFound"
    POD_REPLACED = "PodReplaced"
    POD_TERMINATING = "PodTerminating"
    POD_FINISHED = "PodFinished"
    POD_BOUND_ELSEWHERE = "PodBoundElsewhere"
    # Binding.
    NOT_READY = "NotReady"
    STALE_STATE = "StaleState"
    BIND_IN_PROGRESS = "BindInProgress"
    CONFLICT = "Conflict"
    API_ERROR = "KubernetesAPIError"
    LEDGER_UNAVAILABLE = "LedgerUnavailable"
    LEDGER_FULL = "LedgerFull"
    OUTCOME_UNKNOWN = "OutcomeUnknown"
    # Requests of kubelet.
    UNKNOWN_DEVICE_ID = "UnknownDeviceID"
    UNEQUAL_SHARES = "UnequalShares"
    # Cards that aren't given to pods.
    CARD_LOST = "CardLost"
    EXCLUDED = "Excluded"
    FABRIC_NOT_READY = "FabricNotReady"
    MIG_ENABLED = "MIGEnabled"
    RECOVERY_REQUIRED = "RecoveryRequired"
    ROW_REMAP_FAILED = "RowRemapFailed"
    UNIFIED_MEMORY = "UnifiedMemory"
    XID_ERROR = "XIDError"
    MEMORY_LIMIT_UNAVAILABLE = "MemoryLimitUnavailable"
    # Containers that aren't held to their memory of a card.
    MEMORY_LIMIT_FAILED = "MemoryLimitFailed"
    MEMORY_LIMIT_EXCEEDED = "MemoryLimitExceeded"
    FOREIGN_MEMORY_HELD = "ForeignMemoryHeld"
    UNACCOUNTED_MEMORY_HELD = "UnaccountedMemoryHeld"
    MEMORY_WITHOUT_CLAIM = "MemoryWithoutClaim"
    CDI_UNAVAILABLE = "CDIUnavailable"

    def __str__(self) -> str:
        return str(self.value)


# With these, memory that pods were promised is held by others.
LIMIT_VIOLATIONS = frozenset((Reason.MEMORY_LIMIT_EXCEEDED, Reason.FOREIGN_MEMORY_HELD, Reason.UNACCOUNTED_MEMORY_HELD))


class Refusal(t.NamedTuple):
    """A reason code and its text."""

    code: Reason
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class ContractError(ValueError):
    """A value violates the contract."""


@dataclasses.dataclass(frozen=True)
class Card:
    """One physical card of a node.

    :param index: position in NVML's order; shown to people, never used as identity.
    :param uuid: the identity, ``GPU-…``; empty if only upstream's plugin announces the card.
    :param minor: N of /dev/nvidiaN.
    :param memory_mib: the card's memory in MiB; 0 if unknown.
    :param units: its memory in the cluster's unit, without the reserve.
    :param healthy: whether it may be given to pods.
    :param model: NVML's name of it; empty if unknown.
    :param reason: why it isn't given to pods, as text; empty if unknown.
    :param code: the same as a :class:`Reason`'s value; empty if unknown.
    :param xid: the number of the driver's error, for the code ``XIDError``.
    :param limit: whether the driver limits memory on it: ``LIMIT_ENFORCED``, ``LIMIT_OFF`` or the value of the
        :class:`Reason` why not; empty if unknown.
    :param limit_reason: who holds memory of it that isn't theirs, or isn't limited, as text; empty without such a
        holder.
    :param reserved_mib: what of its memory isn't given to pods, because they couldn't allocate it, in MiB.
    :param unreleased: units of deleted pods whose processes haven't ended; they aren't given to pods.
    """

    index: int
    uuid: str
    minor: int
    memory_mib: int
    units: int
    healthy: bool = True
    model: str = ""
    reason: str = ""
    code: str = ""
    xid: int = 0
    reserved_mib: int = 0
    limit: str = ""
    limit_reason: str = ""
    unreleased: int = 0

    @property
    def shared_mib(self) -> int:
        """Return the memory that its units are counted from, in MiB."""
        return max(0, self.memory_mib - self.reserved_mib)


@dataclasses.dataclass(frozen=True)
class Booking:
    """A pod's cards by its annotations.

    :param indices: the cards, at least one; -1 or any number that the node doesn't have means none.
    :param assigned: kubelet has allocated the pod's devices.
    :param assume_time: when the extender chose the cards, in nanoseconds since 1970.
    """

    indices: tuple[int, ...]
    assigned: bool
    assume_time: int

    @property
    def index(self) -> int:
        """The first card, often the only one."""
        return self.indices[0]


@dataclasses.dataclass(frozen=True)
class Demand:
    """A pod's demand.

    :param units: all of its units.
    :param count: number of cards of one node with equal shares.
    :param placement: ``binpack`` or ``spread``; empty for the cluster's default.
    :param models: patterns, in lower case, of which a card's model must match one; empty for any.
    :param excluded: patterns, in lower case, of which a card's model must match none.
    """

    units: int
    count: int = 1
    placement: str = ""
    models: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def share(self) -> int:
        """Return the units on each of its cards."""
        return self.units // self.count

    def accepts(self, card: Card) -> bool:
        """Return whether the pod accepts this card's model."""
        return self.accepts_model(card.model)

    def accepts_model(self, model: str) -> bool:
        """Return whether the pod accepts a model; with a list, an unknown model is never accepted."""
        if not (self.models or self.excluded):
            return True
        model = model.lower()
        if not model or any(matches(model, pattern) for pattern in self.excluded):
            return False
        return not self.models or any(matches(model, pattern) for pattern in self.models)


def matches(text: str, pattern: str) -> bool:
    """Return whether a pattern matches a whole text: ``*`` any characters, ``?`` one.

    Nothing is compiled or kept: tenants write the patterns, and any number of different ones.
    """
    at = of_pattern = 0
    star = resume = -1
    while at < len(text):
        now = pattern[of_pattern : of_pattern + 1]
        if now == "*":
            star, resume = of_pattern, at
            of_pattern += 1
        elif now in ("?", text[at]):
            at, of_pattern = at + 1, of_pattern + 1
        elif star >= 0:
            # The last star takes one character more.
            resume += 1
            at, of_pattern = resume, star + 1
        else:
            return False
    return not pattern[of_pattern:].strip("*")


# --------------------------------------------------------------------------- memory


def units_of(memory_mib: int, unit: str) -> int:
    """Convert MiB to whole units, rounded down as upstream does.

    :raises ContractError: the unit is neither GiB nor MiB.
    """
    if unit not in MIB_PER_UNIT:
        raise ContractError(f"memory unit {unit!r} is neither GiB nor MiB")
    return memory_mib // MIB_PER_UNIT[unit]


def short_uuids(uuids: t.Sequence[str]) -> dict[str, str]:
    """Return the shortest unique prefixes (8 digits or more) of these cards' UUIDs, by UUID.

    Short ones, because kubelet limits the size of the device list.

    :raises ContractError: two cards have one UUID.
    """
    bare = {uuid: re.sub(r"[^0-9a-zA-Z]", "", uuid[4:] if uuid.startswith("GPU-") else uuid) for uuid in uuids}
    if len(set(bare.values())) != len(uuids):
        raise ContractError(f"two cards of one node have the same UUID: {', '.join(sorted(uuids))}")
    length = 8
    while len({text[:length] for text in bare.values()}) != len(bare):
        length += 1
    return {uuid: text[:length] for uuid, text in bare.items()}


def device_id(short: str, slot: int) -> str:
    """Return the kubelet device ID of one unit: its card and a slot on it."""
    return f"{short}-{slot}"


def card_of_device_id(identifier: str) -> str:
    """Return the short UUID in a device ID.

    :raises ContractError: the ID isn't one of ours.
    """
    short, dash, slot = identifier.rpartition("-")
    if not (dash and short and slot.isdigit()):
        raise ContractError(f"device ID {identifier!r} doesn't name a card and a slot")
    return short


def card_by_short(cards: t.Iterable[Card], short: str) -> Card | None:
    """Return the card of a device ID, whose short UUID may have any length; None if it is unknown."""
    fitting = [card for card in cards if re.sub(r"[^0-9a-zA-Z]", "", card.uuid[4:]).startswith(short)]
    return fitting[0] if len(fitting) == 1 else None


def device_list_bytes(cards: t.Sequence[Card]) -> int:
    """Return the size of the ListAndWatchResponse (device plugin API v1beta1) for these cards, all unhealthy.

    Computed without building it: a device is ``ID`` (field 1) and ``health`` (field 2) inside field 1 of the list.
    """
    shorts = short_uuids([card.uuid for card in cards])
    health = 2 + len(UNHEALTHY)
    total = 0
    for card in cards:
        fixed = 2 + len(shorts[card.uuid]) + 1 + health
        # Slots of equal decimal length have messages of equal length.
        low, digits = 0, 1
        while low < card.units:
            high = min(card.units, 10**digits)
            message = fixed + digits
            total += (high - low) * (message + 1 + (1 if message < 128 else 2))
            low, digits = high, digits + 1
    return total


def check_device_list(cards: t.Sequence[Card], unit: str) -> None:
    """Refuse a memory unit that makes more device IDs than kubelet accepts in one message.

    :raises ContractError: too many; the message names the variable.
    """
    size = device_list_bytes(cards)
    if size > KUBELET_MESSAGE_BYTES:
        raise ContractError(
            f"gpushare_memory_unit: {unit} makes {sum(card.units for card in cards)} device IDs of this node's cards, "
            f"{size} bytes where kubelet accepts {KUBELET_MESSAGE_BYTES}; use GiB"
        )


# --------------------------------------------------------------------------- nodes


def cards_to_annotation(cards: t.Iterable[Card]) -> str:
    """Return the value of the node annotation: compact JSON, cards by index."""
    rows = []
    for card in sorted(cards, key=lambda card: card.index):
        row = {
            "index": card.index,
            "uuid": card.uuid,
            "minor": card.minor,
            "memoryMiB": card.memory_mib,
            "units": card.units,
            "healthy": card.healthy,
            "model": card.model,
        }
        optional = {
            "reason": card.reason,
            "code": card.code,
            "xid": card.xid,
            "reservedMiB": card.reserved_mib,
            "limit": card.limit,
            "limitReason": card.limit_reason,
            "unreleasedUnits": card.unreleased,
        }
        rows.append({**row, **{key: value for key, value in optional.items() if value}})
    return json.dumps(rows, separators=(",", ":"), sort_keys=True)


def cards_from_annotation(text: str) -> list[Card]:
    """Parse a node annotation, whose texts may be anything that whoever took the node wrote there.

    :raises ContractError: it is malformed, or larger than that of any machine.
    """
    if len(text) > CARDS_LENGTH:
        raise ContractError(f"node annotation {NODE_CARDS} has more than {CARDS_LENGTH} characters")
    try:
        cards = [
            Card(
                index=int(row["index"]),
                uuid=exact(row["uuid"], MOST_CHARACTERS),
                minor=int(row["minor"]),
                memory_mib=int(row["memoryMiB"]),
                units=int(row["units"]),
                healthy=row["healthy"] is True,
                model=exact(row.get("model", ""), MOST_CHARACTERS),
                reason=exact(row.get("reason", "")),
                code=exact(row.get("code", ""), MOST_CHARACTERS),
                xid=int(row.get("xid", 0)),
                reserved_mib=int(row.get("reservedMiB", 0)),
                limit=exact(row.get("limit", ""), MOST_CHARACTERS),
                limit_reason=exact(row.get("limitReason", "")),
                unreleased=int(row.get("unreleasedUnits", 0)),
            )
            for row in json.loads(text)
        ]
    # A number may be Infinity, and brackets may be nested too deeply.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ContractError(f"node annotation {NODE_CARDS} can't be read: {error!r}") from error
    if len({card.index for card in cards}) != len(cards) or any(
        min(card.units, card.index, card.unreleased) < 0 for card in cards
    ):
        raise ContractError(f"node annotation {NODE_CARDS} names a card twice or has a negative number")
    numbers = (max(card.units, card.index, card.minor, card.memory_mib, card.unreleased) for card in cards)
    if len(cards) > MOST_CARDS or max(numbers, default=0) > MOST_UNITS:
        raise ContractError(f"node annotation {NODE_CARDS} has more than {MOST_CARDS} cards or a number above 2^31")
    return sorted(cards, key=lambda card: card.index)


_QUANTITY = re.compile(r"([0-9]+)(?:[eE]\+?([0-9]+)|(k|[KMGTPE]i|[MGTPE]))?")


def quantity(value: t.Any) -> int:
    """Parse a whole number of an extended resource: plain, or with k, M, Gi, e3 and the like.

    Malformed values are 0; the API server refuses them in pods.
    """
    match = _QUANTITY.fullmatch(str(value).strip())
    if not match:
        return 0
    number, exponent, suffix = match.groups()
    if exponent:
        factor: int = 10 ** min(int(exponent), 30)
    elif suffix:
        factor = (1024 if suffix.endswith("i") else 1000) ** ("KMGTPE".index(suffix[0].upper()) + 1)
    else:
        factor = 1
    return int(number) * factor


STATUS_FIELDS = ("capacity", "allocatable")


def node_resource(node: JsonObject, resource: str, field: str = "capacity") -> int:
    """Return a node's ``status.capacity`` (or ``allocatable``) of a resource."""
    return quantity(((node.get("status") or {}).get(field) or {}).get(resource, 0))


def left_behind(node: JsonObject, names: t.Iterable[str]) -> dict[str, list[str]]:
    """Return where resources of a vanished plugin may go from a node's status: the fields by resource.

    kubelet announces the former size for five minutes, then 0 for good. Removed before, it comes back.
    """
    status = node.get("status") or {}
    there = {name: [field for field in STATUS_FIELDS if name in (status.get(field) or {})] for name in names}
    return {name: at for name, at in there.items() if at and not any(node_resource(node, name, field) for field in at)}


def node_cards(node: JsonObject) -> list[Card]:
    """Return a node's cards from its annotation, or else capacity divided by count as upstream does.

    A malformed annotation is treated as absent.
    """
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(NODE_CARDS)
    if text:
        try:
            return cards_from_annotation(text)
        except ContractError:
            pass
    return equal_cards(node_resource(node, RESOURCE_MEMORY), node_resource(node, RESOURCE_COUNT))


def equal_cards(memory: int, count: int) -> list[Card]:
    """Return the cards of upstream's plugin, which announces only their number and sum."""
    if not 0 < memory <= MOST_UNITS or not 0 < count <= MOST_CARDS:
        return []
    return [Card(index=n, uuid="", minor=n, memory_mib=0, units=memory // count) for n in range(count)]


# --------------------------------------------------------------------------- pods


def container_units(container: JsonObject) -> int:
    """Return the units that a container requests; requests and limits of extended resources are equal."""
    resources = container.get("resources") or {}
    for field in ("limits", "requests"):
        if RESOURCE_MEMORY in (resources.get(field) or {}):
            return quantity(resources[field][RESOURCE_MEMORY])
    return 0


def containers_in_order(spec: JsonObject) -> list[tuple[JsonObject, bool]]:
    """Return a pod's containers in kubelet's order, and whether the next one waits for its end (no sidecar's)."""
    inits = [(container, container.get("restartPolicy") != "Always") for container in spec.get("initContainers") or []]
    return inits + [(container, False) for container in spec.get("containers") or []]


def gpu_containers(pod: JsonObject) -> list[tuple[str, int]]:
    """Return name and units of the containers that request units, in the order in which kubelet allocates."""
    everything = containers_in_order(pod.get("spec") or {})
    asked = [(str(container.get("name", "")), container_units(container)) for container, _ends in everything]
    return [(name, units) for name, units in asked if units > 0]


def pod_units(pod: JsonObject) -> int:
    """Return a pod's units by Kubernetes' rule for init and sidecar containers.

    The larger of: the sum over containers and sidecars; for each init container, its units and those of the sidecars
    started before it.
    """
    spec = pod.get("spec") or {}
    sidecars = highest_init = 0
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            sidecars += container_units(container)
            highest_init = max(highest_init, sidecars)
        else:
            highest_init = max(highest_init, sidecars + container_units(container))
    return max(highest_init, sidecars + sum(map(container_units, spec.get("containers") or [])))


def pod_key(pod: JsonObject) -> str:
    """Return ``namespace/name``."""
    metadata = pod.get("metadata") or {}
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def pod_uid(pod: JsonObject) -> str:
    return str((pod.get("metadata") or {}).get("uid", ""))


def pod_node(pod: JsonObject) -> str:
    """Return the node that a pod is bound to; empty before."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def pod_priority(pod: JsonObject) -> int:
    """Return ``spec.priority``, which the API server sets from the priority class; 0 without one."""
    priority = (pod.get("spec") or {}).get("priority")
    return priority if isinstance(priority, int) else 0


def terminating(pod: JsonObject) -> bool:
    """Return whether the pod is being deleted; it holds its memory until then."""
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def finished(pod: JsonObject) -> bool:
    """Return whether all containers have ended; processes of a terminating pod may still hold memory."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def wants_a_node(pod: JsonObject) -> bool:
    """Return whether the pod is still to be scheduled."""
    return not pod_node(pod) and not terminating(pod) and not finished(pod)


def counts(pod: JsonObject) -> bool:
    """Return whether the pod holds (or will hold) memory of its node: it is bound, not finished, and requests units.

    Annotations of an unbound pod don't count: they remain after a failed bind.
    """
    return bool(pod_node(pod)) and not finished(pod) and pod_units(pod) > 0


def _annotations(pod: JsonObject) -> JsonObject:
    return (pod.get("metadata") or {}).get("annotations") or {}


def demand(pod: JsonObject) -> Demand:
    """Return a pod's demand; without memory its other annotations are ignored.

    :raises ContractError: an annotation is invalid; the message names it.
    """
    units = pod_units(pod)
    annotations = _annotations(pod)
    if units:
        _check_containers(pod)
    if units == 0 or not any(key in annotations for key in POD_DEMANDS):
        return Demand(units)
    placement = annotations.get(POD_PLACEMENT, "")
    if POD_PLACEMENT in annotations and placement not in PLACEMENTS:
        raise ContractError(f"{POD_PLACEMENT}: {placement!r} is neither {' nor '.join(PLACEMENTS)}")
    asked = annotations.get(POD_CARD_COUNT, "1")
    if not isinstance(asked, str) or not re.fullmatch("[0-9]{1,9}", asked) or int(asked) < 1:
        raise ContractError(f"{POD_CARD_COUNT}: {asked!r} is no number of cards")
    count = int(asked)
    for name, held in gpu_containers(pod):
        if held % count:
            raise ContractError(
                f"{POD_CARD_COUNT}: the {held} units of container {name} can't be spread equally over {count} cards"
            )
    if count > 1:
        _check_reuse(pod)
    return Demand(
        units, count, placement, _patterns(annotations, POD_MODELS), _patterns(annotations, POD_EXCLUDE_MODELS)
    )


def _check_containers(pod: JsonObject) -> None:
    """Refuse a pod of which servers would keep too much.

    :raises ContractError: it has too many containers.
    """
    spec = pod.get("spec") or {}
    number = sum(len(spec.get(field) or []) for field in ("initContainers", "containers"))
    if number > MOST_CONTAINERS:
        raise ContractError(
            f"the pod has {number} containers, and one with {RESOURCE_MEMORY} at most {MOST_CONTAINERS}"
        )
    if (number := len(gpu_containers(pod))) > MOST_SHARES:
        raise ContractError(f"{number} of its containers ask for {RESOURCE_MEMORY}, and at most {MOST_SHARES} may")


def _check_reuse(pod: JsonObject) -> None:
    """Refuse a pod of several cards in which kubelet could reuse a part of an init container's units.

    Any units may be in that part, so the shares of the cards may differ.

    :raises ContractError: a container would be given such a part.
    """
    pool = 0
    for container, reusable in containers_in_order(pod.get("spec") or {}):
        units = container_units(container)
        if 0 < units < pool:
            raise ContractError(
                f"{POD_CARD_COUNT}: its container {container.get('name', '')} asks for {units} units and would be "
                f"given a part of the {pool} that an init container had, of any card"
            )
        if units:
            # kubelet reuses all of them, and adds new ones.
            pool = units if reusable else 0


def _patterns(annotations: JsonObject, key: str) -> tuple[str, ...]:
    if key not in annotations:
        return ()
    text = str(annotations[key])
    if len(text) > PATTERNS_LENGTH:
        raise ContractError(f"{key}: the list has more than {PATTERNS_LENGTH} characters")
    listed = text.split(",", MAX_PATTERNS)
    if len(listed) > MAX_PATTERNS:
        raise ContractError(f"{key}: the list has more than {MAX_PATTERNS} patterns")
    patterns = tuple(pattern.strip().lower() for pattern in listed)
    if max(map(len, patterns)) > PATTERN_LENGTH:
        raise ContractError(f"{key}: a pattern has more than {PATTERN_LENGTH} characters")
    if not all(patterns):
        raise ContractError(f"{key}: {text[:PATTERN_LENGTH]!r} is no list of models, separated by commas")
    return patterns


def booking(pod: JsonObject) -> Booking | None:
    """Read the annotations; None if they name no card."""
    annotations = _annotations(pod)
    try:
        index = int(annotations[POD_INDEX])
    except (KeyError, ValueError, TypeError):
        return None
    try:
        assume_time = int(annotations.get(POD_ASSUME_TIME, "0"))
    except (ValueError, TypeError):
        assume_time = 0
    indices: tuple[int, ...] = (index,)
    if annotations.get(POD_INDICES):
        indices = _several(annotations[POD_INDICES], index, pod) or indices
    return Booking(indices, annotations.get(POD_ASSIGNED) == "true", assume_time)


def _several(text: t.Any, first: int, pod: JsonObject) -> tuple[int, ...]:
    """Parse a list of cards; empty if it contradicts the pod, as after upstream's plugin changed only the index."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})+", text):
        return ()
    indices = tuple(map(int, text.split(",")))
    repeated = len(set(indices)) != len(indices)
    return () if repeated or indices[0] != first or pod_units(pod) % len(indices) else indices


def shares(pod: JsonObject) -> dict[int, int]:
    """Return a pod's booked units by the card's index; empty without a booking."""
    held = booking(pod)
    if held is None:
        return {}
    return dict.fromkeys(held.indices, pod_units(pod) // len(held.indices))


def booking_annotations(cards: t.Sequence[Card], pod: JsonObject, now_ns: int, assigned: bool) -> dict[str, str | None]:
    """Return all of ``POD_ANNOTATIONS`` for a pod of these cards.

    None removes an annotation, as in a merge patch: those of several cards from a pod of one card. For requests that
    can't remove any (a Binding merges), see ``merge_only``.

    :param now_ns: when the cards were chosen, in nanoseconds since 1970.
    :param assigned: whether kubelet has allocated the units.
    """
    several = len(cards) > 1
    allocation = {
        str(position): {str(card.index): container_units(container) // len(cards) for card in cards}
        for position, container in enumerate((pod.get("spec") or {}).get("containers") or [])
        if container_units(container)
    }
    return {
        POD_INDEX: str(cards[0].index),
        POD_CARD_UNITS: str(cards[0].units),
        POD_UNITS: str(pod_units(pod)),
        POD_ASSIGNED: "true" if assigned else "false",
        POD_ASSUME_TIME: str(now_ns),
        POD_INDICES: ",".join(str(card.index) for card in cards) if several else None,
        POD_ALLOCATION: json.dumps(allocation, separators=(",", ":")) if several and allocation else None,
    }


def merge_only(annotations: t.Mapping[str, str | None], pod: JsonObject) -> dict[str, str]:
    """Convert ``booking_annotations`` for a request that can't remove annotations.

    A removed annotation becomes empty, which counts as absent, if the pod has it; otherwise it is omitted.
    """
    there = _annotations(pod)
    return {key: value or "" for key, value in annotations.items() if value is not None or key in there}


def used_units(cards: t.Sequence[Card], pods: t.Iterable[JsonObject]) -> tuple[dict[int, int], int]:
    """Return the units held on each card (by index), and those of pods whose card is unknown; for pods of one node.

    More than a card's size is reported as it is.
    """
    used = {card.index: 0 for card in cards}
    unknown = 0
    for pod in pods:
        if not counts(pod):
            continue
        for index, units in (shares(pod) or {-1: pod_units(pod)}).items():
            if index in used:
                used[index] += units
            else:
                unknown += units
    return used, unknown
