# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks D5, D6 and D11: what the DRA driver has prepared and kubelet lists, with the API's claims. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .model import ListedClaim, Node, Pod, Record, Snapshot, Specification
from .parse import join, plural, shorten
from .result import CheckResult
from .snapshot import VISIBLE

# With CDI devices the variable names no card.
BY_CDI = "void"


def claims_are_prepared(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D5: each claim of a running pod has its record and its CDI specification, and none besides is there."""
    mine = {claim.uid: claim for claim in snapshot.claims if any(part.pool == node.name for part in claim.parts)}
    running = [pod for pod in node.pods if pod.steady and pod.phase == "Running" and pod.claimed()]
    prepared = node.kubelet.prepared
    if result.without_data(running, prepared.problem):
        return
    if prepared.problem:
        result.unknown("no_data_node", why=prepared.problem)
        return
    for pod in running:
        for claim in pod.claims:
            if claim.uid in mine:
                result.count()
                _check_record(node, pod, claim, prepared.records.get(claim.uid), result)
                _check_specification(node, pod, claim, prepared.specifications.get(claim.uid), result)
    for uid in sorted(set(prepared.specifications) - set(prepared.records)):
        result.count()
        result.fail("leaked_specification", uid_of_claim=uid, key=uid, kubelet=f"specification {uid}; no record")


def prepared_claims_are_allocated(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D11: what the driver has prepared of a card is allocated in the API, and no more than the card has."""
    prepared = node.kubelet.prepared
    if problem := prepared.problem or snapshot.claims_problem:
        result.unknown("no_data", why=problem)
        return
    known = {claim.uid: claim for claim in snapshot.claims}
    held: dict[str, dict[str, int]] = {device.name: {} for device in node.devices}
    unbooked = set()
    for record in prepared.records.values():
        result.count()
        if record.problem:
            result.unknown("record_unreadable", why=record.problem, key=record.uid, kubelet=f"record {record.uid}")
            continue
        claim = known.get(record.uid)
        allocated = {part.device for part in claim.parts if part.pool == node.name} if claim else set()
        for device, mib in _by_device(record).items():
            held.setdefault(device, {})[record.uid] = mib
            if device not in allocated:
                unbooked.add(device)
                _report_unbooked(node, record, claim, device, mib, result)
    for device, parts in held.items():
        _check_card(node, device, parts, device in unbooked, result)


def _by_device(record: Record) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in record.shares:
        found[one.device] = found.get(one.device, 0) + (one.mib or 0)
    return found


def _report_unbooked(
    node: Node, record: Record, claim: dra.Claim | None, device: str, mib: int, result: CheckResult
) -> None:
    pods = join(
        name for name, places in sorted(node.kubelet.claimed.items()) if record.key in {one[0] for one in places}
    )
    details = {"claim": record.key, "key": record.uid, "mib": mib, "pods": pods or "no pod that kubelet lists"}
    details |= {"card": _index(node, device), "uuid": node.uuid_of(device)}
    details["kubelet"] = f"record {record.uid}: {mib} MiB; listed for {pods or 'no pod'}"
    if claim is None:
        result.fail("claim_gone", api=f"no ResourceClaim has the UID {record.uid}", **details)
    else:
        api = join(f"{one.pool}/{one.device} {one.mib} MiB" for one in claim.parts) or "not allocated"
        result.fail("not_allocated", api=api, **details)


def _check_card(node: Node, device: str, parts: t.Mapping[str, int], unbooked: bool, result: CheckResult) -> None:
    """Compare what is prepared of a card with its memory, and its taint with what isn't allocated."""
    offered = next((one for one in node.devices if one.name == device), None)
    total, place = sum(parts.values()), {"card": _index(node, device), "uuid": node.uuid_of(device)}
    shown = {"kubelet": f"{plural(len(parts), 'prepared claim')}: {total} MiB"}
    if offered is None:
        # D1 and D3 report a card that isn't offered.
        return
    if total > offered.memory_mib:
        numbers = {"held": total, "offered": offered.memory_mib, "parts": parts, "most": offered.memory_mib}
        result.fail("overprepared", api=f"{offered.memory_mib} MiB", key="sum", **numbers, **shown, **place)
    taint = f"taint {dra.UNBOOKED}={offered.unbooked}" if offered.unbooked else "no taint"
    if unbooked and not offered.unbooked:
        result.fail("not_tainted", api=taint, key="taint", **shown, **place)
    elif offered.unbooked and not unbooked:
        result.warn("still_tainted", api=taint, key="taint", code=offered.unbooked, **shown, **place)


def _index(node: Node, device: str) -> int | None:
    return next((one.index for one in node.devices if one.name == device), None)


def _check_record(node: Node, pod: Pod, claim: dra.Claim, record: Record | None, result: CheckResult) -> None:
    expected = sorted((one.request, one.device, one.share, one.mib or 0) for one in claim.parts)
    details = {"pod": pod, "claim": claim.key, "key": f"record {claim.name}", "api": _shown(expected)}
    if record is None:
        result.fail("not_recorded", kubelet="no record", **details)
    elif record.problem:
        result.fail("record_unreadable", why=record.problem, **details)
    else:
        found = sorted((one.request, one.device, one.share, one.mib or 0) for one in record.shares)
        if found != expected:
            result.fail("record_differs", kubelet=_shown(found), **details)


def _shown(shares: t.Iterable[tuple[str, str, str, int]]) -> str:
    return join(f"{request}: {mib} MiB of {shorten(device)}" for request, device, _share, mib in shares) or "nothing"


def _check_specification(
    node: Node, pod: Pod, claim: dra.Claim, found: Specification | None, result: CheckResult
) -> None:
    details = {"pod": pod, "claim": claim.key, "key": f"specification {claim.name}"}
    if found is None:
        result.fail("not_specified", kubelet="no specification", **details)
        return
    if found.problem:
        result.fail("specification_unreadable", why=found.problem, **details)
        return
    details["kubelet"] = join(f"{VISIBLE}={shorten(one.get(VISIBLE, ''), 100)}" for one in found.envs)
    if not found.recorded:
        result.fail("specification_differs", **details)
        return
    unit_mib = node.unit_mib
    for part, variables in zip(claim.parts, found.envs):
        own = claim.mib(part.request)
        cards = {node.uuid_of(device) for _pool, device in own}
        visible = variables.get(VISIBLE, "")
        units = variables.get(contract.CONTAINER_UNITS, "")
        if visible != BY_CDI and set(visible.split(",")) != cards:
            result.fail("other_card", visible=shorten(visible), cards=join(sorted(cards)), **details)
        elif unit_mib and units != str(sum(own.values()) // unit_mib):
            result.fail("other_units", units=shorten(units), expected=sum(own.values()) // unit_mib, **details)
    if len(found.envs) != len(claim.parts):
        result.fail("other_card", visible=plural(len(found.envs), "device"), cards=len(claim.parts), **details)


def kubelet_lists_claims(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D6: PodResources lists each running pod's claims with the cards that they are allocated."""
    mine = [pod for pod in node.pods if pod.steady and pod.phase == "Running" and pod.claimed()]
    if result.without_data(mine, node.kubelet.pod_resources_problem):
        return
    for pod in mine:
        if pod.key in node.kubelet.duplicate_pods:
            continue
        result.count()
        expected = _expected(pod)
        listed = node.kubelet.claimed.get(pod.key, frozenset())
        # Before 1.36 kubelet lists no IDs of shares.
        found = {(*one[:3], "") for one in listed} if all(not one[3] for one in listed) else set(listed)
        wanted = {(*one[:3], "") for one in expected} if found and all(not one[3] for one in found) else expected
        details = {"pod": pod, "api": _places(wanted), "kubelet": _places(found)}
        if not listed and wanted:
            result.fail("not_listed", **details)
        elif found != wanted:
            result.fail("differs", **details)
    known = {pod.key for pod in node.pods if pod.active}
    for key in sorted(set(node.kubelet.claimed) - known):
        places = node.kubelet.claimed[key]
        result.warn("unknown_pod", key=key, name=key, api="no such pod is on the node", kubelet=_places(places))


def _expected(pod: Pod) -> set[ListedClaim]:
    """Return what PodResources lists of a pod: the claims of its containers, without those of init containers."""
    containers = {one.name for one in pod.containers if not one.init}
    found: set[ListedClaim] = set()
    for use in pod.uses:
        claim = next((one for one in pod.claims if one.name == use.claim), None)
        for container, request in use.containers:
            if claim is not None and container in containers:
                parts = [one for one in claim.parts if request in ("", one.request)]
                found |= {(claim.key, one.pool, one.device, one.share) for one in parts}
    return found


def _places(places: t.Iterable[ListedClaim]) -> str:
    return join(f"{claim}: {pool}/{device}" for claim, pool, device, _share in sorted(places)) or "nothing"
