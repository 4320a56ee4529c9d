# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HAMi's contract: its annotations and resources, their meaning, and its arithmetic. No I/O.

Names and formats are those of https://github.com/Project-HAMi/HAMi up to v2.10.0. Its device plugin annotates a node
with its GPUs in one of two formats: a JSON list without false, 0 and empty values (2.8 and newer), or text of 7 or 9
fields. Its scheduler annotates a pod with its containers' parts when it has chosen the node, before the pod is bound.
Memory is in MiB, times the node's deviceMemoryScaling.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core.untrusted import line

NODE_REGISTER = "hami.io/node-nvidia-register"
NODE_HANDSHAKE = "hami.io/node-handshake"
POD_NODE = "hami.io/vgpu-node"
POD_ALLOCATED = "hami.io/vgpu-devices-allocated"
POD_BIND_PHASE = "hami.io/bind-phase"

RESOURCE_COUNT = "nvidia.com/gpu"
RESOURCE_MEMORY = "nvidia.com/gpumem"
# A request for any of these is one to HAMi: NVIDIA's plugin has none of them.
RESOURCES_OF_ITS_OWN = (RESOURCE_MEMORY, "nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority")
SCHEDULER = "hami-scheduler"

# HAMi's numbers have 32 bits.
MAX_NUMBER = 2**31 - 1
FIELDS = (7, 9)


class HamiError(ValueError):
    """An annotation violates HAMi's contract."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of a node.

    :param uuid: ``GPU-…``.
    :param index: NVML's, or the position in the list where HAMi doesn't write it.
    :param count: how many containers may share it.
    :param devmem: allocatable MiB, times the node's deviceMemoryScaling.
    :param devcore: allocatable percent of its cores.
    :param mode: ``hami-core``, ``mig`` or ``mps``; empty where it isn't written.
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
    """A part of one GPU: MiB, percent of its cores, and number of slots."""

    mib: int
    cores: int
    slots: int


NOTHING = Held(0, 0, 0)


# --------------------------------------------------------------------------- nodes


def registered(text: t.Any) -> list[Gpu]:
    """Parse the GPUs in a node's register, by index.

    :raises HamiError: it is in neither format.
    """
    if not isinstance(text, str):
        raise HamiError(f"node annotation {NODE_REGISTER} isn't text")
    gpus = _from_json(text) if text.lstrip().startswith(("[", "{")) else _from_text(text)
    if len({gpu.uuid for gpu in gpus}) != len(gpus):
        raise HamiError(f"node annotation {NODE_REGISTER} lists a GPU twice")
    if len({gpu.index for gpu in gpus}) != len(gpus):
        gpus = [dataclasses.replace(gpu, index=position) for position, gpu in enumerate(gpus)]
    return sorted(gpus, key=lambda gpu: gpu.index)


def is_abandoned(handshake: t.Any) -> bool:
    """Return whether the scheduler has abandoned a node, so that its register is out of date."""
    return isinstance(handshake, str) and handshake.startswith("Deleted")


def _from_json(text: str) -> list[Gpu]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HamiError(f"node annotation {NODE_REGISTER} isn't valid JSON") from error
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
    gpus = []
    for position, entry in enumerate(part for part in text.strip().split(":") if part):
        fields = entry.split(",")
        if len(fields) not in FIELDS:
            raise HamiError(
                f"node annotation {NODE_REGISTER} has an entry of {len(fields)} fields, where HAMi writes 7 or 9"
            )
        gpus.append(
            Gpu(
                uuid=_word(fields[0], "id", needed=True),
                index=_digits(fields[7], "index") if len(fields) == 9 else position,
                count=_digits(fields[1], "count"),
                devmem=_digits(fields[2], "devmem"),
                devcore=_digits(fields[3], "devcore"),
                model=line(fields[4]),
                numa=_digits(fields[5], "numa"),
                mode=line(fields[8]) if len(fields) == 9 else "",
                healthy=fields[6] == "true",
            )
        )
    return gpus


def _word(value: t.Any, name: str, needed: bool = False) -> str:
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't text")
    return line(value)


def _number(value: t.Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't an integer from 0 to {MAX_NUMBER}")
    return value


def _digits(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise HamiError(f"node annotation {NODE_REGISTER}: {name} isn't an integer from 0 to {MAX_NUMBER}")
    return _number(int(text), name)


# --------------------------------------------------------------------------- pods


def allocated(text: t.Any) -> list[list[tuple[str, int, int]]]:
    """Parse a pod's annotation: for each container the UUID, MiB and percent of the cores of each of its GPUs.

    :raises HamiError: it isn't in HAMi's format.
    """
    if not isinstance(text, str):
        raise HamiError(f"pod annotation {POD_ALLOCATED} isn't text")
    parts = text.split(";")
    # Each container's part ends with a semicolon.
    if not parts[-1].strip():
        parts.pop()
    return [[_share(entry) for entry in part.split(":") if entry.strip()] for part in parts]


def _share(entry: str) -> tuple[str, int, int]:
    fields = entry.split(",")
    if len(fields) < 4 or not fields[0] or not all(re.fullmatch("[0-9]{1,10}", field) for field in fields[2:4]):
        raise HamiError(f"pod annotation {POD_ALLOCATED} has an entry that isn't UUID, vendor, MiB and cores")
    mib, cores = int(fields[2]), int(fields[3])
    if max(mib, cores) > MAX_NUMBER:
        raise HamiError(f"pod annotation {POD_ALLOCATED} has a number above {MAX_NUMBER}")
    return fields[0], mib, cores


# The parts of one container's GPUs: UUID, MiB and percent of the cores.
Parts = t.Sequence[tuple[str, int, int]]
