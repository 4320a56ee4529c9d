# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults injected into a healthy cluster, one at a time, with the check that reports each."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils._contracts import backends
from ansible_collections.kubegpu.share.plugins.module_utils._contracts import gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._contracts.claim_templates import Shape
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from check_worlds import (
    COUNT,
    FOUR,
    GPU,
    HAMI_PLUGIN,
    MEM,
    NODE,
    NOW,
    OUR_PLUGIN,
    container,
    host_process,
    inspected,
    our_cards,
    our_node,
    our_pod,
    plugin,
    pod,
    pod_uid,
    process,
    scheduler,
    server,
    uuid,
)
from check_worlds import node as other_node
from dra_objects import claim, share_id, turned


@dataclasses.dataclass(frozen=True)
class Mutation:
    """
    :param check: reports it; no other check reports FAIL.
    :param world: the healthy cluster.
    :param what: for the documentation.
    :param cause: code of the finding's cause.
    """

    check: str
    world: str
    what: str
    cause: str
    change: Callable[[JsonObject], None]
    level: str = "FAIL"

    @property
    def id(self) -> str:
        return f"{self.check}-{self.world}-{self.what.replace(' ', '_')}"


MUTATIONS: list[Mutation] = []


def breaks(check: str, world: str, what: str, cause: str, level: str = "FAIL") -> Callable[..., Any]:
    def register(change: Callable[[JsonObject], None]) -> Callable[[JsonObject], None]:
        MUTATIONS.append(Mutation(check, world, what, cause, change, level))
        return change

    return register


# --------------------------------------------------------------------------- parts of a cluster


def node(world: JsonObject) -> JsonObject:
    return world["nodes"][0]


def the_pod(world: JsonObject, at: int = 0) -> JsonObject:
    return world["pods"][at]


def notes(world: JsonObject, at: int = 0) -> JsonObject:
    """A pod's annotations."""
    return world["pods"][at]["metadata"]["annotations"]


def nvml(world: JsonObject) -> JsonObject:
    return world["evidence"][NODE]["nvml"]


def card(world: JsonObject, at: int = 0) -> JsonObject:
    return nvml(world)["cards"][at]


def checkpoint(world: JsonObject) -> JsonObject:
    return world["evidence"][NODE]["kubelet"]["checkpoint"]


def entry(world: JsonObject, at: int = 0) -> JsonObject:
    return checkpoint(world)["entries"][at]


def listing(world: JsonObject) -> JsonObject:
    return world["evidence"][NODE]["kubelet"]["pod_resources"]


def listed(world: JsonObject, at: int = 0) -> list[str]:
    """The IDs of a pod's first container in PodResources."""
    return listing(world)["pods"][at]["containers"][0]["devices"][0]["ids"]


def resource(world: JsonObject, name: str, value: int | str, *fields: str) -> None:
    for field in fields or ("capacity", "allocatable"):
        node(world)["status"][field][name] = str(value)


def shift(world: JsonObject, at: int = 0, seconds: int = 70) -> None:
    """Date back the time at which a GPU was chosen for a pod."""
    notes(world, at)[contract.POD_ASSUME_TIME] = str((NOW - seconds) * 10**9)


def devs(world: JsonObject) -> list[JsonObject]:
    """The node's GPUs in the extender's cache."""
    return world["extender"]["cp1"]["nodes"][0]["devs"]


def node_notes(world: JsonObject) -> JsonObject:
    """The node's annotations."""
    return node(world)["metadata"]["annotations"]


def uses(world: JsonObject, mib: int, in_use: int, at: int = 0) -> None:
    """Let a process of the first GPU use so much memory."""
    card(world)["processes"][at]["used_mib"] = mib
    card(world)["memory"]["used_mib"] = in_use


def chosen(world: JsonObject, part: str, at: int = 0, **envs: str) -> None:
    """Let HAMi choose this part (MiB, percent of the cores) of the first GPU for a pod."""
    notes(world, at)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,{part}:;"
    entry(world, at)["envs"].update(envs)


def unhealthy(world: JsonObject, indices: str) -> None:
    """Add upstream's ConfigMap of the node's unhealthy GPUs."""
    metadata = {"name": f"unhealthy-gpu-{NODE}", "creationTimestamp": "2026-11-22T10:00:00Z"}
    world["configmaps"].append({"metadata": metadata, "data": {"gpus": indices}})


# --------------------------------------------------------------------------- common


breaks("C1", "ours_envvar", "HAMi's device plugin runs beside gpushare's", "plugins_of_several_stacks")(
    lambda w: w["pods"].append(plugin(HAMI_PLUGIN))
)
breaks("C1", "nvidia_exclusive", "gpushare's resource is registered with kubelet too", "several_stacks_registered")(
    lambda w: checkpoint(w)["registered"].update({MEM: ["5a4d7f21-0"]})
)
breaks("C1", "ours_cdi", "two pods of the device plugin run on one node", "several_plugins")(
    lambda w: w["pods"].append({**plugin(OUR_PLUGIN), "metadata": {**plugin(OUR_PLUGIN)["metadata"], "name": "second"}})
)

breaks("C1", "hami_json", "a tenant's pod has the label of HAMi's device plugin", "unconfirmed", "WARN")(
    lambda w: w["pods"].append(pod(60, [container("main")], labels=HAMI_PLUGIN, namespace="team"))
)
breaks("C1", "nvidia_exclusive", "the device plugin is in a namespace that isn't known", "unconfirmed", "WARN")(
    lambda w: the_pod(w, -2)["metadata"].update(namespace="gpu-stack")
)

breaks("C2", "ours_envvar", "a process outside any pod uses a GPU", "outside_pods")(
    lambda w: card(w)["processes"].append(host_process(4711, "python3", 200))
)
breaks("C2", "hami_json", "a process of a pod that requests no GPU uses one", "pod_without_request")(
    lambda w: card(w)["processes"].append(process(80, 811, 200))
)
breaks("C2", "nvidia_exclusive", "a process of a deleted pod still runs", "unknown_pod")(
    lambda w: card(w)["processes"].append(process(70, 711, 200))
)

breaks("C2", "ours_cdi", "a tenant's pod has a device plugin's label and uses a GPU", "pod_without_request")(
    lambda w: (
        w["pods"].append(pod(60, [container("main")], labels=OUR_PLUGIN, namespace="team")),
        card(w)["processes"].append(process(60, 611, 200)),
    )
)

breaks("C3", "ours_envvar", "a pod's process uses another GPU", "other_gpu")(
    lambda w: card(w, 1)["processes"].append(process(1, 102, 100))
)
breaks("C3", "upstream_2019", "a pod's process uses another GPU", "other_gpu")(
    lambda w: card(w, 0)["processes"].append(process(2, 202, 100))
)

breaks("C4", "ours_envvar", "kubelet's checkpoint has no entry of a running container", "not_allocated")(
    lambda w: checkpoint(w)["entries"].pop(0)
)


@breaks("C4", "nvidia_time_slicing", "a container has one device more than it requests", "count_differs")
def mutation_10(world: JsonObject) -> None:
    entry(world)["ids"] = [f"{uuid(2)}::0"]
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world)["processes"].pop(0)
    listed(world).append(f"{uuid(1)}::1")


@breaks("C5", "upstream_2019", "the machine came back with other GPUs", "gpu_missing")
def mutation_11(world: JsonObject) -> None:
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(9)
    card(world)["processes"].clear()
    card(world)["memory"]["used_mib"] = 300


@breaks("C5", "nvidia_exclusive", "gpu_exclude names a GPU that a pod still has", "gpu_excluded")
def mutation_excluded(world: JsonObject) -> None:
    mutation_12(world)
    world["evidence"][NODE]["nvml"]["excluded"] = [{"uuid": uuid(9)}]


@breaks("C5", "nvidia_exclusive", "a GPU of a pod is gone", "gpu_missing")
def mutation_12(world: JsonObject) -> None:
    entry(world)["ids"] = [uuid(9)]
    entry(world)["cdi_devices"] = [f"nvidia.com/gpu={uuid(9)}"]
    card(world)["processes"].clear()


breaks("C6", "ours_envvar", "the device plugin was killed", "plugin_stopped")(
    lambda w: resource(w, MEM, 0, "allocatable")
)


@breaks("C6", "ours_several", "a GPU is unhealthy", "unhealthy_gpu")
def mutation_14(world: JsonObject) -> None:
    rows = json.loads(node_notes(world)[contract.NODE_CARDS])
    rows[1].update(healthy=False, reason="GPU has fallen off the bus")
    node_notes(world)[contract.NODE_CARDS] = json.dumps(rows)
    resource(world, MEM, 32, "allocatable")


def outlived(world: JsonObject, *units: int) -> None:
    """Let processes of gone pods hold these units of the cards."""
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    shown = [dataclasses.replace(card, unreleased=held) for card, held in zip(cards, units, strict=True)]
    node_notes(world)[contract.NODE_CARDS] = contract.cards_to_annotation(shown)
    resource(world, MEM, sum(card.units for card in cards) - sum(units), "allocatable")


@breaks("C6", "ours_several", "a process outlived its pod", "unreleased", level="WARN")
def mutation_unreleased(world: JsonObject) -> None:
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    outlived(world, 4, *[0 for _card in cards[1:]])


@breaks("C6", "ours_several", "the device plugin was killed while processes outlived their pods", "plugin_stopped")
def mutation_stopped_with_unreleased(world: JsonObject) -> None:
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    outlived(world, *[card.units for card in cards])


breaks("C6", "nvidia_time_slicing", "a GPU is unhealthy", "not_allocatable")(
    lambda w: resource(w, "nvidia.com/gpu.shared", 4, "allocatable")
)


@breaks("C6", "nvidia_time_slicing", "kubelet keeps what the plugin announced before", "resource_kept", level="WARN")
def mutation_kept(world: JsonObject) -> None:
    resource(world, "nvidia.com/gpu", 2, "capacity")
    resource(world, "nvidia.com/gpu", 0, "allocatable")


breaks("C7", "ours_cdi", "processes hold more than is in use on the GPU", "processes_exceed_used", level="UNKNOWN")(
    lambda w: card(w)["memory"].update(used_mib=100)
)
breaks("C7", "hami_json", "more is in use on a GPU than it has", "used_exceeds_size", level="UNKNOWN")(
    lambda w: card(w)["memory"].update(used_mib=99999)
)

ALL_GPUS = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
breaks("C8", "ours_envvar", "a pod with a share sets NVIDIA_VISIBLE_DEVICES itself", "overrides_allocation")(
    lambda w: the_pod(w)["spec"]["containers"][0].update(env=ALL_GPUS)
)
breaks("C8", "nvidia_exclusive", "a pod of NVIDIA's runtime class names GPUs and requests none", "without_request")(
    lambda w: w["pods"].append(pod(60, [container("main", env=ALL_GPUS)], runtimeClassName="nvidia"))
)


breaks("C8", "ours_cdi", "a privileged pod names all GPUs", "set_and_privileged", level="WARN")(
    lambda w: w["pods"].append(pod(60, [container("main", env=ALL_GPUS, securityContext={"privileged": True})]))
)
breaks("C8", "ours_envvar", "a pod is privileged and requests no GPU", "privileged", level="WARN")(
    lambda w: w["pods"].append(pod(60, [container("main", securityContext={"privileged": True})]))
)


def has_devices(world: JsonObject, pod_: JsonObject, *minors: int) -> None:
    """Let a pod's container have these /dev/nvidiaN."""
    rows = world["evidence"][NODE]["kubelet"]["device_nodes"]
    rows.append({"pod_uid": pod_["metadata"]["uid"], "container_id": "c" * 64, "minors": list(minors)})


breaks("C8", "ours_envvar", "a container has another card's device node", "other_devices")(
    lambda w: has_devices(w, the_pod(w), 0, 1)
)


@breaks("C8", "ours_cdi", "an image's variable gave a pod without a share a card", "other_devices")
def mutation_by_image(world: JsonObject) -> None:
    world["pods"].append(pod(60, [container("main")]))
    has_devices(world, world["pods"][-1], 0)


CUDA = [{"name": "CUDA_VERSION", "value": "12.4.1"}]
breaks("C8", "nvidia_exclusive", "CUDA_VERSION gives a pod of NVIDIA's runtime class every GPU", "without_request")(
    lambda w: w["pods"].append(pod(60, [container("main", env=CUDA)], runtimeClassName="nvidia"))
)
breaks("C8", "ours_cdi", "a mount names all GPUs", "device_mount", level="WARN")(
    lambda w: the_pod(w)["spec"]["containers"][0].update(
        volumeMounts=[{"name": "v", "mountPath": "/var//run/nvidia-container-devices/all"}]
    )
)


breaks("C9", "ours_envvar", "the node isn't ready", "not_ready")(
    lambda w: node(w)["status"]["conditions"][1].update(status="Unknown")
)
breaks("C9", "ours_cdi", "a GPU isn't registered with its NVSwitches", "unregistered")(
    lambda w: card(w).setdefault("health", {}).update(fabric={"state": "in_progress", "status": 0})
)
breaks("C9", "ours_envvar", "a GPU doesn't register with its NVSwitches", "not_registering", level="WARN")(
    lambda w: card(w).setdefault("health", {}).update(fabric={"state": "not_started", "status": 0})
)
breaks("C9", "hami_text", "a GPU's registration with its NVSwitches has failed", "unregistered")(
    lambda w: card(w).setdefault("health", {}).update(fabric={"state": "completed", "status": 999})
)
breaks("C9", "hami_json", "an observed machine isn't in the API", "unknown_node", level="UNKNOWN")(
    lambda w: w["evidence"].update(gpu7={"nvml": None, "kubelet": None, "problem": ""})
)


# --------------------------------------------------------------------------- claims


def offered(world: JsonObject, at: int = 0) -> JsonObject:
    """A card in the node's slice."""
    return world["slices"][0]["spec"]["devices"][at]


def held(world: JsonObject, at: int = 0) -> JsonObject:
    """A claim's status."""
    return world["claims"][at]["status"]


def results(world: JsonObject, at: int = 0) -> list[JsonObject]:
    return held(world, at)["allocation"]["devices"]["results"]


def prepared(world: JsonObject) -> JsonObject:
    return world["evidence"][NODE]["kubelet"]["prepared"]


def in_kubelet(world: JsonObject, at: int = 0) -> list[JsonObject]:
    """The claims of a pod's first container in PodResources."""
    return listing(world)["pods"][at]["containers"][0]["claims"]


def without_pod(world: JsonObject, at: int = 0) -> None:
    """Let a pod be gone, with all that its node had of it."""
    gone = world["pods"].pop(at)
    listing(world)["pods"].pop(at)
    for card in nvml(world)["cards"]:
        card["processes"] = [each for each in card["processes"] if each["pod_uid"] != gone["metadata"]["uid"]]


def waits(world: JsonObject, shape: Shape) -> str:
    """Add a pod that has waited for its claim for an hour, and return its template."""
    world["pods"].append(turned(50, shape, on="", named=False))
    return f"default/{world['pods'][-1]['spec']['resourceClaims'][0]['resourceClaimTemplateName']}"


def starts(world: JsonObject, at: int) -> None:
    """Let kubelet not have started a pod yet."""
    the_pod(world, at)["status"].update(phase="Pending", startTime=None)


@breaks("C1", "claims_enforced", "the device plugin announces the cards of a slice, too", "several_stacks_announced")
def mutation_announced_twice(world: JsonObject) -> None:
    other = our_node(our_cards(16, 40))
    node_notes(world).update(other["metadata"]["annotations"])
    node(world)["status"] |= {field: other["status"][field] for field in ("capacity", "allocatable")}
    world["extender"] = inspected([], our_cards(16, 40))


breaks("C1", "claims_enforced", "the device plugin runs beside the DRA driver", "plugins_of_several_stacks")(
    lambda w: w["pods"].append({**plugin(OUR_PLUGIN), "metadata": {**plugin(OUR_PLUGIN)["metadata"], "name": "second"}})
)
breaks("C2", "claims_mib", "a process of a pod without a claim uses a GPU", "pod_without_request")(
    lambda w: card(w)["processes"].append(process(80, 811, 200))
)
breaks("C3", "claims_enforced", "a pod's process uses a card that its claim doesn't have", "other_gpu")(
    lambda w: card(w, 1)["processes"].append(process(1, 102, 100))
)
breaks("C8", "claims_mib", "a container has a card's device node and no claim", "other_devices")(
    lambda w: has_devices(w, the_pod(w, 3), 0)
)


@breaks("D1", "claims_enforced", "the machine has a card that no slice offers", "not_in_slice")
def mutation_new_card(world: JsonObject) -> None:
    nvml(world)["cards"].append({**copy.deepcopy(card(world)), "index": 2, "minor": 2, "uuid": uuid(7)})
    card(world, 2)["processes"], card(world, 2)["limits"] = [], []


breaks("D1", "claims_mib", "a slice offers more than the card has", "size_differs")(
    lambda w: offered(w)["capacity"]["memory"].update(value="17000Mi")
)
breaks("D1", "claims_enforced", "the driver's reserve is offered", "reserve_shared", "WARN")(
    lambda w: card(w)["memory"].update(reserved_mib=450)
)
breaks("D1", "claims_enforced", "a slice offers less than the card has", "smaller", "WARN")(
    lambda w: offered(w, 1)["capacity"]["memory"].update(value="20Gi")
)


@breaks("D1", "claims_enforced", "a card that is gone is still offered", "not_on_machine")
def mutation_gone_card(world: JsonObject) -> None:
    extra = copy.deepcopy(offered(world))
    extra.update(name=uuid(9).lower())
    extra["attributes"].update(uuid={"string": uuid(9)}, index={"int": 2})
    world["slices"][0]["spec"]["devices"].append(extra)


breaks("D2", "claims_enforced", "a slice of the pool is missing", "incomplete")(
    lambda w: w["slices"][0]["spec"]["pool"].update(resourceSliceCount=2)
)
breaks("D2", "claims_mib", "a slice is of another pool than the node's", "other_pool")(
    lambda w: w["slices"][0]["spec"]["pool"].update(name="another")
)


@breaks("D3", "claims_enforced", "claims have more of a card than it has", "overcommitted")
def mutation_overcommitted(world: JsonObject) -> None:
    world["claims"].append(claim(60, Shape((9,)), our_cards(16)))
    world["pods"].append(turned(60, Shape((9,))))
    starts(world, -1)


@breaks("D3", "claims_mib", "a claim is allocated without an amount", "no_amount")
def mutation_no_amount(world: JsonObject) -> None:
    results(world, 1)[0].pop("consumedCapacity")
    starts(world, 1)


@breaks("D4", "claims_enforced", "a running pod's claim doesn't exist", "missing")
def mutation_no_claim(world: JsonObject) -> None:
    uid_ = world["claims"].pop(0)["metadata"]["uid"]
    for rows in (prepared(world)["records"], prepared(world)["specifications"]):
        rows[:] = [row for row in rows if row["uid"] != uid_]
    card(world)["processes"].pop(0)


@breaks("D4", "claims_mib", "a running pod's claim is reserved for another pod", "not_reserved")
def mutation_not_reserved(world: JsonObject) -> None:
    held(world).update(reservedFor=[{"resource": "pods", "name": "work-2", "uid": pod_uid(2)}])
    card(world).update(processes=[])


@breaks("D4", "claims_mib", "a running pod's claim has another node's card", "other_node")
def mutation_other_node(world: JsonObject) -> None:
    results(world)[0]["pool"] = in_kubelet(world)[0]["pool"] = "elsewhere"
    uid_ = world["claims"][0]["metadata"]["uid"]
    for rows in (prepared(world)["records"], prepared(world)["specifications"]):
        rows[:] = [row for row in rows if row["uid"] != uid_]
    card(world).update(processes=[])


@breaks("D5", "claims_enforced", "a running pod's claim isn't prepared", "not_recorded")
def mutation_not_prepared(world: JsonObject) -> None:
    prepared(world)["records"].pop(0)
    prepared(world)["specifications"].pop(0)


breaks("D5", "claims_enforced", "a record has another amount than the claim", "record_differs")(
    lambda w: prepared(w)["records"][0]["shares"][0].update(mib=8192)
)
breaks("D5", "claims_mib", "a claim's CDI specification is gone", "not_specified")(
    lambda w: prepared(w)["specifications"].pop(0)
)
breaks("D5", "claims_enforced", "somebody edited a CDI specification", "specification_differs")(
    lambda w: prepared(w)["specifications"][0].update(recorded=False)
)
breaks("D5", "claims_mib", "record and specification give all cards", "other_card")(
    lambda w: prepared(w)["specifications"][0]["envs"][0].update(NVIDIA_VISIBLE_DEVICES="all")
)


breaks("D5", "claims_mib", "a CDI specification has no record", "leaked_specification")(
    lambda w: prepared(w)["specifications"].append({**prepared(w)["specifications"][0], "uid": "of-nobody"})
)


breaks("D6", "claims_enforced", "kubelet lists no claim of a running pod", "not_listed")(
    lambda w: in_kubelet(w).clear()
)
breaks("D6", "claims_mib", "kubelet lists another card of a claim", "differs")(
    lambda w: in_kubelet(w)[0].update(device="gpu-of-another")
)
breaks("D6", "claims_mib", "kubelet lists another share of a card", "differs")(
    lambda w: in_kubelet(w, 1)[0].update(share=share_id(9, 9))
)
breaks("D7", "claims_enforced", "a pod uses more than its claim although limits are enforced", "over_enforced_share")(
    lambda w: uses(w, 4900, 9400)
)
breaks("D7", "claims_enforced", "a limit was raised above the claim", "limit_raised")(
    lambda w: card(w)["limits"][0].update(hard_mib=8192)
)


@breaks("D7", "claims_enforced", "of two pods with one claim one may use all of it", "limit_raised")
def mutation_shared_claim(world: JsonObject) -> None:
    users = world["claims"][0]["status"]["reservedFor"]
    users.append({**users[0], "name": "another", "uid": "of-another"})
    uses(world, 1900, 6300)
    card(world)["limits"][0]["used_mib"] = 1900


breaks("D7", "claims_enforced", "a promised limit isn't in force", "limit_missing", level="WARN")(
    lambda w: card(w)["limits"].pop(0)
)
breaks("D7", "claims_mib", "a pod uses more than its claim", "over_share", level="WARN")(lambda w: uses(w, 3100, 3500))
breaks("D8", "claims_mib", "a claim holds memory and its pod is gone", "unused")(without_pod)
breaks("D8", "claims_enforced", "a claim is left of a pod that is gone", "owner_gone")(
    lambda w: w["claims"].append(claim(70, FOUR))
)
breaks("D8", "claims_enforced", "a pod waits, and nobody makes its template", "template_missing")(
    lambda w: waits(w, Shape((7,)))
)
breaks("D8", "claims_mib", "a pod waits, and nobody makes its claim", "claim_not_made")(
    lambda w: w["templates"].append(waits(w, FOUR))
)
breaks("D8", "claims_beside_extender", "nothing sweeps templates", "templates_left", level="WARN")(
    lambda w: w["templates"].append("default/gpu-mem-7")
)
breaks("D9", "claims_enforced", "a card has a problem, and isn't tainted", "not_tainted")(
    lambda w: card(w, 1).update(problem="GPU is lost")
)


def tainted(world: JsonObject, code: str) -> None:
    offered(world)["taints"] = [{"key": "gpu.kubegpu.share/unhealthy", "value": code, "effect": "NoSchedule"}]


breaks("D9", "claims_mib", "a card is back, and still tainted", "still_tainted", level="WARN")(
    lambda w: tainted(w, "CardLost")
)
breaks("D9", "claims_mib", "MIG is on, and the card isn't tainted", "divided")(
    lambda w: card(w, 0)["mig"].update(mode="enabled")
)
breaks("D9", "claims_mib", "MIG is off again, and the card still tainted", "still_tainted", level="WARN")(
    lambda w: tainted(w, "MIGEnabled")
)
breaks("D9", "claims_mib", "pods hold a card that is tainted", "holds_unhealthy", level="WARN")(
    lambda w: tainted(w, "XIDError")
)


@breaks("C5", "claims_mib", "gpu_exclude names a card that a pod's claim still has", "gpu_excluded")
def mutation_excluded_claim(world: JsonObject) -> None:
    tainted(world, "Excluded")
    named = offered(world)["name"]
    cards = nvml(world)["cards"]
    nvml(world)["excluded"] = [{"uuid": card["uuid"]} for card in cards if card["uuid"].lower() == named]
    nvml(world)["cards"] = [card for card in cards if card["uuid"].lower() != named]


ADMISSION = "admissionregistration.k8s.io/v1"
TURNS = (ADMISSION, "MutatingAdmissionPolicy", "", "gpushare-claims")
breaks("D10", "claims_enforced", "an admission policy is gone", "missing")(
    lambda w: w["servers"].update(objects=[one for one in w["servers"]["objects"] if one["kind"] != TURNS[1]])
)
breaks("D10", "claims_enforced", "somebody edited an admission policy", "changed")(
    lambda w: w["servers"].update(edited=[(TURNS, ("f:spec", "f:a"), "c")])
)


@breaks("D10", "claims_enforced", "a binding names another policy", "other_policy")
def mutation_other_policy(world: JsonObject) -> None:
    for one in world["servers"]["objects"]:
        if one["kind"] == "MutatingAdmissionPolicyBinding":
            one["spec"]["policyName"] = "theirs"


@breaks("D10", "claims_enforced", "a binding only audits", "other_action")
def mutation_audits(world: JsonObject) -> None:
    for one in world["servers"]["objects"]:
        if one["kind"] == "ValidatingAdmissionPolicyBinding":
            one["spec"]["validationActions"] = ["Audit"]


@breaks("D11", "claims_enforced", "a record outlived its claim", "claim_gone")
def mutation_leaked_record(world: JsonObject) -> None:
    without_pod(world)
    world["claims"].pop(0)
    unbooked(world)


@breaks("D11", "claims_mib", "kubelet still ends a pod that was deleted by force", "claim_gone")
def mutation_ends_deleted_pod(world: JsonObject) -> None:
    world["claims"].pop(1)
    world["pods"].pop(1)
    unbooked(world)


def unbooked(world: JsonObject) -> None:
    taint = {"key": "gpu.kubegpu.share/memory-without-claim", "value": "ClaimNotFound", "effect": "NoSchedule"}
    offered(world)["taints"] = [taint]


@breaks("D11", "claims_enforced", "another claim has the name of a prepared one", "claim_gone")
def mutation_replaced_claim(world: JsonObject) -> None:
    starts(world, 0)
    world["claims"][0]["metadata"]["uid"] = "of-another"
    unbooked(world)


@breaks("D11", "claims_mib", "a prepared claim isn't allocated any more", "not_allocated")
def mutation_deallocated(world: JsonObject) -> None:
    starts(world, 0)
    held(world).clear()
    unbooked(world)


@breaks("D11", "claims_enforced", "pods hold memory without a claim, and the card isn't tainted", "not_tainted")
def mutation_not_tainted(world: JsonObject) -> None:
    mutation_leaked_record(world)
    del offered(world)["taints"]


breaks("D11", "claims_mib", "a card is tainted for no claim", "still_tainted", level="WARN")(unbooked)


@breaks("D11", "claims_enforced", "more of a card is prepared than it has", "overprepared")
def mutation_overprepared(world: JsonObject) -> None:
    starts(world, 0)
    prepared(world)["records"][0]["shares"][0].update(mib=16384)


# --------------------------------------------------------------------------- gpushare


breaks("G1", "ours_envvar", "a GPU's /dev/nvidiaN is another than the node announces", "minor_differs")(
    lambda w: card(w).update(minor=3)
)


@breaks("G1", "ours_several", "the node's annotation lacks a GPU", "not_in_annotation")
def mutation_24(world: JsonObject) -> None:
    nvml(world)["cards"].append({**copy.deepcopy(card(world)), "index": 3, "minor": 3, "uuid": uuid(7)})
    card(world, 3)["processes"].clear()


breaks("G1", "upstream_head", "NVML's indices aren't the numbers of /dev/nvidiaN", "index_is_not_minor")(
    lambda w: [card(w, at).update(minor=1 - at) for at in (0, 1)]
)


breaks("G1", "upstream_2019", "a GPU is smaller than the first", "sizes_differ")(
    lambda w: card(w, 1)["memory"].update(total_mib=11178)
)

breaks("G1", "ours_envvar", "the driver's reserve is announced", "reserve_shared", "WARN")(
    lambda w: card(w)["memory"].update(reserved_mib=450)
)

breaks("G2", "ours_envvar", "gpu-count isn't the number of GPUs", "capacity_differs")(lambda w: resource(w, COUNT, 3))


@breaks("G2", "upstream_single", "gpu-mem isn't the GPU's", "capacity_is_not_nvmls")
def mutation_28(world: JsonObject) -> None:
    resource(world, MEM, 11)
    notes(world)[contract.POD_CARD_UNITS] = "11"
    devs(world)[0]["totalGPU"] = 11


@breaks("G3", "upstream_head", "a pod was bound without the extender (nodeName)", "bypassed_extender")
def mutation_29(world: JsonObject) -> None:
    pod_ = the_pod(world)
    pod_["metadata"]["annotations"] = {}
    pod_["spec"]["schedulerName"] = "default-scheduler"
    devs(world)[0]["pods"] = []


breaks("G3", "ours_envvar", "POD isn't what the containers request", "value_differs")(
    lambda w: notes(w).update({contract.POD_UNITS: "7"})
)
breaks("G3", "ours_cdi", "DEV isn't the GPU's size", "value_differs")(
    lambda w: notes(w).update({contract.POD_CARD_UNITS: "15"})
)
breaks("G3", "ours_several", "ASSUME_TIME is not a time", "assume_time_invalid")(
    lambda w: notes(w, 1).update({contract.POD_ASSUME_TIME: "yesterday"})
)


@breaks("G3", "ours_several", "the list of GPUs contradicts the other annotations", "indices_invalid")
def mutation_33(world: JsonObject) -> None:
    notes(world)[contract.POD_INDICES] = "0,0"
    devs(world)[0]["pods"][0]["usedGPU"] = 8
    devs(world)[2]["pods"] = []
    # Without the list the annotations name one card, which is what kubelet is compared with.
    entry(world)["ids"] = [one for one in entry(world)["ids"] if "7f21" in one] + [
        f"5a4d7f21-{n}" for n in (90, 91, 92, 93)
    ]
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(1)
    card(world, 2)["processes"] = []


breaks("G4", "ours_envvar", "a running pod isn't marked as assigned", "not_assigned")(
    lambda w: notes(w).update({contract.POD_ASSIGNED: "false"})
)
breaks("G4", "upstream_head", "a running pod isn't marked as assigned", "not_assigned")(
    lambda w: notes(w, 1).update({contract.POD_ASSIGNED: "false"})
)


@breaks("G5", "ours_envvar", "a pod waits for its GPU for a minute", "stale_assumption")
def mutation_36(world: JsonObject) -> None:
    waits = the_pod(world)
    waits["status"] = {"phase": "Pending"}
    notes(world)[contract.POD_ASSIGNED] = "false"
    shift(world)
    checkpoint(world)["entries"].pop(0)


@breaks("G6", "ours_envvar", "a GPU is overcommitted", "overcommitted")
def mutation_37(world: JsonObject) -> None:
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    extra = our_pod(40, [cards[0]], 18)
    extra["status"] = {"phase": "Pending"}
    extra["metadata"]["creationTimestamp"] = "2026-11-22T11:59:50Z"
    world["pods"].append(extra)


@breaks(
    "G6", "upstream_head", "a GPU is overcommitted while a pod terminates", "overcommitted_by_terminating", level="WARN"
)
def mutation_38(world: JsonObject) -> None:
    ends = copy.deepcopy(the_pod(world, 1))
    ends["metadata"].update(name="ends", uid=pod_uid(50), deletionTimestamp="2026-11-22T11:59:50Z")
    world["pods"].append(ends)


@breaks("G7", "ours_envvar", "an annotation was edited by hand", "other_gpu_allocated")
def mutation_39(world: JsonObject) -> None:
    notes(world)[contract.POD_INDEX] = "1"
    notes(world)[contract.POD_CARD_UNITS] = "40"
    devs(world)[1]["pods"].append(devs(world)[0]["pods"].pop())


@breaks("G7", "ours_cdi", "a container has another GPU's CDI device", "other_gpu_visible")
def mutation_40(world: JsonObject) -> None:
    nvml(world)["cards"].append({**copy.deepcopy(card(world)), "index": 1, "minor": 1, "uuid": uuid(2)})
    card(world, 1)["processes"].clear()
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    cards.append(contract.Card(1, uuid(2), 1, 16000, 16000, True, "NVIDIA T4"))
    node_notes(world)[contract.NODE_CARDS] = contract.cards_to_annotation(cards)
    resource(world, MEM, 32000)
    resource(world, COUNT, 2)
    devs(world).append({**copy.deepcopy(devs(world)[0]), "id": 1, "pods": []})
    entry(world, 1)["cdi_devices"] = [f"nvidia.com/gpu={uuid(2)}"]


@breaks("G7", "upstream_head", "two pods of one size got each other's GPU", "other_index")
def mutation_41(world: JsonObject) -> None:
    entry(world)["envs"].update({contract.POD_INDEX: "1", "NVIDIA_VISIBLE_DEVICES": "1"})
    card(world, 1)["processes"].append(card(world)["processes"].pop())


@breaks("G7", "upstream_2019", "the plugin found no GPU", "no_gpu_found")
def mutation_42(world: JsonObject) -> None:
    entry(world)["envs"].update({contract.POD_INDEX: "-1", "NVIDIA_VISIBLE_DEVICES": "no-gpu-has-2MiB-to-run"})
    card(world)["processes"].clear()


@breaks("G8", "ours_cdi", "kubelet counts fewer device IDs than units", "count_differs")
def mutation_43(world: JsonObject) -> None:
    entry(world)["ids"].pop()
    entry(world)["count"] = 2999
    listed(world).pop()


breaks("G8", "upstream_single", "PodResources lists one device ID more", "count_differs")(
    lambda w: listed(w).append(f"{uuid(1)}-_-99")
)


breaks("G9", "ours_cdi", "a pod uses more than its share", "over_share", level="WARN")(lambda w: uses(w, 3500, 3800))


breaks("G9", "ours_envvar", "a pod uses more than its share where limits are enforced", "over_enforced_share")(
    lambda w: uses(w, 3000, 3400)
)


breaks("G9", "ours_envvar", "a pod's limit was raised", "limit_raised")(
    lambda w: card(w)["limits"][0].update(hard_mib=9000)
)

breaks("G10", "ours_envvar", "the extender's cache lacks a pod", "pod_differs")(lambda w: devs(w)[0].update(pods=[]))


breaks("G10", "upstream_head", "the extender's cache has a deleted pod", "pod_gone")(
    lambda w: devs(w)[1]["pods"].append({"name": "ghost", "namespace": "default", "usedGPU": 4})
)


breaks("G10", "ours_several", "the extender's cache has another size of a GPU", "size_differs")(
    lambda w: devs(w)[1].update(totalGPU=0)
)
breaks("G10", "ours_envvar", "the extender's cache has an older pod of that name", "pod_gone")(
    lambda w: devs(w)[0]["pods"][0].update(uid="0d3f6b0e-0000-4000-8000-00000000dead")
)

breaks("G11", "upstream_head", "the ConfigMap of unhealthy GPUs can't be read", "configmap_invalid")(
    lambda w: unhealthy(w, "0, 1")
)


breaks("G11", "upstream_head", "a pod was placed on an unhealthy GPU", "placed_on_unhealthy")(
    lambda w: unhealthy(w, "1")
)


breaks("G12", "ours_envvar", "a pod has a scheduler that doesn't call the extender", "other_scheduler")(
    lambda w: the_pod(w)["spec"].update(schedulerName="volcano")
)
breaks("G12", "ours_envvar", "a pod was created with nodeName", "bypassed_scheduler", "WARN")(
    lambda w: the_pod(w)["metadata"].update(managedFields=[{"fieldsV1": {"f:spec": {"f:nodeName": {}}}}])
)


# --------------------------------------------------------------------------- HAMi


REGISTER = "hami.io/node-nvidia-register"


@breaks("H1", "hami_json", "the register lists a GPU that NVML doesn't", "not_on_machine")
def mutation_56(world: JsonObject) -> None:
    rows = json.loads(node_notes(world)[REGISTER])
    node_notes(world)[REGISTER] = json.dumps([*rows, {**rows[1], "id": uuid(9), "index": 2}])
    resource(world, GPU, 30)


breaks("H1", "hami_text", "the register lists too little memory for a GPU", "memory_too_small")(
    lambda w: node_notes(w).update({REGISTER: node_notes(w)[REGISTER].replace("16384", "16000", 1)})
)


breaks("H2", "hami_json", "kubelet has another number of slots than the register", "count_differs")(
    lambda w: resource(w, GPU, 2)
)

breaks("H3", "hami_json", "HAMi chose another node", "other_node")(
    lambda w: notes(w).update({"hami.io/vgpu-node": "gpu9"})
)


@breaks("H3", "hami_text", "a container has fewer GPUs than it requests", "count_differs")
def mutation_60(world: JsonObject) -> None:
    the_pod(world, 1)["spec"]["containers"][0]["resources"]["limits"][GPU] = "3"
    for one in (entry(world, 1)["ids"], listed(world, 1)):
        one.append(f"{uuid(1)}-7")
    entry(world, 1)["count"] = 3


breaks("H4", "hami_json", "the device plugin failed", "allocation_failed")(
    lambda w: notes(w).update({"hami.io/bind-phase": "failed"})
)
breaks("H4", "hami_text", "a container waits for its GPU", "not_allocated")(
    lambda w: notes(w).update({"hami.io/vgpu-devices-to-allocate": notes(w)["hami.io/vgpu-devices-allocated"]})
)


breaks("H5", "hami_json", "a GPU's memory is overcommitted", "memory_overcommitted")(
    lambda w: chosen(w, "15000,30", CUDA_DEVICE_MEMORY_LIMIT_0="15000m")
)


breaks("H5", "hami_text", "a GPU's cores are overcommitted", "cores_overcommitted")(
    lambda w: chosen(w, "3000,90", CUDA_DEVICE_SM_LIMIT="90")
)


@breaks("H6", "hami_json", "a container has access to another GPU than HAMi chose", "other_gpu")
def mutation_65(world: JsonObject) -> None:
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world)["processes"].pop(0)


breaks("H6", "hami_text", "a container has another limit than HAMi chose", "memory_limit_differs")(
    lambda w: entry(w)["envs"].update(CUDA_DEVICE_MEMORY_LIMIT_0="9000m")
)

breaks("H7", "hami_json", "the node is locked for ten minutes", "lock_expired")(
    lambda w: node_notes(w).update({"hami.io/mutex.lock": "2026-11-22T19:50:00+08:00,default,work-1"})
)
breaks("H7", "hami_text", "the node is locked for a pod that is gone", "lock_without_pod")(
    lambda w: node_notes(w).update({"hami.io/mutex.lock": "2026-11-22T11:59:30Z,default,ghost"})
)

breaks("H8", "hami_json", "HAMi's library isn't loaded in a process", "not_loaded")(
    lambda w: card(w)["processes"][0].update(libvgpu=False)
)
breaks("H8", "hami_text", "a pod disables HAMi's limits", "disabled", level="WARN")(
    lambda w: the_pod(w)["spec"]["containers"][0].update(env=[{"name": "CUDA_DISABLE_CONTROL", "value": "true"}])
)


breaks("H9", "hami_json", "a pod uses more than its part", "over_part")(lambda w: uses(w, 5000, 9200))


breaks("H10", "hami_json", "the webhook didn't change a pod", "other_scheduler")(
    lambda w: the_pod(w)["spec"].update(schedulerName="default-scheduler")
)


@breaks("H10", "hami_json", "kubelet refused a pod that another scheduler placed", "refused")
def a_refused_pod(world: JsonObject) -> None:
    refused = copy.deepcopy(the_pod(world))
    refused["metadata"].update(name="slipped", uid=pod_uid(61), annotations={})
    refused["spec"]["schedulerName"] = "default-scheduler"
    refused["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
    world["pods"].append(refused)


# C5 compares kubelet's UUID, this the instances.
breaks("H11", "hami_mig", "a MIG device that HAMi chose is gone", "device_missing")(
    lambda w: card(w)["mig"]["devices"][1].update(gi=5)
)


# --------------------------------------------------------------------------- NVIDIA


breaks("N1", "nvidia_exclusive", "more GPUs are announced than there are", "capacity_differs")(
    lambda w: resource(w, GPU, 4)
)
breaks("N1", "nvidia_mig_mixed", "a MIG device isn't announced", "capacity_differs")(
    lambda w: resource(w, "nvidia.com/mig-1g.10gb", 1)
)

breaks("N1", "nvidia_mig_shared", "a slot of a shared MIG device isn't announced", "capacity_differs")(
    lambda w: resource(w, "nvidia.com/mig-1g.10gb.shared", 5)
)

breaks("N2", "nvidia_time_slicing", "one slot is allocated to two containers", "allocated_twice")(
    lambda w: entry(w, 1).update(ids=[f"{uuid(1)}::0"])
)
breaks("N2", "nvidia_mps", "a container holds a slot that doesn't exist", "no_such_slot")(
    lambda w: entry(w, 1).update(ids=[f"{uuid(1)}::9"])
)

breaks("N3", "nvidia_exclusive", "a container has access to another GPU than the allocated one", "other_device")(
    lambda w: entry(w).update(cdi_devices=[f"nvidia.com/gpu={uuid(2)}"])
)


@breaks("N4", "nvidia_mps", "a container holds two slots with MPS", "several_slots_of_mps", level="WARN")
def mutation_79(world: JsonObject) -> None:
    the_pod(world)["spec"]["containers"][0]["resources"]["limits"][GPU] = "2"
    entry(world)["ids"].append(f"{uuid(1)}::2")
    entry(world)["count"] = 2
    listed(world).append(f"{uuid(1)}::2")


breaks("N5", "nvidia_time_slicing", "a pod uses more than a fair share", "over_fair_share", level="WARN")(
    lambda w: uses(w, 9000, 13000)
)


breaks("N6", "nvidia_mps", "a GPU's compute mode allows programs without MPS", "compute_mode")(
    lambda w: card(w).update(compute_mode="default")
)
breaks("N6", "nvidia_mps", "the MPS server is gone", "server_missing")(lambda w: card(w)["processes"].pop(0))


breaks("N6", "nvidia_mps", "a program without MPS has the name of its server", "without_mps")(
    lambda w: card(w)["processes"][1].update(name="nvidia-cuda-mps", types=["compute"])
)


breaks("N6", "nvidia_mps", "a process uses more than MPS allows", "over_limit")(lambda w: uses(w, 6000, 10000, at=1))


breaks("N7", "nvidia_mig_mixed", "a process uses another MIG device than its pod's", "other_device")(
    lambda w: card(w)["processes"][1].update(gi=1)
)
breaks("N7", "nvidia_mig_mixed", "the MIG layout couldn't be applied", "layout_failed")(
    lambda w: node(w)["metadata"]["labels"].update({"nvidia.com/mig.config.state": "failed"})
)


# --------------------------------------------------------------------------- servers


breaks("S1", "ours_envvar", "the extender doesn't run", "not_running")(lambda w: w["servers"]["pods"].pop(0))


breaks("S1", "ours_envvar", "the device plugin isn't ready", "not_ready")(
    lambda w: w["servers"].update(pods=[*w["servers"]["pods"][::2], server("device-plugin", NODE, "False")])
)


@breaks("S1", "ours_envvar", "the node has a taint that the device plugin doesn't tolerate", "kept_away")
def mutation_kept_away(world: JsonObject) -> None:
    world["servers"]["pods"].pop(1)
    node(world)["spec"] = {"taints": [{"key": "sku", "value": "gpu", "effect": "NoExecute"}]}


breaks(
    "S2", "ours_envvar", "an upgrade removed the extender from kube-scheduler's configuration", "configuration_lost"
)(lambda w: w["servers"].update(pods=[*w["servers"]["pods"][:2], scheduler("cp1", "--leader-elect=true")]))


def runs(world: JsonObject, **facts: Any) -> None:
    """The kube-scheduler process of the control plane's machine is observed."""
    world["servers"]["running"] = {
        "cp1": [{"config": "/c.yaml", "policy": "", "fresh": True, "extender": True, **facts}]
    }


breaks(
    "S2",
    "ours_envvar",
    "kube-scheduler's configuration was written anew without the extender, and it restarted",
    "loaded_without_extender",
)(lambda w: runs(w, extender=False))


breaks(
    "S2", "ours_envvar", "kube-scheduler's configuration was changed, and it didn't restart", "older_than_configuration"
)(lambda w: runs(w, fresh=False))


breaks("S3", "ours_envvar", "the admission policy is gone", "missing")(
    lambda w: w["servers"].update(
        scheduler="dedicated", pods=[server("scheduler", "w1"), server("device-plugin", NODE)]
    )
)


breaks("S4", "ours_envvar", "a GPU node lacks the label", "no_label")(
    lambda w: node(w)["metadata"]["labels"].pop(contract.NODE_LABEL)
)
breaks("S4", "ours_envvar", "a GPU node has the label that kubelet may set, alone", "not_restricted")(
    lambda w: node(w)["metadata"]["labels"].pop(backends.RESTRICTED)
)
breaks("S4", "ours_envvar", "a node has the restricted label alone", "restricted_alone", level="WARN")(
    lambda w: w["nodes"].append(other_node({}, labels={backends.RESTRICTED: "extender"}, name="w9"))
)


def violate(world: JsonObject, reason: contract.Reason, text: str) -> None:
    cards = contract.cards_from_annotation(node_notes(world)[contract.NODE_CARDS])
    held = [dataclasses.replace(cards[0], limit=reason.value, limit_reason=text), *cards[1:]]
    node_notes(world)[contract.NODE_CARDS] = contract.cards_to_annotation(held)
    node_notes(world)[contract.NODE_LIMIT] = f"{contract.LIMIT_UNENFORCED}{reason}: {text}"


breaks("S5", "ours_envvar", "a container holds another pod's memory", "violated", level="WARN")(
    lambda w: violate(w, contract.Reason.FOREIGN_MEMORY_HELD, "container x of pod a/b holds 9 MiB")
)


breaks("S5", "ours_envvar", "a process outlived its pod", "unaccounted", level="WARN")(
    lambda w: violate(w, contract.Reason.UNACCOUNTED_MEMORY_HELD, "more than 9 MiB of card 0 are used")
)


OLD_DRIVER = "NVIDIA's driver is 580.95, and limits need 615 or newer"
breaks("S5", "ours_envvar", "the driver enforces no limits", "not_enforced", level="WARN")(
    lambda w: node_notes(w).update({contract.NODE_LIMIT: contract.LIMIT_UNENFORCED + OLD_DRIVER})
)


# --------------------------------------------------------------------------- cards for virtual machines


def vfio(world: JsonObject, at: int = 0) -> JsonObject:
    """A function that a virtual machine is to have."""
    return world["evidence"][NODE]["virtual_machines"]["functions"][at]


@breaks("V1", "virtual_beside_shares", "NVIDIA's driver has a virtual machine's card again", "not_bound")
def _(world: JsonObject) -> None:
    vfio(world)["driver"] = "nvidia"


@breaks("V1", "virtual_beside_shares", "the audio function of a card has its own driver", "not_viable")
def _(world: JsonObject) -> None:
    vfio(world).update(state="not_viable", others=["0000:02:00.1 (snd_hda_intel)"])


@breaks("V1", "virtual_beside_shares", "the kernel refuses an answer about a group", "not_asked", "UNKNOWN")
def _(world: JsonObject) -> None:
    vfio(world)["state"] = "unknown"


@breaks("V1", "virtual_beside_shares", "nobody has asked the kernel", "not_asked", "UNKNOWN")
def _(world: JsonObject) -> None:
    del vfio(world)["state"]


@breaks("V1", "virtual_beside_shares", "a card was pulled", "gone")
def _(world: JsonObject) -> None:
    vfio(world).update(present=False, driver="", group="")


@breaks("V1", "virtual_beside_shares", "the IOMMU is off since the last boot", "no_group")
def _(world: JsonObject) -> None:
    vfio(world).update(driver="", group="")


@breaks("V1", "virtual_beside_shares", "a record is no record", "unreadable", "UNKNOWN")
def _(world: JsonObject) -> None:
    world["evidence"][NODE]["virtual_machines"]["problem"] = "the record can't be read"


@breaks("V2", "virtual_beside_shares", "somebody removed the udev rule", "file_missing")
def _(world: JsonObject) -> None:
    world["evidence"][NODE]["virtual_machines"]["missing"] = ["/etc/udev/rules.d/10-kubegpu-vfio.rules"]


@breaks("V2", "virtual_beside_shares", "the udev rule lacks a card", "not_ruled")
def _(world: JsonObject) -> None:
    vfio(world)["ruled"] = False


def image(world: JsonObject) -> JsonObject:
    """The initramfs of the newest kernel."""
    return world["evidence"][NODE]["virtual_machines"]["images"][1]


breaks("V2", "virtual_beside_shares", "an update rebuilt the initramfs without the hook", "not_in_image")(
    lambda world: image(world).update(rule=False)
)
breaks("V2", "virtual_beside_shares", "an initramfs lacks VFIO's module", "module_not_in_image")(
    lambda world: image(world).update(lacking=["vfio_pci"])
)
breaks("V2", "virtual_beside_shares", "an initramfs is older than the rule", "image_older")(
    lambda world: image(world).update(newer=False)
)
breaks("V2", "virtual_beside_shares", "an initramfs can't be listed", "image_unreadable", "UNKNOWN")(
    lambda world: image(world).update(rule=None)
)
breaks("V2", "virtual_beside_shares", "/boot isn't mounted", "no_image", "UNKNOWN")(
    lambda world: world["evidence"][NODE]["virtual_machines"].update(images=[])
)


@breaks("V3", "virtual_beside_shares", "kubelet still has a virtual machine's card", "announced")
def _(world: JsonObject) -> None:
    checkpoint(world)["registered"][GPU].append(uuid(2))


def divided(world: JsonObject) -> JsonObject:
    """The card with vGPUs."""
    return world["evidence"][NODE]["virtual_machines"]["cards"][0]


def devices(world: JsonObject) -> list[JsonObject]:
    """What virtual machines can be given: a card with its audio function, and four vGPUs."""
    return world["evidence"][NODE]["virtual_machines"]["devices"]


@breaks("V4", "virtual_beside_shares", "vGPUs are gone after a boot, and so from kubelet", "vgpus_differ")
def _(world: JsonObject) -> None:
    divided(world)["vgpus"] = {}
    del devices(world)[2:]
    registered = checkpoint(world)["registered"]
    for resource in ("nvidia.com/A10-4Q", "nvidia.com/NVIDIA_A10-8Q"):
        del registered[resource]


@breaks("V4", "virtual_beside_shares", "as many vGPUs, of other types", "vgpus_differ")
def _(world: JsonObject) -> None:
    divided(world)["vgpus"] = {"A10-4Q": 2, "A10-8Q": 2}


@breaks("V4", "virtual_beside_shares", "one more vGPU, of a type whose name nobody knows", "vgpus_differ")
def _(world: JsonObject) -> None:
    divided(world)["unnamed"] = 1


@breaks("V4", "virtual_beside_shares", "this boot has shown no names of types", "type_unknown", "UNKNOWN")
def _(world: JsonObject) -> None:
    divided(world).update(vgpus={}, unnamed=4)
    for device in devices(world):
        device["type"] = ""


@breaks("V4", "virtual_beside_shares", "another card is at the address", "card_gone")
def _(world: JsonObject) -> None:
    divided(world).update(present=False, vgpus={})


@breaks("V4", "virtual_beside_shares", "kubelet has a mediated device that was made anew", "announced_gone")
def _(world: JsonObject) -> None:
    devices(world)[5]["uuid"] = "00000000-0000-4000-8000-000000000001"


@breaks("V4", "virtual_beside_shares", "kubelet has the group of a card that the host has back", "announced_gone")
def _(world: JsonObject) -> None:
    del devices(world)[:2]


@breaks("V4", "virtual_beside_shares", "a vGPU was made again with another type", "announced_types")
def _(world: JsonObject) -> None:
    divided(world)["vgpus"] = divided(world)["wanted"] = {"A10-4Q": 2, "A10-8Q": 2}
    devices(world)[2]["type"] = "A10-8Q"


@breaks("V4", "virtual_beside_shares", "a device plugin hasn't seen a new vGPU", "not_announced")
def _(world: JsonObject) -> None:
    checkpoint(world)["registered"]["nvidia.com/A10-4Q"].remove("41")


# --------------------------------------------------------------------------- pods of Kata


def kata(world: JsonObject) -> JsonObject:
    """What the node has for pods of Kata."""
    return world["evidence"][NODE]["kata"]


@breaks("K1", "kata_cards", "somebody removed containerd's drop-in", "no_handler")
def _(world: JsonObject) -> None:
    kata(world).update(handlers=["runc"], handler_loaded=False)


@breaks("K1", "kata_cards", "containerd wasn't restarted", "not_loaded")
def _(world: JsonObject) -> None:
    kata(world)["handler_loaded"] = False


@breaks("K1", "kata_cards", "NVIDIA's runtime is the default again", "default_nvidia")
def _(world: JsonObject) -> None:
    kata(world)["default_runtime"] = "nvidia"


@breaks("K2", "kata_cards", "the CDI file is from before a card was bound", "count_differs")
def _(world: JsonObject) -> None:
    kata(world)["devices"].pop()


@breaks("K2", "kata_cards", "the CDI file is gone", "count_differs")
def _(world: JsonObject) -> None:
    kata(world)["devices"].clear()


@breaks("K2", "kata_cards", "a card has another IOMMU group since the last boot", "not_bound")
def _(world: JsonObject) -> None:
    vfio(world)["group"] = "15"


@breaks("K2", "kata_cards", "two cards are in one IOMMU group", "twice")
def _(world: JsonObject) -> None:
    kata(world)["devices"] = ["nvidia.com/pgpu=31", "nvidia.com/pgpu=31"]


@breaks("K3", "kata_cards", "nobody sets the label by which the RuntimeClass selects nodes", "not_selected")
def _(world: JsonObject) -> None:
    del node(world)["metadata"]["labels"]["nvidia.com/cc.ready.state"]


@breaks("K3", "kata_cards", "the RuntimeClass has another handler", "class_handler")
def _(world: JsonObject) -> None:
    world["runtimeclasses"][0]["handler"] = "kata-qemu"


@breaks("K3", "kata_cards", "the RuntimeClass was deleted", "no_class")
def _(world: JsonObject) -> None:
    del world["runtimeclasses"][0]


for check in ("K1", "K2", "K3"):
    breaks(check, "kata_cards", "the machine's containerd can't be read", "unreadable", "UNKNOWN")(
        lambda world: kata(world).update(problem="containerd can't be read")
    )
