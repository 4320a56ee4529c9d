# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``nvidia``: cases on one node of NVIDIA's device plugin; see ``nvidia_cases``."""

from __future__ import annotations

import typing as t

from .._allocation.node_backends import allocator_of
from .._contracts import backends
from .._contracts import nvidia_plugin as contract
from .._core.errors import BadInput, ShareError
from .._core.types import JsonObject
from . import nodes
from .case_suite import CaseSuite
from .cases import Case
from .client import SuiteClient
from .exec import Execute
from .nvidia_cases import CARD, CASES, KINDS, Announced, announced, configuration_of, free
from .objects import Options
from .result import NoBackend, Skipped

# In the name of the plugin's image, whoever deploys it.
PLUGIN = "k8s-device-plugin"


class Nvidia(CaseSuite):
    """See gpu_acceptance, suite ``nvidia``."""

    log = "NVIDIA's device plugin"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES)
        unknown = sorted({kind for case in self._all for kind in case.kinds} - set(KINDS))
        if unknown:
            raise BadInput(f"cases: kinds are of {', '.join(KINDS)}, not {', '.join(unknown)}")
        self._announced = Announced("", frozenset(), 0)

    @property
    def kinds(self) -> frozenset[str]:
        return self._announced.kinds

    @property
    def cards(self) -> int:
        return self._announced.cards

    def select(self) -> None:
        maps: JsonObject | None = None
        reasons = {}
        best: tuple[int, str, Announced] | None = None
        for node in self._client.all_nodes():
            name = nodes.name_of(node)
            if allocator_of(node) != backends.NVIDIA or self._options.node not in (None, name):
                continue
            if not nodes.accepts_pods(node, self._options.node_selector):
                reasons[name] = "it isn't Ready, is cordoned, or has a taint or other labels"
                continue
            maps = self._configurations() if maps is None else maps
            label = (node["metadata"].get("labels") or {}).get(contract.LABEL_CONFIG)
            found = announced(node, configuration_of(maps, label))
            if found is None:
                reasons[name] = "it announces no device"
                continue
            left = free(node, self._client.unfinished_pods(name), found.resource)
            if best is None or left > best[0]:
                best = (left, name, found)
        if best is None:
            text = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())[:3])
            if reasons:
                raise Skipped(f"no node of NVIDIA's device plugin can be used ({text})")
            raise NoBackend("the cluster has no node of NVIDIA's device plugin")
        _left, self._name, self._announced = best
        if not self._client.image:
            raise BadInput("image: not set; the image of NVIDIA's device plugin has no sleep, so name one that has it")

    def _configurations(self) -> JsonObject:
        """Return the data of the ConfigMap that the plugin's DaemonSet has; empty where it can't be read."""
        try:
            for one in self._client.daemon_sets():
                spec = one["spec"]["template"]["spec"]
                if any(PLUGIN in str(container.get("image")) for container in spec["containers"]):
                    for volume in spec.get("volumes") or []:
                        name = (volume.get("configMap") or {}).get("name")
                        data = self._client.config_map(one["metadata"]["namespace"], name) if name else {}
                        if data:
                            return data
        except (ShareError, *nodes.MALFORMED):
            # The labels say less, but enough for most cases.
            return {}
        return {}

    def keep_to_back_end(self, spec: JsonObject) -> None:
        # Admission refuses pods that could be bound to HAMi's nodes, and sees no name of a node.
        [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        term["matchExpressions"] = [{"key": backends.LABEL, "operator": "NotIn", "values": [backends.HAMI]}]

    def fits(self, case: Case) -> int:
        node = self._client.node(self.node)
        pods = self._client.unfinished_pods(self.node)
        limits = self.limits(case)
        return min(free(node, pods, name) // number for name, number in limits.items()) if node and limits else 0

    def limits(self, case: Case) -> t.Mapping[str, int]:
        return {self._announced.resource if key == CARD else key: value for key, value in case.limits.items()}
