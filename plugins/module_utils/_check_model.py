# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the invariants look at: one moment of a cluster, in types. No I/O.

Memory is in MiB. What nobody could see is None (or empty with a ``problem``), and never a guess.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card, Json

GPUSHARE, UPSTREAM, HAMI, NVIDIA = "gpushare", "gpushare-upstream", "hami", "nvidia"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user says.

    :param processes: names of processes outside pods that may use cards.
    :param pods: ``namespace/name`` patterns of pods that may use cards without a grant.
    :param schedulers: schedulers that ask gpushare's extender.
    :param hami_schedulers: schedulers that ask HAMi's.
    :param grace: seconds between two samples.
    :param extender: what gpushare's extenders answered (parsed JSON, or a sentence why not), by name; None: not asked.
    :param story: what ``verification_info`` returned; None: not asked.
    """

    processes: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    hami_schedulers: tuple[str, ...] = ()
    grace: int = 30
    extender: t.Mapping[str, t.Any] | None = None
    story: t.Mapping[str, t.Any] | None = None


@dataclasses.dataclass(frozen=True)
class Process:
    """A process that NVML lists on a card; ``where`` is pod, container, host, gone or unknown."""

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
    """A MIG device of a card."""

    uuid: str
    gi: int | None
    ci: int | None
    total_mib: int | None = None


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the driver keeps for a card and a control group, in MiB; ``hard_mib`` is None for no limit."""

    pod_uid: str
    container_id: str
    hard_mib: int | None
    used_mib: int | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A card as NVML has it; ``processes`` and ``limits`` are None where NVML doesn't say."""

    index: int
    minor: int | None
    uuid: str
    name: str
    problem: str
    total_mib: int | None
    used_mib: int | None
    mig_mode: str
    mig: tuple[Mig, ...]
    compute_mode: str
    processes: tuple[Process, ...] | None
    limits: tuple[Limit, ...] | None

    @property
    def label(self) -> str:
        return f"card {self.index} ({self.uuid})"


@dataclasses.dataclass(frozen=True)
class Nvml:
    """NVML's word on a node; ``problem`` says why there is none, ``nameless`` that a card doesn't say who it is."""

    problem: str
    gpus: tuple[Gpu, ...] = ()
    nameless: str = ""

    def gpu(self, uuid: str) -> Gpu | None:
        """The card of a UUID, be it the card's own or one of its MIG devices'."""
        for one in self.gpus:
            if uuid and (one.uuid == uuid or any(mig.uuid == uuid for mig in one.mig)):
                return one
        return None

    def at(self, index: int) -> Gpu | None:
        return next((one for one in self.gpus if one.index == index), None)

    @property
    def uuids(self) -> frozenset[str]:
        """Of all cards and MIG devices."""
        return frozenset(x for one in self.gpus for x in (one.uuid, *(mig.uuid for mig in one.mig)))


@dataclasses.dataclass(frozen=True)
class Entry:
    """What kubelet's checkpoint says of a container and a resource; ``envs`` is None where it can't be decoded."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    count: int
    envs: t.Mapping[str, str] | None
    cdi: tuple[str, ...]
    problem: str


@dataclasses.dataclass(frozen=True)
class Kubelet:
    """kubelet's word on a node; each problem is empty where the source could be read.

    :param listed: IDs by pod (``namespace/name``), container and resource, as PodResources have them.
    :param twice: pods that PodResources list twice: one deleted by force, and its successor of the same name.
    """

    problem: str
    entries: tuple[Entry, ...]
    registered: t.Mapping[str, tuple[str, ...]]
    listed_problem: str
    listed: t.Mapping[str, t.Mapping[str, t.Mapping[str, tuple[str, ...]]]]
    sockets: tuple[str, ...]
    twice: frozenset[str] = frozenset()

    def of(self, uid: str, resource: str = "") -> list[Entry]:
        return [one for one in self.entries if one.pod_uid == uid and resource in ("", one.resource)]


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of a pod that stays beside the others; plain init containers end before kubelet shows them."""

    name: str
    requests: t.Mapping[str, int]
    env: t.Mapping[str, str | None]
    privileged: bool
    init: bool
    image: str


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod, read with care.

    :param json: what is kept of it, for the functions of the contracts.
    :param uids: its UIDs; those of static pods have a second one in their control groups.
    :param created: seconds since 1970.
    :param claims: it has devices by resource claims (DRA), which nothing here can judge.
    :param placed: whoever made it set spec.nodeName, so that no scheduler was asked.
    """

    json: Json
    key: str
    uid: str
    uids: frozenset[str]
    node: str
    phase: str
    finished: bool
    terminating: bool
    started: bool
    created: int | None
    scheduler: str
    runtime_class: str
    claims: bool
    placed: bool
    annotations: t.Mapping[str, str]
    labels: t.Mapping[str, str]
    containers: tuple[Container, ...]

    @property
    def active(self) -> bool:
        return bool(self.node) and not self.finished

    @property
    def told_apart(self) -> str:
        return f"{self.key} {self.uid}"

    @property
    def steady(self) -> bool:
        """kubelet has taken it, and it isn't on its way out: everything about it must be settled."""
        return self.active and self.started and not self.terminating

    def asks(self, *prefixes: str) -> dict[str, int]:
        """What its containers ask for of the resources that begin so, by resource."""
        found: dict[str, int] = {}
        for one in self.containers:
            for resource, number in one.requests.items():
                if number > 0 and resource.startswith(prefixes):
                    found[resource] = found.get(resource, 0) + number
        return found

    @property
    def units(self) -> int:
        return contract.pod_units(self.json)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the API, and what its machine showed.

    :param cards: as gpushare's contract has them; none for other backends.
    :param looked: whether somebody looked at the machine.
    :param damage: sentences of what couldn't be read of it.
    """

    json: Json
    name: str
    labels: t.Mapping[str, str]
    annotations: t.Mapping[str, str]
    ready: str
    backends: tuple[str, ...]
    cards: tuple[Card, ...]
    cards_problem: str
    unit: str | None
    pods: tuple[Pod, ...]
    looked: bool
    nvml: Nvml
    kubelet: Kubelet
    damage: tuple[str, ...]

    @property
    def sharing(self) -> bool:
        return GPUSHARE in self.backends or UPSTREAM in self.backends

    @property
    def ours(self) -> bool:
        return GPUSHARE in self.backends

    @property
    def unit_mib(self) -> int | None:
        return contract.MIB_PER_UNIT.get(self.unit or "")

    def resource(self, name: str, field: str = "capacity") -> int:
        return contract.node_resource(self.json, name, field)

    def resources(self, field: str = "capacity") -> dict[str, int]:
        return {name: self.resource(name, field) for name in (self.json["status"].get(field) or {})}

    def by_uid(self) -> dict[str, Pod]:
        return {uid: pod for pod in self.pods for uid in pod.uids}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One moment.

    :param now: seconds since 1970.
    :param strangers: nodes in the evidence that the API doesn't have.
    :param homeless: pods that are bound to a node that the API doesn't have.
    :param configmaps: ``data`` of kube-system's ConfigMaps by name; None where they couldn't be read.
    """

    nodes: tuple[Node, ...]
    waiting: tuple[Pod, ...]
    strangers: tuple[str, ...]
    configmaps: t.Mapping[str, Json] | None
    configmaps_problem: str
    damage: tuple[str, ...]
    now: int
    options: Options
    homeless: tuple[Pod, ...] = ()
