# SPDX-License-Identifier: GPL-3.0-or-later
"""What can go wrong in a healthy cluster, one thing at a time, and which check finds it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from check_worlds import (
    COUNT,
    GPU,
    HAMI_PLUGIN,
    MEM,
    NODE,
    NOW,
    OUR_PLUGIN,
    container,
    host_process,
    our_pod,
    plugin,
    pod,
    pod_uid,
    process,
    uuid,
)

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """
    :param check: finds it, and no other check has a FAIL.
    :param world: the healthy cluster.
    :param what: for the documentation.
    :param says: a part of the finding's sentence.
    """

    check: str
    world: str
    what: str
    says: str
    change: Callable[[Json], None]
    level: str = "FAIL"

    @property
    def id(self) -> str:
        return f"{self.check}-{self.world}-{self.what.replace(' ', '_')}"


MUTATIONS: list[Mutation] = []


def breaks(check: str, world: str, what: str, says: str, level: str = "FAIL") -> Callable[..., Any]:
    def keep(change: Callable[[Json], None]) -> Callable[[Json], None]:
        MUTATIONS.append(Mutation(check, world, what, says, change, level))
        return change

    return keep


# --------------------------------------------------------------------------- where things are


def node(world: Json) -> Json:
    return world["nodes"][0]


def the_pod(world: Json, at: int = 0) -> Json:
    return world["pods"][at]


def notes(world: Json, at: int = 0) -> Json:
    """A pod's annotations."""
    return world["pods"][at]["metadata"]["annotations"]


def nvml(world: Json) -> Json:
    return world["evidence"][NODE]["nvml"]


def card(world: Json, at: int = 0) -> Json:
    return nvml(world)["cards"][at]


def checkpoint(world: Json) -> Json:
    return world["evidence"][NODE]["kubelet"]["checkpoint"]


def entry(world: Json, at: int = 0) -> Json:
    return checkpoint(world)["entries"][at]


def listing(world: Json) -> Json:
    return world["evidence"][NODE]["kubelet"]["pod_resources"]


def listed(world: Json, at: int = 0) -> list[str]:
    """The IDs of a pod's first container in PodResources."""
    return listing(world)["pods"][at]["containers"][0]["devices"][0]["ids"]


def resource(world: Json, name: str, value: int, *fields: str) -> None:
    for field in fields or ("capacity", "allocatable"):
        node(world)["status"][field][name] = str(value)


def shift(world: Json, at: int = 0, seconds: int = 70) -> None:
    """A pod that was chosen so long ago and waits."""
    notes(world, at)[contract.POD_ASSUME_TIME] = str((NOW - seconds) * 10**9)


# --------------------------------------------------------------------------- common


@breaks("C1", "ours_envvar", "HAMi's device plugin runs beside gpushare's", "device plugins of HAMi and gpushare")
def mutation_1(world: Json) -> None:
    world["pods"].append(plugin(HAMI_PLUGIN))


@breaks("C1", "nvidia_exclusive", "gpushare's resource is registered with kubelet too", "of two stacks")
def mutation_2(world: Json) -> None:
    checkpoint(world)["registered"][MEM] = ["5a4d7f21-0"]


@breaks("C1", "ours_cdi", "two pods of the device plugin run on one node", "2 device plugins of gpushare")
def mutation_3(world: Json) -> None:
    world["pods"].append({**plugin(OUR_PLUGIN), "metadata": {**plugin(OUR_PLUGIN)["metadata"], "name": "second"}})


@breaks("C2", "ours_envvar", "a process outside any pod uses a card", "process 4711 (python3) outside all pods")
def mutation_4(world: Json) -> None:
    card(world)["processes"].append(host_process(4711, "python3", 200))


@breaks("C2", "hami_json", "a process of a pod that asks for nothing uses a card", "its pod asks for no card")
def mutation_5(world: Json) -> None:
    card(world)["processes"].append(process(80, 811, 200))


@breaks("C2", "nvidia_exclusive", "a process of a pod that has gone goes on", "is finished, or not this cluster's")
def mutation_6(world: Json) -> None:
    card(world)["processes"].append(process(70, 711, 200))


@breaks("C3", "ours_envvar", "a pod's process is on another card", "and the pod was given GPU-5a4d7f21")
def mutation_7(world: Json) -> None:
    card(world, 1)["processes"].append(process(1, 102, 100))


@breaks("C3", "upstream_2019", "a pod's process is on another card", "and the pod was given GPU-5a4d7f22")
def mutation_8(world: Json) -> None:
    card(world, 0)["processes"].append(process(2, 202, 100))


@breaks("C4", "ours_envvar", "kubelet's checkpoint has no entry of a running container", "given it none")
def mutation_9(world: Json) -> None:
    checkpoint(world)["entries"].pop(0)


@breaks(
    "C4", "nvidia_time_slicing", "a container has one device more than it asks for", "kubelet's books say otherwise"
)
def mutation_10(world: Json) -> None:
    entry(world)["ids"] = [f"{uuid(2)}::0"]
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world)["processes"].pop(0)
    listed(world).append(f"{uuid(1)}::1")


@breaks("C5", "upstream_2019", "the machine came back with other cards", "which the machine doesn't have")
def mutation_11(world: Json) -> None:
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(9)
    card(world)["processes"].clear()
    card(world)["memory"]["used_mib"] = 300


@breaks("C5", "nvidia_exclusive", "a card of a pod is gone", "which the machine doesn't have")
def mutation_12(world: Json) -> None:
    entry(world)["ids"] = [uuid(9)]
    entry(world)["cdi_devices"] = [f"nvidia.com/gpu={uuid(9)}"]
    card(world)["processes"].clear()


@breaks("C6", "ours_envvar", "the device plugin was killed", "no device plugin answers kubelet")
def mutation_13(world: Json) -> None:
    resource(world, MEM, 0, "allocatable")


@breaks("C6", "ours_several", "a card is unhealthy", "GPU has fallen off the bus")
def mutation_14(world: Json) -> None:
    annotations = node(world)["metadata"]["annotations"]
    rows = json.loads(annotations[contract.NODE_CARDS])
    rows[1].update(healthy=False, reason="GPU has fallen off the bus")
    annotations[contract.NODE_CARDS] = json.dumps(rows)
    resource(world, MEM, 32, "allocatable")


@breaks("C6", "nvidia_time_slicing", "a card is unhealthy", "4 of 8 can be given")
def mutation_15(world: Json) -> None:
    resource(world, "nvidia.com/gpu.shared", 4, "allocatable")


@breaks("C7", "ours_cdi", "processes hold more than is in use on the card", "NVML contradicts itself", level="UNKNOWN")
def mutation_16(world: Json) -> None:
    card(world)["memory"]["used_mib"] = 100


@breaks("C7", "hami_json", "more is in use on a card than it has", "NVML contradicts itself", level="UNKNOWN")
def mutation_17(world: Json) -> None:
    card(world)["memory"]["used_mib"] = 99999


@breaks("C8", "ours_envvar", "a pod with a share sets NVIDIA_VISIBLE_DEVICES itself", "other cards than it was given")
def mutation_18(world: Json) -> None:
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]


@breaks(
    "C8", "nvidia_exclusive", "a pod of NVIDIA's runtime class names cards and asks for none", "gives it what it names"
)
def mutation_19(world: Json) -> None:
    world["pods"].append(
        pod(
            60,
            [container("main", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])],
            runtimeClassName="nvidia",
        )
    )


@breaks("C8", "ours_cdi", "a privileged pod names all cards", "is privileged", level="WARN")
def mutation_20(world: Json) -> None:
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    world["pods"].append(pod(60, [container("main", env=env, securityContext={"privileged": True})]))


@breaks("C9", "ours_envvar", "the node isn't ready", "the node isn't ready (condition Ready: Unknown)")
def mutation_21(world: Json) -> None:
    node(world)["status"]["conditions"][1]["status"] = "Unknown"


@breaks("C9", "hami_json", "a machine that was looked at isn't in the API", "the API doesn't have it", level="UNKNOWN")
def mutation_22(world: Json) -> None:
    world["evidence"]["gpu7"] = {"nvml": None, "kubelet": None, "problem": ""}


# --------------------------------------------------------------------------- gpushare


@breaks("G1", "ours_envvar", "a card's /dev/nvidiaN is another than the node says", "is /dev/nvidia3")
def mutation_23(world: Json) -> None:
    card(world)["minor"] = 3


@breaks("G1", "ours_several", "the node's annotation lacks a card", "and the node's annotation doesn't")
def mutation_24(world: Json) -> None:
    nvml(world)["cards"].append({**copy.deepcopy(card(world)), "index": 3, "minor": 3, "uuid": uuid(7)})
    card(world, 3)["processes"].clear()


@breaks("G1", "upstream_head", "NVML's numbers aren't those of /dev/nvidiaN", "pods come to other cards")
def mutation_25(world: Json) -> None:
    card(world)["minor"], card(world, 1)["minor"] = 1, 0


@breaks("G1", "upstream_2019", "a card is smaller than the first", "the cards differ in size")
def mutation_26(world: Json) -> None:
    card(world, 1)["memory"]["total_mib"] = 11178


@breaks(
    "G2",
    "ours_envvar",
    "gpu-count isn't the number of cards",
    "announces aliyun.com/gpu-mem 56, aliyun.com/gpu-count 3",
)
def mutation_27(world: Json) -> None:
    resource(world, COUNT, 3)


@breaks("G2", "upstream_single", "gpu-mem isn't the card's", "aliyun.com/gpu-mem 11")
def mutation_28(world: Json) -> None:
    resource(world, MEM, 11)
    notes(world)[contract.POD_CARD_UNITS] = "11"
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["totalGPU"] = 11


@breaks("G3", "upstream_head", "a pod was bound around the scheduler (nodeName)", "it came past the extender")
def mutation_29(world: Json) -> None:
    pod_ = the_pod(world)
    pod_["metadata"]["annotations"] = {}
    pod_["spec"]["schedulerName"] = "default-scheduler"
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []


@breaks("G3", "ours_envvar", "POD isn't what the containers ask for", "ALIYUN_COM_GPU_MEM_POD is '7', and should be 2")
def mutation_30(world: Json) -> None:
    notes(world)[contract.POD_UNITS] = "7"


@breaks("G3", "ours_cdi", "DEV isn't the card's size", "ALIYUN_COM_GPU_MEM_DEV is '15'")
def mutation_31(world: Json) -> None:
    notes(world)[contract.POD_CARD_UNITS] = "15"


@breaks("G3", "ours_several", "ASSUME_TIME is no time", "is no time")
def mutation_32(world: Json) -> None:
    notes(world, 1)[contract.POD_ASSUME_TIME] = "yesterday"


@breaks("G3", "ours_several", "the list of cards can't be true", "can't be true of it")
def mutation_33(world: Json) -> None:
    notes(world)[contract.POD_INDICES] = "0,0"
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"][0]["usedGPU"] = 8
    world["extender"]["cp1"]["nodes"][0]["devs"][2]["pods"] = []
    # Without the list the annotations name one card, which is what kubelet is compared with.
    entry(world)["ids"] = [one for one in entry(world)["ids"] if "7f21" in one] + [
        f"5a4d7f21-{n}" for n in (90, 91, 92, 93)
    ]
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(1)
    card(world, 2)["processes"] = []


@breaks("G4", "ours_envvar", "a running pod isn't marked as assigned", "ASSIGNED is 'false'")
def mutation_34(world: Json) -> None:
    notes(world)[contract.POD_ASSIGNED] = "false"


@breaks("G4", "upstream_head", "a running pod isn't marked as assigned", "ASSIGNED is 'false'")
def mutation_35(world: Json) -> None:
    notes(world, 1)[contract.POD_ASSIGNED] = "false"


@breaks("G5", "ours_envvar", "a pod waits for its card for a minute", "70 s ago")
def mutation_36(world: Json) -> None:
    waits = the_pod(world)
    waits["status"] = {"phase": "Pending"}
    notes(world)[contract.POD_ASSIGNED] = "false"
    shift(world)
    checkpoint(world)["entries"].pop(0)


@breaks("G6", "ours_envvar", "a card is given away twice", "pods hold 20 units of card 0, which has 16")
def mutation_37(world: Json) -> None:
    cards = contract.cards_from_annotation(node(world)["metadata"]["annotations"][contract.NODE_CARDS])
    extra = our_pod(40, [cards[0]], 18)
    extra["status"] = {"phase": "Pending"}
    extra["metadata"]["creationTimestamp"] = "2026-11-22T11:59:50Z"
    world["pods"].append(extra)


@breaks("G6", "upstream_head", "a card is given away while a pod of it ends", "for free", level="WARN")
def mutation_38(world: Json) -> None:
    ends = copy.deepcopy(the_pod(world, 1))
    ends["metadata"].update(name="ends", uid=pod_uid(50), deletionTimestamp="2026-11-22T11:59:50Z")
    world["pods"].append(ends)


@breaks("G7", "ours_envvar", "an annotation was edited by hand", "the pod's annotations say card 1")
def mutation_39(world: Json) -> None:
    notes(world)[contract.POD_INDEX] = "1"
    notes(world)[contract.POD_CARD_UNITS] = "40"
    _first, second = world["extender"]["cp1"]["nodes"][0]["devs"]
    second["pods"] += world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"]
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []


@breaks("G7", "ours_cdi", "a container has another card's CDI device", "and is booked on")
def mutation_40(world: Json) -> None:
    nvml(world)["cards"].append({**copy.deepcopy(card(world)), "index": 1, "minor": 1, "uuid": uuid(2)})
    card(world, 1)["processes"].clear()
    cards = contract.cards_from_annotation(node(world)["metadata"]["annotations"][contract.NODE_CARDS])
    cards.append(contract.Card(1, uuid(2), 1, 16000, 16000, True, "NVIDIA T4"))
    node(world)["metadata"]["annotations"][contract.NODE_CARDS] = contract.cards_to_annotation(cards)
    resource(world, MEM, 32000)
    resource(world, COUNT, 2)
    other = {**copy.deepcopy(world["extender"]["cp1"]["nodes"][0]["devs"][0]), "id": 1, "pods": []}
    world["extender"]["cp1"]["nodes"][0]["devs"].append(other)
    entry(world, 1)["cdi_devices"] = [f"nvidia.com/gpu={uuid(2)}"]


@breaks("G7", "upstream_head", "two pods of one size got each other's card", "another pod of this size")
def mutation_41(world: Json) -> None:
    entry(world)["envs"].update({contract.POD_INDEX: "1", "NVIDIA_VISIBLE_DEVICES": "1"})
    card(world, 1)["processes"].append(card(world)["processes"].pop())


@breaks("G7", "upstream_2019", "the plugin found no card", "it can't start")
def mutation_42(world: Json) -> None:
    entry(world)["envs"].update({contract.POD_INDEX: "-1", "NVIDIA_VISIBLE_DEVICES": "no-gpu-has-2MiB-to-run"})
    card(world)["processes"].clear()


@breaks("G8", "ours_cdi", "kubelet counts fewer device IDs than units", "asks for 3000 units")
def mutation_43(world: Json) -> None:
    entry(world)["ids"].pop()
    entry(world)["count"] = 2999
    listed(world).pop()


@breaks(
    "G8", "upstream_single", "PodResources have one device ID more", "asks for 2 units, and kubelet counts otherwise"
)
def mutation_44(world: Json) -> None:
    listed(world).append(f"{uuid(1)}-_-99")


@breaks("G9", "ours_cdi", "a pod uses more than its share", "nobody holds it to it", level="WARN")
def mutation_45(world: Json) -> None:
    card(world)["processes"][0]["used_mib"] = 3500
    card(world)["memory"]["used_mib"] = 3800


@breaks("G9", "ours_envvar", "a pod uses more than its share where limits are enforced", "though limits are enforced")
def mutation_46(world: Json) -> None:
    card(world)["processes"][0]["used_mib"] = 3000
    card(world)["memory"]["used_mib"] = 3400


@breaks("G9", "ours_envvar", "a pod's limit was raised", "its limit on card 0")
def mutation_47(world: Json) -> None:
    card(world)["limits"][0]["hard_mib"] = 9000


@breaks("G10", "ours_envvar", "the extender has forgotten a pod (stale cache)", "believes that it holds nothing")
def mutation_48(world: Json) -> None:
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"] = []


@breaks("G10", "upstream_head", "the extender remembers a pod that is gone", "no such pod holds anything")
def mutation_49(world: Json) -> None:
    ghost = {"name": "ghost", "namespace": "default", "usedGPU": 4}
    world["extender"]["cp1"]["nodes"][0]["devs"][1]["pods"].append(ghost)


@breaks("G10", "ours_several", "the extender takes a card for another size", "for one of 0 units")
def mutation_50(world: Json) -> None:
    world["extender"]["cp1"]["nodes"][0]["devs"][1]["totalGPU"] = 0


@breaks("G10", "ours_envvar", "the extender means an older pod of that name", "no such pod holds anything")
def mutation_51(world: Json) -> None:
    world["extender"]["cp1"]["nodes"][0]["devs"][0]["pods"][0]["uid"] = "0d3f6b0e-0000-4000-8000-00000000dead"


@breaks("G11", "upstream_head", "the ConfigMap of unhealthy cards can't be read", "isn't a list of the node's cards")
def mutation_52(world: Json) -> None:
    world["configmaps"].append({"metadata": {"name": f"unhealthy-gpu-{NODE}"}, "data": {"gpus": "0, 1"}})


@breaks("G11", "upstream_head", "a pod was given a card that is unhealthy", "after that was said to be unhealthy")
def mutation_53(world: Json) -> None:
    metadata = {"name": f"unhealthy-gpu-{NODE}", "creationTimestamp": "2026-11-22T10:00:00Z"}
    world["configmaps"].append({"metadata": metadata, "data": {"gpus": "1"}})


@breaks("G12", "ours_envvar", "a pod has a scheduler that doesn't ask the extender", "isn't known to ask the extender")
def mutation_54(world: Json) -> None:
    the_pod(world)["spec"]["schedulerName"] = "volcano"


@breaks("G12", "ours_envvar", "a pod was made with nodeName", "it went around the scheduler", "WARN")
def mutation_55(world: Json) -> None:
    the_pod(world)["metadata"]["managedFields"] = ["junk", {"fieldsV1": {"f:spec": {"f:nodeName": {}}}}]


# --------------------------------------------------------------------------- HAMi


@breaks("H1", "hami_json", "the register has a card that NVML hasn't", "and NVML doesn't")
def mutation_56(world: Json) -> None:
    rows = json.loads(node(world)["metadata"]["annotations"]["hami.io/node-nvidia-register"])
    rows.append({**rows[1], "id": uuid(9), "index": 2})
    node(world)["metadata"]["annotations"]["hami.io/node-nvidia-register"] = json.dumps(rows)
    resource(world, GPU, 30)


@breaks("H1", "hami_text", "the register has a card's memory too small", "and it has 16384")
def mutation_57(world: Json) -> None:
    annotations = node(world)["metadata"]["annotations"]
    annotations["hami.io/node-nvidia-register"] = annotations["hami.io/node-nvidia-register"].replace(
        "16384", "16000", 1
    )


@breaks("H2", "hami_json", "kubelet has other numbers than the register", "kubelet has 2 of 2 places")
def mutation_58(world: Json) -> None:
    resource(world, GPU, 2)


@breaks("H3", "hami_json", "HAMi chose another node", "HAMi chose node gpu9")
def mutation_59(world: Json) -> None:
    notes(world)["hami.io/vgpu-node"] = "gpu9"


@breaks("H3", "hami_text", "a container has fewer GPUs than it asks for", "asks for 3 GPUs, and was given 2")
def mutation_60(world: Json) -> None:
    the_pod(world, 1)["spec"]["containers"][0]["resources"]["limits"][GPU] = "3"
    for one in (entry(world, 1)["ids"], listed(world, 1)):
        one.append(f"{uuid(1)}-7")
    entry(world, 1)["count"] = 3


@breaks("H4", "hami_json", "the device plugin failed", "failed to give it its GPUs")
def mutation_61(world: Json) -> None:
    notes(world)["hami.io/bind-phase"] = "failed"


@breaks("H4", "hami_text", "a container waits for its GPU", "doesn't have its GPUs yet")
def mutation_62(world: Json) -> None:
    notes(world)["hami.io/vgpu-devices-to-allocate"] = notes(world)["hami.io/vgpu-devices-allocated"]


@breaks("H5", "hami_json", "a GPU is given away twice", "pods hold 19000 MiB")
def mutation_63(world: Json) -> None:
    notes(world)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,15000,30:;"
    entry(world)["envs"]["CUDA_DEVICE_MEMORY_LIMIT_0"] = "15000m"


@breaks("H5", "hami_text", "a GPU's cores are given away twice", "pods hold 130 % of the cores")
def mutation_64(world: Json) -> None:
    notes(world)["hami.io/vgpu-devices-allocated"] = f"{uuid(1)},NVIDIA,3000,90:;"
    entry(world)["envs"]["CUDA_DEVICE_SM_LIMIT"] = "90"


@breaks("H6", "hami_json", "a container sees another GPU than HAMi chose", "and HAMi chose others")
def mutation_65(world: Json) -> None:
    entry(world)["envs"]["NVIDIA_VISIBLE_DEVICES"] = uuid(2)
    card(world)["processes"].pop(0)


@breaks("H6", "hami_text", "a container's limit is another than HAMi chose", "is limited to 9000m")
def mutation_66(world: Json) -> None:
    entry(world)["envs"]["CUDA_DEVICE_MEMORY_LIMIT_0"] = "9000m"


@breaks("H7", "hami_json", "the node is locked for ten minutes", "the node is locked for 600 s")
def mutation_67(world: Json) -> None:
    node(world)["metadata"]["annotations"]["hami.io/mutex.lock"] = "2026-11-22T19:50:00+08:00,default,work-1"


@breaks("H7", "hami_text", "the node is locked for a pod that is gone", "which doesn't exist")
def mutation_68(world: Json) -> None:
    node(world)["metadata"]["annotations"]["hami.io/mutex.lock"] = "2026-11-22T11:59:30Z,default,ghost"


@breaks("H8", "hami_json", "HAMi's library isn't in a process", "without HAMi's library")
def mutation_69(world: Json) -> None:
    card(world)["processes"][0]["libvgpu"] = False


@breaks("H8", "hami_text", "a pod turns HAMi's limits off", "CUDA_DISABLE_CONTROL", level="WARN")
def mutation_70(world: Json) -> None:
    the_pod(world)["spec"]["containers"][0]["env"] = [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]


@breaks("H9", "hami_json", "a pod uses more than its part", "its part is 3000 MiB")
def mutation_71(world: Json) -> None:
    card(world)["processes"][0]["used_mib"] = 5000
    card(world)["memory"]["used_mib"] = 9200


@breaks("H10", "hami_json", "the webhook didn't see a pod", "HAMi's webhook didn't see it")
def mutation_72(world: Json) -> None:
    the_pod(world)["spec"]["schedulerName"] = "default-scheduler"


@breaks("H11", "hami_mig", "a MIG device that HAMi chose is gone", "NVML doesn't have the MIG device")
def mutation_73(world: Json) -> None:
    # kubelet's answer is another's: C5 looks at the UUID, this at the instances.
    card(world)["mig"]["devices"][1]["gi"] = 5


# --------------------------------------------------------------------------- NVIDIA


@breaks("N1", "nvidia_exclusive", "more is announced than there are cards", "announces nvidia.com/gpu 4")
def mutation_74(world: Json) -> None:
    resource(world, GPU, 4)


@breaks("N1", "nvidia_mig_mixed", "a MIG device isn't announced", "2 MIG devices")
def mutation_75(world: Json) -> None:
    resource(world, "nvidia.com/mig-1g.10gb", 1)


@breaks("N2", "nvidia_time_slicing", "two containers hold one place", "which default/work-1 holds too")
def mutation_76(world: Json) -> None:
    entry(world, 1)["ids"] = [f"{uuid(1)}::0"]


@breaks("N2", "nvidia_mps", "a container holds a place that a card hasn't", "a card has 4 places")
def mutation_77(world: Json) -> None:
    entry(world, 1)["ids"] = [f"{uuid(1)}::9"]


@breaks("N3", "nvidia_exclusive", "a container sees another card than kubelet counts", "kubelet counts GPU-5a4d7f21")
def mutation_78(world: Json) -> None:
    entry(world)["cdi_devices"] = [f"nvidia.com/gpu={uuid(2)}"]


@breaks("N4", "nvidia_mps", "a container holds two places with MPS", "with MPS one is the most")
def mutation_79(world: Json) -> None:
    the_pod(world)["spec"]["containers"][0]["resources"]["limits"][GPU] = "2"
    entry(world)["ids"].append(f"{uuid(1)}::2")
    entry(world)["count"] = 2
    listed(world).append(f"{uuid(1)}::2")


@breaks("N5", "nvidia_time_slicing", "a pod uses more than a fair share", "its fair share is 4096", level="WARN")
def mutation_80(world: Json) -> None:
    card(world)["processes"][0]["used_mib"] = 9000
    card(world)["memory"]["used_mib"] = 13000


@breaks("N6", "nvidia_mps", "a card's compute mode lets programs past MPS", "compute mode default")
def mutation_81(world: Json) -> None:
    card(world)["compute_mode"] = "default"


@breaks("N6", "nvidia_mps", "the MPS server is gone", "no nvidia-cuda-mps-server does")
def mutation_82(world: Json) -> None:
    card(world)["processes"].pop(0)


@breaks("N6", "nvidia_mps", "a process uses more than MPS should allow", "MPS should allow it 4096")
def mutation_83(world: Json) -> None:
    card(world)["processes"][1]["used_mib"] = 6000
    card(world)["memory"]["used_mib"] = 10000


@breaks("N7", "nvidia_mig_mixed", "a process is in another MIG device than its pod", "its pod was given MIG-")
def mutation_84(world: Json) -> None:
    card(world)["processes"][1]["gi"] = 1


@breaks("N7", "nvidia_mig_mixed", "the MIG layout couldn't be made", "mig.config.state=failed")
def mutation_85(world: Json) -> None:
    node(world)["metadata"]["labels"]["nvidia.com/mig.config.state"] = "failed"


# --------------------------------------------------------------------------- servers


@breaks("S1", "ours_envvar", "the extender doesn't run", "extender doesn't run on cp1")
def mutation_86(world: Json) -> None:
    world["story"]["problems"].append("extender doesn't run on cp1")
