# SPDX-License-Identifier: GPL-3.0-or-later
"""What a ResourceClaim gives its pods of this node's cards. No I/O, no clock."""

from __future__ import annotations

import dataclasses
import enum
import re
import typing as t

from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.claim_templates import container_of
from gpushare.shared._core.types import JsonObject

DRIVER = "gpu.kubegpu.share"
# The capacity of each device.
MEMORY = "memory"
BYTES_PER_MIB = 1024 * 1024
# The API server's UIDs; files are named after them.
_UID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,62}")


class Code(enum.StrEnum):
    """Why a claim isn't prepared; docs/dra-driver.md explains each."""

    INVALID_REQUEST = "InvalidRequest"
    API_ERROR = "KubernetesAPIError"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_REPLACED = "ClaimReplaced"
    CLAIM_NOT_ALLOCATED = "ClaimNotAllocated"
    CLAIM_OF_OTHER_NODE = "ClaimOfOtherNode"
    INVALID_ALLOCATION = "InvalidAllocation"
    UNSUPPORTED_CLAIM = "UnsupportedClaim"
    UNKNOWN_CARD = "UnknownCard"
    CARD_FULL = "CardFull"
    CDI_REQUIRED = "CDIRequired"
    STATE_NOT_WRITTEN = "StateNotWritten"
    CALL_ENDED = "CallEnded"
    NOT_READY = "NotReady"


class ClaimRefused(Exception):
    """A claim isn't prepared; the message begins with the code, since kubelet transports a string only.

    It becomes an Event of the claim's pod, so it names nothing of other namespaces.

    :param code: one of ours, or a card's.
    :param holders: with ``CardFull``, the UIDs of the prepared claims that hold the card's memory.
    :param fields: for the driver's own log.
    """

    def __init__(
        self,
        code: Code | contract.Reason,
        text: str,
        holders: t.Iterable[str] = (),
        fields: t.Mapping[str, t.Any] | None = None,
    ) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.holders = frozenset(holders)
        self.fields = fields or {}


class Pod(t.NamedTuple):
    """A pod that a claim is reserved for."""

    name: str
    uid: str


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a card that a claim has.

    :param request: the claim's request, without a subrequest's name.
    :param device: the card's name in the slice.
    :param share: the ID of this part; empty if the scheduler gave none.
    :param mib: its memory.
    """

    request: str
    device: str
    share: str
    mib: int


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that is allocated to this node.

    :param shares: in the order of its allocation.
    :param pods: that it is reserved for.
    """

    uid: str
    namespace: str
    name: str
    shares: tuple[Share, ...]
    pods: tuple[Pod, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def mib(self, request: str = "") -> dict[str, int]:
        """Return its MiB by device.

        :param request: of a container, which has all of that container's; empty for all.
        """
        mib_by_device: dict[str, int] = {}
        for share in self.shares:
            if not request or container_of(request) == container_of(share.request):
                mib_by_device[share.device] = mib_by_device.get(share.device, 0) + share.mib
        return mib_by_device


@dataclasses.dataclass(frozen=True)
class Unbooked:
    """What a prepared claim holds of cards without having it in the API: kube-scheduler gives that memory to others.

    :param code: what became of the claim there.
    :param mib: by device.
    """

    code: str
    mib: t.Mapping[str, int]


def device_name(uuid: str) -> str:
    """Return a card's name in the slice, which is a DNS label."""
    return uuid.lower()


def valid_uid(uid: str) -> bool:
    return _UID.fullmatch(uid) is not None


def parse(obj: JsonObject, uid: str, node: str) -> Claim:
    """Return what a claim has of this node's cards.

    :param obj: the claim in the API.
    :param uid: that kubelet names.
    :param node: this node's name, which is its pool's, too.
    :raises ClaimRefused: it isn't that claim, isn't allocated to this node, or asks for what isn't supported.
    """
    metadata = obj.get("metadata") or {}
    key = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    if metadata.get("uid") != uid:
        text = f"claim {key} has the UID {metadata.get('uid')} now, and kubelet asks for {uid}: replace the pod"
        raise ClaimRefused(Code.CLAIM_REPLACED, text)
    status = obj.get("status") or {}
    devices = (status.get("allocation") or {}).get("devices")
    if devices is None:
        raise ClaimRefused(Code.CLAIM_NOT_ALLOCATED, f"claim {key} isn't allocated; the scheduler does that")
    for configuration in devices.get("config") or []:
        if (configuration.get("opaque") or {}).get("driver") == DRIVER:
            source = configuration.get("source")
            text = f"claim {key} has a configuration for {DRIVER} (source {source}); there is none yet"
            raise ClaimRefused(Code.UNSUPPORTED_CLAIM, text)
    ours = [result for result in devices.get("results") or [] if result.get("driver") == DRIVER]
    return Claim(
        uid,
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        tuple(_share(result, key, node) for result in ours),
        tuple(
            Pod(str(consumer.get("name", "")), str(consumer.get("uid", "")))
            for consumer in status.get("reservedFor") or []
            if consumer.get("resource") == "pods" and not consumer.get("apiGroup")
        ),
    )


def _share(result: t.Mapping[str, t.Any], key: str, node: str) -> Share:
    pool, device = str(result.get("pool", "")), str(result.get("device", ""))
    if pool != node:
        text = f"claim {key} is allocated device {device} of pool {pool}, and this is node {node}"
        raise ClaimRefused(Code.CLAIM_OF_OTHER_NODE, text)
    if result.get("adminAccess"):
        text = f"claim {key} asks for administrative access to {device}; a share's memory can't be held to that"
        raise ClaimRefused(Code.UNSUPPORTED_CLAIM, text)
    given = (result.get("consumedCapacity") or {}).get(MEMORY)
    memory = contract.quantity(given)
    if memory <= 0 or memory % BYTES_PER_MIB:
        text = f"claim {key} is allocated {given!r} of the capacity {MEMORY} of {device}, which is no number of MiB"
        raise ClaimRefused(Code.INVALID_ALLOCATION, text)
    request = str(result.get("request", "")).partition("/")[0]
    return Share(request, device, str(result.get("shareID") or ""), memory // BYTES_PER_MIB)


def check_there(claim: Claim, cards: t.Iterable[contract.Card]) -> None:
    """Check that a claim's cards are on this node, also where it was prepared before: the machine may have restarted.

    :param cards: of this node.
    :raises ClaimRefused: a card is missing.
    """
    by_device = {device_name(card.uuid): card for card in cards}
    for device in claim.mib():
        card = by_device.get(device)
        if card is None:
            text = (
                f"claim {claim.key} has a part of card {device}, and this node has no such card (any more): delete the "
                "pod, for a claim keeps its card"
            )
            raise ClaimRefused(Code.UNKNOWN_CARD, text)
        if card.code == contract.Reason.CARD_LOST:
            text = (
                f"claim {claim.key}: card {card.index} ({card.uuid}): {card.reason}; if it doesn't come back, delete "
                "the pod, for a claim keeps its card"
            )
            raise ClaimRefused(contract.Reason.CARD_LOST, text)


def unbooked(claim: Claim, obj: JsonObject | None, node: str) -> Unbooked | None:
    """Return what a prepared claim holds and doesn't have in the API; None if it has all of it there.

    :param obj: the claim of its name in the API; None if there is none.
    :param node: this node's name.
    """
    try:
        if obj is None:
            raise ClaimRefused(Code.CLAIM_NOT_FOUND, "")
        booked = parse(obj, claim.uid, node).mib()
    except ClaimRefused as refused:
        return Unbooked(str(refused.code), claim.mib())
    lacking = {device: mib - booked.get(device, 0) for device, mib in claim.mib().items()}
    lacking = {device: mib for device, mib in lacking.items() if mib > 0}
    return Unbooked(str(Code.CLAIM_NOT_ALLOCATED), lacking) if lacking else None


def check_room(
    claim: Claim,
    cards: t.Iterable[contract.Card],
    others: t.Iterable[Claim],
    without_booking: t.Mapping[str, Unbooked] | None = None,
) -> None:
    """Check that this node's cards have room for a claim that isn't prepared yet.

    The scheduler gives memory away again when the API has lost a pod or its claim; the pod may still run then.

    :param cards: of this node, which has those of the claim.
    :param others: the claims that are prepared, without an earlier state of this one.
    :param without_booking: those of them, by UID, that hold memory which they don't have in the API.
    :raises ClaimRefused: a card isn't given to pods, or has no room yet.
    """
    lost = without_booking or {}
    by_device = {device_name(card.uuid): card for card in cards}
    prepared = list(others)
    for device, mib in claim.mib().items():
        card = by_device[device]
        if not card.healthy:
            code = contract.Reason(card.code) if card.code else contract.Reason.CARD_LOST
            raise ClaimRefused(code, f"claim {claim.key}: card {card.index} ({card.uuid}) {card.reason}")
        holders = [holder for holder in prepared if device in holder.mib()]
        held = sum(holder.mib()[device] for holder in holders)
        if held + mib > card.shared_mib:
            taken = {holder.key: lost[holder.uid].mib.get(device, 0) for holder in holders if holder.uid in lost}
            free, count = max(0, card.shared_mib - held), len(holders)
            text = (
                f"claim {claim.key} is allocated {mib} MiB of card {card.index}, and {free} of its {card.shared_mib} "
                f"MiB are free, since claims of pods that haven't ended ({count}) hold {held} MiB"
            )
            if any(taken.values()):
                text += (
                    f", {sum(taken.values())} of them without having these in the API (any more): the card gets no "
                    "further pods as long as that is so. Delete this pod if a new one may have another card"
                )
            text += "; kubelet tries again until those pods have ended"
            raise ClaimRefused(
                Code.CARD_FULL,
                text,
                (holder.uid for holder in holders),
                {
                    "card": card.index,
                    "free_mib": free,
                    "holders": sorted(holder.key for holder in holders),
                    "without_booking": sorted(key for key, number in taken.items() if number),
                },
            )


# --------------------------------------------------------------------------- JSON


def to_json(claim: Claim) -> JsonObject:
    """Return a claim as a value for JSON."""
    return dataclasses.asdict(claim)


def from_json(value: JsonObject) -> Claim:
    """Return the claim of :func:`to_json`.

    :raises ValueError: it is none.
    """
    try:
        return Claim(
            str(value["uid"]),
            str(value["namespace"]),
            str(value["name"]),
            tuple(
                Share(str(share["request"]), str(share["device"]), str(share["share"]), int(share["mib"]))
                for share in value["shares"]
            ),
            tuple(Pod(str(name), str(uid)) for name, uid in value["pods"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no claim: {error!r}") from error
