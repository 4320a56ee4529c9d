# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parse one machine's evidence: the results of ``nvml_info``, ``kubelet_devices_info`` and ``virtual_machines_info``.

No I/O. It may be JSON of any shape: a value of the wrong type is left out and recorded, never raised.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import typing as t

from .._core.types import JsonObject
from .model import (
    BootImage,
    Device,
    DividedCard,
    Entry,
    Gpu,
    Kata,
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
    VfioFunction,
    Virtual,
)
from .parse import MAX_NUMBER, shorten

# Per node.
MAX_UNREADABLE = 20
PLACES = ("pod", "container", "host", "gone", "unknown")
# Above what a node can have.
MAX_GPUS = 256
# Fields of a GPU that stand in its parts "memory" and "mig".
OF_PARTS = ("total_mib", "used_mib", "reserved_mib", "mig_mode", "unregistered")


class Reader:
    """Takes values of one type, and records each value of another type. ``null`` counts as absent."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def reject(self, where: str, expected: str, value: t.Any) -> None:
        self.add(f"{where} is {describe(value)}, not {expected}")

    def add(self, problem: str) -> None:
        """Record what can't be read."""
        if problem not in self.unreadable and len(self.unreadable) < MAX_UNREADABLE:
            self.unreadable.append(problem)

    def mapping(self, value: t.Any, where: str) -> JsonObject:
        if isinstance(value, dict):
            return {key: entry for key, entry in value.items() if isinstance(key, str)}
        if value is not None:
            self.reject(where, "an object", value)
        return {}

    def sequence(self, value: t.Any, where: str) -> list[t.Any]:
        if isinstance(value, (list, tuple)):
            return list(value)
        if value is not None:
            self.reject(where, "a list", value)
        return []

    def mappings(self, value: t.Any, where: str) -> list[JsonObject]:
        mappings = []
        for entry in self.sequence(value, where):
            if isinstance(entry, dict):
                mappings.append(self.mapping(entry, where))
            else:
                self.reject(f"an entry of {where}", "an object", entry)
        return mappings

    def text(self, value: t.Any, where: str) -> str:
        if isinstance(value, str):
            return value
        if value is not None:
            self.reject(where, "text", value)
        return ""

    def texts(self, value: t.Any, where: str) -> list[str]:
        texts = []
        for entry in self.sequence(value, where):
            if isinstance(entry, str):
                texts.append(entry)
            else:
                self.reject(f"an entry of {where}", "text", entry)
        return texts

    def number(self, value: t.Any, where: str) -> int | None:
        """Return an integer from 0 to ``MAX_NUMBER``; None for anything else."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER:
            return value
        if value is not None:
            self.reject(where, "a number from 0 to 10^15", value)
        return None

    def fields(self, kind: t.Any, raw: JsonObject, where: str) -> JsonObject:
        """Return the fields of a dataclass that are text, numbers, flags or lists of text, for its constructor."""
        readers: dict[str, t.Callable[[t.Any, str], t.Any]] = {
            "str": self.text,
            "int | None": self.number,
            "bool | None": lambda value, _place: value if isinstance(value, bool) else None,
            "tuple[str, ...]": lambda value, place: tuple(self.texts(value, place)),
        }
        plain = [field for field in dataclasses.fields(kind) if field.type in readers]
        return {field.name: readers[str(field.type)](raw.get(field.name), f"{where} {field.name}") for field in plain}

    def strings(self, value: t.Any, where: str) -> dict[str, str]:
        """Return text by text, as annotations, labels and environments are."""
        strings: dict[str, str] = {}
        for key, entry in self.mapping(value, where).items():
            if isinstance(entry, str):
                strings[key] = entry
            elif entry is not None:
                self.reject(f"{where} {shorten(key)}", "text", entry)
        return strings


def describe(value: t.Any) -> str:
    """Describe a value for an error message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {value}" if abs(value) <= MAX_NUMBER else "a number out of range"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, str):
        return f"the text {shorten(value)!r}"
    return "a list" if isinstance(value, (list, tuple)) else "an object" if isinstance(value, dict) else "no JSON"


def evidence_of(
    given: t.Any, observed: bool, reader: Reader
) -> tuple[Nvml, Kubelet, tuple[str, ...], str, Virtual | None]:
    """Parse a machine's evidence: NVML's answer, kubelet's, the UUIDs of its GPUs where only these are known, whose
    answer it is (empty for the machine's own), and its cards for virtual machines.

    :param given: an object with ``nvml``, ``kubelet``, ``virtual_machines`` and ``problem``, its JSON text, or a
        list of UUIDs.
    :param observed: whether there is evidence of this machine.
    """
    uuids = given if isinstance(given, list) else None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            reader.reject("its evidence", "JSON", given)
            given = None
    evidence = reader.mapping(given, "its evidence") if uuids is None else {}
    problem = reader.text(evidence.get("problem"), "its evidence's problem")
    absent = problem or ("" if observed else "its machine wasn't observed in this run")
    nvml = nvml_of(evidence.get("nvml"), reader, absent)
    kubelet = kubelet_of(evidence.get("kubelet"), reader, absent)
    source = shorten(reader.text(evidence.get("source"), "its evidence's source"), 400)
    virtual = virtual_of(evidence.get("virtual_machines"), reader)
    if virtual is not None and virtual.has_all and nvml.problem and not absent:
        # NVIDIA's driver has no card, and isn't there where it finds none.
        nvml = Nvml("")
    return nvml, kubelet, tuple(reader.texts(uuids, "its evidence")), source, virtual


def kata_of(given: t.Any, reader: Reader) -> Kata | None:
    """Parse what a machine has for pods of Kata; None where it isn't to have any.

    :param given: the machine's evidence, with ``kata`` as role verify has it, or anything else.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            # It is reported with the rest of the evidence.
            given = None
    raw = given.get("kata") if isinstance(given, dict) else None
    if raw is None:
        return None
    where = "kata in its evidence"
    fields = reader.fields(Kata, reader.mapping(raw, where), where)
    return Kata(**{**fields, **({} if isinstance(raw, dict) else {"problem": f"{where} is {describe(raw)}"})})


def virtual_of(raw: t.Any, reader: Reader) -> Virtual | None:
    """Parse a machine's cards for virtual machines.

    :param raw: ``virtual_machines`` as ``virtual_machines_info`` returns it, or anything else.
    """
    if raw is None:
        return None
    where = "virtual_machines in its evidence"
    given = reader.mapping(raw, where)
    problem = "" if isinstance(raw, dict) else f"{where} is {describe(raw)}"

    def rows(name: str) -> list[JsonObject]:
        return reader.mappings(given.get(name), f"{where} {name}")

    def fields(kind: t.Any, name: str) -> t.Iterator[JsonObject]:
        return (reader.fields(kind, row, f"{where} {name}") for row in rows(name))

    def counts(row: JsonObject, name: str) -> dict[str, int]:
        given = reader.mapping(row.get(name), f"{where} cards {name}")
        numbers = {kind: reader.number(count, f"{where} cards {name}") for kind, count in given.items()}
        return {kind: number for kind, number in numbers.items() if number is not None}

    return Virtual(
        **{**reader.fields(Virtual, given, where), **({"problem": problem} if problem else {})},
        functions=tuple(VfioFunction(**row) for row in fields(VfioFunction, "functions")),
        images=tuple(BootImage(**row) for row in fields(BootImage, "images")),
        cards=tuple(
            DividedCard(**plain, wanted=counts(row, "wanted"), vgpus=counts(row, "vgpus"))
            for plain, row in zip(fields(DividedCard, "cards"), rows("cards"))
        ),
        devices=tuple(Device(**row) for row in fields(Device, "devices")),
    )


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
