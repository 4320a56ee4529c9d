# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""One moment of a cluster in types, from plain JSON that may be anything. No I/O."""

from __future__ import annotations

import dataclasses
import json
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import node_unit
from ansible_collections.kubegpu.share.plugins.module_utils._check_evidence import MOST_CARDS, kubelet_of, nvml_of
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import (
    GPUSHARE,
    HAMI,
    NVIDIA,
    UPSTREAM,
    Container,
    Node,
    Nvml,
    Options,
    Pod,
    Snapshot,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader, kind, seconds, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, ContractError, Json
from ansible_collections.kubegpu.share.plugins.module_utils._hami import NODE_REGISTER
from ansible_collections.kubegpu.share.plugins.module_utils._nvidia_plugin import announced

STATIC_HASH = "kubernetes.io/config.hash"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
# Environments are read for these alone; a pod's other variables are nobody's business.
VARIABLES = (VISIBLE, "CUDA_DISABLE_CONTROL", "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_GPU_MEMORY_LIMIT")


def snapshot(
    nodes: t.Any,
    pods: t.Iterable[Pod],
    evidence: t.Any,
    options: Options,
    now: int,
    reader: Reader,
    configmaps: t.Any = None,
    configmaps_problem: str = "",
) -> Snapshot:
    """Read everything else, and put it together.

    :param nodes: Nodes as the API has them.
    :param pods: as ``read_pods`` gives them; finished ones may be left out.
    :param evidence: by node's name, ``nvml``, ``kubelet`` and ``problem``; of each an object, or that as JSON text.
    :param now: seconds since 1970.
    :param reader: that the pods were read with.
    :param configmaps: of kube-system; None where nobody may read them.
    """
    seen = reader.obj(evidence, "the evidence")
    by_node: dict[str, list[Pod]] = {}
    waiting = []
    for pod in pods:
        if pod.node:
            by_node.setdefault(pod.node, []).append(pod)
        elif not pod.finished:
            waiting.append(pod)
    found: dict[str, Node] = {}
    for raw in reader.objs(nodes, "the list of nodes"):
        node = _node(raw, by_node, seen, reader)
        if node is not None:
            found[node.name] = node
    maps = None if configmaps is None else reader.objs(configmaps, "the list of ConfigMaps")
    return Snapshot(
        nodes=tuple(found[name] for name in sorted(found)),
        waiting=tuple(waiting),
        strangers=tuple(sorted(set(seen) - set(found))),
        configmaps=None if maps is None else dict(_configmap(one, reader) for one in maps),
        configmaps_problem=configmaps_problem,
        damage=tuple(reader.damage),
        now=now,
        options=options,
        homeless=tuple(one for name in sorted(set(by_node) - set(found)) for one in by_node[name] if one.active),
    )


def _configmap(raw: Json, reader: Reader) -> tuple[str, Json]:
    metadata = reader.obj(raw.get("metadata"), "a ConfigMap's metadata")
    name = reader.text(metadata.get("name"), "a ConfigMap's name")
    created = seconds(reader.text(metadata.get("creationTimestamp"), f"ConfigMap {name} creationTimestamp"))
    return name, {"data": reader.strings(raw.get("data"), f"ConfigMap {name} data"), "created": created}


# --------------------------------------------------------------------------- pods


def read_pods(pods: t.Any, reader: Reader) -> list[Pod]:
    """Of Pods as the API has them what the checks ask for, which is little."""
    found = (pod_of(raw, reader) for raw in reader.objs(pods, "the list of pods"))
    return [pod for pod in found if pod is not None]


def pod_of(raw: Json, reader: Reader) -> Pod | None:
    """A pod; None where it has no name."""
    metadata = reader.obj(raw.get("metadata"), "a pod's metadata")
    namespace, name = (reader.text(metadata.get(key), f"a pod's {key}") for key in ("namespace", "name"))
    if not name:
        reader.bad("a pod", "one with a name", raw)
        return None
    where = f"pod {namespace}/{name}"
    spec, status = reader.obj(raw.get("spec"), f"{where} spec"), reader.obj(raw.get("status"), f"{where} status")
    annotations = reader.strings(metadata.get("annotations"), f"{where} annotation")
    labels = reader.strings(metadata.get("labels"), f"{where} label")
    kept = {
        field: [_container(one, reader, where) for one in reader.objs(spec.get(field), f"{where} {field}")]
        for field in ("initContainers", "containers")
    }
    uid = reader.text(metadata.get("uid"), f"{where} uid")
    plain: Json = {
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
                _ended(one, reader, where)
                for one in reader.objs(status.get("initContainerStatuses"), f"{where} initContainerStatuses")
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
        created=seconds(reader.text(metadata.get("creationTimestamp"), f"{where} creationTimestamp")),
        scheduler=reader.text(spec.get("schedulerName"), f"{where} schedulerName"),
        runtime_class=reader.text(spec.get("runtimeClassName"), f"{where} runtimeClassName"),
        claims=bool(spec.get("resourceClaims")),
        placed=_placed(metadata.get("managedFields")),
        annotations=annotations,
        labels=labels,
        containers=tuple(
            _requests(one, raw_one, field == "initContainers", reader, where)
            for field in ("initContainers", "containers")
            for one, raw_one in zip(kept[field], reader.objs(spec.get(field), f"{where} {field}"))
        ),
    )


def _placed(managed: t.Any) -> bool:
    """A binding leaves no owner of spec.nodeName; who writes the field himself is told in managedFields."""
    for entry in managed if isinstance(managed, list) else []:
        fields = entry.get("fieldsV1") if isinstance(entry, dict) else None
        spec = fields.get("f:spec") if isinstance(fields, dict) else None
        if isinstance(spec, dict) and "f:nodeName" in spec:
            return True
    return False


def _ended(raw: Json, reader: Reader, where: str) -> Json:
    """An init container's name, and how it ended."""
    state = reader.obj(raw.get("state"), f"{where} state")
    ended = reader.obj(state.get("terminated"), f"{where} terminated")
    code = ended.get("exitCode")
    return {
        "name": reader.text(raw.get("name"), f"{where} initContainerStatuses name"),
        "state": {"terminated": {"exitCode": code}} if isinstance(code, int) else {},
    }


def _container(raw: Json, reader: Reader, where: str) -> Json:
    """What the contract asks of a container."""
    resources = reader.obj(raw.get("resources"), f"{where} resources")
    return {
        "name": reader.text(raw.get("name"), f"{where} container name"),
        "restartPolicy": reader.text(raw.get("restartPolicy"), f"{where} restartPolicy"),
        "resources": {
            field: reader.quantities(resources.get(field), f"{where} {field}") for field in ("limits", "requests")
        },
    }


def _requests(kept: Json, raw: Json, init: bool, reader: Reader, where: str) -> Container:
    env: dict[str, str | None] = {}
    for one in reader.objs(raw.get("env"), f"{where} env"):
        name = one.get("name")
        if name in VARIABLES:
            value = one.get("value")
            # Without a value it is empty, with a valueFrom it is something that only the container knows.
            env[name] = value if isinstance(value, str) else None if one.get("valueFrom") else ""
    security = reader.obj(raw.get("securityContext"), f"{where} securityContext")
    both = {**kept["resources"]["requests"], **kept["resources"]["limits"]}
    return Container(
        name=kept["name"],
        requests={name: contract.quantity(value) for name, value in both.items()},
        env=env,
        privileged=security.get("privileged") is True,
        init=init and kept["restartPolicy"] != "Always",
        image=reader.text(raw.get("image"), f"{where} image"),
    )


# --------------------------------------------------------------------------- nodes


def _node(raw: Json, by_node: t.Mapping[str, list[Pod]], seen: Json, whole: Reader) -> Node | None:
    reader = Reader()
    metadata = reader.obj(raw.get("metadata"), "metadata")
    name = reader.text(metadata.get("name"), "its name")
    if not name:
        whole.bad("a node", "one with a name", raw)
        return None
    status = reader.obj(raw.get("status"), "status")
    annotations = reader.strings(metadata.get("annotations"), "annotation")
    plain: Json = {
        "metadata": {"name": name, "annotations": annotations},
        "status": {field: reader.quantities(status.get(field), field) for field in ("capacity", "allocatable")},
    }
    has = name in seen
    evidence = reader.obj(_unpacked(seen.get(name), reader), "its evidence")
    problem = reader.text(evidence.get("problem"), "its evidence's problem")
    absent = problem or ("" if has else "its machine wasn't looked at in this run")
    nvml = nvml_of(evidence.get("nvml"), reader, absent)
    kubelet = kubelet_of(evidence.get("kubelet"), reader, absent)
    cards, cards_problem = _cards(plain, annotations, nvml)
    return Node(
        json=plain,
        name=name,
        labels=reader.strings(metadata.get("labels"), "label"),
        annotations=annotations,
        ready=_ready(reader, status),
        backends=backends(plain),
        cards=cards,
        cards_problem=cards_problem,
        unit=_unit(cards, nvml),
        pods=tuple(by_node.get(name, ())),
        looked=has,
        nvml=nvml,
        kubelet=kubelet,
        damage=tuple(reader.damage),
    )


def _unpacked(evidence: t.Any, reader: Reader) -> t.Any:
    """A machine's evidence, which may be JSON text."""
    if not isinstance(evidence, str):
        return evidence
    try:
        return json.loads(evidence)
    except (ValueError, RecursionError):
        reader.bad("its evidence", "JSON", evidence)
        return None


def _ready(reader: Reader, status: Json) -> str:
    """The node's condition Ready: True, False or Unknown; empty where it says nothing."""
    for one in reader.objs(status.get("conditions"), "conditions"):
        if one.get("type") == "Ready":
            return reader.text(one.get("status"), "condition Ready")
    return ""


def backends(node: Json) -> tuple[str, ...]:
    """Who shares the cards of a node (as ``_node`` keeps it), as it says itself."""
    annotations, found = node["metadata"]["annotations"], []
    if annotations.get(contract.NODE_CARDS):
        found.append(GPUSHARE)
    elif contract.node_resource(node, contract.RESOURCE_MEMORY) or contract.node_resource(
        node, contract.RESOURCE_COUNT
    ):
        found.append(UPSTREAM)
    if annotations.get(NODE_REGISTER):
        found.append(HAMI)
    elif any(announced(node, "capacity").values()):
        found.append(NVIDIA)
    return tuple(found)


def _cards(node: Json, annotations: t.Mapping[str, str], nvml: Nvml) -> tuple[tuple[Card, ...], str]:
    """gpushare's cards with their UUIDs, where anybody tells those, and what is wrong with what the node says."""
    text, problem = annotations.get(contract.NODE_CARDS), ""
    if text:
        try:
            return tuple(contract.cards_from_annotation(text)), ""
        except ContractError as error:
            problem = shorten(str(error), 300)
    count = contract.node_resource(node, contract.RESOURCE_COUNT)
    if count > MOST_CARDS:
        return (), f"{contract.RESOURCE_COUNT} is {kind(count)}, more cards than a machine has"
    cards = []
    for card in contract.node_cards({**node, "metadata": {}}):
        gpu = nvml.at(card.index)
        cards.append(dataclasses.replace(card, uuid=gpu.uuid if gpu else ""))
    return tuple(cards), problem


def _unit(cards: t.Sequence[Card], nvml: Nvml) -> str | None:
    """The memory unit, as the cards' sizes tell it; guessed where nobody tells those."""
    for card in cards:
        gpu = nvml.gpu(card.uuid)
        if not card.memory_mib and gpu is not None and gpu.total_mib:
            for unit in contract.MIB_PER_UNIT:
                if contract.units_of(gpu.total_mib, unit) == card.units:
                    return unit
    return node_unit(list(cards))
