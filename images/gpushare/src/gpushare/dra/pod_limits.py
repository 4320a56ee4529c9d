# SPDX-License-Identifier: GPL-3.0-or-later
"""Hold pods to the memory of their claims by NVIDIA's driver.

The pod's own cgroup is there before kubelet prepares its claims, and none of its containers: a limit on it holds from
their first process on, with any version of the container toolkit. The toolkit's limit on a container makes that
container see its share as the card's memory; it is read back and set again where it is another one.

Of a claim that several pods share each has an equal part: whatever they allocate, together it is no more than the
claim. kubelet prepares a claim once, so a pod that comes later is limited when kubelet lists it.

Where several containers of a pod have claims, it isn't known which cgroup is whose. The toolkit limits each of them to
its own request; these limits stay as long as they are that and no more than the pod's together.
"""

from __future__ import annotations

import logging
import os
import typing as t

from gpushare.dra.claims import Claim, ClaimRefused, Pod, device_name
from gpushare.dra.specifications import claim_of
from gpushare.kubelet.dra import PodClaims
from gpushare.node.cgroups import PodCgroups
from gpushare.node.limit_enforcer import Enforcer, Group
from gpushare.node.limits import Target, Usage
from gpushare.node.usage import Share
from gpushare.nvml.limits import Refusal
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.dra.limits")


class FolderCgroups:
    """Cgroups that are named by their folders, as this package's targets are."""

    def __init__(self, cgroups: PodCgroups) -> None:
        self._cgroups = cgroups

    @property
    def root(self) -> str:
        return self._cgroups.root

    def version(self) -> int:
        return self._cgroups.version()

    def own(self) -> str | None:
        return self._cgroups.own()

    def folders(self, containers: t.Collection[str]) -> dict[str, str]:
        return {container: container for container in containers if os.path.isdir(container)}

    def populated(self, folder: str) -> bool:
        return self._cgroups.populated(folder)


def mib_by_card(cards: t.Sequence[contract.Card], claims: t.Iterable[Claim]) -> dict[str, int]:
    """Return the MiB of claims by card (UUID)."""
    by_device = {device_name(card.uuid): card.uuid for card in cards}
    mib_by_uuid: dict[str, int] = {}
    for claim in claims:
        for device, mib in claim.mib().items():
            if uuid := by_device.get(device):
                mib_by_uuid[uuid] = mib_by_uuid.get(uuid, 0) + mib
    return mib_by_uuid


def mib_of_pod(cards: t.Sequence[contract.Card], claims: t.Iterable[Claim]) -> dict[str, int]:
    """Return the MiB that one pod has of its claims by card (UUID): an equal part of each that others share."""
    mib_by_uuid: dict[str, int] = {}
    for claim in claims:
        for uuid, mib in mib_by_card(cards, [claim]).items():
            mib_by_uuid[uuid] = mib_by_uuid.get(uuid, 0) + mib // max(1, len(claim.pods))
    return mib_by_uuid


def _parts(cards: t.Sequence[contract.Card], claims: t.Iterable[Claim]) -> dict[str, set[int]]:
    """Return the MiB that a container may have by card (UUID): those of one request."""
    by_device = {device_name(card.uuid): card.uuid for card in cards}
    parts: dict[str, set[int]] = {}
    for claim in claims:
        for request in {share.request for share in claim.shares}:
            for device, mib in claim.mib(request).items():
                if uuid := by_device.get(device):
                    parts.setdefault(uuid, set()).add(mib)
    return parts


def by_pod(claims: t.Iterable[Claim]) -> dict[str, tuple[str, list[Claim]]]:
    """Return each pod's key and claims by its UID."""
    claims_by_pod: dict[str, tuple[str, list[Claim]]] = {}
    for claim in claims:
        for pod in claim.pods:
            claims_by_pod.setdefault(pod.uid, (f"{claim.namespace}/{pod.name}", []))[1].append(claim)
    return claims_by_pod


def _listed(key: str, claims: t.Iterable[Claim], listing: t.Iterable[PodClaims]) -> list[PodClaims]:
    """Return what kubelet lists of a pod with these claims; after a forced deletion it may list two of a name."""
    uids = {claim.uid for claim in claims}
    return [
        pod
        for pod in listing
        if f"{pod.namespace}/{pod.name}" == key and any(claim_of(name) in uids for name in pod.cdi)
    ]


def _users(key: str, claims: t.Iterable[Claim], listing: t.Iterable[PodClaims]) -> int:
    """Return how many containers of a pod have claims by kubelet's list; 0 if it isn't listed with these."""
    return max((pod.containers for pod in _listed(key, claims, listing)), default=0)


class PodLimits:
    """The limits of the pods that have claims."""

    def __init__(
        self,
        enforcer: Enforcer,
        cgroups: PodCgroups,
        cards: t.Callable[[], t.Sequence[contract.Card]],
        claims: t.Callable[[], t.Sequence[Claim]],
    ) -> None:
        """
        :param enforcer: of targets whose IDs are folders.
        :param cgroups: of the node.
        :param cards: returns the node's cards.
        :param claims: returns the prepared claims.
        """
        self._enforcer, self._cgroups, self._cards, self._claims = enforcer, cgroups, cards, claims

    def hold(self, claim: Claim) -> None:
        """Limit the pods of a claim that is prepared now.

        :raises ClaimRefused: limits are required, and one can't be set.
        """
        pods = by_pod(self._claims())
        # Where a claim has several pods, kubelet may have started this one only, or ended one already.
        there = [pod for pod in claim.pods if self.is_alive(pod.uid)] or claim.pods
        problems = [problem for pod in there if (problem := self._hold(pod.uid, *pods.get(pod.uid, ("", []))))]
        if problems and self._enforcer.mode == "required":
            raise ClaimRefused(contract.Reason.MEMORY_LIMIT_FAILED, f"claim {claim.key}: {problems[0]}")

    def once(self, listing: t.Sequence[PodClaims]) -> dict[str, Usage]:
        """Read all limits, and correct those that differ.

        :param listing: kubelet's; of a pod that isn't listed yet only the pod itself is limited.
        :returns: the claims and their memory by card (UUID).
        """
        cards, claims = self._cards(), self._claims()
        pods = by_pod(claims)
        folders = self._cgroups.pods(pods)
        targets, groups = list[Target](), list[Group]()
        for uid, (key, its) in pods.items():
            if uid not in folders:
                continue
            self._hold(uid, key, its)
            mib, users = mib_of_pod(cards, its), _users(key, its, listing)
            inside = self._cgroups.containers(folders[uid])
            if users == 1:
                targets += [Target(key, uid, os.path.basename(folder), folder, mib) for folder in inside]
                continue
            groups.append(Group(Target(key, uid, "", folders[uid], mib), inside))
            if users > 1:
                try:
                    self._enforcer.partition(cards, inside, mib, _parts(cards, its), users)
                except Refusal as refusal:
                    log.warning("containers of pod %s may hold more than their parts: %s", key, refusal)
        promised = mib_by_card(cards, claims)
        self._enforcer.enforce(cards, self.pods(), targets, promised, groups=groups)
        counts = {card.uuid: sum(1 for claim in claims if device_name(card.uuid) in claim.mib()) for card in cards}
        # A sandbox is a container, too; so the claims are counted.
        return {
            uuid: Usage(counts[uuid], promised.get(uuid, 0), usage.used_mib)
            for uuid, usage in self._enforcer.usage.items()
        }

    def shares(self, listing: t.Sequence[PodClaims]) -> list[Share]:
        """Return what the running pods have of their claims.

        A pod's containers are one share, for no account of this server tells their cgroups apart; it has the
        container's name where only one of them has claims.

        :param listing: kubelet's.
        """
        cards, pods = self._cards(), by_pod(self._claims())
        folders, shares = self._cgroups.pods(pods), list[Share]()
        for uid, (key, its) in pods.items():
            if uid not in folders:
                continue
            here = _listed(key, its, listing)
            name = here[0].container if len(here) == 1 else ""
            inside = (
                tuple(self._cgroups.containers(folders[uid])) if _users(key, its, listing) == 1 else (folders[uid],)
            )
            shares.append(Share(key, uid, name, frozenset(), inside, mib_of_pod(cards, its)))
        return shares

    def pods(self) -> list[JsonObject]:
        """Return the pods of the prepared claims, as far as claims tell of them."""
        named = ((uid, *key.split("/", 1)) for uid, (key, _claims) in by_pod(self._claims()).items())
        return [{"metadata": {"namespace": space, "name": name, "uid": uid}} for uid, space, name in named]

    def is_alive(self, uid: str) -> bool:
        """Return whether a pod has a cgroup."""
        folder = self._cgroups.pods([uid]).get(uid)
        return folder is not None and os.path.isdir(folder)

    def has_processes(self, pod: Pod) -> bool:
        """Return whether a pod has processes, its sandbox's among them."""
        folder = self._cgroups.pods([pod.uid]).get(pod.uid)
        return folder is not None and self._cgroups.populated(folder)

    def _hold(self, uid: str, key: str, claims: t.Sequence[Claim]) -> str:
        """Limit a pod; return the problem, or an empty string."""
        cards = self._cards()
        if not self._enforcer.active:
            return ""
        folder = self._cgroups.pods([uid]).get(uid)
        if folder is None:
            return f"the cgroup of pod {key} isn't found below {self._cgroups.root}"
        try:
            self._enforcer.hold_group(cards, folder, mib_of_pod(cards, claims))
        except Refusal as refusal:
            return f"pod {key} isn't limited: {refusal}"
        return ""
