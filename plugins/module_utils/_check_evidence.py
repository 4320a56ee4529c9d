# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The evidence of one machine: what ``nvml_info`` and ``kubelet_devices_info`` returned, read with care. No I/O."""

from __future__ import annotations

import collections
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._check_model import (
    Entry,
    Gpu,
    Kubelet,
    Limit,
    Mig,
    Nvml,
    Process,
)
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader, kind, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

PLACES = ("pod", "container", "host", "gone", "unknown")
# Over what a node can have, so that nonsense isn't walked through.
MOST_CARDS = 256


def nvml_of(raw: t.Any, reader: Reader, absent: str) -> Nvml:
    """NVML's word.

    :param raw: ``nvml`` as ``nvml_info`` returns it, or anything else.
    :param absent: why there is none, where there is none.
    """
    if raw is None:
        return Nvml(absent or "nobody asked NVML there")
    if not isinstance(raw, dict):
        return Nvml(f"what is given as NVML's answer is {kind(raw)}")
    if raw.get("available") is not True:
        told = raw.get("problem")
        return Nvml(told if isinstance(told, str) and told else "NVML didn't answer")
    cards = raw.get("cards")
    if not isinstance(cards, list) or len(cards) > MOST_CARDS:
        return Nvml(f"NVML's cards are {kind(cards)}, not a list of cards")
    gpus = []
    for one in reader.objs(cards, "nvml.cards"):
        gpu = _gpu(one, reader)
        if gpu is not None:
            gpus.append(gpu)
    if len({one.uuid for one in gpus}) != len(gpus) or len({one.index for one in gpus}) != len(gpus):
        return Nvml("NVML lists two cards with the same index or UUID")
    silent = next((one for one in cards if isinstance(one, dict) and one.get("uuid") in (None, "")), None)
    why = silent.get("problem") if silent else None
    told = f": {shorten(why, 200)}" if isinstance(why, str) and why else ""
    nameless = f"NVML lists a card without its UUID{told}" if silent is not None else ""
    return Nvml("", tuple(sorted(gpus, key=lambda one: one.index)), nameless)


def _gpu(raw: Json, reader: Reader) -> Gpu | None:
    index, uuid = reader.number(raw.get("index"), "nvml.cards index"), reader.text(raw.get("uuid"), "nvml.cards uuid")
    if index is None or not uuid:
        reader.bad("nvml.cards", "a card with an index and a UUID", raw)
        return None
    where = f"nvml card {index}"
    memory = reader.obj(raw.get("memory"), f"{where} memory")
    mig = reader.obj(raw.get("mig"), f"{where} mig")
    devices = reader.objs(mig.get("devices"), f"{where} mig.devices")
    processes, limits = raw.get("processes"), raw.get("limits")
    if processes is not None and not isinstance(processes, list):
        reader.bad(f"{where} processes", "a list", processes)
    if limits is not None and not isinstance(limits, list):
        reader.bad(f"{where} limits", "a list", limits)
    return Gpu(
        index=index,
        minor=reader.number(raw.get("minor"), f"{where} minor"),
        uuid=uuid,
        name=reader.text(raw.get("name"), f"{where} name"),
        problem=reader.text(raw.get("problem"), f"{where} problem"),
        total_mib=reader.number(memory.get("total_mib"), f"{where} memory.total_mib"),
        used_mib=reader.number(memory.get("used_mib"), f"{where} memory.used_mib"),
        mig_mode=reader.text(mig.get("mode"), f"{where} mig.mode"),
        mig=tuple(
            Mig(
                reader.text(one.get("uuid"), f"{where} mig uuid"),
                reader.number(one.get("gi"), f"{where} mig gi"),
                reader.number(one.get("ci"), f"{where} mig ci"),
                reader.number(one.get("total_mib"), f"{where} mig total_mib"),
            )
            for one in devices
        ),
        compute_mode=reader.text(raw.get("compute_mode"), f"{where} compute_mode"),
        processes=tuple(_process(one, reader, where) for one in reader.objs(processes, f"{where} processes"))
        if isinstance(processes, list)
        else None,
        limits=tuple(_limit(one, reader, where) for one in reader.objs(limits, f"{where} limits"))
        if isinstance(limits, list)
        else None,
    )


def _process(raw: Json, reader: Reader, where: str) -> Process:
    place = reader.text(raw.get("where"), f"{where} process where")
    libvgpu = raw.get("libvgpu")
    if place not in PLACES:
        reader.bad(f"{where} process where", "one of " + ", ".join(PLACES), raw.get("where"))
    return Process(
        pid=reader.number(raw.get("pid"), f"{where} process pid") or 0,
        name=reader.text(raw.get("name"), f"{where} process name"),
        used_mib=reader.number(raw.get("used_mib"), f"{where} process used_mib"),
        mig_uuid=reader.text(raw.get("mig_uuid"), f"{where} process mig_uuid"),
        gi=reader.number(raw.get("gi"), f"{where} process gi"),
        ci=reader.number(raw.get("ci"), f"{where} process ci"),
        where=place if place in PLACES else "unknown",
        pod_uid=reader.text(raw.get("pod_uid"), f"{where} process pod_uid"),
        container_id=reader.text(raw.get("container_id"), f"{where} process container_id"),
        cgroup=reader.text(raw.get("cgroup"), f"{where} process cgroup"),
        types=tuple(reader.texts(raw.get("types"), f"{where} process types")),
        libvgpu=libvgpu if isinstance(libvgpu, bool) else None,
    )


def _limit(raw: Json, reader: Reader, where: str) -> Limit:
    return Limit(
        pod_uid=reader.text(raw.get("pod_uid"), f"{where} limit pod_uid"),
        container_id=reader.text(raw.get("container_id"), f"{where} limit container_id"),
        hard_mib=reader.number(raw.get("hard_mib"), f"{where} limit hard_mib"),
        used_mib=reader.number(raw.get("used_mib"), f"{where} limit used_mib"),
    )


def kubelet_of(raw: t.Any, reader: Reader, absent: str) -> Kubelet:
    """kubelet's word.

    :param raw: ``kubelet`` as ``kubelet_devices_info`` returns it, or anything else.
    :param absent: why there is none, where there is none.
    """
    if not isinstance(raw, dict):
        why = absent or "nobody asked kubelet there" if raw is None else f"what is given as kubelet's is {kind(raw)}"
        return Kubelet(why, (), {}, why, {}, ())
    checkpoint = reader.obj(raw.get("checkpoint"), "kubelet.checkpoint")
    listing = reader.obj(raw.get("pod_resources"), "kubelet.pod_resources")
    entries, pods = checkpoint.get("entries"), listing.get("pods")
    problem = _source(checkpoint, "kubelet's checkpoint", entries)
    listed_problem = _source(listing, "kubelet's PodResources", pods)
    registered = reader.obj(checkpoint.get("registered"), "kubelet.checkpoint.registered")
    rows = [] if listed_problem else reader.objs(pods, "kubelet.pod_resources.pods")
    names = [_name(one, reader) for one in rows]
    return Kubelet(
        problem,
        () if problem else tuple(_entry(one, reader) for one in reader.objs(entries, "kubelet.checkpoint.entries")),
        {name: tuple(reader.texts(ids, f"kubelet registered {name}")) for name, ids in registered.items()},
        listed_problem,
        _listed(rows, reader),
        tuple(reader.texts(raw.get("sockets"), "kubelet.sockets")),
        frozenset(name for name, number in collections.Counter(names).items() if number > 1),
    )


def _source(raw: Json, name: str, rows: t.Any) -> str:
    """Why a source says nothing; empty where it speaks."""
    state, told = raw.get("state"), raw.get("problem")
    if state != "ok":
        word = state if isinstance(state, str) and state else "unknown"
        return told if isinstance(told, str) and told else f"{name} is {word}"
    return "" if isinstance(rows, list) else f"{name} has {kind(rows)} where its entries should be"


def _entry(raw: Json, reader: Reader) -> Entry:
    ids = tuple(reader.texts(raw.get("ids"), "checkpoint ids"))
    count, envs = reader.number(raw.get("count"), "checkpoint count"), raw.get("envs")
    if envs is not None and not isinstance(envs, dict):
        reader.bad("checkpoint envs", "an object", envs)
    return Entry(
        pod_uid=reader.text(raw.get("pod_uid"), "checkpoint pod_uid"),
        container=reader.text(raw.get("container"), "checkpoint container"),
        resource=reader.text(raw.get("resource"), "checkpoint resource"),
        ids=ids,
        count=len(ids) if count is None else count,
        envs=reader.strings(envs, "checkpoint envs") if isinstance(envs, dict) else None,
        cdi=(*reader.texts(raw.get("cdi_devices"), "checkpoint cdi_devices"), *_annotated(raw, reader)),
        problem=reader.text(raw.get("problem"), "checkpoint entry problem"),
    )


def _annotated(raw: Json, reader: Reader) -> list[str]:
    """CDI devices that an answer names in annotations, as NVIDIA's plugin does with cdi-annotations."""
    found = reader.strings(raw.get("annotations"), "checkpoint annotation")
    return [one for key, text in found.items() if key.startswith("cdi.k8s.io/") for one in text.split(",")]


def _name(pod: Json, reader: Reader) -> str:
    return "/".join(reader.text(pod.get(key), f"pod_resources {key}") for key in ("namespace", "name"))


def _listed(pods: list[Json], reader: Reader) -> dict[str, dict[str, dict[str, tuple[str, ...]]]]:
    found: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
    for pod in pods:
        containers = found.setdefault(_name(pod, reader), {})
        for one in reader.objs(pod.get("containers"), "pod_resources containers"):
            has = containers.setdefault(reader.text(one.get("name"), "pod_resources container name"), {})
            # kubelet may send an entry for each ID, or one for all of a resource.
            for device in reader.objs(one.get("devices"), "pod_resources devices"):
                resource = reader.text(device.get("resource"), "pod_resources resource")
                has[resource] = has.get(resource, ()) + tuple(reader.texts(device.get("ids"), "pod_resources ids"))
    return found
