# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics of the containers that have a share: its size, the memory that they hold, and how much they compute.

What a container holds is known by the driver's limit of its cgroup (R615 and newer), or by the driver's list of
processes, which needs the node's own process IDs. Where neither is there, it has no sample: 0 would be a claim.

The names are cAdvisor's, which kubelet had until Kubernetes 1.25 removed its accelerator metrics; there they were the
whole card's.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import typing as t

from gpushare.nvml.limits import MIB
from gpushare.nvml.processes import Held, ProcessReader, total
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger("gpushare.usage")

# Of one node. kubelet admits some hundred pods; more samples than these would be somebody's mistake.
MOST_SAMPLES = 2000
LABELS = ("namespace", "pod", "container", "uuid", "node")


@dataclasses.dataclass(frozen=True)
class Share:
    """What a container was given.

    :param pod: its pod, ``namespace/name``.
    :param uid: the pod's.
    :param container: its name; empty for several containers of a pod together.
    :param ids: the IDs of its containers in the process list; empty for all of the pod.
    :param limits: by which the limit's usage of it is known.
    :param mib: its MiB by card (UUID).
    """

    pod: str
    uid: str
    container: str
    ids: frozenset[str]
    limits: tuple[str, ...]
    mib: t.Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A container and a card.

    :param used: bytes that it holds; None if unknown.
    :param duty: percent of the time in which the card computed for it; None if unknown.
    """

    pod: str
    container: str
    uuid: str
    share: int
    used: int | None
    duty: int | None


def samples(
    shares: t.Iterable[Share],
    limited: t.Mapping[tuple[str, str], int],
    by_card: t.Mapping[str, t.Sequence[Held] | None],
) -> list[Sample]:
    """Return the samples of containers, sorted; at most ``MOST_SAMPLES``.

    :param limited: bytes that the driver counts for a limit, by the limit's name and card (UUID).
    :param by_card: the containers by the driver's list of processes, by card (UUID); None where it is unknown.
    """
    found = []
    for share in shares:
        for uuid, mib in share.mib.items():
            counted = [limited.get((name, uuid)) for name in share.limits]
            used = total(counted) if counted else None
            held = by_card.get(uuid)
            duty = None
            if held is not None:
                mine = [
                    each
                    for each in held
                    if each.container_id in share.ids or (not share.ids and each.pod_uid == share.uid)
                ]
                duty = total((each.duty for each in mine), 100)
                by_list = total(each.used_mib for each in mine)
                used = by_list * MIB if used is None and by_list is not None else used
            found.append(Sample(share.pod, share.container, uuid, mib * MIB, used, duty))
    if len(found) > MOST_SAMPLES:
        log.warning("%d samples of containers are left out of the metrics", len(found) - MOST_SAMPLES)
    return sorted(found, key=lambda sample: (sample.pod, sample.container, sample.uuid))[:MOST_SAMPLES]


class Usage(Collector):
    """Gauges of the present containers; one that has ended has none.

    :param node: the label ``node``.
    :param reader: None without the node's own process IDs.
    """

    def __init__(self, node: str, reader: ProcessReader | None) -> None:
        self._node, self._reader = node, reader
        self._lock = threading.Lock()
        self._samples: t.Sequence[Sample] = ()

    def refresh(self, shares: t.Sequence[Share], limited: t.Mapping[tuple[str, str], int]) -> None:
        """Read what containers hold now.

        :param limited: as in ``samples``.
        """
        reader, cards = self._reader, sorted({uuid for share in shares for uuid in share.mib})
        found = samples(shares, limited, reader.read(cards) if reader and cards else {})
        with self._lock:
            self._samples = found

    def describe(self) -> t.Iterator[Metric]:
        return iter(())

    def collect(self) -> t.Iterator[Metric]:
        with self._lock:
            found = self._samples

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"container_accelerator_{name}", text, labels=LABELS)

        share = gauge("memory_total_bytes", "Memory of a card that a container may hold: its share")
        used = gauge("memory_used_bytes", "Memory of a card that a container's processes hold")
        duty = gauge("duty_cycle", "Percent of the past seconds in which a card computed for a container")
        for sample in found:
            space, _slash, name = sample.pod.partition("/")
            values = [space, name, sample.container, sample.uuid, self._node]
            share.add_metric(values, sample.share)
            if sample.used is not None:
                used.add_metric(values, sample.used)
            if sample.duty is not None:
                duty.add_metric(values, sample.duty)
        yield from (share, used, duty)
