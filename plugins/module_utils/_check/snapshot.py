# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build a Snapshot from the API's objects and the machines' evidence. No I/O."""

from __future__ import annotations

import dataclasses
import typing as t

from .._allocation.claims import Read
from .._contracts import backends as of_others
from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts import model
from .._contracts.gpushare import Card
from .._contracts.hami import NODE_REGISTER
from .._contracts.model import Pod, PodParser, node_of, node_unit, parse_time
from .._contracts.nvidia_plugin import announced
from .._core.types import JsonObject
from .evidence import MAX_GPUS, Reader, describe, evidence_of, kata_of
from .model import DRA, GPUSHARE, HAMI, NVIDIA, UPSTREAM, Node, Nvml, Options, RuntimeClass, Servers, Snapshot
from .parse import shorten


def snapshot(
    nodes: t.Iterable[model.Node],
    pods: t.Iterable[Pod],
    evidence: t.Any,
    options: Options,
    now: int,
    reader: Reader,
    configmaps: t.Any = None,
    configmaps_problem: str = "",
    servers: Servers | None = None,
    by_claims: Read | None = None,
    templates: t.Iterable[str] = (),
) -> Snapshot:
    """Build a snapshot.

    :param nodes: from ``read_nodes``.
    :param pods: from ``read_pods``; finished ones may be left out.
    :param evidence: by node name, as ``evidence_of`` takes it.
    :param now: seconds since 1970.
    :param reader: the one that nodes and pods were read with.
    :param configmaps: of kube-system; None where they can't be read.
    :param servers: None where this collection's servers aren't checked.
    :param by_claims: slices and claims; None where there are none.
    :param templates: of claims, as ``namespace/name``, that gpushare-dra-templates has made.
    """
    in_api = by_claims or Read()
    ours = {claim.key: claim for claim in in_api.claims if claim.ours}
    slices = dra.newest(in_api.slices)
    reader.unreadable += in_api.unreadable[:5]
    evidence_by_node = reader.mapping(evidence, "the evidence")
    by_node: dict[str, list[Pod]] = {}
    pending = []
    for given in pods:
        pod = _with_claims(given, ours)
        if pod.node:
            by_node.setdefault(pod.node, []).append(pod)
        elif not pod.finished:
            pending.append(pod)
    by_name = {node.name: _node(node, by_node, evidence_by_node, slices) for node in nodes}
    maps = None if configmaps is None else reader.mappings(configmaps, "the list of ConfigMaps")
    return Snapshot(
        nodes=tuple(by_name[name] for name in sorted(by_name)),
        pending=tuple(pending),
        unknown_nodes=tuple(sorted(set(evidence_by_node) - set(by_name))),
        configmaps=None if maps is None else dict(_configmap(raw, reader) for raw in maps),
        configmaps_problem=configmaps_problem,
        unreadable=tuple(reader.unreadable),
        now=now,
        options=options,
        orphaned_pods=tuple(pod for name in sorted(set(by_node) - set(by_name)) for pod in by_node[name] if pod.active),
        servers=servers,
        claims=tuple(ours.values()),
        claims_problem=in_api.problem,
        templates=frozenset(templates),
    )


def classes_of(items: t.Iterable[JsonObject]) -> dict[str, RuntimeClass]:
    """Return RuntimeClasses by name; the API server holds them to their schema."""
    classes = {}
    for item in items:
        selector = (item.get("scheduling") or {}).get("nodeSelector") or {}
        classes[str(item["metadata"]["name"])] = RuntimeClass(str(item.get("handler")), dict(selector))
    return classes


def _with_claims(pod: Pod, ours: t.Mapping[str, dra.Claim]) -> Pod:
    """Return a pod with those of its claims that are for cards of this collection's driver."""
    if not pod.uses:
        return pod
    keys = (f"{pod.namespace}/{use.claim}" for use in pod.uses)
    return pod._replace(claims=tuple(ours[key] for key in keys if key in ours))


def _configmap(raw: JsonObject, reader: Reader) -> tuple[str, JsonObject]:
    metadata = reader.mapping(raw.get("metadata"), "a ConfigMap's metadata")
    name = reader.text(metadata.get("name"), "a ConfigMap's name")
    created = parse_time(reader.text(metadata.get("creationTimestamp"), f"ConfigMap {name} creationTimestamp"))
    return name, {"data": reader.strings(raw.get("data"), f"ConfigMap {name} data"), "created": created}


# --------------------------------------------------------------------------- pods


def read_pods(pods: t.Any, reader: Reader) -> list[Pod]:
    """Keep of Pods what the checks need."""
    parse = PodParser()
    read = []
    for raw in reader.mappings(pods, "the list of pods"):
        pod = parse(raw)
        if pod is None:
            reader.reject("a pod", "one with a name", raw)
            continue
        if pod.problem:
            reader.add(f"pod {pod.key}: {pod.problem}")
        read.append(pod)
    return read


# --------------------------------------------------------------------------- nodes


def read_nodes(nodes: t.Any, reader: Reader) -> list[model.Node]:
    """Keep of Nodes what the checks need."""
    read = []
    for raw in reader.mappings(nodes, "the list of nodes"):
        node = node_of(raw)
        if node is None:
            reader.reject("a node", "one with a name", raw)
        else:
            read.append(node)
    return read


def _node(
    known: model.Node,
    by_node: t.Mapping[str, list[Pod]],
    evidence_by_node: JsonObject,
    slices: t.Mapping[str, t.Sequence[dra.Slice]],
) -> Node:
    reader = Reader()
    if known.problem:
        reader.add(known.problem)
    observed = known.name in evidence_by_node
    nvml, kubelet, uuids, source, virtual = evidence_of(evidence_by_node.get(known.name), observed, reader)
    cards, cards_problem = _cards(known, nvml)
    mine = tuple(slices.get(known.name, ()))
    return Node(
        **{**vars(known), "cards": cards, "cards_problem": cards_problem},
        backends=backends(known, bool(mine)),
        unit=_unit(cards, nvml) or next((device.unit for of_node in mine for device in of_node.devices), None),
        pods=tuple(by_node.get(known.name, ())),
        observed=observed,
        source=source,
        uuids=uuids,
        nvml=nvml,
        kubelet=kubelet,
        unreadable=tuple(reader.unreadable),
        slices=mine,
        virtual=virtual,
        kata=kata_of(evidence_by_node.get(known.name), reader),
    )


def backends(node: model.Node, by_claims: bool = False) -> tuple[str, ...]:
    """Return the back ends that a node's resources and annotations belong to.

    A resource of which nothing is allocatable, on a node that was given to another back end, is what kubelet still
    reports of a removed device plugin.

    :param by_claims: it has slices of this collection's driver.
    """
    present = []
    given = of_others.given(node.labels)
    free = node.allocatable.get(contract.RESOURCE_MEMORY, 0)
    left = (by_claims and not free) or of_others.is_left(node.labels, contract.RESOURCE_MEMORY, free)
    if node.announced:
        present.append(GPUSHARE)
    elif not left and (node.capacity.get(contract.RESOURCE_MEMORY) or node.capacity.get(contract.RESOURCE_COUNT)):
        present.append(UPSTREAM)
    if by_claims:
        present.append(DRA)
    amounts = node.allocatable if given in (of_others.GPUSHARE, HAMI) else node.capacity
    if node.annotations.get(NODE_REGISTER):
        present.append(HAMI)
    elif any(announced(amounts).values()):
        present.append(NVIDIA)
    return tuple(present)


def _cards(node: model.Node, nvml: Nvml) -> tuple[tuple[Card, ...], str]:
    """Return gpushare's GPUs, with UUIDs where they are known; and why the node's annotation can't be read."""
    if node.announced and not node.cards_problem:
        return node.cards, ""
    count = node.capacity.get(contract.RESOURCE_COUNT, 0)
    if count > MAX_GPUS:
        return (), f"{contract.RESOURCE_COUNT} is {describe(count)}, more GPUs than a machine has"
    cards = []
    for card in node.cards:
        gpu = nvml.at(card.index)
        cards.append(dataclasses.replace(card, uuid=gpu.uuid if gpu else ""))
    return tuple(cards), shorten(node.cards_problem, 300)


def _unit(cards: t.Sequence[Card], nvml: Nvml) -> str | None:
    """Return the memory unit: by NVML's sizes where they are known, or else estimated from the units."""
    for card in cards:
        gpu = nvml.gpu(card.uuid)
        if not card.memory_mib and gpu is not None and gpu.total_mib:
            for unit in contract.MIB_PER_UNIT:
                if contract.units_of(gpu.total_mib, unit) == card.units:
                    return unit
    return node_unit(cards)
