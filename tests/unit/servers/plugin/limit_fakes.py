# SPDX-License-Identifier: GPL-3.0-or-later
"""Doubles of a driver with memory limits as documented for R615, and of a tree of cgroups."""

from __future__ import annotations

import dataclasses
import typing as t

from gpushare.kubelet.pod_resources import Entry
from gpushare.nvml.limits import MESSAGES, MIB, UNLIMITED, Limit, Refusal
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

# Versions of the driver with and without limits.
R615, R580 = "615.71.09", "580.95.05"
FIRST, SECOND = "GPU-aaaaaaaa-0000-4000-8000-000000000001", "GPU-bbbbbbbb-0000-4000-8000-000000000002"
CARDS = (
    contract.Card(0, FIRST, 0, 16384, 16, model="Simulated"),
    contract.Card(1, SECOND, 1, 8192, 8, model="Simulated"),
)
PODS = "/sys/fs/cgroup/kubepods.slice"
OWN = f"{PODS}/own"


class FakeDriver:
    """The driver: limits by card and folder, and used memory of a folder in bytes.

    :param cards: MiB by UUID.
    """

    def __init__(self, version: str = "615.71.09", cards: t.Mapping[str, int] | None = None) -> None:
        self.version = version
        self.sizes = cards or {card.uuid: card.memory_mib for card in CARDS}
        self.kept: dict[tuple[str, str], Limit] = {}
        self.held: dict[tuple[str, str], int] = {}
        self.folders: set[str] = {OWN, PODS}
        self.mig: set[str] = set()
        # A code that the next calls of "set" or "get" answer, by card.
        self.broken: dict[tuple[str, str], int] = {}
        self.forgets = False
        # As with the kernel's dmem: a lower limit than what is held is taken, and frees nothing.
        self.lowers = False
        self.sets = self.gets = 0
        # MiB that the driver keeps of each card, and that processes outside of cgroups hold, by card.
        self.keeps = 256
        self.outside: dict[str, int] = {}
        # Cards that don't answer how much of them is used.
        self.silent: set[str] = set()

    def driver(self) -> str:
        if not self.version:
            raise Refusal("Driver Not Loaded", 9)
        return self.version

    def divided(self, uuid: str) -> bool:
        return uuid in self.mig

    def used_mib(self, uuid: str) -> int:
        if uuid in self.silent:
            raise Refusal(MESSAGES.get(15, "code 15"), 15)
        held = sum(used for (card, _folder), used in self.held.items() if card == uuid)
        return self.keeps + self.outside.get(uuid, 0) - -held // MIB

    def get(self, uuid: str, folder: str) -> Limit | None:
        self.gets += 1
        self._check("get", uuid, folder)
        # As R615's "misc": where a cgroup has none, its parent's counts.
        kept = self.kept.get((uuid, folder)) or self.kept.get((uuid, PODS))
        return None if kept is None else dataclasses.replace(kept, used=self.held.get((uuid, folder), 0))

    def set(self, uuid: str, folder: str, limit: Limit) -> None:
        self._check("set", uuid, folder)
        size = self.sizes[uuid] * MIB
        if limit.soft > limit.hard or (limit.hard != UNLIMITED and limit.hard > size):
            raise Refusal(MESSAGES[2], 2)
        if self.held.get((uuid, folder), 0) > limit.hard and not self.lowers:
            raise Refusal("it answers In use by another client", 19)
        self.sets += 1
        if limit.absent:
            self.kept.pop((uuid, folder), None)
        elif not self.forgets:
            self.kept[uuid, folder] = limit

    def _check(self, call: str, uuid: str, folder: str) -> None:
        if code := self.broken.get((call, uuid)):
            raise Refusal(MESSAGES.get(code, f"code {code}"), code)
        if folder not in self.folders:
            raise Refusal(MESSAGES[17], 17)

    # For tests.

    def remove(self, folder: str) -> None:
        """Remove a cgroup and its limits."""
        self.folders.discard(folder)
        for store in (self.kept, self.held):
            for key in [key for key in store if key[1] == folder]:
                del store[key]

    def mib(self, folder: str) -> dict[str, int]:
        """The hard limits of a folder in MiB, by card."""
        return {uuid: limit.hard // MIB for (uuid, at), limit in self.kept.items() if at == folder}


class EveryFolder(set[str]):
    """Contains the cgroup of any container."""

    def __contains__(self, folder: object) -> bool:
        return True


class FakeCgroups:
    """Processes end with their container, except those in ``outlived`` (folders)."""

    def __init__(self, driver: FakeDriver, outlived: set[str] | None = None) -> None:
        self.outlived = set() if outlived is None else outlived
        self.root = "/sys/fs/cgroup"
        self.number = 2
        self.mounted = True
        self._driver = driver

    def version(self) -> int:
        return self.number

    def own(self) -> str | None:
        return OWN if self.mounted else None

    def folders(self, containers: t.Collection[str]) -> dict[str, str]:
        return {
            container: folder_of(container) for container in containers if folder_of(container) in self._driver.folders
        }

    def populated(self, folder: str) -> bool:
        return folder in self.outlived


def folder_of(container_id: str) -> str:
    return f"{PODS}/cri-containerd-{container_id}.scope"


def identifier(number: int) -> str:
    """A container ID as the runtime makes them."""
    return f"{number:064x}"


def ids(uuid: str, first: int, units: int) -> tuple[str, ...]:
    """kubelet device IDs of one card."""
    short = contract.short_uuids([card.uuid for card in CARDS])[uuid]
    return tuple(contract.device_id(short, slot) for slot in range(first, first + units))


def pod(name: str, containers: t.Mapping[str, int], running: t.Mapping[str, str], **more: t.Any) -> JsonObject:
    """A pod whose containers ask for so many units, and of which these run (by container ID)."""
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"} | more,
        "spec": {
            "nodeName": "gpu1",
            "containers": [_container(container, units) for container, units in containers.items()],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": one, "containerID": f"containerd://{identifier}", "state": {"running": {}}}
                for one, identifier in running.items()
            ],
        },
    }


def _container(name: str, units: int) -> JsonObject:
    return {"name": name, "resources": {"limits": {contract.RESOURCE_MEMORY: str(units)}} if units else {}}


def entry(name: str, **containers: tuple[str, ...]) -> Entry:
    return Entry(f"default/{name}", containers)
