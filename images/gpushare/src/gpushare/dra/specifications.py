# SPDX-License-Identifier: GPL-3.0-or-later
"""The CDI specifications of prepared claims: which cards a container sees, and its hard limit.

The runtime applies them after the container's own environment, whose values they replace, so that a pod can't widen
what it was given. A container has the devices of its requests, so each has the variables of its own request. Where two
of one container set the same variable, the last one counts. So with CDI each card is named by its device of NVIDIA's
specification; where only the variable names cards, it must have one value in a pod (see :func:`check_variable`).
"""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

from gpushare.dra import records
from gpushare.dra.claims import DRIVER, Claim, ClaimRefused, Code, device_name
from gpushare.kubelet.dra import Device
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

# Names that begin with a digit need this version.
CDI_VERSION = "0.5.0"
KIND = f"{DRIVER}/claim"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
_PREFIX, _ENDING = f"{DRIVER}-claim-", ".json"


def claim_of(name: str) -> str:
    """Return the UID of the claim in a CDI name; empty if it isn't ours."""
    kind, _equals, device = name.partition("=")
    return device.rpartition("-")[0] if kind == KIND else ""


def record(
    claim: Claim,
    cards: t.Iterable[contract.Card],
    node: str,
    unit: str,
    injected: t.Mapping[str, str],
    limits: t.Callable[[t.Mapping[str, int]], t.Mapping[str, str]],
) -> records.Record:
    """Return the record of a claim, which has room on the cards.

    :param cards: of the node.
    :param node: its name, which is its pool's, too.
    :param unit: of the cluster's shares, GiB or MiB.
    :param injected: the names of the cards' devices in NVIDIA's CDI specification, by UUID; empty where the variable
        names the cards.
    :param limits: returns the variables of a hard limit, by MiB by card (UUID).
    """
    by_device = {device_name(card.uuid): card for card in cards}
    total = contract.units_of(sum(part.mib for part in claim.shares), unit)
    devices, entries = [], list[JsonObject]()
    for number, share in enumerate(claim.shares):
        card, name = by_device[share.device], f"{KIND}={claim.uid}-{number}"
        own = {by_device[device].uuid: mib for device, mib in claim.mib(share.request).items()}
        variables = {
            # With CDI names NVIDIA's runtime must add nothing, in any of its modes.
            VISIBLE: "void" if injected else ",".join(own),
            contract.POD_INDEX: str(card.index),
            contract.POD_CARD_UNITS: str(card.units),
            contract.POD_UNITS: str(total),
            contract.CONTAINER_UNITS: str(contract.units_of(sum(own.values()), unit)),
            **limits(own),
        }
        edits = {"env": [f"{key}={value}" for key, value in variables.items()]}
        entries.append({"name": name.partition("=")[2], "containerEdits": edits})
        names = (name, injected[card.uuid]) if injected else (name,)
        devices.append(Device(share.request, node, share.device, names, share.share))
    specification: JsonObject = {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": entries}
    return records.Record(claim, tuple(devices), specification)


def check_variable(claim: Claim, others: t.Iterable[Claim]) -> None:
    """Refuse a claim whose cards the variable can't name exactly.

    :param others: the claims that are prepared.
    :raises ClaimRefused: its requests have different cards, or a pod has another claim.
    """
    why = "a container's cards can only be told apart by CDI; see --device-injection and NVIDIA's CDI specification"
    if len({frozenset(claim.mib(share.request)) for share in claim.shares}) > 1:
        raise ClaimRefused(Code.CDI_REQUIRED, f"claim {claim.key} has requests of different cards: {why}")
    pods = {pod.uid for pod in claim.pods}
    for other in others:
        if other.uid != claim.uid and pods & {pod.uid for pod in other.pods}:
            text = f"claims {claim.key} and {other.key} are of one pod: {why}"
            raise ClaimRefused(Code.CDI_REQUIRED, text)


class Specifications:
    """Our files in a folder of CDI specifications.

    :param folder: that the container runtime reads; others have files there, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, uid: str, specification: JsonObject) -> None:
        """Write a claim's specification unless it is there.

        :raises OSError: it can't be written.
        """
        path, text = self._file(uid), json.dumps(specification, separators=(",", ":"))
        try:
            if path.read_text(encoding="utf-8") == text:
                return
        except (OSError, ValueError):
            # It is missing or damaged.
            pass
        self._folder.mkdir(parents=True, exist_ok=True)
        records.write(path, text)

    def missing(self, uids: t.Iterable[str]) -> list[str]:
        """Return the claims, by UID, whose specifications aren't there."""
        return [uid for uid in uids if not self._file(uid).exists()]

    @property
    def removed(self) -> str:
        """Return why nothing can be written into the folder: it was removed, and the mount still shows it."""
        try:
            is_removed = self._folder.stat().st_nlink == 0
        except OSError:
            return ""
        return f"{self._folder} was removed on the node, and this container still has the old one" if is_removed else ""

    def remove(self, uid: str) -> None:
        """Remove a claim's specification.

        :raises OSError: it can't be removed.
        """
        records.remove(self._file(uid))

    def sweep(self, kept: t.Container[str]) -> list[str]:
        """Remove the specifications of all other claims, and what an interrupted write has left.

        :param kept: UIDs of prepared claims.
        :returns: the UIDs of the claims whose specifications were removed.
        :raises OSError: the folder can't be read, or a file can't be removed.
        """
        if not self._folder.is_dir():
            return []
        swept = []
        for file in sorted(self._folder.iterdir()):
            name = file.name.removeprefix(".")
            if not name.startswith(_PREFIX):
                continue
            if file.name.startswith("."):
                records.remove(file)
            elif name.endswith(_ENDING) and (uid := name[len(_PREFIX) : -len(_ENDING)]) not in kept:
                records.remove(file)
                swept.append(uid)
        return swept

    def _file(self, uid: str) -> Path:
        return self._folder / f"{_PREFIX}{uid}{_ENDING}"
