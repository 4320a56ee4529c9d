# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build a Snapshot from the API's objects and the machines' evidence, which may be JSON of any shape. No I/O."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from .._allocation.claims import Read
from .._allocation.nodes import node_unit
from .._contracts import backends as of_others
from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts.gpushare import Card, ContractError
from .._contracts.hami import NODE_REGISTER
from .._contracts.nvidia_plugin import announced, mount_names_cards
from .._core.types import JsonObject
from .evidence import MAX_GPUS, kubelet_of, nvml_of
from .model import DRA, GPUSHARE, HAMI, NVIDIA, UPSTREAM, Container, Node, Nvml, Options, Pod, Servers, Snapshot
from .parse import Reader, describe, parse_time, shorten

TAINT = ("key", "value", "effect")
STATIC_HASH = "kubernetes.io/config.hash"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
# NVIDIA's container toolkit gives every card to a container with this variable and without the other one.
LEGACY = "CUDA_VERSION"
# No other environment variables are read.
VARIABLES = (VISIBLE, LEGACY, "CUDA_DISABLE_CONTROL", "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_GPU_MEMORY_LIMIT")


def snapshot(
    nodes: t.Any,
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

    :param nodes: Nodes, as the API returns them.
    :param pods: from ``read_pods``; finished ones may be left out.
    :param evidence: by node name, an object with ``nvml``, ``kubelet`` and ``problem``, or its JSON text; or a
        list of the UUIDs of the machine's GPUs.
    :param now: seconds since 1970.
    :param reader: the one the pods were read with.
    :param configmaps: of kube-system; None where they can't be read.
    :param servers: None where this collection's servers aren't checked.
    :param by_claims: slices and claims; None where there are none.
    :param templates: of claims, as ``namespace/name``, that gpushare-dra-templates has made.
    """
    in_api = by_claims or Read()
    ours = {one.key: one for one in in_api.claims if one.ours}
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
    found: dict[str, Node] = {}
    for raw in reader.mappings(nodes, "the list of nodes"):
        node = _node(raw, by_node, evidence_by_node, slices, reader)
        if node is not None:
            found[node.name] = node
    maps = None if configmaps is None else reader.mappings(configmaps, "the list of ConfigMaps")
    return Snapshot(
        nodes=tuple(found[name] for name in sorted(found)),
        pending=tuple(pending),
        unknown_nodes=tuple(sorted(set(evidence_by_node) - set(found))),
        configmaps=None if maps is None else dict(_configmap(one, reader) for one in maps),
        configmaps_problem=configmaps_problem,
        unreadable=tuple(reader.unreadable),
        now=now,
        options=options,
        orphaned_pods=tuple(one for name in sorted(set(by_node) - set(found)) for one in by_node[name] if one.active),
        servers=servers,
        claims=tuple(ours.values()),
        claims_problem=in_api.problem,
        templates=frozenset(templates),
    )


def _with_claims(pod: Pod, ours: t.Mapping[str, dra.Claim]) -> Pod:
    """Return a pod with those of its claims that are for cards of this collection's driver."""
    if not pod.uses:
        return pod
    namespace = pod.key.partition("/")[0]
    found = (ours.get(f"{namespace}/{one.claim}") for one in pod.uses)
    return dataclasses.replace(pod, claims=tuple(one for one in found if one is not None))


def _configmap(raw: JsonObject, reader: Reader) -> tuple[str, JsonObject]:
    metadata = reader.mapping(raw.get("metadata"), "a ConfigMap's metadata")
    name = reader.text(metadata.get("name"), "a ConfigMap's name")
    created = parse_time(reader.text(metadata.get("creationTimestamp"), f"ConfigMap {name} creationTimestamp"))
    return name, {"data": reader.strings(raw.get("data"), f"ConfigMap {name} data"), "created": created}


# --------------------------------------------------------------------------- pods


def read_pods(pods: t.Any, reader: Reader) -> list[Pod]:
    """Keep of Pods what the checks need."""
    found = (pod_of(raw, reader) for raw in reader.mappings(pods, "the list of pods"))
    return [pod for pod in found if pod is not None]


def pod_of(raw: JsonObject, reader: Reader) -> Pod | None:
    """Parse a pod; None where it has no name."""
    metadata = reader.mapping(raw.get("metadata"), "a pod's metadata")
    namespace, name = (reader.text(metadata.get(key), f"a pod's {key}") for key in ("namespace", "name"))
    if not name:
        reader.reject("a pod", "one with a name", raw)
        return None
    where = f"pod {namespace}/{name}"
    spec, status = (
        reader.mapping(raw.get("spec"), f"{where} spec"),
        reader.mapping(raw.get("status"), f"{where} status"),
    )
    annotations = reader.strings(metadata.get("annotations"), f"{where} annotation")
    labels = reader.strings(metadata.get("labels"), f"{where} label")
    rows = {
        field: reader.mappings(spec.get(field), f"{where} {field}")
        for field in ("initContainers", "containers", "ephemeralContainers")
    }
    kept = {field: [_container_json(one, reader, where) for one in rows[field]] for field in rows}
    uid = reader.text(metadata.get("uid"), f"{where} uid")
    plain: JsonObject = {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": uid,
            "annotations": annotations,
            **({"deletionTimestamp": "set"} if metadata.get("deletionTimestamp") else {}),
        },
        "spec": {"nodeName": reader.text(spec.get("nodeName"), f"{where} nodeName"), **kept},
        "status": {
            "phase": reader.text(status.get("phase"), f"{where} phase"),
            "initContainerStatuses": [
                _init_status(one, reader, where)
                for one in reader.mappings(status.get("initContainerStatuses"), f"{where} initContainerStatuses")
            ],
        },
    }
    return Pod(
        json=plain,
        key=contract.pod_key(plain),
        uid=uid,
        uids=frozenset(one for one in (uid, annotations.get(STATIC_HASH, "")) if one),
        node=contract.pod_node(plain),
        phase=str(plain["status"]["phase"]),
        finished=contract.finished(plain),
        terminating=contract.terminating(plain),
        started=bool(reader.text(status.get("startTime"), f"{where} startTime")),
        created=parse_time(reader.text(metadata.get("creationTimestamp"), f"{where} creationTimestamp")),
        scheduler=reader.text(spec.get("schedulerName"), f"{where} schedulerName"),
        runtime_class=reader.text(spec.get("runtimeClassName"), f"{where} runtimeClassName"),
        uses=_uses({"spec": spec, "status": status}, reader, where),
        bypassed_scheduler=_bypassed_scheduler(metadata.get("managedFields")),
        annotations=annotations,
        labels=labels,
        containers=tuple(
            _container_of(one, raw_one, field == "initContainers", reader, where)
            for field in rows
            for one, raw_one in zip(kept[field], rows[field])
        ),
    )


def _uses(pod: JsonObject, reader: Reader, where: str) -> tuple[dra.PodClaim, ...]:
    """Return a pod's resource claims."""
    try:
        return dra.pod_claims(pod)
    except ContractError:
        reader.reject(f"{where} resourceClaims", "a list of claims", pod["spec"].get("resourceClaims"))
        return ()


def _bypassed_scheduler(managed: t.Any) -> bool:
    """Return whether the creator set spec.nodeName: managedFields has an owner of it, which a binding doesn't leave."""
    for entry in managed if isinstance(managed, list) else []:
        fields = entry.get("fieldsV1") if isinstance(entry, dict) else None
        spec = fields.get("f:spec") if isinstance(fields, dict) else None
        if isinstance(spec, dict) and "f:nodeName" in spec:
            return True
    return False


def _init_status(raw: JsonObject, reader: Reader, where: str) -> JsonObject:
    """Return an init container's name and exit code."""
    state = reader.mapping(raw.get("state"), f"{where} state")
    ended = reader.mapping(state.get("terminated"), f"{where} terminated")
    code = ended.get("exitCode")
    return {
        "name": reader.text(raw.get("name"), f"{where} initContainerStatuses name"),
        "state": {"terminated": {"exitCode": code}} if isinstance(code, int) else {},
    }


def _container_json(raw: JsonObject, reader: Reader, where: str) -> JsonObject:
    """Return the part of a container that the contracts need."""
    resources = reader.mapping(raw.get("resources"), f"{where} resources")
    return {
        "name": reader.text(raw.get("name"), f"{where} container name"),
        "restartPolicy": reader.text(raw.get("restartPolicy"), f"{where} restartPolicy"),
        "resources": {
            field: reader.quantities(resources.get(field), f"{where} {field}") for field in ("limits", "requests")
        },
    }


def _container_of(kept: JsonObject, raw: JsonObject, init: bool, reader: Reader, where: str) -> Container:
    env: dict[str, str | None] = {}
    for one in reader.mappings(raw.get("env"), f"{where} env"):
        name = one.get("name")
        if name in VARIABLES:
            value = one.get("value")
            # Without a value it is empty; a valueFrom is resolved in the container only.
            env[name] = value if isinstance(value, str) else None if one.get("valueFrom") else ""
    security = reader.mapping(raw.get("securityContext"), f"{where} securityContext")
    paths = [
        reader.text(one.get("mountPath"), f"{where} mountPath")
        for one in reader.mappings(raw.get("volumeMounts"), f"{where} volumeMounts")
    ]
    claims = reader.mappings(
        reader.mapping(raw.get("resources"), f"{where} resources").get("claims"), f"{where} claims"
    )
    both = {**kept["resources"]["requests"], **kept["resources"]["limits"]}
    return Container(
        name=kept["name"],
        requests={name: contract.quantity(value) for name, value in both.items()},
        env=env,
        device_mounts=tuple(one for one in paths if mount_names_cards(one)),
        privileged=security.get("privileged") is True,
        init=init and kept["restartPolicy"] != "Always",
        claims=frozenset(reader.text(one.get("name"), f"{where} claims name") for one in claims),
    )


# --------------------------------------------------------------------------- nodes


def _node(
    raw: JsonObject,
    by_node: t.Mapping[str, list[Pod]],
    evidence_by_node: JsonObject,
    slices: t.Mapping[str, t.Sequence[dra.Slice]],
    cluster: Reader,
) -> Node | None:
    reader = Reader()
    metadata = reader.mapping(raw.get("metadata"), "metadata")
    name = reader.text(metadata.get("name"), "its name")
    if not name:
        cluster.reject("a node", "one with a name", raw)
        return None
    status = reader.mapping(raw.get("status"), "status")
    annotations = reader.strings(metadata.get("annotations"), "annotation")
    labels = reader.strings(metadata.get("labels"), "label")
    taints = reader.mappings(reader.mapping(raw.get("spec"), "spec").get("taints"), "taints")
    plain: JsonObject = {
        "metadata": {"name": name, "annotations": annotations, "labels": labels},
        "spec": {"taints": [{key: reader.text(one.get(key), f"taint {key}") for key in TAINT} for one in taints]},
        "status": {field: reader.quantities(status.get(field), field) for field in ("capacity", "allocatable")},
    }
    given = evidence_by_node.get(name)
    observed = name in evidence_by_node
    evidence = {} if isinstance(given, list) else reader.mapping(_parse_evidence(given, reader), "its evidence")
    problem = reader.text(evidence.get("problem"), "its evidence's problem")
    absent = problem or ("" if observed else "its machine wasn't observed in this run")
    nvml = nvml_of(evidence.get("nvml"), reader, absent)
    kubelet = kubelet_of(evidence.get("kubelet"), reader, absent)
    cards, cards_problem = _cards(plain, annotations, nvml)
    mine = tuple(slices.get(name, ()))
    return Node(
        json=plain,
        name=name,
        labels=labels,
        annotations=annotations,
        ready=_ready(reader, status),
        backends=backends(plain, bool(mine)),
        cards=cards,
        cards_problem=cards_problem,
        unit=_unit(cards, nvml) or next((device.unit for one in mine for device in one.devices), None),
        pods=tuple(by_node.get(name, ())),
        observed=observed,
        uuids=tuple(reader.texts(given, "its evidence")) if isinstance(given, list) else (),
        nvml=nvml,
        kubelet=kubelet,
        unreadable=tuple(reader.unreadable),
        slices=mine,
    )


def _parse_evidence(evidence: t.Any, reader: Reader) -> t.Any:
    """Parse a machine's evidence, which may be JSON text."""
    if not isinstance(evidence, str):
        return evidence
    try:
        return json.loads(evidence)
    except (ValueError, RecursionError):
        reader.reject("its evidence", "JSON", evidence)
        return None


def _ready(reader: Reader, status: JsonObject) -> str:
    """Return the node's condition Ready: True, False or Unknown; empty where it has none."""
    for one in reader.mappings(status.get("conditions"), "conditions"):
        if one.get("type") == "Ready":
            return reader.text(one.get("status"), "condition Ready")
    return ""


def backends(node: JsonObject, by_claims: bool = False) -> tuple[str, ...]:
    """Return the back ends that a node's resources and annotations belong to.

    A resource of which nothing is allocatable, on a node that was given to another back end, is what kubelet still
    reports of a removed device plugin.

    :param by_claims: it has slices of this collection's driver.
    """
    annotations, found = node["metadata"]["annotations"], []
    labels = node["metadata"].get("labels")
    given = of_others.given(labels)
    free = contract.node_resource(node, contract.RESOURCE_MEMORY, "allocatable")
    left = (by_claims and not free) or of_others.is_left(labels, contract.RESOURCE_MEMORY, free)
    if annotations.get(contract.NODE_CARDS):
        found.append(GPUSHARE)
    elif not left and (
        contract.node_resource(node, contract.RESOURCE_MEMORY) or contract.node_resource(node, contract.RESOURCE_COUNT)
    ):
        found.append(UPSTREAM)
    if by_claims:
        found.append(DRA)
    if annotations.get(NODE_REGISTER):
        found.append(HAMI)
    elif any(announced(node, "allocatable" if given in (of_others.GPUSHARE, HAMI) else "capacity").values()):
        found.append(NVIDIA)
    return tuple(found)


def _cards(node: JsonObject, annotations: t.Mapping[str, str], nvml: Nvml) -> tuple[tuple[Card, ...], str]:
    """Return gpushare's GPUs, with UUIDs where they are known; and why the node's annotation can't be read."""
    text, problem = annotations.get(contract.NODE_CARDS), ""
    if text:
        try:
            return tuple(contract.cards_from_annotation(text)), ""
        except ContractError as error:
            problem = shorten(str(error), 300)
    count = contract.node_resource(node, contract.RESOURCE_COUNT)
    if count > MAX_GPUS:
        return (), f"{contract.RESOURCE_COUNT} is {describe(count)}, more GPUs than a machine has"
    cards = []
    for card in contract.node_cards({**node, "metadata": {}}):
        gpu = nvml.at(card.index)
        cards.append(dataclasses.replace(card, uuid=gpu.uuid if gpu else ""))
    return tuple(cards), problem


def _unit(cards: t.Sequence[Card], nvml: Nvml) -> str | None:
    """Return the memory unit: by NVML's sizes where they are known, or else estimated from the units."""
    for card in cards:
        gpu = nvml.gpu(card.uuid)
        if not card.memory_mib and gpu is not None and gpu.total_mib:
            for unit in contract.MIB_PER_UNIT:
                if contract.units_of(gpu.total_mib, unit) == card.units:
                    return unit
    return node_unit(list(cards))
