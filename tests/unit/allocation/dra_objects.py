# SPDX-License-Identifier: GPL-3.0-or-later
"""Slices, claims and pods with claims, as the driver, kube-scheduler and admission write them."""

from __future__ import annotations

import typing as t
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._contracts import claim_templates as templates
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from gpushare.dra import claims, records, slices, specifications
from gpushare.dra.claims import device_name
from gpushare.shared._contracts import gpushare as contract
from gpushare.templates import objects

DRIVER = templates.DRIVER
HOUR_AGO = "2026-11-22T11:00:00Z"


def claim_uid(number: int) -> str:
    return f"c1a1c1a1-2222-4333-8444-0000000000{number:02d}"


def share_id(number: int, at: int) -> str:
    return f"54a4e1d0-{number:04d}-4333-8444-0000000000{at:02d}"


def slices_of(
    node: str, cards: t.Sequence[contract.Card], unit: str = "GiB", limits: str = "", generation: int = 1
) -> list[JsonObject]:
    """Return a node's slices, made by the driver's own code.

    :param limits: whether memory is limited, on each card.
    """
    facts = slices.Facts("615.12", limits={card.uuid: limits for card in cards})
    plan = slices.plan(node, "uid-of-the-node", slices.devices(cards, unit, facts), (), generation - 1)
    return list(plan.create)


def claim(
    number: int,
    shape: templates.Shape,
    cards: t.Sequence[contract.Card] = (),
    node: str = "gpu1",
    unit: str = "GiB",
    namespace: str = "default",
    pods: t.Mapping[str, str] | None = None,
) -> JsonObject:
    """Return the claim of a template, allocated where cards are given.

    :param cards: of each request, or as many as the only request has; of several containers' cards, the first one's for
        each of them, then the second one's.
    :param pods: UIDs by name that it is reserved for; by default ``work-<number>``.
    """
    template = objects.template_of(namespace, templates.name_of(shape), unit)
    assert template is not None
    users = {f"work-{number}": pod_uid(number)} if pods is None else pods
    spec = template["spec"]["spec"]
    found: JsonObject = {
        "metadata": {
            "name": f"work-{number}-gpu-mem-x{number}",
            "namespace": namespace,
            "uid": claim_uid(number),
            "creationTimestamp": HOUR_AGO,
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "controller": True}
                for name, uid in list(users.items())[:1]
            ],
        },
        "spec": spec,
        "status": {},
    }
    if cards:
        named = [request["name"] for request in spec["devices"]["requests"]]
        requests = named * (len(shape.shares) * shape.cards // len(named))
        amounts = [share // shape.cards for share in shape.shares] * shape.cards
        results = [
            {
                "request": request,
                "driver": DRIVER,
                "pool": node,
                "device": device_name(card.uuid),
                "shareID": share_id(number, at),
                "consumedCapacity": {"memory": f"{amount}{objects.SUFFIXES[unit]}"},
            }
            for at, (request, amount, card) in enumerate(zip(requests, amounts, cards, strict=True))
        ]
        found["status"] = {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": uid} for name, uid in users.items()],
        }
    return found


def pod_uid(number: int) -> str:
    return f"11111111-2222-4333-8444-0000000000{number:02d}"


def turned(number: int, shape: templates.Shape, on: str = "gpu1", named: bool = True, **more: t.Any) -> JsonObject:
    """Return a pod that admission has turned: a container for each request, whose resource is 0 now.

    :param on: its node; empty while it waits.
    :param named: its claim has been made.
    """
    statuses = [{"name": templates.POD_CLAIM, "resourceClaimName": f"work-{number}-gpu-mem-x{number}"}]
    return {
        "metadata": {
            "name": f"work-{number}",
            "namespace": "default",
            "uid": pod_uid(number),
            "creationTimestamp": HOUR_AGO,
            **more,
        },
        "spec": {
            **({"nodeName": on} if on else {}),
            "schedulerName": "default-scheduler",
            "resourceClaims": [
                {"name": templates.POD_CLAIM, "resourceClaimTemplateName": templates.name_of(shape)},
            ],
            "containers": [
                {
                    "name": f"main-{at}",
                    "image": "registry.example/work:1",
                    "resources": {
                        "claims": [
                            {"name": templates.POD_CLAIM, "request": f"{templates.REQUEST}{at}{card}"}
                            for card in _of_cards(shape)
                        ],
                    },
                }
                for at in range(len(shape.shares))
            ],
        },
        "status": {
            "phase": "Running" if on else "Pending",
            **({"startTime": HOUR_AGO} if on else {}),
            **({"resourceClaimStatuses": statuses} if named else {}),
        },
    }


def _of_cards(shape: templates.Shape) -> list[str]:
    several = min(shape.cards, len(shape.shares)) > 1
    return [f"-{card}" for card in range(shape.cards)] if several else [""]


def record_of(made: JsonObject, cards: t.Sequence[contract.Card], node: str = "gpu1", unit: str = "GiB") -> JsonObject:
    """Return the record of an allocated claim as JSON, made by the driver's own code; its cards are injected by CDI."""
    parsed = claims.parse(made, made["metadata"]["uid"], node)
    injected = {card.uuid: f"nvidia.com/gpu={card.uuid}" for card in cards}
    made_record = specifications.record(
        parsed, cards, node, unit, injected, lambda mib: {"NVIDIA_GPU_MEMORY_LIMIT": str(max(mib.values()))}
    )
    return t.cast(JsonObject, records._encode(made_record))


def prepare(made: JsonObject, cards: t.Sequence[contract.Card], root: Path, cdi: Path, unit: str = "GiB") -> None:
    """Write a claim's record and specification, as the driver does.

    :param root: kubelet's folder.
    :param cdi: the folder of CDI specifications.
    """
    record = records._decode(record_of(made, cards, unit=unit))
    folder = root / "plugins" / DRIVER / "claims"
    store = records.Records(folder)
    folder.mkdir(parents=True, exist_ok=True)
    store.put(record)
    specifications.Specifications(cdi).put(record.claim.uid, record.specification)
