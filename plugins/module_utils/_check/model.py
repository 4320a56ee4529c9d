# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One moment of a cluster as the checks read it: the API's objects and each machine's evidence, in types. No I/O.

Memory is in MiB. What is missing is None, or empty beside a ``problem``; it is never guessed.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import claims as dra
from .._contracts import gpushare as contract
from .._contracts import model
from .._contracts.model import Pod
from .._core.types import JsonObject
from .._kube.refs import Ref

GPUSHARE, UPSTREAM, DRA, HAMI, NVIDIA = "gpushare", "gpushare-upstream", "dra", "hami", "nvidia"
# How shares are allocated, as the variable gpushare_allocation has it.
EXTENDER = "extender"


class ObjectReader(t.Protocol):
    """Reads single objects of the API."""

    def get(self, ref: Ref) -> JsonObject | None: ...

    def version(self) -> JsonObject: ...


@dataclasses.dataclass(frozen=True)
class Servers:
    """This collection's gpushare servers: where they must run, and what is needed to check them.

    :param control_plane: nodes on which a scheduler runs.
    :param namespace: of the servers.
    :param dedicated_namespace: of the dedicated scheduler.
    :param scheduler: how the cluster runs its scheduler, as ``cluster_info`` reports it.
    :param admission: what the admission policy does with a GPU pod for another scheduler: deny, warn or none.
    :param reserved_mib: of each card, what isn't given to pods beside the driver's own.
    :param problem: why the servers can't be checked; empty where they can.
    :param running: by node, the kube-scheduler processes that ``control_plane_info`` observed there.
    :param pods: the servers' and schedulers' pods, as the API has them.
    :param api: for single objects such as the admission policy.
    """

    control_plane: tuple[str, ...]
    namespace: str
    scheduler: str
    admission: str
    dedicated_namespace: str = "gpushare-scheduler"
    reserved_mib: int = 0
    problem: str = ""
    running: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)
    pods: tuple[JsonObject, ...] = ()
    api: ObjectReader | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user sets.

    :param allowed_processes: names of processes outside pods that may use GPUs.
    :param allowed_pods: ``namespace/name`` patterns of pods that may use GPUs without requesting them.
    :param exempt_namespaces: namespaces of nodes' own components, whose pods may be privileged; only there a pod is a
        stack's own by its labels.
    :param schedulers: schedulers that call gpushare's extender.
    :param hami_schedulers: schedulers that call HAMi's extender.
    :param grace_seconds: between two samples.
    :param extender: the answers of gpushare's extenders (parsed JSON, or text: why there is none) by extender; None
        where none was asked.
    """

    allowed_processes: tuple[str, ...] = ()
    allowed_pods: tuple[str, ...] = ()
    exempt_namespaces: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    hami_schedulers: tuple[str, ...] = ()
    grace_seconds: int = 30
    extender: t.Mapping[str, t.Any] | None = None


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that NVML lists on a GPU; ``where`` is pod, container, host, gone or unknown."""

    pid: int
    name: str
    used_mib: int | None
    mig_uuid: str
    gi: int | None
    ci: int | None
    where: str
    pod_uid: str
    container_id: str
    cgroup: str
    types: tuple[str, ...]
    libvgpu: bool | None

    @property
    def label(self) -> str:
        return f"process {self.pid}" + (f" ({self.name})" if self.name else "")


@dataclasses.dataclass(frozen=True)
class Mig:
    """A MIG device of a GPU; ``gi`` and ``ci`` are its GPU instance and compute instance."""

    uuid: str
    gi: int | None
    ci: int | None
    total_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class Limit:
    """The driver's memory limit for a GPU and a control group, in MiB; ``hard_mib`` is None where there is no limit."""

    pod_uid: str
    container_id: str
    hard_mib: int | None
    used_mib: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as NVML lists it; ``processes`` and ``limits`` are None where NVML doesn't report them.

    :param reserved_mib: what driver and firmware keep of its memory; None where the driver doesn't report it.
    :param unregistered: the state of its registration with NVSwitches where it isn't completed; else empty.
    """

    index: int
    minor: int | None
    uuid: str
    name: str
    problem: str
    total_mib: int | None
    used_mib: int | None
    reserved_mib: int | None
    mig_mode: str
    mig: tuple[Mig, ...]
    compute_mode: str
    processes: tuple[Process, ...] | None
    limits: tuple[Limit, ...] | None
    unregistered: str = ""

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


@dataclasses.dataclass(frozen=True)
class Nvml:
    """NVML's answer on a node.

    :param problem: why there is none; empty where there is one.
    :param unidentified: that NVML lists a GPU without its UUID, and why; empty where all have one.
    :param excluded: UUIDs of the cards that gpu_exclude keeps from Kubernetes, which aren't among ``gpus``.
    """

    problem: str
    gpus: tuple[Gpu, ...] = ()
    unidentified: str = ""
    excluded: frozenset[str] = frozenset()

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU of a UUID, which is the GPU's own or that of one of its MIG devices."""
        for gpu in self.gpus:
            if uuid and (gpu.uuid == uuid or any(mig.uuid == uuid for mig in gpu.mig)):
                return gpu
        return None

    def at(self, index: int) -> Gpu | None:
        return next((gpu for gpu in self.gpus if gpu.index == index), None)

    @property
    def uuids(self) -> frozenset[str]:
        """Those of all GPUs and MIG devices."""
        return frozenset(uuid for gpu in self.gpus for uuid in (gpu.uuid, *(mig.uuid for mig in gpu.mig)))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The checkpoint's entry of a container and a resource; ``envs`` is None where it can't be decoded."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    count: int
    envs: t.Mapping[str, str] | None
    cdi: tuple[str, ...]
    problem: str


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a card that a claim has, by the DRA driver's record."""

    request: str
    device: str
    share: str
    mib: int | None


@dataclasses.dataclass(frozen=True)
class Record:
    """The DRA driver's record of a claim; ``problem`` says why it can't be read."""

    uid: str
    namespace: str
    name: str
    problem: str
    shares: tuple[Share, ...]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Specification:
    """A claim's CDI specification.

    :param recorded: its record has the same.
    :param envs: the variables of each of its devices.
    """

    uid: str
    problem: str
    recorded: bool | None
    envs: tuple[t.Mapping[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The claims that the DRA driver has prepared on a node, by UID.

    :param problem: why they are unknown; empty where they aren't.
    """

    problem: str
    records: t.Mapping[str, Record] = dataclasses.field(default_factory=dict)
    specifications: t.Mapping[str, Specification] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VfioFunction:
    """A PCI function that a virtual machine is to have.

    :param uuid: its card's; empty where it is unknown.
    :param present: PCI has it, with the recorded ids.
    :param driver: empty without one.
    :param group: its IOMMU group; empty without one.
    :param state: the kernel's answer about that group: viable, not_viable, held, absent, unknown; empty if not asked.
    :param others: functions of its group that other drivers have, with these.
    :param ruled: the udev rule has it.
    """

    address: str
    uuid: str
    present: bool | None
    driver: str
    group: str
    state: str
    others: tuple[str, ...]
    ruled: bool | None


@dataclasses.dataclass(frozen=True)
class BootImage:
    """An initramfs that may boot next.

    :param rule: it contains the udev rule; None where it can't be read.
    :param lacking: modules that it needs and doesn't contain.
    :param newer: it is as new as the files that it is made from.
    """

    path: str
    release: str
    rule: bool | None
    lacking: tuple[str, ...]
    newer: bool | None


@dataclasses.dataclass(frozen=True)
class DividedCard:
    """A card with vGPUs.

    :param present: PCI has it, with the recorded ids.
    :param wanted: the recorded number of vGPUs by type; ``vgpus``: the number that is there.
    :param unnamed: number of vGPUs whose type's name isn't known.
    """

    address: str
    present: bool | None
    unnamed: int | None
    wanted: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    vgpus: t.Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Device:
    """What a virtual machine can be given: a vGPU, or a function that VFIO has.

    :param uuid: of a mediated device; empty for others.
    :param type: of a vGPU; empty for others.
    :param group: its IOMMU group; ``number`` is N of /dev/vfio/devices/vfioN.
    """

    address: str
    uuid: str
    type: str
    group: str
    number: str

    @property
    def ids(self) -> set[str]:
        """The IDs under which device plugins announce it: KubeVirt's by its group, NVIDIA's a vGPU by its UUID."""
        return {self.uuid, self.group, self.number} - {""}

    @property
    def name(self) -> str:
        return self.uuid or self.address


@dataclasses.dataclass(frozen=True)
class Virtual:
    """A machine's cards for virtual machines, by the records of roles passthrough and vgpu.

    :param problem: why a record can't be read, or the machine gave no answer; empty otherwise.
    :param missing: files that bind the functions at boot and aren't there.
    :param others: number of cards that no VFIO driver has.
    :param devices: of the whole machine, recorded or not.
    """

    problem: str
    missing: tuple[str, ...]
    others: int | None
    functions: tuple[VfioFunction, ...] = ()
    images: tuple[BootImage, ...] = ()
    cards: tuple[DividedCard, ...] = ()
    devices: tuple[Device, ...] = ()

    @property
    def has_all(self) -> bool:
        """Whether VFIO has all cards of the machine, so that NVIDIA's driver has none."""
        return self.others == 0 and bool(self.functions)


@dataclasses.dataclass(frozen=True)
class Kata:
    """What a machine has for pods of Kata.

    :param problem: why it is unknown; empty where it isn't.
    :param handler: the runtime that it is to have, and ``runtime_class`` the one of its pods.
    :param handler_loaded: the running containerd has it.
    :param devices: of the CDI specifications, each as ``kind=name``.
    :param iommufd: these are named by their device files, not by IOMMU groups.
    """

    problem: str
    handler: str
    runtime_class: str
    handlers: tuple[str, ...]
    handler_loaded: bool | None
    default_runtime: str
    devices: tuple[str, ...]
    iommufd: bool | None


@dataclasses.dataclass(frozen=True)
class RuntimeClass:
    """A RuntimeClass.

    :param selector: labels that a node of its pods has.
    """

    handler: str
    selector: t.Mapping[str, str]


# A claim (namespace/name), and of a card the pool, the device and the share's ID.
ListedClaim = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Kubelet:
    """kubelet's answer on a node; each problem is empty where the source could be read.

    :param pod_resources: IDs by pod (``namespace/name``), container and resource.
    :param duplicate_pods: pods that PodResources lists twice: one deleted by force, and its successor of the same name.
    :param device_nodes: N of each /dev/nvidiaN that containers have, by their pod's UID; None where it is unknown.
    :param claimed: what pods have by claims, by pod (``namespace/name``), by PodResources.
    """

    problem: str
    entries: tuple[Entry, ...] = ()
    registered: t.Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    pod_resources_problem: str = ""
    pod_resources: t.Mapping[str, t.Mapping[str, t.Mapping[str, tuple[str, ...]]]] = dataclasses.field(
        default_factory=dict
    )
    sockets: tuple[str, ...] = ()
    duplicate_pods: frozenset[str] = frozenset()
    device_nodes: t.Mapping[str, frozenset[int]] | None = None
    claimed: t.Mapping[str, frozenset[ListedClaim]] = dataclasses.field(default_factory=dict)
    prepared: Prepared = Prepared("they weren't read")

    def of(self, uid: str, resource: str = "") -> list[Entry]:
        return [entry for entry in self.entries if entry.pod_uid == uid and resource in ("", entry.resource)]


@dataclasses.dataclass(frozen=True)
class Node(model.Node):
    """A node of the API with its pods, and its machine's evidence.

    :param observed: whether there is evidence of the machine.
    :param source: whose answer the evidence is, where nobody logs in to the machine; else empty.
    :param uuids: of the machine's GPUs, where the evidence has only these.
    :param unreadable: what couldn't be read of it.
    :param slices: this collection's ResourceSlices of the newest generation.
    :param virtual: its cards for virtual machines; None where there are none, or they are unknown.
    :param kata: what it has for pods of Kata; None where it isn't to have any.
    """

    backends: tuple[str, ...] = ()
    unit: str | None = None
    pods: tuple[Pod, ...] = ()
    observed: bool = False
    source: str = ""
    uuids: tuple[str, ...] = ()
    nvml: Nvml = Nvml("NVML wasn't queried")
    kubelet: Kubelet = Kubelet("kubelet wasn't observed")
    unreadable: tuple[str, ...] = ()
    slices: tuple[dra.Slice, ...] = ()
    virtual: Virtual | None = None
    kata: Kata | None = None

    @property
    def devices(self) -> tuple[dra.Device, ...]:
        """The cards in its slices."""
        return tuple(device for of_node in self.slices for device in of_node.devices)

    def uuid_of(self, device: str) -> str:
        """Return the UUID of a card of its slices; its device's name is the same in lower case."""
        known = [known.uuid for known in self.devices if known.name == device]
        return next(
            (uuid for uuid in [*known, *(gpu.uuid for gpu in self.nvml.gpus)] if uuid.lower() == device), device
        )

    @property
    def sharing(self) -> bool:
        return GPUSHARE in self.backends or UPSTREAM in self.backends

    @property
    def ours(self) -> bool:
        return GPUSHARE in self.backends

    @property
    def unit_mib(self) -> int | None:
        return contract.MIB_PER_UNIT.get(self.unit or "")

    def by_uid(self) -> dict[str, Pod]:
        """Return the node's pods by each of their UIDs."""
        return {uid: pod for pod in self.pods for uid in pod.uids}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One moment.

    :param now: seconds since 1970.
    :param unknown_nodes: nodes in the evidence that aren't in the API.
    :param orphaned_pods: pods bound to a node that isn't in the API.
    :param servers: None where this collection's servers aren't checked.
    :param configmaps: ``data`` of kube-system's ConfigMaps by name; None where they couldn't be read.
    :param claims: ResourceClaims for cards of this collection's driver.
    :param claims_problem: why slices and claims are unknown; empty where they aren't.
    :param templates: of claims, as ``namespace/name``, that gpushare-dra-templates has made.
    :param classes: RuntimeClasses by name; None where they couldn't be read, or weren't asked for.
    """

    nodes: tuple[Node, ...]
    pending: tuple[Pod, ...]
    unknown_nodes: tuple[str, ...]
    configmaps: t.Mapping[str, JsonObject] | None
    configmaps_problem: str
    unreadable: tuple[str, ...]
    now: int
    options: Options
    orphaned_pods: tuple[Pod, ...] = ()
    servers: Servers | None = None
    claims: tuple[dra.Claim, ...] = ()
    claims_problem: str = ""
    templates: frozenset[str] = frozenset()
    classes: t.Mapping[str, RuntimeClass] | None = None
    classes_problem: str = ""
