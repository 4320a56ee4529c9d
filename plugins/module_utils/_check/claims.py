# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks D1 to D9 and D11 of claims: slices, pods, and what the DRA driver and kubelet have. No I/O."""

from __future__ import annotations

import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts.model import VISIBLE, Pod
from .catalog_claims import WAITING_SECONDS
from .gpushare_pods import check_usage
from .grants import is_own
from .model import Gpu, ListedClaim, Node, Record, Servers, Snapshot, Specification
from .parse import join, plural, shorten
from .result import CheckResult

# Each source rounds a GPU's memory to MiB.
ROUNDING_MIB = 1
TEMPLATES_LABEL = ("app.kubernetes.io/name", "gpushare-dra-templates")


def cards_match_nvml(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D1: the cards in the node's slices are NVML's."""
    result.count(len(node.devices))
    existing = [gpu.uuid for gpu in node.nvml.gpus] or list(node.uuids)
    if node.nvml.problem and not node.uuids:
        result.unknown("no_data", why=node.nvml.problem)
        return
    known = {device.uuid for device in node.devices}
    planes = {"api": join(sorted(known)) or "no card", "nvml": join(existing) or "no GPU"}
    divided = {gpu.uuid for gpu in node.nvml.gpus if gpu.mig_mode == "enabled"}
    for uuid in sorted(set(existing) - known - divided):
        result.fail("not_in_slice", uuid=uuid, key=uuid, **planes)
    for device in node.devices:
        place = {"card": device.index, "uuid": device.uuid}
        if device.uuid not in existing:
            if device.unhealthy is None and node.nvml.unidentified:
                result.unknown("unidentified", why=node.nvml.unidentified, **place)
            elif device.unhealthy is None:
                result.fail("not_on_machine", **place, **planes)
            continue
        gpu = node.nvml.gpu(device.uuid)
        if gpu is not None:
            _check_size(device, gpu, snapshot.servers, result)


def _check_size(device: dra.Device, gpu: Gpu, servers: Servers | None, result: CheckResult) -> None:
    place = {"card": device.index, "uuid": device.uuid}
    if gpu.total_mib is None:
        result.unknown("size_unknown", why=gpu.problem or "NVML doesn't report it", **place)
        return
    unit_mib = contract.MIB_PER_UNIT[device.unit]
    reserved = (gpu.reserved_mib or 0) + (servers.reserved_mib if servers else 0)
    expected = max(0, gpu.total_mib - reserved) // unit_mib * unit_mib
    details = {
        **place,
        "offered": device.memory_mib,
        "mib": gpu.total_mib,
        "expected": expected,
        "api": f"{device.memory_mib} MiB in units of {unit_mib} MiB",
        "nvml": f"{gpu.total_mib} MiB, {reserved} MiB of them reserved",
    }
    if device.memory_mib > gpu.total_mib + ROUNDING_MIB or device.memory_mib % unit_mib:
        result.fail("size_differs", **details)
    elif device.memory_mib > expected + ROUNDING_MIB:
        result.warn("reserve_shared", **details)
    elif device.memory_mib < expected - ROUNDING_MIB:
        result.warn("smaller", **details)


def pool_is_complete(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D2: the node's slices are one complete pool, which kube-scheduler allocates from."""
    result.count(len(node.slices))
    api = join(
        f"{pool_slice.name}: generation {pool_slice.generation}, {plural(len(pool_slice.devices), 'card')}"
        for pool_slice in node.slices
    )
    count, there = node.slices[0].count, len(node.slices)
    if there != count:
        result.fail("incomplete", there=there, count=count, key="count", api=api)
    names = [device.name for device in node.devices]
    for name in sorted({repeated for repeated in names if names.count(repeated) > 1}):
        result.fail("named_twice", device=name, key=name, api=api)
    for pool_slice in node.slices:
        if pool_slice.pool != node.name:
            result.fail("other_pool", pool=pool_slice.pool, key=pool_slice.name, api=api)


def claims_fit(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D3: what claims have of each card is no more than its memory."""
    result.count(len(node.devices))
    held: dict[str, list[tuple[dra.Claim, int | None]]] = {device.name: [] for device in node.devices}
    for claim in snapshot.claims:
        for part in claim.parts:
            if part.pool == node.name:
                held.setdefault(part.device, []).append((claim, part.mib))
    sizes = {device.name: device for device in node.devices}
    for name, parts in held.items():
        device = sizes.get(name)
        place = {"card": device.index if device else None, "uuid": node.uuid_of(name)}
        shown = join(f"{claim.key} {mib} MiB" for claim, mib in parts)
        for claim, mib in parts:
            if mib is None:
                result.fail("no_amount", claim=claim.key, key=claim.key, api=shown, **place)
        total = sum(mib or 0 for _claim, mib in parts)
        if device is None:
            result.fail(
                "unknown_card", device=name, key=name, claims=join(claim.key for claim, _mib in parts), api=shown
            )
        elif total > device.memory_mib:
            by_claim: dict[str, int] = {}
            for claim, mib in parts:
                by_claim[claim.uid] = by_claim.get(claim.uid, 0) + (mib or 0)
            numbers = {"held": total, "offered": device.memory_mib, "parts": by_claim, "most": device.memory_mib}
            result.fail("overcommitted", api=shown, **numbers, **place)


def pods_have_claims(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D4: each running pod with a share has a claim that is allocated on its node, and reserved for it."""
    for pod in node.pods:
        if not (pod.steady and pod.asks_by_claim):
            continue
        known = {claim.name: claim for claim in pod.claims}
        for use in pod.uses:
            claim = known.get(use.claim)
            if claim is None and not use.units():
                # Another driver's.
                continue
            result.count()
            details = {"pod": pod, "claim": use.claim or f"of template {use.template}", "key": use.name}
            if claim is None:
                result.fail("missing", api="no such ResourceClaim", **details)
                continue
            details["api"] = (
                join(f"{part.pool}/{part.device} {part.mib} MiB" for part in claim.parts) or "not allocated"
            )
            if not claim.parts:
                result.fail("not_allocated", **details)
            elif pod.uid not in {user.uid for user in claim.users}:
                details["api"] = f"reserved for {join(user.name for user in claim.users) or 'no pod'}"
                result.fail("not_reserved", **details)
            elif any(part.pool != node.name for part in claim.parts):
                result.fail("other_node", other=join({part.pool for part in claim.parts}), **details)


def claims_are_respected(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D7: no pod uses more of a card than its claims, and the driver limits it to that where that is promised."""
    mine = [pod for pod in node.pods if pod.active and pod.claimed()]
    if result.without_data(mine, node.nvml.problem):
        return
    limits = {device.name: device.limit for device in node.devices}
    for pod in mine:
        whole, parts = pod.claimed(), pod.claimed(apart=True)
        for pool, device in whole:
            gpu, promise = node.nvml.gpu(node.uuid_of(device)), limits.get(device) or "none"
            if pool == node.name and gpu is not None:
                held = parts if promise == contract.LIMIT_ENFORCED else whole
                check_usage(pod, gpu, held[pool, device], promise, result)


def claims_have_pods(snapshot: Snapshot, result: CheckResult) -> None:
    """Check D8: each claim that holds memory has a pod, and each waiting pod gets its claim."""
    if snapshot.claims_problem:
        result.unknown("no_data", why=snapshot.claims_problem)
        return
    pods = [*snapshot.pending, *snapshot.orphaned_pods, *(pod for node in snapshot.nodes for pod in node.pods)]
    alive = {uid for pod in pods if not pod.finished for uid in pod.uids}
    for claim in snapshot.claims:
        result.count()
        users = [user for user in claim.users if user.uid in alive]
        where = claim.parts[0].pool if claim.parts else ""
        details = {"node": where, "claim": claim.key, "key": f"{claim.key} {claim.uid}"}
        details["api"] = f"reserved for {join(user.name for user in claim.users) or 'no pod'}"
        if claim.terminating:
            continue
        if claim.parts and not users:
            # Between its allocation and its reservation there is a moment.
            result.fail("unused", **details)
        elif claim.owner is not None and claim.owner.uid not in alive and not claim.parts:
            result.fail("owner_gone", owner=claim.owner.name, **details)
    _check_waiting(snapshot, pods, result)


def _check_waiting(snapshot: Snapshot, pods: t.Sequence[Pod], result: CheckResult) -> None:
    named = {f"{_namespace(pod)}/{use.template}" for pod in pods for use in pod.uses}
    for pod in snapshot.pending:
        for use in pod.uses:
            if use.claim or not use.units() or pod.created is None or snapshot.now - pod.created < WAITING_SECONDS:
                continue
            result.count()
            template = f"{_namespace(pod)}/{use.template}"
            cause = "claim_not_made" if template in snapshot.templates else "template_missing"
            result.fail(
                cause, pod=pod, template=template, key=use.name, api=f"created {snapshot.now - pod.created} s ago"
            )
    key, value = TEMPLATES_LABEL
    running = [pod for pod in pods if pod.phase == "Running" and is_own(pod, snapshot.options)]
    sweeps = any(pod.labels.get(key) == value for pod in running)
    left = sorted(snapshot.templates - named)
    if left and not sweeps:
        result.warn("templates_left", templates=join(left), number=len(left), key="templates", api=join(left))


def _namespace(pod: Pod) -> str:
    return pod.key.partition("/")[0]


def unhealthy_cards_are_tainted(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check D9: a card that NVML can't use has the taint that keeps pods away, and no other lacks pods for it."""
    if node.nvml.problem:
        result.unknown("no_data", why=node.nvml.problem)
        return
    for device in node.devices:
        result.count()
        gpu = node.nvml.gpu(device.uuid)
        if gpu is None:
            # D1 reports a card that is offered and isn't there.
            continue
        details = {"gpu": gpu, "why": gpu.problem, "code": device.unhealthy}
        details["api"] = f"taint {dra.UNHEALTHY}={device.unhealthy}" if device.unhealthy else "no taint"
        is_divided = gpu.mig_mode == "enabled"
        details["nvml"] = gpu.problem or ("MIG is on" if is_divided else "no problem")
        # The codes of what is over as soon as NVML says so.
        gone = {contract.Reason.CARD_LOST.value: not gpu.problem, contract.Reason.MIG_ENABLED.value: not is_divided}
        if gpu.problem and device.unhealthy is None:
            result.fail("not_tainted", **details)
        elif is_divided and device.unhealthy is None:
            result.fail("divided", **details)
        elif gone.get(device.unhealthy or "") and not gpu.problem:
            result.warn("still_tainted", **details)
    for pod in node.pods:
        for device in node.devices:
            if device.unhealthy is not None and pod.active and (node.name, device.name) in pod.claimed():
                place = {"card": device.index, "uuid": device.uuid, "pod": pod, "code": device.unhealthy}
                result.warn("holds_unhealthy", api=f"taint {dra.UNHEALTHY}={device.unhealthy}", **place)


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
    booked: dict[str, int] = {}
    for share in record.shares:
        booked[share.device] = booked.get(share.device, 0) + (share.mib or 0)
    return booked


def _report_unbooked(
    node: Node, record: Record, claim: dra.Claim | None, device: str, mib: int, result: CheckResult
) -> None:
    pods = join(
        name for name, places in sorted(node.kubelet.claimed.items()) if record.key in {place[0] for place in places}
    )
    details = {"claim": record.key, "key": record.uid, "mib": mib, "pods": pods or "no pod that kubelet lists"}
    details |= {"card": _index(node, device), "uuid": node.uuid_of(device)}
    details["kubelet"] = f"record {record.uid}: {mib} MiB; listed for {pods or 'no pod'}"
    if claim is None:
        result.fail("claim_gone", api=f"no ResourceClaim has the UID {record.uid}", **details)
    else:
        api = join(f"{part.pool}/{part.device} {part.mib} MiB" for part in claim.parts) or "not allocated"
        result.fail("not_allocated", api=api, **details)


def _check_card(node: Node, device: str, parts: t.Mapping[str, int], unbooked: bool, result: CheckResult) -> None:
    """Compare what is prepared of a card with its memory, and its taint with what isn't allocated."""
    offered = next((announced for announced in node.devices if announced.name == device), None)
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
    return next((offered.index for offered in node.devices if offered.name == device), None)


def _check_record(node: Node, pod: Pod, claim: dra.Claim, record: Record | None, result: CheckResult) -> None:
    expected = sorted((part.request, part.device, part.share, part.mib or 0) for part in claim.parts)
    details = {"pod": pod, "claim": claim.key, "key": f"record {claim.name}", "api": _shown(expected)}
    if record is None:
        result.fail("not_recorded", kubelet="no record", **details)
    elif record.problem:
        result.fail("record_unreadable", why=record.problem, **details)
    else:
        recorded = sorted((share.request, share.device, share.share, share.mib or 0) for share in record.shares)
        if recorded != expected:
            result.fail("record_differs", kubelet=_shown(recorded), **details)


def _shown(shares: t.Iterable[tuple[str, str, str, int]]) -> str:
    return join(f"{request}: {mib} MiB of {shorten(device)}" for request, device, _share, mib in shares) or "nothing"


def _check_specification(
    node: Node, pod: Pod, claim: dra.Claim, specification: Specification | None, result: CheckResult
) -> None:
    details = {"pod": pod, "claim": claim.key, "key": f"specification {claim.name}"}
    if specification is None:
        result.fail("not_specified", kubelet="no specification", **details)
        return
    if specification.problem:
        result.fail("specification_unreadable", why=specification.problem, **details)
        return
    details["kubelet"] = join(f"{VISIBLE}={shorten(env.get(VISIBLE, ''), 100)}" for env in specification.envs)
    if not specification.recorded:
        result.fail("specification_differs", **details)
        return
    unit_mib = node.unit_mib
    for part, variables in zip(claim.parts, specification.envs):
        own = claim.mib(part.request)
        cards = {node.uuid_of(device) for _pool, device in own}
        visible = variables.get(VISIBLE, "")
        units = variables.get(contract.CONTAINER_UNITS, "")
        if visible != BY_CDI and set(visible.split(",")) != cards:
            result.fail("other_card", visible=shorten(visible), cards=join(sorted(cards)), **details)
        elif unit_mib and units != str(sum(own.values()) // unit_mib):
            result.fail("other_units", units=shorten(units), expected=sum(own.values()) // unit_mib, **details)
    if len(specification.envs) != len(claim.parts):
        result.fail("other_card", visible=plural(len(specification.envs), "device"), cards=len(claim.parts), **details)


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
        if listed and not any(place[3] for place in listed):
            # Before 1.36 kubelet lists no IDs of shares.
            expected = {(*place[:3], "") for place in expected}
        details = {"pod": pod, "api": _places(expected), "kubelet": _places(listed)}
        if not listed and expected:
            result.fail("not_listed", **details)
        elif listed != expected:
            result.fail("differs", **details)
    known = {pod.key for pod in node.pods if pod.active}
    for key in sorted(set(node.kubelet.claimed) - known):
        places = node.kubelet.claimed[key]
        result.warn("unknown_pod", key=key, name=key, api="no such pod is on the node", kubelet=_places(places))


def _expected(pod: Pod) -> set[ListedClaim]:
    """Return what PodResources lists of a pod: the claims of its containers, without those of init containers."""
    containers = {container.name for container in pod.containers if not container.init}
    places: set[ListedClaim] = set()
    for use in pod.uses:
        claim = next((own for own in pod.claims if own.name == use.claim), None)
        for container, request in use.containers:
            if claim is not None and container in containers:
                parts = [part for part in claim.parts if request in ("", part.request)]
                places |= {(claim.key, part.pool, part.device, part.share) for part in parts}
    return places


def _places(places: t.Iterable[ListedClaim]) -> str:
    return join(f"{claim}: {pool}/{device}" for claim, pool, device, _share in sorted(places)) or "nothing"
