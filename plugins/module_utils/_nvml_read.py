# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What the process that asks NVML does, message by message, so that nothing is lost when it comes to hang. No I/O.

Messages, in this order: ``failed`` (a sentence; nothing else follows), or ``system``, then for every card ``begin``
(its index; again with ``so_far`` when it is known which card this is) and ``card``, then for every process ``begin``
(its PID as text) and ``libvgpu``, then ``end``.
"""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _nvml_card as cards
from ansible_collections.kubegpu.share.plugins.module_utils import _nvml_holders as holders
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_asking import Asking, Nvml
from ansible_collections.kubegpu.share.plugins.module_utils._nvml_words import Refused, sentence

Json = t.Dict[str, t.Any]
Tell = t.Callable[[Json], None]

# More than any machine has.
MOST_CARDS = 256


class Host(t.Protocol):
    """The door to what the node itself knows of processes; nothing of it raises."""

    def now(self) -> int:
        """Clock ticks since boot."""

    def process(self, pid: int, asked: int) -> Json:
        """``name``, ``start_time``, ``cgroup``, ``where``, ``pod_uid``, ``container_id``, ``runtime``, ``static``.

        :param asked: when the process was known to be there; one that began later is another.
        """

    def libvgpu(self, pid: int, start_time: str) -> bool | None:
        """Whether the process has HAMi's library; this can hang with a process that does."""

    def groups(self) -> t.Sequence[holders.Group]:
        """The cgroups of pods' containers, of version 2."""

    def xids(self) -> t.Mapping[str, t.Sequence[int]] | None:
        """Codes of Xid by PCI address (V(00000000:3B:00)); None where the kernel's log can't be read."""


class Request(t.NamedTuple):
    """What is to be read.

    :param skip: cards that were read, or are known to hang.
    :param processes: PID and start time of those that cards read before have.
    :param skip_processes: of those, who needn't be looked at any more.
    """

    skip: frozenset[int] = frozenset()
    processes: tuple[tuple[int, str], ...] = ()
    skip_processes: frozenset[int] = frozenset()


def read(start: t.Callable[[], Nvml], host: Host, request: Request, tell: Tell) -> None:
    """Read all that is asked for and tell it.

    :param start: load and initialise the library; raises Refused.
    """
    try:
        nvml = start()
        count = nvml.ask("nvmlDeviceGetCount")
    except Refused as refused:
        tell({"failed": sentence(refused)})
        return
    asking = Asking(nvml)
    number = asking.whole("the number of cards", count) or 0
    driver = asking.text("the driver's version", "nvmlSystemGetDriverVersion")
    if number > MOST_CARDS:
        asking.doubt(f"NVML counts {number} cards; only the first {MOST_CARDS} were looked at")
        number = MOST_CARDS
    system = {
        "driver": driver,
        "nvml": asking.text("NVML's version", "nvmlSystemGetNVMLVersion"),
        "cuda": _cuda(asking.number("the CUDA version", "nvmlSystemGetCudaDriverVersion_v2")),
        "count": number,
    }
    tell({"system": {**system, "problem": asking.problem()}})
    xids, groups = host.xids(), host.groups()
    processes = dict(request.processes)
    for index in range(number):
        if index not in request.skip:
            tell({"begin": index})
            card = _card(nvml, host, index, driver, xids, groups, tell)
            processes.update((one["pid"], one["start_time"]) for one in card["processes"] or () if one["start_time"])
            tell({"card": card})
    for pid, started in processes.items():
        if pid not in request.skip_processes:
            tell({"begin": str(pid)})
            tell({"libvgpu": [pid, host.libvgpu(pid, started)]})
    tell({"end": True})


def _cuda(number: int | None) -> str:
    return "" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _card(
    nvml: Nvml,
    host: Host,
    index: int,
    driver: str,
    xids: t.Mapping[str, t.Sequence[int]] | None,
    groups: t.Sequence[holders.Group],
    tell: Tell,
) -> Json:
    asking, card, ended = Asking(nvml), cards.blank(index, ""), None
    try:
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        cards.identify(asking, handle, card)
        if xids is not None and card["pci"]:
            card["health"]["xids"] = list(xids.get(card["pci"].rpartition(".")[0], ()))
        tell({"begin": index, "so_far": card})
        card["memory"] = cards.memory(asking, handle)
        card["mig"], migs = cards.mig(asking, handle)
        card["compute_mode"] = cards.compute_mode(asking, handle)
        card["health"] = {**cards.health(asking, handle), "xids": card["health"]["xids"]}
        total = card["memory"]["total_mib"] if card["memory"] else None
        rows = holders.processes(asking, handle, driver, total, migs)
        asked = host.now()
        if rows is not None:
            card["processes"] = [{**row, **host.process(row["pid"], asked), "libvgpu": None} for row in rows]
        card["limits"] = holders.limits(asking, handle, groups)
    except Refused as refused:
        # Lost, or there is no way to it at all: what was read before stays.
        ended = refused
    card["problem"] = asking.problem(ended)
    return card
