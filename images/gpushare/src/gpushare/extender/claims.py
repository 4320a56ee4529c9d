# SPDX-License-Identifier: GPL-3.0-or-later
"""Publish claims on freed memory to all extenders: each is written on its pod and received by a watch.

A claim reserves the memory of evicted pods for the pod that they were evicted for. Only the extender that chose the
victims has it, but another extender may schedule the pod next, after a change of leadership or behind a Service. So it
writes an annotation, and a label of the same name, by which a watch selects these pods only.

No booking depends on a claim. It only hides free memory from other pods; if it is lost or received late, another pod
may get the freed card, and the preemptor waits or evicts other pods.

A claim of a pod that can never be scheduled would hide the memory of any node. So claims are exchanged only where the
API server has the admission policy that lets the servers alone write them; elsewhere each extender has its own claims
only. From a claim only node, cards and victims are read: its size and priority are those of the pod.
"""

from __future__ import annotations

import json
import logging
import sys
import threading

from gpushare.api.client import Kube, KubeError
from gpushare.api.mirror import Mirror
from gpushare.extender.binding_status import patch_pod
from gpushare.extender.state import Claim, State
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import ContractError
from gpushare.shared._core.types import JsonObject

LABEL_VALUE = "true"
# The annotation's length, for the UIDs of 400 victims, and the claims that are kept.
CLAIM_LENGTH, MOST_CLAIMS = 16 * 1024, 5000
# Pods without a claim aren't sent.
PODS = ("/api/v1/pods", {"labelSelector": contract.POD_CLAIM, "fieldSelector": "spec.nodeName="})
POLICY = f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/{contract.ANNOTATIONS_POLICY}"

log = logging.getLogger("gpushare.extender")


def claim_to_text(claim: Claim) -> str:
    """Format the annotation's value: compact JSON."""
    cards = [index for index, _units in claim.cards]
    value = {"node": claim.node, "cards": cards, "victims": sorted(claim.victims)}
    return json.dumps(value, separators=(",", ":"))


def claim_of(pod: JsonObject) -> Claim | None:
    """Read a pod's claim; None without one, or if it isn't one that an extender writes."""
    metadata = pod.get("metadata") or {}
    text = (metadata.get("annotations") or {}).get(contract.POD_CLAIM)
    if not text or len(text) > CLAIM_LENGTH or not contract.wants_a_node(pod):
        return None
    try:
        value = json.loads(text)
        node, indices, victims = value["node"], value["cards"], value["victims"]
        demand = contract.demand(pod)
        if not isinstance(node, str) or {*map(type, indices)} - {int} or {*map(type, victims)} - {str}:
            return None
    except (ValueError, TypeError, KeyError, RecursionError, ContractError):
        return None
    if not demand.units or len(indices) != demand.count or len(set(indices)) != demand.count:
        return None
    return Claim(
        contract.pod_uid(pod),
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        sys.intern(node),
        tuple((index, demand.share) for index in sorted(indices)),
        contract.pod_priority(pod),
        frozenset(victims),
    )


class Claims:
    """Copies claims from pods to the state, and the state's own to their pods."""

    def __init__(self, kube: Kube, state: State, backoff: tuple[float, float] = (0.2, 10.0)) -> None:
        self._kube, self._state = kube, state
        self.mirror: Mirror[Claim] = Mirror(
            kube, *PODS, self._row, self._changed, backoff, self.check_policy, most=MOST_CLAIMS
        )
        # Whether the API server lets the servers alone write claims.
        self._guarded = False
        self._lock = threading.Lock()
        # Claims that were written, or tried to be written, by the pod's UID.
        self._written: dict[str, Claim] = {}
        self._failed: set[str] = set()
        # Claims of pods that left the watch, mostly because they were bound; their writers may have ended.
        self._ended: dict[str, Claim] = {}
        self.start, self.stop = self.mirror.start, self.mirror.stop

    def check_policy(self) -> None:
        """Read whether the API server lets the servers alone write claims, and apply the others' claims if it does.

        :raises KubeError: the API server can't be asked.
        """
        try:
            binding = self._kube.get(POLICY)
        except KubeError as error:
            if error.status not in (403, 404):
                raise
            binding = {}
        before, self._guarded = self._guarded, "Deny" in ((binding.get("spec") or {}).get("validationActions") or ())
        if self._guarded != before:
            log.info("claims on freed memory are %s", "exchanged" if self._guarded else "kept from other extenders")
        if self._guarded and not before and self.mirror.synced:
            self.mirror.relist()

    def publish(self, claim: Claim) -> None:
        """Write a claim on its pod, unless that was done or tried before; see ``publish_all``."""
        if not self._guarded:
            return
        with self._lock:
            if self._written.get(claim.uid) == claim or self.mirror.get(f"{claim.namespace}/{claim.name}") == claim:
                return
            self._written[claim.uid] = claim
            self._failed.discard(claim.uid)
        try:
            self._patch(claim, claim_to_text(claim), LABEL_VALUE)
        except KubeError as error:
            log.warning("a claim can't be published to other extenders: %s", error)
            with self._lock:
                self._failed.add(claim.uid)

    def publish_all(self, again: bool = False) -> None:
        """Write all claims of the state that aren't on their pods yet, and remove those that ended.

        :param again: retry failed writes, and remove the claims of other extenders from pods that left the watch.
        """
        if again:
            try:
                self.check_policy()
            except KubeError as error:
                log.debug("the admission policy can't be read: %s", error)
            with self._lock:
                for uid in self._failed:
                    self._written.pop(uid, None)
                self._failed.clear()
                left, self._ended = self._ended, {}
            for claim in left.values():
                # The watch of all pods may not have the binding yet: only whether the claim is back counts.
                if self.mirror.get(f"{claim.namespace}/{claim.name}") is None:
                    self.withdraw(claim)
        claims = {claim.uid: claim for claim in self._state.claims()}
        for claim in claims.values():
            self.publish(claim)
        with self._lock:
            ended = [claim for uid, claim in self._written.items() if uid not in claims]
        for claim in ended:
            self.withdraw(claim)

    def withdraw(self, claim: Claim) -> None:
        """Remove a claim from its pod, which was bound, or wasn't in time."""
        with self._lock:
            self._written.pop(claim.uid, None)
            self._failed.discard(claim.uid)
        try:
            self._patch(claim, None, None)
        except KubeError as error:
            # Mostly the pod is gone; otherwise every extender ends the claim after its time.
            log.debug("a claim stays on pod %s/%s: %s", claim.namespace, claim.name, error)

    def _patch(self, claim: Claim, text: str | None, label: str | None) -> None:
        metadata: JsonObject = {
            "uid": claim.uid,
            "annotations": {contract.POD_CLAIM: text},
            "labels": {contract.POD_CLAIM: label},
        }
        patch_pod(self._kube, claim.namespace, claim.name, metadata)

    def _row(self, pod: JsonObject) -> Claim | None:
        """Return a pod's claim where only servers write claims: of others' there may be any number."""
        return claim_of(pod) if self._guarded else None

    def _changed(self, _key: str, before: Claim | None, after: Claim | None) -> None:
        if not self._guarded:
            return
        # Another pod may have the same name by now.
        if before is not None and (after is None or after.uid != before.uid):
            self._state.unclaim(before.uid)
            with self._lock:
                self._ended[before.uid] = before
        if after is not None:
            self._state.claim(after)
