# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""HAMi's contract: what its annotations and resources are called and mean, and how it counts. No I/O.

Names and formats are those of Project-HAMi/HAMi up to 2.10. Its device plugin writes which GPUs a node has, in one of
two formats: a JSON list in which everything false, 0 or empty is left out (2.8 and newer), or text of 7 or 9 fields.
Its scheduler writes what a pod's containers have, when it has chosen the node: before the pod is bound.
Memory is in MiB, times the deviceMemoryScaling that the node was set up with.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json, quantity

NODE_REGISTER = "hami.io/node-nvidia-register"
NODE_HANDSHAKE = "hami.io/node-handshake"
POD_NODE = "hami.io/vgpu-node"
POD_ALLOCATED = "hami.io/vgpu-devices-allocated"
POD_BIND_PHASE = "hami.io/bind-phase"

RESOURCE_COUNT = "nvidia.com/gpu"
RESOURCE_MEMORY = "nvidia.com/gpumem"
# Each of these in a request means that HAMi is meant: NVIDIA's plugin has none of them.
RESOURCES_OF_ITS_OWN = (RESOURCE_MEMORY, "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority")
SCHEDULER = "hami-scheduler"

# Its numbers are of 32 bits.
MOST = 2**31 - 1
FIELDS = (7, 9)


class HamiError(ValueError):
    """Something that breaks HAMi's contract, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of a node.

    :param uuid: ``GPU-…``.
    :param index: NVML's, or the position in the list where HAMi doesn't tell it.
    :param count: how many containers may share it.
    :param devmem: MiB that are given out, times the node's deviceMemoryScaling.
    :param devcore: percent of its cores that are given out.
    :param mode: ``hami-core``, ``mig`` or ``mps``; empty where it isn't told.
    """

    uuid: str
    index: int
    count: int
    devmem: int
    devcore: int
    model: str
    numa: int
    mode: str
    healthy: bool


class Held(t.NamedTuple):
    """What is held of one GPU: MiB, percent of its cores, and places among those that share it."""

    mib: int
    cores: int
    slots: int


NOTHING = Held(0, 0, 0)


# --------------------------------------------------------------------------- nodes


def registered(text: t.Any) -> list[Gpu]:
    """The GPUs in a node's register, by index.

    :raises HamiError: it is in neither format.
    """
    if not isinstance(text, str):
        raise HamiError(f"node annotation {NODE_REGISTER} isn't text")
    found = _from_json(text) if text.lstrip().startswith(("[", "{")) else _from_text(text)
    if len({gpu.uuid for gpu in found}) != len(found):
        raise HamiError(f"node annotation {NODE_REGISTER} names a GPU twice")
    if len({gpu.index for gpu in found}) != len(found):
        found = [dataclasses.replace(gpu, index=position) for position, gpu in enumerate(found)]
    return sorted(found, key=lambda gpu: gpu.index)


def gone(handshake: t.Any) -> bool:
    """Whether the scheduler has given a node up, so that its register is what was left behind."""
    return isinstance(handshake, str) and handshake.startswith("Deleted")


def _from_json(text: str) -> list[Gpu]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HamiError(f"node annotation {NODE_REGISTER} isn't the JSON that it begins as") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise HamiError(f"node annotation {NODE_REGISTER} isn't a list of GPUs")
    return [
        Gpu(
            uuid=_word(row.get("id"), "id", needed=True),
            index=_number(row.get("index", 0), "index"),
            count=_number(row.get("count", 0), "count"),
            devmem=_number(row.get("devmem", 0), "devmem"),
            devcore=_number(row.get("devcore", 0), "devcore"),
            model=_word(row.get("type"), "type"),
            numa=_number(row.get("numa", 0), "numa"),
            mode=_word(row.get("mode"), "mode"),
            healthy=row.get("health") is True,
        )
        for row in rows
    ]


def _from_text(text: str) -> list[Gpu]:
    found = []
    for position, entry in enumerate(one for one in text.strip().split(":") if one):
        fields = entry.split(",")
        if len(fields) not in FIELDS:
            raise HamiError(
                f"node annotation {NODE_REGISTER} has an entry of {len(fields)} fields, where HAMi writes 7 or 9"
            )
        found.append(
            Gpu(
                uuid=_word(fields[0], "id", needed=True),
                index=_digits(fields[7], "index") if len(fields) == 9 else position,
                count=_digits(fields[1], "count"),
                devmem=_digits(fields[2], "devmem"),
                devcore=_digits(fields[3], "devcore"),
                model=fields[4],
                numa=_digits(fields[5], "numa"),
                mode=fields[8] if len(fields) == 9 else "",
                healthy=fields[6] == "true",
            )
        )
    return found


def _word(value: t.Any, name: str, needed: bool = False) -> str:
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't text")
    return value


def _number(value: t.Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't a whole number from 0 to {MOST}")
    return value


def _digits(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't a whole number from 0 to {MOST}")
    return _number(int(text), name)


# --------------------------------------------------------------------------- pods


def allocated(text: t.Any) -> list[list[tuple[str, int, int]]]:
    """What a pod's annotation gives each container: UUID, MiB and percent of the cores of each of its GPUs.

    :raises HamiError: it isn't what HAMi writes.
    """
    if not isinstance(text, str):
        raise HamiError(f"pod annotation {POD_ALLOCATED} isn't text")
    parts = text.split(";")
    # Each container ends with one.
    if not parts[-1].strip():
        parts.pop()
    return [[_share(entry) for entry in part.split(":") if entry.strip()] for part in parts]


def _share(entry: str) -> tuple[str, int, int]:
    fields = entry.split(",")
    if len(fields) < 4 or not fields[0] or not all(re.fullmatch("[0-9]{1,10}", one) for one in fields[2:4]):
        raise HamiError(f"pod annotation {POD_ALLOCATED} has an entry that isn't UUID, vendor, MiB and cores")
    mib, cores = int(fields[2]), int(fields[3])
    if max(mib, cores) > MOST:
        raise HamiError(f"pod annotation {POD_ALLOCATED} has a number above {MOST}")
    return fields[0], mib, cores


def held(pod: Json, given: t.Sequence[t.Sequence[tuple[str, int, int]]]) -> dict[str, Held]:
    """What a pod holds of each GPU (by UUID), as HAMi's scheduler counts it.

    Init containers run one after the other, sidecars from their turn on, the others at once when all init containers
    have ended: the most that is held at any time, and once they have ended, what is held from then on.

    :param given: what ``allocated`` gives: init containers first.
    """
    inits = list(pod["spec"].get("initContainers") or [])
    # Older versions leave init containers out.
    skipped = len(inits) if len(given) <= len(pod["spec"].get("containers") or []) else 0
    ended = _init_containers_ended(pod, inits)
    staying: dict[str, Held] = {}
    most: dict[str, Held] = {}
    for position, shares in enumerate(given, skipped):
        init = position < len(inits)
        passing = init and inits[position].get("restartPolicy") != "Always"
        if passing and ended:
            continue
        # One container may have several parts of one GPU.
        now = dict(staying)
        for uuid, mib, cores in shares:
            before = now.get(uuid, NOTHING)
            now[uuid] = Held(before.mib + mib, before.cores + cores, before.slots + 1)
        for uuid, one in now.items():
            most[uuid] = Held(*map(max, one, most.get(uuid, NOTHING)))
        if not passing:
            staying = now
    return most


def containers(pod: Json, given: t.Sequence[t.Sequence[tuple[str, int, int]]]) -> list[tuple[str, int]]:
    """Name and MiB of each container that has any GPU, init containers first."""
    inits, others = list(pod["spec"].get("initContainers") or []), list(pod["spec"].get("containers") or [])
    named = others if len(given) <= len(others) else inits + others
    names = [str(one.get("name", "")) for one in named] + [""] * len(given)
    return [(name, sum(mib for _uuid, mib, _cores in shares)) for name, shares in zip(names, given) if shares]


def asked_mib(pod: Json) -> int:
    """MiB that a pod's containers ask for; 0 where they ask for a part of a GPU, or for all of it."""
    total = 0
    for one in pod["spec"].get("containers") or []:
        limits = {**((one.get("resources") or {}).get("requests") or {})}
        limits.update((one.get("resources") or {}).get("limits") or {})
        # What is asked for is of each GPU.
        total += quantity(limits.get(RESOURCE_MEMORY, 0)) * max(1, quantity(limits.get(RESOURCE_COUNT, 1)))
    return total


def _init_containers_ended(pod: Json, inits: t.Sequence[Json]) -> bool:
    """All of them but sidecars, and well."""
    passing = {one.get("name") for one in inits if one.get("restartPolicy") != "Always"}
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or []
    ended = {
        one.get("name")
        for one in statuses
        if (((one.get("state") or {}).get("terminated") or {}).get("exitCode", 1)) == 0
    }
    return passing <= ended
