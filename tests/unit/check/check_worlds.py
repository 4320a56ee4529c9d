# SPDX-License-Identifier: GPL-3.0-or-later
"""Small healthy clusters, one per backend and image generation, as the API, kubelet and NVML report them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import dra_objects
from ansible_collections.kubegpu.share.plugins.module_utils._allocation.node_backends import ALLOCATORS
from ansible_collections.kubegpu.share.plugins.module_utils._check import servers as servers_claims
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.checkpoint import prepared_claims
from ansible_collections.kubegpu.share.plugins.module_utils._kubelet.source import NodeKubelet

NOW = 1795348800  # 2026-11-22T12:00:00Z
HOUR_AGO = "2026-11-22T11:00:00Z"
ASSUMED = str((NOW - 3590) * 10**9)
NODE = "gpu1"


def uuid(number: int, kind: str = "GPU") -> str:
    return f"{kind}-5a4d7f2{number:x}-0000-4000-8000-00000000000{number:x}"


def pod_uid(number: int) -> str:
    return f"11111111-2222-4333-8444-0000000000{number:02d}"


# --------------------------------------------------------------------------- the API


def node(
    capacity: JsonObject, annotations: JsonObject | None = None, labels: JsonObject | None = None, name: str = NODE
) -> JsonObject:
    numbers = {key: str(value) for key, value in capacity.items()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}, "annotations": annotations or {}},
        "status": {
            "capacity": {"cpu": "64", "memory": "263781668Ki", **numbers},
            "allocatable": {"cpu": "64", "memory": "263679268Ki", **numbers},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
        },
    }


def container(name: str, limits: JsonObject | None = None, **more: Any) -> JsonObject:
    resources = {"limits": {key: str(value) for key, value in limits.items()}} if limits else {}
    return {"name": name, "image": "registry.example/work:1", "resources": resources, **more}


def pod(
    number: int,
    containers: list[JsonObject],
    annotations: JsonObject | None = None,
    labels: JsonObject | None = None,
    scheduler: str = "default-scheduler",
    name: str = "",
    namespace: str = "default",
    **spec: Any,
) -> JsonObject:
    identity = {"namespace": namespace, "name": name or f"work-{number}", "uid": pod_uid(number)}
    about = {"creationTimestamp": HOUR_AGO, "labels": labels or {}, "annotations": annotations or {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**identity, **about},
        "spec": {"nodeName": NODE, "schedulerName": scheduler, "containers": containers, **spec},
        "status": {"phase": "Running", "startTime": HOUR_AGO},
    }


def plugin(labels: JsonObject) -> JsonObject:
    found = pod(90, [container("plugin")], labels=labels, name="device-plugin-x7k2p", namespace="kube-system")
    found["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    return found


def bystander() -> JsonObject:
    """A pod without GPUs, with the variable of CUDA's sample images."""
    return pod(80, [container("web", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}])], name="web-0")


# --------------------------------------------------------------------------- the machine


def process(number: int, pid: int, used: int, **more: Any) -> JsonObject:
    """A process of a pod."""
    uid = pod_uid(number)
    burstable = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
    cid = f"{number:02d}" * 32
    cgroup = f"{burstable}{uid.replace('-', '_')}.slice/cri-containerd-{cid}.scope"
    by_nvml = {"pid": pid, "types": ["compute"], "used_mib": used, "gi": None, "ci": None, "mig_uuid": ""}
    by_proc = {"name": "python3", "start_time": "4711", "cgroup": cgroup, "libvgpu": None}
    owner = {"where": "pod", "pod_uid": uid, "container_id": cid, "runtime": "containerd", "static": False}
    return {**by_nvml, **by_proc, **owner, **more}


def host_process(pid: int, name: str, used: int) -> JsonObject:
    owner = {"where": "host", "pod_uid": "", "container_id": "", "runtime": ""}
    return process(0, pid, used, name=name, cgroup="/user.slice/user-1000.slice/session-2.scope", **owner)


def gpu(
    index: int, total: int, processes: list[JsonObject], limits: list[JsonObject] | None = None, **more: Any
) -> JsonObject:
    used = 300 + sum(process["used_mib"] for process in processes)
    place = {"index": index, "minor": index, "uuid": uuid(index + 1), "pci": f"00000000:{index + 1:02X}:00.0"}
    return {
        **place,
        **{"name": "NVIDIA T4", "problem": "", "compute_mode": "default"},
        "memory": {"total_mib": total, "used_mib": used, "free_mib": total - used, "reserved_mib": None},
        "mig": {"mode": "disabled", "pending": "disabled", "devices": []},
        "health": {"xids": None, "recovery_action": "none"},
        **{"processes": processes, "limits": limits},
        **more,
    }


def entry(
    number: int, name: str, resource: str, ids: list[str], envs: JsonObject, cdi: list[str] | None = None
) -> JsonObject:
    allocated = {"resource": resource, "ids": ids, "count": len(ids)}
    answer = {"envs": envs, "cdi_devices": cdi or [], "devices": [], "annotations": {}, "problem": ""}
    return {"pod_uid": pod_uid(number), "container": name, **allocated, **answer}


def kubelet(pods: list[JsonObject], entries: list[JsonObject], registered: dict[str, list[str]]) -> JsonObject:
    """kubelet's checkpoint, and PodResources with the same by name instead of UID."""
    listed = []
    for pod in pods:
        metadata, containers = pod["metadata"], []
        for name in [each["name"] for each in pod["spec"]["containers"]]:
            rows = [row for row in entries if (row["pod_uid"], row["container"]) == (metadata["uid"], name)]
            devices = [{"resource": row["resource"], "ids": list(row["ids"])} for row in rows]
            containers.append({"name": name, "devices": devices})
        listed.append({"namespace": metadata["namespace"], "name": metadata["name"], "containers": containers})
    return {
        "root": "/var/lib/kubelet",
        "checkpoint": {"state": "ok", "problem": "", "entries": entries, "registered": registered},
        "pod_resources": {"state": "ok", "problem": "", "pods": listed},
        "sockets": ["plugin.sock"],
        "device_nodes": [],
    }


def nvml(*gpus: JsonObject) -> JsonObject:
    versions = {"driver": "615.12", "nvml": "13.615.12", "cuda": "13.4"}
    return {"available": True, "problem": "", **versions, "cards": list(gpus), "seconds": 0.1}


def world(
    node_: JsonObject,
    pods: list[JsonObject],
    gpus: list[JsonObject],
    entries: list[JsonObject],
    registered: dict[str, list[str]],
    **more: Any,
) -> JsonObject:
    return {
        "now": NOW,
        "nodes": [node_],
        "pods": pods,
        "configmaps": [],
        "evidence": {NODE: {"nvml": nvml(*gpus), "kubelet": kubelet(pods, entries, registered), "problem": ""}},
        "extender": {"cp1": {"nodes": []}},
        "servers": None,
        **more,
    }


# --------------------------------------------------------------------------- gpushare, ours


def server(component: str, on: str, ready: str = "True", **status: Any) -> JsonObject:
    """A pod of this collection's servers."""
    space = "gpushare-scheduler" if component == "scheduler" else "gpushare-system"
    labels = {"app.kubernetes.io/component": component, "app.kubernetes.io/part-of": "gpushare"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{component}-{on}", "namespace": space, "labels": labels},
        "spec": {"nodeName": on},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}], **status},
    }


def scheduler(on: str, *arguments: str, annotations: JsonObject | None = None) -> JsonObject:
    """The pod of a kube-scheduler."""
    labels = {"component": "kube-scheduler", "tier": "control-plane"}
    metadata = {"name": f"kube-scheduler-{on}", "namespace": "kube-system", "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "annotations": annotations or {}},
        "spec": {"nodeName": on, "containers": [{"name": "kube-scheduler", "command": ["kube-scheduler", *arguments]}]},
        "status": {"phase": "Running"},
    }


OUR_CONFIGURATION = "--config=/etc/kubernetes/kubegpu-share/scheduler.yaml"


def servers(**more: Any) -> JsonObject:
    """This collection's servers, and what beside the API's lists is read of them."""
    return {
        "control_plane": ["cp1"],
        "namespace": "gpushare-system",
        "scheduler": "static_pod",
        "admission": "deny",
        "pods": [server("extender", "cp1"), server("device-plugin", NODE), scheduler("cp1", OUR_CONFIGURATION)],
        "objects": [],
        **more,
    }


OUR_PLUGIN = {
    "app.kubernetes.io/name": "gpushare-device-plugin",
    "app.kubernetes.io/component": "device-plugin",
    "app.kubernetes.io/part-of": "gpushare",
}
MEM, COUNT = contract.RESOURCE_MEMORY, contract.RESOURCE_COUNT
# Of a node, by its allocator.
LABELS = {name: dict((allocator.label, allocator.restricted)) for name, allocator in ALLOCATORS.items()}


def our_cards(*units: int, mib: int = 1024) -> list[contract.Card]:
    return [contract.Card(at, uuid(at + 1), at, unit * mib, unit, True, "NVIDIA T4") for at, unit in enumerate(units)]


def our_node(cards: list[contract.Card], limit: str = contract.LIMIT_OFF) -> JsonObject:
    return node(
        {MEM: sum(card.units for card in cards), COUNT: len(cards)},
        {contract.NODE_CARDS: contract.cards_to_annotation(cards), contract.NODE_LIMIT: limit},
        LABELS["extender"],
    )


def our_pod(number: int, cards: list[contract.Card], *units: int, **more: Any) -> JsonObject:
    found = pod(number, [container(f"main-{at}", {MEM: unit}) for at, unit in enumerate(units)], **more)
    annotations = contract.booking_annotations(cards, found, int(ASSUMED), assigned=True)
    found["metadata"]["annotations"].update(contract.merge_only(annotations, {}))
    return found


def our_entries(
    number: int, everything: list[contract.Card], cards: list[contract.Card], *units: int, cdi: bool = False
) -> list[JsonObject]:
    shorts = contract.short_uuids([card.uuid for card in everything])
    entries = []
    for at, unit in enumerate(units):
        part = unit // len(cards)
        first = number * 10 + at * part
        ids = [contract.device_id(shorts[card.uuid], first + slot) for card in cards for slot in range(part)]
        envs = {
            "NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(card.uuid for card in cards),
            contract.POD_INDEX: str(cards[0].index),
            contract.POD_CARD_UNITS: str(cards[0].units),
            contract.POD_UNITS: str(sum(units)),
            contract.CONTAINER_UNITS: str(unit),
        }
        names = [f"nvidia.com/gpu={card.uuid}" for card in cards] if cdi else []
        entries.append(entry(number, f"main-{at}", MEM, ids, envs, names))
    return entries


def limit(number: int, hard: int, used: int) -> JsonObject:
    cid = f"{number:02d}" * 32
    owner = {"cgroup": f"/kubepods/{cid}", "pod_uid": pod_uid(number), "container_id": cid}
    return {**owner, "hard_mib": hard, "soft_mib": 0, "used_mib": used}


def inspected(pods: list[JsonObject], cards: list[contract.Card], upstream: bool = False) -> JsonObject:
    """The answer to /inspect of our extender, or of upstream's, which has no UID."""
    devs = []
    for card in cards:
        rows = [
            {
                "name": pod["metadata"]["name"],
                "namespace": pod["metadata"]["namespace"],
                "usedGPU": contract.shares(pod)[card.index],
                **({} if upstream else {"uid": pod["metadata"]["uid"]}),
            }
            for pod in pods
            if contract.counts(pod) and card.index in contract.shares(pod)
        ]
        used = sum(row["usedGPU"] for row in rows)
        devs.append({"id": card.index, "totalGPU": card.units, "usedGPU": used, "pods": rows})
    sums = {"totalGPU": sum(card.units for card in cards), "usedGPU": sum(dev["usedGPU"] for dev in devs)}
    return {"cp1": {"nodes": [{"name": NODE, **sums, "devs": devs}]}}


def ours_envvar() -> JsonObject:
    """GPUs of different size, several containers, a terminating pod, memory limits enforced by the driver."""
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
    gpu_node = our_node(cards, contract.LIMIT_ENFORCED)
    registered = {MEM: ["5a4d7f21-0"]}
    return world(gpu_node, pods, gpus, entries, registered, extender=inspected(pods, cards), servers=servers())


def ours_cdi() -> JsonObject:
    """Devices by CDI names, in MiB, on a node whose driver can't enforce limits."""
    cards = our_cards(16000, mib=1)
    pods = [our_pod(1, cards, 3000), our_pod(2, cards, 1000), plugin(OUR_PLUGIN), bystander()]
    entries = [*our_entries(1, cards, cards, 3000, cdi=True), *our_entries(2, cards, cards, 1000, cdi=True)]
    gpus = [gpu(0, 16000, [process(1, 101, 2900)])]
    gpu_node = our_node(cards, contract.LIMIT_UNENFORCED + "NVIDIA's driver is 580.95, and limits need 615 or newer")
    return world(gpu_node, pods, gpus, entries, {MEM: ["5a4d7f21-0"]}, extender=inspected(pods, cards))


def ours_several() -> JsonObject:
    """A pod of two GPUs beside one of one, and a GPU that the device plugin numbers differently from NVML."""
    cards = our_cards(16, 16, 16)
    pods = [our_pod(1, [cards[0], cards[2]], 8), our_pod(2, [cards[1]], 4), plugin(OUR_PLUGIN)]
    entries = [*our_entries(1, cards, [cards[0], cards[2]], 8), *our_entries(2, cards, [cards[1]], 4)]
    gpus = [
        gpu(0, 16384, [process(1, 101, 3000)]),
        {**gpu(1, 16384, [process(2, 201, 3000)]), "index": 2},
        {**gpu(2, 16384, [process(1, 101, 3000)]), "index": 1},
    ]
    return world(our_node(cards), pods, gpus, entries, {MEM: ["5a4d7f21-0"]}, extender=inspected(pods, cards))


# --------------------------------------------------------------------------- claims

DRIVER_POD = {
    "app.kubernetes.io/name": "gpushare-dra-driver",
    "app.kubernetes.io/component": "dra-driver",
    "app.kubernetes.io/part-of": "gpushare",
}
TEMPLATES_POD = {
    "app.kubernetes.io/name": "gpushare-dra-templates",
    "app.kubernetes.io/component": "dra-templates",
    "app.kubernetes.io/part-of": "gpushare",
}
FOUR, PAIR, SPREAD, GRID = Shape((4,)), Shape((4, 2)), Shape((8,), cards=2), Shape((4, 2), cards=2)


def admission_objects() -> list[JsonObject]:
    """What the template of role gpushare has beside the servers, as references to be applied."""
    kinds = [one for kind, name in servers_claims.POLICIES for one in ((kind, name), (f"{kind}Binding", name))]
    objects = [
        {
            "apiVersion": servers_claims.ADMISSION,
            "kind": kind,
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]} if "Binding" in kind else {"a": "b"},
        }
        for kind, name in kinds
    ]
    metadata = {"name": dra_objects.DRIVER}
    return [
        *objects,
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata, "spec": {"a": 1}},
    ]


def claims_servers() -> JsonObject:
    """This collection's servers where kube-scheduler allocates claims."""
    templates = {**server("dra-templates", NODE), "metadata": {**server("dra-templates", NODE)["metadata"]}}
    templates["metadata"]["labels"] = TEMPLATES_POD
    return servers(control_plane=[], pods=[server("dra-driver", NODE), templates], objects=admission_objects())


def claimed_evidence(
    pods: list[JsonObject], made: list[JsonObject], cards: list[contract.Card], unit: str
) -> tuple[list[JsonObject], JsonObject]:
    """PodResources' pods, and the driver's records and specifications, of claims in the API."""
    by_name = {one["metadata"]["name"]: one for one in made}
    listed = []
    for pod in pods:
        statuses = {each["name"]: each["resourceClaimName"] for each in pod["status"].get("resourceClaimStatuses", [])}
        containers = []
        for each in pod["spec"]["containers"]:
            rows = [
                {
                    "namespace": "default",
                    "claim": statuses[use["name"]],
                    "pool": result["pool"],
                    "device": result["device"],
                    "share": result["shareID"],
                }
                for use in each["resources"].get("claims", [])
                for result in by_name[statuses[use["name"]]]["status"]["allocation"]["devices"]["results"]
                if result["request"] == use["request"]
            ]
            containers.append({"name": each["name"], "devices": [], "claims": rows})
        metadata = pod["metadata"]
        listed.append({"namespace": metadata["namespace"], "name": metadata["name"], "containers": containers})
    with tempfile.TemporaryDirectory() as folder:
        for one in made:
            dra_objects.prepare(one, cards, Path(folder), Path(folder) / "cdi", unit)
        found = prepared_claims(NodeKubelet(), folder, f"{folder}/cdi")
    return listed, json.loads(json.dumps(found))


def claims_world(
    pods: list[JsonObject], made: list[JsonObject], gpus: list[JsonObject], cards: list[contract.Card], **more: Any
) -> JsonObject:
    unit = more.pop("unit", "GiB")
    limits = more.pop("limits", contract.LIMIT_OFF)
    found = world(
        node({}, labels=LABELS["dra"]),
        [*pods, plugin(DRIVER_POD), bystander()],
        gpus,
        [],
        {},
        slices=dra_objects.slices_of(NODE, cards, unit, limits),
        claims=made,
        templates=[
            f"default/{use['resourceClaimTemplateName']}" for pod in pods for use in pod["spec"]["resourceClaims"]
        ],
        **more,
    )
    listed, prepared = claimed_evidence(pods, made, cards, unit)
    evidence = found["evidence"][NODE]["kubelet"]
    evidence["pod_resources"]["pods"], evidence["prepared"] = listed, prepared
    # Where no device plugin has ever run.
    sentence = "device-plugins/kubelet_internal_checkpoint doesn't exist"
    evidence["checkpoint"] = {"state": "missing", "problem": sentence, "entries": [], "registered": {}}
    return found


def claims_enforced() -> JsonObject:
    """Claims on cards of different size, for two containers, over two cards, and both; limits enforced; servers."""
    cards = our_cards(16, 40)
    pods = [dra_objects.turned(1, FOUR), dra_objects.turned(2, PAIR), dra_objects.turned(3, SPREAD)]
    pods.append(dra_objects.turned(4, GRID))
    made = [
        dra_objects.claim(1, FOUR, cards[:1]),
        dra_objects.claim(2, PAIR, [cards[1]] * 2),
        dra_objects.claim(3, SPREAD, cards),
        dra_objects.claim(4, GRID, [cards[0], cards[0], cards[1], cards[1]]),
    ]
    gpus = [
        gpu(0, 16 * 1024, [process(1, 101, 3500), process(3, 301, 4000)], [limit(1, 4096, 3500), limit(3, 4096, 4000)]),
        gpu(1, 40 * 1024, [process(2, 201, 5000)], [limit(2, 6144, 5000)]),
    ]
    return claims_world(pods, made, gpus, cards, limits=contract.LIMIT_ENFORCED, servers=claims_servers())


def claims_mib() -> JsonObject:
    """Claims in MiB, on a node whose driver can't enforce limits."""
    cards = our_cards(16000, mib=1)
    pods = [dra_objects.turned(1, Shape((3000,))), dra_objects.turned(2, Shape((1000,)))]
    made = [dra_objects.claim(number, Shape((units,)), cards, unit="MiB") for number, units in ((1, 3000), (2, 1000))]
    return claims_world(pods, made, [gpu(0, 16000, [process(1, 101, 2900)])], cards, unit="MiB", limits="DriverTooOld")


def claims_beside_extender() -> JsonObject:
    """A node of claims beside one of the extender, in one cluster."""
    found = claims_enforced()
    other = json.loads(json.dumps(ours_cdi()).replace(NODE, "gpu2"))
    for pod in other["pods"]:
        if pod["metadata"]["namespace"] == "kube-system":
            pod["metadata"]["name"] += "-other"
        else:
            pod["metadata"]["namespace"] = "other"
    text = json.dumps(other).replace("11111111-2222", "99999999-2222").replace("11111111_2222", "99999999_2222")
    other = json.loads(text.replace('"namespace": "default"', '"namespace": "other"'))
    found["nodes"] += other["nodes"]
    found["pods"] += other["pods"]
    found["evidence"].update(other["evidence"])
    found["extender"] = other["extender"]
    found["servers"] = None
    return found


# --------------------------------------------------------------------------- gpushare, upstream's

UPSTREAM_PLUGIN = {"component": "gpushare-device-plugin", "app": "gpushare", "name": "gpushare-device-plugin-ds"}


def upstream_node(cards: int, units: int) -> JsonObject:
    return node({MEM: cards * units, COUNT: cards}, labels=LABELS["extender"])


def upstream_pod(number: int, card: int, per_card: int, units: int, assigned: bool = True) -> JsonObject:
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


def upstream_entry(number: int, card: int, per_card: int, units: int, shown: str, ids_of: int = 1) -> JsonObject:
    """An entry with the IDs of any GPU, which aren't those of the GPU that the container got."""
    envs = {
        "NVIDIA_VISIBLE_DEVICES": shown,
        contract.POD_INDEX: str(card),
        contract.POD_UNITS: str(units),
        contract.CONTAINER_UNITS: str(units),
        contract.POD_CARD_UNITS: str(per_card),
    }
    ids = [f"{uuid(ids_of)}-_-{number * 20 + slot}" for slot in range(units)]
    return entry(number, "main", MEM, ids, envs)


def upstream_head() -> JsonObject:
    """HEAD on two GPUs: the variable is the GPU's index."""
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


def upstream_single() -> JsonObject:
    """HEAD on one GPU: the variable is the UUID, and the pod is never marked as assigned."""
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


def upstream_2019() -> JsonObject:
    """The images in upstream's manifests: the variable is the UUID on every node."""
    found = upstream_head()
    for at, row in enumerate(found["evidence"][NODE]["kubelet"]["checkpoint"]["entries"]):
        row["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(at + 1)
    return found


# --------------------------------------------------------------------------- HAMi

HAMI_PLUGIN = {"app.kubernetes.io/component": "hami-device-plugin", "app.kubernetes.io/name": "hami"}
GPU = "nvidia.com/gpu"


def hami_pod(number: int, *parts: tuple[int, int, int], **more: Any) -> JsonObject:
    """A pod of one container with parts of GPUs: (index, MiB, percent of the cores)."""
    text = ":".join(f"{uuid(card + 1)},NVIDIA,{mib},{cores}" for card, mib, cores in parts)
    found = pod(
        number,
        [container("main", {GPU: len(parts), "nvidia.com/gpumem": parts[0][1], "nvidia.com/gpucores": parts[0][2]})],
        {
            **{"hami.io/vgpu-node": NODE, "hami.io/vgpu-time": str(NOW - 3590)},
            **{"hami.io/vgpu-devices-allocated": f"{text}:;", "hami.io/vgpu-devices-to-allocate": ";"},
            **{"hami.io/bind-phase": "success", "hami.io/bind-time": str(NOW - 3590)},
        },
        scheduler="hami-scheduler",
    )
    found["metadata"]["annotations"].update(more)
    return found


def hami_entry(number: int, *parts: tuple[int, int, int]) -> JsonObject:
    envs = {
        "NVIDIA_VISIBLE_DEVICES": ",".join(uuid(card + 1) for card, _mib, _cores in parts),
        **{f"CUDA_DEVICE_MEMORY_LIMIT_{at}": f"{mib}m" for at, (_card, mib, _cores) in enumerate(parts)},
        "CUDA_DEVICE_SM_LIMIT": str(parts[0][2]),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/vgpu/x.cache",
    }
    return entry(number, "main", GPU, [f"{uuid(card + 1)}-{number}" for card, _mib, _cores in parts], envs)


def hami(register: str) -> JsonObject:
    pods = [hami_pod(1, (0, 3000, 30)), hami_pod(2, (0, 4000, 40), (1, 4000, 40)), plugin(HAMI_PLUGIN), bystander()]
    entries = [hami_entry(1, (0, 3000, 30)), hami_entry(2, (0, 4000, 40), (1, 4000, 40))]
    gpus = [
        gpu(0, 16384, [process(1, 101, 3100, libvgpu=True), process(2, 201, 3900, libvgpu=True)]),
        gpu(1, 16384, [process(2, 201, 1000, libvgpu=True)]),
    ]
    gpu_node = node({GPU: 20}, {"hami.io/node-nvidia-register": register}, {"gpu": "on"})
    return world(gpu_node, pods, gpus, entries, {GPU: [f"{uuid(1)}-0"]})


def hami_json() -> JsonObject:
    """2.8 and newer: a JSON list that leaves out what is 0."""
    size = {"count": 10, "devmem": 16384, "devcore": 100, "type": "NVIDIA-T4", "mode": "hami-core", "health": True}
    return hami(json.dumps([{"id": uuid(at + 1), **({"index": at} if at else {}), **size} for at in (0, 1)]))


def hami_text() -> JsonObject:
    """2.7.1 and older: text of 7 fields."""
    return hami("".join(f"{uuid(at + 1)},10,16384,100,NVIDIA-T4,0,true:" for at in (0, 1)))


def hami_mig() -> JsonObject:
    """2.10 with dynamic MIG."""
    rows = [{"id": uuid(1), "count": 7, "devmem": 40960, "devcore": 100, "type": "NVIDIA-A100", "mode": "mig"}]
    rows[0]["health"] = True
    devices = [{"uuid": uuid(at, "MIG"), "index": at, "gi": at, "ci": 0, "total_mib": 9984} for at in (1, 2)]
    pods = []
    for at in (1, 2):
        allocation = {"containerIndex": 0, "deviceIndex": 0, "gpuUUID": uuid(1), "profile": "1g.10gb"}
        allocation |= {"placement": {"start": at * 2, "size": 2}, "migUUID": uuid(at, "MIG")}
        allocation |= {"gpuInstanceID": at, "computeInstanceID": 0}
        pods.append(hami_pod(at, (0, 9984, 14), **{"hami.io/vgpu-mig-allocations": json.dumps([allocation])}))
    pods.append(plugin(HAMI_PLUGIN))
    entries = [
        entry(at, "main", GPU, [f"{uuid(1)}-{at}"], {"NVIDIA_VISIBLE_DEVICES": uuid(at, "MIG")}) for at in (1, 2)
    ]
    mig = {"mode": "enabled", "pending": "enabled", "devices": devices}
    processes = [process(1, 101, 5000, mig_uuid=uuid(1, "MIG"), gi=1, ci=0)]
    gpu_node = node({GPU: 7}, {"hami.io/node-nvidia-register": json.dumps(rows)}, {"gpu": "on"})
    return world(gpu_node, pods, [gpu(0, 40960, processes, mig=mig)], entries, {GPU: [f"{uuid(1)}-0"]})


# --------------------------------------------------------------------------- NVIDIA

NVIDIA_PLUGIN = {"app.kubernetes.io/name": "nvidia-device-plugin"}


def nvidia(
    resource: str,
    labels: JsonObject,
    held: dict[int, list[str]],
    gpus: list[JsonObject],
    capacity: JsonObject,
    envs: JsonObject | None = None,
    cdi: bool = False,
) -> JsonObject:
    pods = [pod(number, [container("main", {resource: len(ids)})]) for number, ids in held.items()]
    entries = []
    for number, ids in held.items():
        shown = sorted({one.partition("::")[0] for one in ids})
        variables = {"NVIDIA_VISIBLE_DEVICES": "void" if cdi else ",".join(shown), **(envs or {})}
        names = [f"nvidia.com/gpu={one}" for one in shown] if cdi else []
        entries.append(entry(number, "main", resource, ids, variables, names))
    pods += [plugin(NVIDIA_PLUGIN), bystander()]
    gpu_node = node(capacity, labels={f"nvidia.com/{key}": value for key, value in labels.items()})
    registered = {resource: [one for ids in held.values() for one in ids]}
    return world(gpu_node, pods, gpus, entries, registered)


def nvidia_exclusive() -> JsonObject:
    """Two GPUs for one pod each, by CDI names."""
    gpus = [gpu(0, 16384, [process(1, 101, 9000)]), gpu(1, 16384, [process(2, 201, 100)])]
    labels = {"gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.strategy": "none"}
    return nvidia(GPU, labels, {1: [uuid(1)], 2: [uuid(2)]}, gpus, {GPU: 2}, cdi=True)


def nvidia_time_slicing() -> JsonObject:
    """Two pods on one time-sliced GPU, by a resource of its own."""
    gpus = [gpu(0, 16384, [process(1, 101, 3000), process(2, 201, 3500)]), gpu(1, 16384, [])]
    labels = {"gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}
    shared = "nvidia.com/gpu.shared"
    return nvidia(shared, labels, {1: [f"{uuid(1)}::0"], 2: [f"{uuid(1)}::3"]}, gpus, {shared: 8, GPU: 0})


def nvidia_mps() -> JsonObject:
    """Two pods on one GPU with MPS."""
    # The lists and the server's name, which Linux cuts, are as tests/gpu sees them.
    server = process(91, 50, 66, name="nvidia-cuda-mps")
    clients = [process(at, at * 100 + 1, 2500 + at * 500, types=["compute", "mps"]) for at in (1, 2)]
    gpus = [gpu(0, 16384, [server, *clients], compute_mode="exclusive_process")]
    labels = {"gpu.count": "1", "gpu.replicas": "4", "gpu.sharing-strategy": "mps"}
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"}
    made = nvidia(GPU, labels, {1: [f"{uuid(1)}::0"], 2: [f"{uuid(1)}::1"]}, gpus, {GPU: 4}, pipe)
    name = "nvidia-device-plugin-mps-control-daemon-x7k2p"
    made["pods"].append(pod(91, [container("daemon")], labels=NVIDIA_PLUGIN, name=name, namespace="kube-system"))
    return made


def nvidia_mig_mixed() -> JsonObject:
    """Two MIG devices of one GPU for one pod each, by a resource per profile."""
    devices = [{"uuid": uuid(at, "MIG"), "index": at, "gi": at, "ci": 0, "total_mib": 9984} for at in (1, 2)]
    mig = {"mode": "enabled", "pending": "enabled", "devices": devices}
    processes = [process(1, 101, 5000, mig_uuid=uuid(1, "MIG"), gi=1, ci=0), process(2, 201, 3000, gi=2, ci=0)]
    labels = {"gpu.replicas": "1", "mig.strategy": "mixed", "mig.config": "all", "mig.config.state": "success"}
    resource = "nvidia.com/mig-1g.10gb"
    held = {1: [uuid(1, "MIG")], 2: [uuid(2, "MIG")]}
    return nvidia(resource, labels, held, [gpu(0, 40960, processes, mig=mig)], {resource: 2, GPU: 0})


def nvidia_mig_shared() -> JsonObject:
    """Two pods on one MIG device that is time-sliced, beside another one; whole cards aren't shared."""
    shared = "nvidia.com/mig-1g.10gb.shared"
    devices = [{"uuid": uuid(at, "MIG"), "index": at, "gi": at, "ci": 0, "total_mib": 9984} for at in (1, 2)]
    mig = {"mode": "enabled", "pending": "enabled", "devices": devices}
    one = [process(number, 100 * number + 1, 3000, mig_uuid=uuid(1, "MIG"), gi=1, ci=0) for number in (1, 2)]
    labels = {"gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.strategy": "mixed"}
    labels |= {"mig-1g.10gb.replicas": "3", "mig-1g.10gb.sharing-strategy": "time-slicing"}
    held = {number: [f"{uuid(1, 'MIG')}::{number}"] for number in (1, 2)}
    return nvidia(shared, labels, held, [gpu(0, 40960, one, mig=mig)], {shared: 6, GPU: 0})


def virtual_beside_shares() -> JsonObject:
    """A pod's GPU beside one that a virtual machine has with its audio function, and one with vGPUs."""
    labels = {"gpu.count": "1", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.strategy": "none"}
    made = nvidia(GPU, labels, {1: [uuid(1)]}, [gpu(0, 16384, [process(1, 101, 9000)])], {GPU: 1}, cdi=True)
    function = {"present": True, "driver": "vfio-pci", "group": "14", "state": "viable", "others": [], "ruled": True}
    image = {"rule": True, "lacking": [], "newer": True}
    vgpus = [f"c73f1fa6-489e-4834-9476-d70dabd98c4{number}" for number in range(4)]
    device = {"uuid": "", "type": "", "number": ""}
    made["evidence"][NODE]["virtual_machines"] = {
        "problem": "",
        "functions": [
            {**function, "address": "0000:02:00.0", "uuid": uuid(2)},
            {**function, "address": "0000:02:00.1", "uuid": ""},
        ],
        "missing": [],
        "images": [
            {**image, "path": f"/boot/initrd.img-{release}", "release": release}
            for release in ("6.1.0-50-amd64", "6.1.0-51-amd64")
        ],
        "others": 2,
        "cards": [
            {
                "address": "0000:03:00.0",
                "present": True,
                "wanted": {"A10-4Q": 3, "A10-8Q": 1},
                "vgpus": {"A10-4Q": 3, "A10-8Q": 1},
                "unnamed": 0,
            }
        ],
        "devices": [
            {**device, "address": "0000:02:00.0", "group": "14"},
            {**device, "address": "0000:02:00.1", "group": "14"},
            *(
                {**device, "address": "0000:03:00.0", "uuid": key, "type": kind, "group": str(group)}
                for group, key, kind in zip(range(40, 44), vgpus, ("A10-4Q", "A10-4Q", "A10-4Q", "A10-8Q"), strict=True)
            ),
        ],
    }
    # KubeVirt's device plugin has IOMMU groups, NVIDIA's the mediated devices themselves.
    made["evidence"][NODE]["kubelet"]["checkpoint"]["registered"].update(
        {"nvidia.com/A10": ["14"], "nvidia.com/A10-4Q": ["40", "41", "42"], "nvidia.com/NVIDIA_A10-8Q": [vgpus[3]]}
    )
    return made


def kata_cards() -> JsonObject:
    """A node whose two cards pods of Kata have, one of which is in a pod's virtual machine."""
    labels = {"kubegpu.share/backend": "kata", "nvidia.com/cc.ready.state": "false"}
    held = pod(1, [container("work", {PGPU: 1})], runtimeClassName=KATA)
    made = world(node({PGPU: 2}, labels=labels), [held], [], [entry(1, "work", PGPU, ["14"], {})], {PGPU: ["14", "31"]})
    function = {"present": True, "driver": "vfio-pci", "state": "viable", "others": [], "ruled": True}
    device = {"uuid": "", "type": "", "number": ""}
    cards = [("0000:02:00.0", uuid(1), "14"), ("0000:03:00.0", uuid(2), "31")]
    functions = [{**function, "address": address, "uuid": name, "group": group} for address, name, group in cards]
    evidence = made["evidence"][NODE]
    evidence["virtual_machines"] = {
        **{"problem": "", "functions": functions, "missing": [], "others": 0, "cards": []},
        "images": [{"rule": True, "lacking": [], "newer": True, "path": "/boot/initrd.img", "release": "6.12"}],
        "devices": [{**device, "address": address, "group": group} for address, _uuid, group in cards],
    }
    evidence["nvml"] = {"available": False, "problem": "NVML isn't there"}
    evidence["kata"] = {
        **{"problem": "", "handler": KATA, "runtime_class": KATA, "handlers": [KATA, "runc"], "handler_loaded": True},
        **{"default_runtime": "runc", "devices": [f"{PGPU}=14", f"{PGPU}=31"], "iommufd": False},
    }
    selector = {"nvidia.com/cc.ready.state": "false"}
    made["runtimeclasses"] = [
        {"metadata": {"name": KATA}, "handler": KATA, "scheduling": {"nodeSelector": selector}},
        {"metadata": {"name": "nvidia"}, "handler": "nvidia"},
    ]
    return made


KATA, PGPU = "kata-qemu-nvidia-gpu", "nvidia.com/pgpu"
OURS = (ours_envvar, ours_cdi, ours_several)
UPSTREAMS = (upstream_head, upstream_single, upstream_2019)
OTHERS = (
    hami_json,
    hami_text,
    hami_mig,
    nvidia_exclusive,
    nvidia_time_slicing,
    nvidia_mps,
    nvidia_mig_mixed,
    nvidia_mig_shared,
    virtual_beside_shares,
    kata_cards,
)
CLAIMS = (claims_enforced, claims_mib, claims_beside_extender)
WORLDS = {one.__name__: one for one in (*OURS, *CLAIMS, *UPSTREAMS, *OTHERS)}
