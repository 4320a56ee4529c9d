# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``hami``: cases on one node of HAMi; see ``hami_cases``."""

from __future__ import annotations

import typing as t

from .._contracts import backends, hami, hami_marks
from .._core.errors import BadInput
from .._core.types import JsonObject
from . import nodes
from .case_suite import CaseSuite
from .cases import Case
from .client import SuiteClient
from .exec import Execute
from .hami_cases import CASES, CORES, fits, free_cards, request_of
from .objects import Options
from .pods import PodState
from .result import Failed


class Hami(CaseSuite[list[hami.Gpu]]):
    """See gpu_acceptance, suite ``hami``."""

    backend, title, log = backends.HAMI, "HAMi", "HAMi's device plugin"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES, [])

    def see(self, node: JsonObject) -> tuple[int, list[hami.Gpu]] | str:
        annotations = node["metadata"].get("annotations") or {}
        if hami.NODE_REGISTER not in annotations:
            return "HAMi's device plugin has registered no card of it"
        try:
            register = hami.registered(annotations[hami.NODE_REGISTER])
        except hami.HamiError as error:
            return str(error)
        cards = free_cards(register, self._client.unfinished_pods(nodes.name_of(node)))
        return sum(card.mib for card in cards), register

    def default_image(self) -> str:
        """Return the image of HAMi's device plugin, which the node has.

        :raises BadInput: it can't be found.
        """
        key, value = hami_marks.PLUGIN_LABEL
        for one in self._client.daemon_sets():
            template = one["spec"]["template"]
            if (template["metadata"].get("labels") or {}).get(key) == value:
                return str(template["spec"]["containers"][0]["image"])
        raise BadInput(
            "image: not set, and the cluster has no DaemonSet of HAMi's device plugin whose image could be used"
        )

    def keep_to_back_end(self, spec: JsonObject) -> None:
        # Where NVIDIA's plugin is in the cluster, too, HAMi's webhook leaves pods alone that name no scheduler.
        spec["schedulerName"] = hami.SCHEDULER

    def fits(self, case: Case) -> int:
        return fits(request_of(case), free_cards(self._seen, self._client.unfinished_pods(self.node)))

    def assert_booked(self, case: Case, running: t.Sequence[PodState]) -> None:
        """Validate that the pods' parts are what they requested, on different cards, and fit together."""
        sums = dict.fromkeys((card.uuid for card in self._seen), 0)
        for pod in running:
            text = pod.annotations.get(hami.POD_ALLOCATED)
            try:
                parts = [part for container in hami.allocated(text) for part in container]
            except hami.HamiError as error:
                raise Failed(f"pod {pod.name} runs, and {error}", "", pod.name) from error
            request = request_of(case)
            cards = {uuid for uuid, *_rest in parts}
            if len(parts) != request.cards or len(cards) != request.cards or not cards <= set(sums):
                raise Failed(
                    f"pod {pod.name} has cards {', '.join(sorted(cards)) or 'none'}", "", pod.name, None, str(text)
                )
            for uuid, mib, cores in parts:
                # Cores that nobody requested are the cluster's default.
                fixed = request.mib is None or CORES in case.limits
                if request.mib not in (None, mib) or (fixed and cores != request.cores):
                    raise Failed(f"pod {pod.name} has {mib} MiB and {cores} % of {uuid}", "", pod.name, None, str(text))
                sums[uuid] += mib
        for card in self._seen:
            if sums[card.uuid] > card.devmem:
                raise Failed(f"pods hold {sums[card.uuid]} MiB of {card.uuid}, which has {card.devmem}")
