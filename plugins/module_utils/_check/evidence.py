# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse one machine's evidence: the results of ``nvml_info`` and ``kubelet_devices_info``. No I/O."""

from __future__ import annotations

import collections
import dataclasses
import typing as t

from .._core.types import JsonObject
from .model import (
    Entry,
    Gpu,
    Kubelet,
    Limit,
    ListedClaim,
    Mig,
    Nvml,
    Prepared,
    Process,
    Record,
    Share,
    Specification,
)
from .parse import Reader, describe, shorten

PLACES = ("pod", "container", "host", "gone", "unknown")
# Above what a node can have.
MAX_GPUS = 256
# Fields of a GPU that stand in its parts "memory" and "mig".
OF_PARTS = ("total_mib", "used_mib", "reserved_mib", "mig_mode", "unregistered")


def nvml_of(raw: t.Any, reader: Reader, absent: str) -> Nvml:
    """Parse NVML's answer.

    :param raw: ``nvml`` as ``nvml_info`` returns it, or anything else.
    :param absent: the reason to report where there is none.
    """
    if raw is None:
        return Nvml(absent or "NVML wasn't queried")
    if not isinstance(raw, dict):
        return Nvml(f"nvml in the evidence is {describe(raw)}")
    if raw.get("available") is not True:
        problem = raw.get("problem")
        return Nvml(problem if isinstance(problem, str) and problem else "NVML didn't answer")
    cards = raw.get("cards")
    if not isinstance(cards, list) or len(cards) > MAX_GPUS:
        return Nvml(f"NVML's GPUs are {describe(cards)}, not a list")
    gpus = []
    for raw_card in reader.mappings(cards, "nvml.cards"):
        gpu = _gpu(raw_card, reader)
        if gpu is not None:
            gpus.append(gpu)
    if len({gpu.uuid for gpu in gpus}) != len(gpus) or len({gpu.index for gpu in gpus}) != len(gpus):
        return Nvml("NVML lists two GPUs with the same index or UUID")
    silent = next((card for card in cards if isinstance(card, dict) and card.get("uuid") in (None, "")), None)
    why = silent.get("problem") if silent else None
    reason = f": {shorten(why, 200)}" if isinstance(why, str) and why else ""
    unidentified = f"NVML lists a GPU without its UUID{reason}" if silent is not None else ""
    excluded = reader.mappings(raw.get("excluded"), "nvml.excluded")
    left_out = (reader.text(card.get("uuid"), "nvml.excluded uuid") for card in excluded)
    return Nvml("", tuple(sorted(gpus, key=lambda gpu: gpu.index)), unidentified, frozenset(left_out) - {""})


def _unregistered(raw: JsonObject, reader: Reader, where: str) -> str:
    """Return the state of a registration with NVSwitches that isn't completed; empty where nothing is missing."""
    health = reader.mapping(raw.get("health"), f"{where} health")
    fabric = reader.mapping(health.get("fabric"), f"{where} health.fabric")
    state = reader.text(fabric.get("state"), f"{where} health.fabric.state")
    status = reader.number(fabric.get("status"), f"{where} health.fabric.status") or 0
    return (f"{state}, status {status}" if status else "") if state == "completed" else shorten(state)


def _gpu(raw: JsonObject, reader: Reader) -> Gpu | None:
    index, uuid = reader.number(raw.get("index"), "nvml.cards index"), reader.text(raw.get("uuid"), "nvml.cards uuid")
    if index is None or not uuid:
        reader.reject("nvml.cards", "a GPU with an index and a UUID", raw)
        return None
    where = f"nvml GPU {index}"
    memory = reader.mapping(raw.get("memory"), f"{where} memory")
    mig = reader.mapping(raw.get("mig"), f"{where} mig")
    devices = reader.mappings(mig.get("devices"), f"{where} mig.devices")
    return Gpu(
        index=index,
        **{name: value for name, value in reader.fields(Gpu, raw, where).items() if name not in OF_PARTS},
        total_mib=reader.number(memory.get("total_mib"), f"{where} memory.total_mib"),
        used_mib=reader.number(memory.get("used_mib"), f"{where} memory.used_mib"),
        unregistered=_unregistered(raw, reader, where),
        reserved_mib=reader.number(memory.get("reserved_mib"), f"{where} memory.reserved_mib"),
        mig_mode=reader.text(mig.get("mode"), f"{where} mig.mode"),
        mig=tuple(Mig(**reader.fields(Mig, device, f"{where} mig")) for device in devices),
        processes=_rows(raw, "processes", where, _process, reader),
        limits=_rows(raw, "limits", where, lambda row, place, _r: Limit(**reader.fields(Limit, row, place)), reader),
    )


Row = t.TypeVar("Row")


def _rows(
    raw: JsonObject, name: str, where: str, parse: t.Callable[[JsonObject, str, Reader], Row], reader: Reader
) -> tuple[Row, ...] | None:
    """Return a GPU's rows of one kind; None where NVML doesn't report them."""
    rows = reader.mappings(raw.get(name), f"{where} {name}")
    return tuple(parse(row, f"{where} {name}", reader) for row in rows) if isinstance(raw.get(name), list) else None


def _process(raw: JsonObject, where: str, reader: Reader) -> Process:
    pid = reader.number(raw.get("pid"), f"{where} pid") or 0
    process = Process(pid=pid, **reader.fields(Process, raw, where))
    if process.where not in PLACES:
        reader.reject(f"{where} where", "one of " + ", ".join(PLACES), raw.get("where"))
        return dataclasses.replace(process, where="unknown")
    return process


def kubelet_of(raw: t.Any, reader: Reader, absent: str) -> Kubelet:
    """Parse kubelet's answer.

    :param raw: ``kubelet`` as ``kubelet_devices_info`` returns it, or anything else.
    :param absent: the reason to report where there is none.
    """
    if not isinstance(raw, dict):
        why = absent or "kubelet wasn't queried" if raw is None else f"kubelet in the evidence is {describe(raw)}"
        return Kubelet(why, (), {}, why, {}, (), prepared=Prepared(why))
    checkpoint = reader.mapping(raw.get("checkpoint"), "kubelet.checkpoint")
    listing = reader.mapping(raw.get("pod_resources"), "kubelet.pod_resources")
    entries, pods = checkpoint.get("entries"), listing.get("pods")
    problem = _source(checkpoint, "kubelet's checkpoint", entries)
    pod_resources_problem = _source(listing, "kubelet's PodResources", pods)
    registered = reader.mapping(checkpoint.get("registered"), "kubelet.checkpoint.registered")
    rows = [] if pod_resources_problem else reader.mappings(pods, "kubelet.pod_resources.pods")
    names = [_name(pod, reader) for pod in rows]
    return Kubelet(
        problem,
        () if problem else tuple(_entry(row, reader) for row in reader.mappings(entries, "kubelet.checkpoint.entries")),
        {name: tuple(reader.texts(ids, f"kubelet registered {name}")) for name, ids in registered.items()},
        pod_resources_problem,
        _listed(rows, reader),
        tuple(reader.texts(raw.get("sockets"), "kubelet.sockets")),
        frozenset(name for name, number in collections.Counter(names).items() if number > 1),
        _device_nodes(raw.get("device_nodes"), reader),
        _claimed(rows, reader),
        _prepared(raw.get("prepared"), reader),
    )


def _device_nodes(raw: t.Any, reader: Reader) -> dict[str, frozenset[int]] | None:
    if raw is None:
        return None
    by_pod: dict[str, frozenset[int]] = {}
    for row in reader.mappings(raw, "kubelet.device_nodes"):
        uid = reader.text(row.get("pod_uid"), "kubelet.device_nodes pod_uid")
        values = reader.sequence(row.get("minors"), "kubelet.device_nodes minors")
        numbers = [reader.number(value, "a minor of kubelet.device_nodes") for value in values]
        by_pod[uid] = by_pod.get(uid, frozenset()) | {number for number in numbers if number is not None}
    return by_pod


def _source(raw: JsonObject, name: str, rows: t.Any) -> str:
    """Return why a source has no data; empty where it has."""
    state, problem = raw.get("state"), raw.get("problem")
    if state != "ok":
        word = state if isinstance(state, str) and state else "unknown"
        return problem if isinstance(problem, str) and problem else f"{name} is {word}"
    return "" if isinstance(rows, list) else f"{name} has {describe(rows)} instead of entries"


def _entry(raw: JsonObject, reader: Reader) -> Entry:
    envs, count = raw.get("envs"), reader.number(raw.get("count"), "checkpoint count")
    if envs is not None and not isinstance(envs, dict):
        reader.reject("checkpoint envs", "an object", envs)
    plain = reader.fields(Entry, raw, "checkpoint")
    cdi = (*reader.texts(raw.get("cdi_devices"), "checkpoint cdi_devices"), *_annotated(raw, reader))
    return Entry(
        **{**plain, "cdi": cdi},
        count=len(plain["ids"]) if count is None else count,
        envs=reader.strings(envs, "checkpoint envs") if isinstance(envs, dict) else None,
    )


def _annotated(raw: JsonObject, reader: Reader) -> list[str]:
    """Return the CDI devices in an answer's annotations: NVIDIA's plugin has the strategy cdi-annotations."""
    annotations = reader.strings(raw.get("annotations"), "checkpoint annotation")
    return [device for key, text in annotations.items() if key.startswith("cdi.k8s.io/") for device in text.split(",")]


def _claimed(pods: list[JsonObject], reader: Reader) -> dict[str, frozenset[ListedClaim]]:
    places: dict[str, frozenset[ListedClaim]] = {}
    for pod in pods:
        rows = [
            row
            for container in reader.mappings(pod.get("containers"), "pod_resources containers")
            for row in reader.mappings(container.get("claims"), "pod_resources claims")
        ]
        for row in rows:
            text = {
                key: reader.text(row.get(key), f"pod_resources claims {key}")
                for key in ("namespace", "claim", "pool", "device", "share")
            }
            place = (f"{text['namespace']}/{text['claim']}", text["pool"], text["device"], text["share"])
            places[_name(pod, reader)] = places.get(_name(pod, reader), frozenset()) | {place}
    return places


def _prepared(raw: t.Any, reader: Reader) -> Prepared:
    if raw is None:
        return Prepared("they weren't read")
    where = "kubelet.prepared"
    given = reader.mapping(raw, where)
    problem = _source(given, "the DRA driver's folder", given.get("records"))
    if problem:
        return Prepared(problem)
    records = [_record(row, reader) for row in reader.mappings(given.get("records"), f"{where}.records")]
    rows = reader.mappings(given.get("specifications"), f"{where}.specifications")
    specifications = [
        Specification(
            **{**reader.fields(Specification, row, where), "problem": reader.text(row.get("problem"), where)},
            envs=tuple(
                reader.strings(each, f"{where} envs") for each in reader.mappings(row.get("envs"), f"{where} envs")
            ),
        )
        for row in rows
    ]
    return Prepared("", {record.uid: record for record in records}, {spec.uid: spec for spec in specifications})


def _record(raw: JsonObject, reader: Reader) -> Record:
    shares = reader.mappings(raw.get("shares"), "kubelet.prepared shares")
    return Record(
        **reader.fields(Record, raw, "kubelet.prepared"),
        shares=tuple(Share(**reader.fields(Share, share, "kubelet.prepared shares")) for share in shares),
    )


def _name(pod: JsonObject, reader: Reader) -> str:
    return "/".join(reader.text(pod.get(key), f"pod_resources {key}") for key in ("namespace", "name"))


def _listed(pods: list[JsonObject], reader: Reader) -> dict[str, dict[str, dict[str, tuple[str, ...]]]]:
    by_pod: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
    for pod in pods:
        containers = by_pod.setdefault(_name(pod, reader), {})
        for container in reader.mappings(pod.get("containers"), "pod_resources containers"):
            has = containers.setdefault(reader.text(container.get("name"), "pod_resources container name"), {})
            # kubelet may send an entry for each ID, or one for all of a resource.
            for device in reader.mappings(container.get("devices"), "pod_resources devices"):
                resource = reader.text(device.get("resource"), "pod_resources resource")
                has[resource] = has.get(resource, ()) + tuple(reader.texts(device.get("ids"), "pod_resources ids"))
    return by_pod
