# SPDX-License-Identifier: GPL-3.0-or-later
"""Hold the containers of the node's pods, as the API and kubelet list them, to their shares."""

from __future__ import annotations

import time
import typing as t

from gpushare.kubelet.pod_resources import Entry
from gpushare.node.cgroups import Cgroups
from gpushare.node.limit_enforcer import Enforcer, Finding
from gpushare.nvml.limits import LimitBackend
from gpushare.plugin import limits
from gpushare.plugin.leftovers import Holder
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject


class LimitEnforcer(Enforcer):
    """Enforces the limits of pods. Thread-safe; ``probe`` and ``once`` are each called by one thread.

    :param mode: ``auto``, ``required`` or ``off``.
    :param unit: of the node's shares, GiB or MiB.
    :param exempt: namespaces whose pods without a share aren't limited.
    """

    def __init__(
        self,
        mode: str,
        unit: str,
        backend: LimitBackend,
        cgroups: Cgroups,
        clock: t.Callable[[], float] = time.monotonic,
        exempt: t.Container[str] = (),
    ) -> None:
        super().__init__(mode, unit, backend, cgroups, clock)
        self._exempt = exempt

    def once(
        self,
        cards: t.Sequence[contract.Card],
        pods: t.Sequence[JsonObject],
        listing: t.Sequence[Entry],
        left: t.Sequence[Holder] = (),
    ) -> list[Finding]:
        """Read the limits of all containers once, and correct those that differ.

        :param pods: of this node, with the statuses of ``limits.trim_statuses``.
        :param listing: from PodResources.
        :param left: containers that outlived their pod.
        :returns: the findings that weren't returned before, and those that ``unsent`` was called with.
        """
        targets = limits.targets(cards, pods, listing, self._unit, self._exempt)
        promised = limits.promised_mib(cards, pods, listing, self._unit)
        for holder in left:
            for uuid, units in holder.units(cards).items():
                promised[uuid] += units * contract.MIB_PER_UNIT[self._unit]
        return self.enforce(cards, pods, targets, promised, [holder.folder for holder in left])

    def release(
        self, cards: t.Sequence[contract.Card], pods: t.Sequence[JsonObject], listing: t.Sequence[Entry]
    ) -> None:
        """Remove the plugin's limits from the running containers, before the plugin is removed from the node."""
        self.clear(cards, limits.targets(cards, pods, listing, self._unit))
