# SPDX-License-Identifier: GPL-3.0-or-later
"""Healthy clusters in small, one per backend and image generation, as API, kubelet and NVML show them."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract

Json = dict[str, Any]

NOW = 1795348800  # 2026-11-22T12:00:00Z
HOUR_AGO = "2026-11-22T11:00:00Z"
ASSUMED = str((NOW - 3590) * 10**9)
NODE = "gpu1"


def uuid(number: int, kind: str = "GPU") -> str:
    return f"{kind}-5a4d7f2{number:x}-0000-4000-8000-00000000000{number:x}"


def pod_uid(number: int) -> str:
    return f"11111111-2222-4333-8444-0000000000{number:02d}"


# --------------------------------------------------------------------------- the API


def node(capacity: Json, annotations: Json | None = None, labels: Json | None = None) -> Json:
    numbers = {key: str(value) for key, value in capacity.items()}
    return {
        "metadata": {"name": NODE, "labels": labels or {}, "annotations": annotations or {}},
        "status": {
            "capacity": {"cpu": "64", "memory": "263781668Ki", **numbers},
            "allocatable": {"cpu": "64", "memory": "263679268Ki", **numbers},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
        },
    }


def container(name: str, limits: Json | None = None, **more: Any) -> Json:
    resources = {"limits": {key: str(value) for key, value in limits.items()}} if limits else {}
    return {"name": name, "image": "registry.example/work:1", "resources": resources, **more}


def pod(
    number: int,
    containers: list[Json],
    annotations: Json | None = None,
    labels: Json | None = None,
    scheduler: str = "default-scheduler",
    name: str = "",
    namespace: str = "default",
    **spec: Any,
) -> Json:
    return {
        "metadata": {
            "namespace": namespace,
            "name": name or f"work-{number}",
            "uid": pod_uid(number),
            "creationTimestamp": HOUR_AGO,
            "labels": labels or {},
            "annotations": annotations or {},
        },
        "spec": {"nodeName": NODE, "schedulerName": scheduler, "containers": containers, **spec},
        "status": {"phase": "Running", "startTime": HOUR_AGO},
    }


def plugin(labels: Json) -> Json:
    found = pod(90, [container("plugin")], labels=labels, name="device-plugin-x7k2p", namespace="kube-system")
    found["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    return found


def bystander() -> Json:
    """A pod that has nothing to do with cards, as CUDA's samples say it."""
    return pod(80, [container("web", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}])], name="web-0")


# --------------------------------------------------------------------------- the machine


def process(number: int, pid: int, used: int, **more: Any) -> Json:
    """A process of a pod."""
    uid = pod_uid(number)
    burstable = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
    cid = f"{number:02d}" * 32
    return {
        "pid": pid,
        "types": ["compute"],
        "used_mib": used,
        "gi": None,
        "ci": None,
        "mig_uuid": "",
        "name": "python3",
        "start_time": "4711",
        "cgroup": f"{burstable}{uid.replace('-', '_')}.slice/cri-containerd-{cid}.scope",
        "where": "pod",
        "pod_uid": uid,
        "container_id": cid,
        "runtime": "containerd",
        "static": False,
        "libvgpu": None,
        **more,
    }


def host_process(pid: int, name: str, used: int) -> Json:
    return process(
        0,
        pid,
        used,
        name=name,
        cgroup="/user.slice/user-1000.slice/session-2.scope",
        where="host",
        pod_uid="",
        container_id="",
        runtime="",
    )


def gpu(index: int, total: int, processes: list[Json], limits: list[Json] | None = None, **more: Any) -> Json:
    used = 300 + sum(one["used_mib"] for one in processes)
    return {
        "index": index,
        "minor": index,
        "uuid": uuid(index + 1),
        "pci": f"00000000:{index + 1:02X}:00.0",
        "name": "NVIDIA T4",
        "problem": "",
        "memory": {"total_mib": total, "used_mib": used, "free_mib": total - used, "reserved_mib": 300},
        "mig": {"mode": "disabled", "pending": "disabled", "devices": []},
        "compute_mode": "default",
        "health": {"xids": None, "recovery_action": "none"},
        "processes": processes,
        "limits": limits,
        **more,
    }


def entry(number: int, name: str, resource: str, ids: list[str], envs: Json, cdi: list[str] | None = None) -> Json:
    return {
        "pod_uid": pod_uid(number),
        "container": name,
        "resource": resource,
        "ids": ids,
        "count": len(ids),
        "envs": envs,
        "cdi_devices": cdi or [],
        "devices": [],
        "annotations": {},
        "problem": "",
    }


def kubelet(pods: list[Json], entries: list[Json], registered: dict[str, list[str]]) -> Json:
    """kubelet's books: PodResources say what the checkpoint says, by name instead of UID."""
    listed = []
    for one in pods:
        mine = [row for row in entries if row["pod_uid"] == one["metadata"]["uid"]]
        containers = []
        for name in [each["name"] for each in one["spec"]["containers"]]:
            rows = [row for row in mine if row["container"] == name]
            containers.append(
                {"name": name, "devices": [{"resource": row["resource"], "ids": list(row["ids"])} for row in rows]}
            )
        listed.append(
            {"namespace": one["metadata"]["namespace"], "name": one["metadata"]["name"], "containers": containers}
        )
    return {
        "root": "/var/lib/kubelet",
        "checkpoint": {"state": "ok", "problem": "", "entries": entries, "registered": registered},
        "pod_resources": {"state": "ok", "problem": "", "pods": listed},
        "sockets": ["plugin.sock"],
    }


def nvml(*gpus: Json) -> Json:
    return {
        "available": True,
        "problem": "",
        "driver": "615.12",
        "nvml": "13.615.12",
        "cuda": "13.4",
        "cards": list(gpus),
        "seconds": 0.1,
    }


def world(
    node_: Json, pods: list[Json], gpus: list[Json], entries: list[Json], registered: dict[str, list[str]], **more: Any
) -> Json:
    return {
        "now": NOW,
        "nodes": [node_],
        "pods": pods,
        "configmaps": [],
        "evidence": {NODE: {"nvml": nvml(*gpus), "kubelet": kubelet(pods, entries, registered), "problem": ""}},
        "extender": {"cp1": {"nodes": []}},
        "story": {"problems": [], "unknown": [], "passed": ["extender is ready on cp1"], "notes": []},
        **more,
    }


# --------------------------------------------------------------------------- gpushare, ours

OUR_PLUGIN = {
    "app.kubernetes.io/name": "gpushare-device-plugin",
    "app.kubernetes.io/component": "device-plugin",
    "app.kubernetes.io/part-of": "gpushare",
}
MEM, COUNT = contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT


def our_cards(*units: int, mib: int = 1024) -> list[contract.Card]:
    return [contract.Card(at, uuid(at + 1), at, one * mib, one, True, "NVIDIA T4") for at, one in enumerate(units)]


def our_node(cards: list[contract.Card], limit: str = contract.LIMIT_OFF) -> Json:
    return node(
        {MEM: sum(card.units for card in cards), COUNT: len(cards)},
        {contract.NODE_CARDS: contract.cards_to_annotation(cards), contract.NODE_LIMIT: limit},
        {contract.NODE_LABEL: contract.NODE_LABEL_VALUE},
    )


def our_pod(number: int, cards: list[contract.Card], *units: int, **more: Any) -> Json:
    found = pod(number, [container(f"main-{at}", {MEM: one}) for at, one in enumerate(units)], **more)
    told = contract.booking_annotations(cards, found, int(ASSUMED), assigned=True)
    found["metadata"]["annotations"].update({key: value for key, value in told.items() if value is not None})
    return found


def our_entries(
    number: int, everything: list[contract.Card], cards: list[contract.Card], *units: int, cdi: bool = False
) -> list[Json]:
    shorts = contract.short_uuids([card.uuid for card in everything])
    entries = []
    for at, one in enumerate(units):
        part = one // len(cards)
        first = number * 10 + at * part
        ids = [contract.device_id(shorts[card.uuid], first + slot) for card in cards for slot in range(part)]
        envs = {
            "NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(card.uuid for card in cards),
            contract.POD_INDEX: str(cards[0].index),
            contract.POD_CARD_UNITS: str(cards[0].units),
            contract.POD_UNITS: str(sum(units)),
            contract.CONTAINER_UNITS: str(one),
        }
        names = [f"nvidia.com/gpu={card.uuid}" for card in cards] if cdi else []
        entries.append(entry(number, f"main-{at}", MEM, ids, envs, names))
    return entries


def limit(number: int, hard: int, used: int) -> Json:
    cid = f"{number:02d}" * 32
    return {
        "cgroup": f"/kubepods/{cid}",
        "pod_uid": pod_uid(number),
        "container_id": cid,
        "hard_mib": hard,
        "soft_mib": 0,
        "used_mib": used,
    }


def inspected(pods: list[Json], cards: list[contract.Card], upstream: bool = False) -> Json:
    """What ours answers to /inspect, or upstream's, which tells no UID."""
    devs = []
    for card in cards:
        rows = [
            {
                "name": one["metadata"]["name"],
                "namespace": one["metadata"]["namespace"],
                "usedGPU": contract.shares(one)[card.index],
                **({} if upstream else {"uid": one["metadata"]["uid"]}),
            }
            for one in pods
            if contract.counts(one) and card.index in contract.shares(one)
        ]
        used = sum(row["usedGPU"] for row in rows)
        devs.append({"id": card.index, "totalGPU": card.units, "usedGPU": used, "pods": rows})
    return {
        "cp1": {
            "nodes": [
                {
                    "name": NODE,
                    "totalGPU": sum(card.units for card in cards),
                    "usedGPU": sum(dev["usedGPU"] for dev in devs),
                    "devs": devs,
                }
            ]
        }
    }


def ours_envvar() -> Json:
    """Cards of different size, several containers, a pod that ends, memory limits by the driver."""
    cards = our_cards(16, 40)
    pods = [
        our_pod(1, [cards[0]], 2),
        our_pod(2, [cards[1]], 8, 4),
        our_pod(3, [cards[1]], 6),
        plugin(OUR_PLUGIN),
        bystander(),
    ]
    pods[2]["metadata"]["deletionTimestamp"] = HOUR_AGO
    entries = [
        *our_entries(1, cards, [cards[0]], 2),
        *our_entries(2, cards, [cards[1]], 8, 4),
        *our_entries(3, cards, [cards[1]], 6),
    ]
    gpus = [
        gpu(0, 16 * 1024, [process(1, 101, 1500), host_process(7, "/usr/lib/xorg/Xorg", 40)], [limit(1, 2048, 1500)]),
        gpu(1, 40 * 1024, [process(2, 201, 4000), process(2, 202, 900)], [limit(2, 8192, 4900)]),
    ]
    told = our_node(cards, contract.LIMIT_ENFORCED)
    return world(told, pods, gpus, entries, {MEM: ["5a4d7f21-0"]}, extender=inspected(pods, cards))


def ours_cdi() -> Json:
    """Devices by CDI names, in MiB, on a node whose driver can't limit."""
    cards = our_cards(16000, mib=1)
    pods = [our_pod(1, cards, 3000), our_pod(2, cards, 1000), plugin(OUR_PLUGIN), bystander()]
    entries = [*our_entries(1, cards, cards, 3000, cdi=True), *our_entries(2, cards, cards, 1000, cdi=True)]
    gpus = [gpu(0, 16000, [process(1, 101, 2900)])]
    told = our_node(cards, contract.LIMIT_UNENFORCED + "NVIDIA's driver is 580.95, and limits need 615 or newer")
    return world(told, pods, gpus, entries, {MEM: ["5a4d7f21-0"]}, extender=inspected(pods, cards))


def ours_several() -> Json:
    """A pod of two cards beside one of one, and a card that its plugin numbers otherwise than NVML."""
    cards = our_cards(16, 16, 16)
    pods = [our_pod(1, [cards[0], cards[2]], 8), our_pod(2, [cards[1]], 4), plugin(OUR_PLUGIN)]
    entries = [*our_entries(1, cards, [cards[0], cards[2]], 8), *our_entries(2, cards, [cards[1]], 4)]
    gpus = [
        gpu(0, 16384, [process(1, 101, 3000)]),
        {**gpu(1, 16384, [process(2, 201, 3000)]), "index": 2},
        {**gpu(2, 16384, [process(1, 101, 3000)]), "index": 1},
    ]
    return world(our_node(cards), pods, gpus, entries, {MEM: ["5a4d7f21-0"]}, extender=inspected(pods, cards))


# --------------------------------------------------------------------------- gpushare, upstream's

UPSTREAM_PLUGIN = {"component": "gpushare-device-plugin", "app": "gpushare", "name": "gpushare-device-plugin-ds"}


def upstream_node(cards: int, units: int) -> Json:
    return node({MEM: cards * units, COUNT: cards}, labels={contract.NODE_LABEL: contract.NODE_LABEL_VALUE})


def upstream_pod(number: int, card: int, per_card: int, units: int, assigned: bool = True) -> Json:
    return pod(
        number,
        [container("main", {MEM: units})],
        {
            contract.POD_INDEX: str(card),
            contract.POD_CARD_UNITS: str(per_card),
            contract.POD_UNITS: str(units),
            contract.POD_ASSIGNED: str(assigned).lower(),
            contract.POD_ASSUME_TIME: ASSUMED,
        },
    )


def upstream_entry(number: int, card: int, per_card: int, units: int, shown: str, ids_of: int = 1) -> Json:
    """kubelet took IDs of any card: they say nothing of the card that the container got."""
    envs = {
        "NVIDIA_VISIBLE_DEVICES": shown,
        contract.POD_INDEX: str(card),
        contract.POD_UNITS: str(units),
        contract.CONTAINER_UNITS: str(units),
        contract.POD_CARD_UNITS: str(per_card),
    }
    ids = [f"{uuid(ids_of)}-_-{number * 20 + slot}" for slot in range(units)]
    return entry(number, "main", MEM, ids, envs)


def upstream_head() -> Json:
    """HEAD on two cards: the variable is the card's number."""
    pods = [upstream_pod(1, 0, 15, 2), upstream_pod(2, 1, 15, 10), plugin(UPSTREAM_PLUGIN), bystander()]
    entries = [upstream_entry(1, 0, 15, 2, "0", ids_of=2), upstream_entry(2, 1, 15, 10, "1")]
    gpus = [gpu(0, 16127, [process(1, 101, 1500)]), gpu(1, 16127, [process(2, 201, 9000)])]
    cards = [contract.Card(at, "", at, 0, 15) for at in (0, 1)]
    return world(
        upstream_node(2, 15),
        pods,
        gpus,
        entries,
        {MEM: [f"{uuid(1)}-_-0"]},
        extender=inspected(pods, cards, upstream=True),
    )


def upstream_single() -> Json:
    """HEAD on one card: the variable is the UUID, and the pod is never marked as assigned."""
    pods = [upstream_pod(1, 0, 10, 2, assigned=False), plugin(UPSTREAM_PLUGIN)]
    entries = [upstream_entry(1, 0, 10, 2, uuid(1))]
    cards = [contract.Card(0, "", 0, 0, 10)]
    return world(
        upstream_node(1, 10),
        pods,
        [gpu(0, 11178, [process(1, 101, 1500)])],
        entries,
        {MEM: [f"{uuid(1)}-_-0"]},
        extender=inspected(pods, cards, upstream=True),
    )


def upstream_2019() -> Json:
    """The images that upstream's manifests name: the variable is the UUID on every node."""
    found = upstream_head()
    for at, row in enumerate(found["evidence"][NODE]["kubelet"]["checkpoint"]["entries"]):
        row["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(at + 1)
    return found


# --------------------------------------------------------------------------- HAMi

HAMI_PLUGIN = {"app.kubernetes.io/component": "hami-device-plugin", "app.kubernetes.io/name": "hami"}
GPU = "nvidia.com/gpu"


def hami_pod(number: int, *parts: tuple[int, int, int], **more: Any) -> Json:
    """A pod of one container with parts of GPUs: (card, MiB, percent of the cores)."""
    text = ":".join(f"{uuid(card + 1)},NVIDIA,{mib},{cores}" for card, mib, cores in parts)
    found = pod(
        number,
        [container("main", {GPU: len(parts), "nvidia.com/gpumem": parts[0][1], "nvidia.com/gpucores": parts[0][2]})],
        {
            "hami.io/vgpu-node": NODE,
            "hami.io/vgpu-time": str(NOW - 3590),
            "hami.io/vgpu-devices-allocated": f"{text}:;",
            "hami.io/vgpu-devices-to-allocate": ";",
            "hami.io/bind-phase": "success",
            "hami.io/bind-time": str(NOW - 3590),
        },
        scheduler="hami-scheduler",
    )
    found["metadata"]["annotations"].update(more)
    return found


def hami_entry(number: int, *parts: tuple[int, int, int]) -> Json:
    envs = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(uuid(card + 1) for card, _mib, _cores in parts),
        **{f"CUDA_DEVICE_MEMORY_LIMIT_{at}": f"{mib}m" for at, (_card, mib, _cores) in enumerate(parts)},
        "CUDA_DEVICE_SM_LIMIT": str(parts[0][2]),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/x.cache",
    }
    return entry(number, "main", GPU, [f"{uuid(card + 1)}-{number}" for card, _mib, _cores in parts], envs)


def hami(register: str) -> Json:
    pods = [
        hami_pod(1, (0, 3000, 30)),
        hami_pod(2, (0, 4000, 40), (1, 4000, 40)),
        plugin(HAMI_PLUGIN),
        bystander(),
    ]
    entries = [hami_entry(1, (0, 3000, 30)), hami_entry(2, (0, 4000, 40), (1, 4000, 40))]
    gpus = [
        gpu(0, 16384, [process(1, 101, 3100, libvgpu=True), process(2, 201, 3900, libvgpu=True)]),
        gpu(1, 16384, [process(2, 201, 1000, libvgpu=True)]),
    ]
    told = node({GPU: 20}, {"hami.io/node-nvidia-register": register}, {"gpu": "on"})
    return world(told, pods, gpus, entries, {GPU: [f"{uuid(1)}-0"]})


def hami_json() -> Json:
    """2.8 and newer: a JSON list that leaves out what is 0."""
    rows = [
        {
            "id": uuid(at + 1),
            **({"index": at} if at else {}),
            "count": 10,
            "devmem": 16384,
            "devcore": 100,
            "type": "NVIDIA-T4",
            "mode": "hami-core",
            "health": True,
        }
        for at in (0, 1)
    ]
    return hami(json.dumps(rows))


def hami_text() -> Json:
    """2.7.1 and older: text of 7 fields."""
    return hami("".join(f"{uuid(at + 1)},10,16384,100,NVIDIA-T4,0,true:" for at in (0, 1)))


def hami_mig() -> Json:
    """2.10 with dynamic MIG."""
    rows = [{"id": uuid(1), "count": 7, "devmem": 40960, "devcore": 100, "type": "NVIDIA-A100", "mode": "mig"}]
    rows[0]["health"] = True
    devices = [{"uuid": uuid(at, "MIG"), "index": at, "gi": at, "ci": 0, "total_mib": 9984} for at in (1, 2)]
    pods = []
    for at in (1, 2):
        allocation = {
            "containerIndex": 0,
            "deviceIndex": 0,
            "gpuUUID": uuid(1),
            "profile": "1g.10gb",
            "placement": {"start": at * 2, "size": 2},
            "migUUID": uuid(at, "MIG"),
            "gpuInstanceID": at,
            "computeInstanceID": 0,
        }
        pods.append(hami_pod(at, (0, 9984, 14), **{"hami.io/vgpu-mig-allocations": json.dumps([allocation])}))
    pods.append(plugin(HAMI_PLUGIN))
    entries = [
        entry(at, "main", GPU, [f"{uuid(1)}-{at}"], {"NVIDIA_VISIBLE_DEVICES": uuid(at, "MIG")}) for at in (1, 2)
    ]
    mig = {"mode": "enabled", "pending": "enabled", "devices": devices}
    processes = [process(1, 101, 5000, mig_uuid=uuid(1, "MIG"), gi=1, ci=0)]
    told = node({GPU: 7}, {"hami.io/node-nvidia-register": json.dumps(rows)}, {"gpu": "on"})
    return world(told, pods, [gpu(0, 40960, processes, mig=mig)], entries, {GPU: [f"{uuid(1)}-0"]})


# --------------------------------------------------------------------------- NVIDIA

NVIDIA_PLUGIN = {"app.kubernetes.io/name": "nvidia-device-plugin"}


def nvidia(
    resource: str,
    labels: Json,
    held: dict[int, list[str]],
    gpus: list[Json],
    capacity: Json,
    envs: Json | None = None,
    cdi: bool = False,
) -> Json:
    pods = [pod(number, [container("main", {resource: len(ids)})]) for number, ids in held.items()]
    entries = []
    for number, ids in held.items():
        shown = sorted({one.partition("::")[0] for one in ids})
        variables = {"NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(shown), **(envs or {})}
        names = [f"nvidia.com/gpu={one}" for one in shown] if cdi else []
        entries.append(entry(number, "main", resource, ids, variables, names))
    pods += [plugin(NVIDIA_PLUGIN), bystander()]
    told = node(capacity, labels={f"nvidia.com/{key}": value for key, value in labels.items()})
    registered = {resource: [one for ids in held.values() for one in ids]}
    return world(told, pods, gpus, entries, registered)


def nvidia_exclusive() -> Json:
    gpus = [gpu(0, 16384, [process(1, 101, 9000)]), gpu(1, 16384, [process(2, 201, 100)])]
    labels = {"gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.strategy": "none"}
    return nvidia(GPU, labels, {1: [uuid(1)], 2: [uuid(2)]}, gpus, {GPU: 2}, cdi=True)


def nvidia_time_slicing() -> Json:
    gpus = [gpu(0, 16384, [process(1, 101, 3000), process(2, 201, 3500)]), gpu(1, 16384, [])]
    labels = {"gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}
    shared = "nvidia.com/gpu.shared"
    return nvidia(shared, labels, {1: [f"{uuid(1)}::0"], 2: [f"{uuid(1)}::3"]}, gpus, {shared: 8, GPU: 0})


def nvidia_mps() -> Json:
    server = host_process(50, "nvidia-cuda-mps-server", 30)
    clients = [process(1, 101, 3000, types=["compute", "mps"]), process(2, 201, 3500, types=["mps"])]
    gpus = [gpu(0, 16384, [server, *clients], compute_mode="exclusive_process")]
    labels = {"gpu.count": "1", "gpu.replicas": "4", "gpu.sharing-strategy": "mps"}
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"}
    return nvidia(GPU, labels, {1: [f"{uuid(1)}::0"], 2: [f"{uuid(1)}::1"]}, gpus, {GPU: 4}, pipe)


def nvidia_mig_mixed() -> Json:
    devices = [{"uuid": uuid(at, "MIG"), "index": at, "gi": at, "ci": 0, "total_mib": 9984} for at in (1, 2)]
    mig = {"mode": "enabled", "pending": "enabled", "devices": devices}
    processes = [
        process(1, 101, 5000, mig_uuid=uuid(1, "MIG"), gi=1, ci=0),
        process(2, 201, 3000, gi=2, ci=0),
    ]
    labels = {"gpu.replicas": "1", "mig.strategy": "mixed", "mig.config": "all", "mig.config.state": "success"}
    resource = "nvidia.com/mig-1g.10gb"
    held = {1: [uuid(1, "MIG")], 2: [uuid(2, "MIG")]}
    return nvidia(resource, labels, held, [gpu(0, 40960, processes, mig=mig)], {resource: 2, GPU: 0})


WORLDS = {
    one.__name__: one
    for one in (
        ours_envvar,
        ours_cdi,
        ours_several,
        upstream_head,
        upstream_single,
        upstream_2019,
        hami_json,
        hami_text,
        hami_mig,
        nvidia_exclusive,
        nvidia_time_slicing,
        nvidia_mps,
        nvidia_mig_mixed,
    )
}
