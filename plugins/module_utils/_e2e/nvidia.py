# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suite ``nvidia``: cases on one node of NVIDIA's device plugin; see ``nvidia_cases``."""

from __future__ import annotations

import typing as t

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

# In the name of the plugin's image, whoever deploys it.
PLUGIN = "k8s-device-plugin"


class Nvidia(CaseSuite[Announced]):
    """See gpu_acceptance, suite ``nvidia``."""

    backend, title, log = backends.NVIDIA, "NVIDIA's device plugin", "NVIDIA's device plugin"

    def __init__(self, client: SuiteClient, execute: Execute, options: Options) -> None:
        super().__init__(client, execute, options, CASES, Announced("", frozenset(), 0))
        unknown = sorted({kind for case in self._all for kind in case.kinds} - set(KINDS))
        if unknown:
            raise BadInput(f"cases: kinds are of {', '.join(KINDS)}, not {', '.join(unknown)}")
        self._maps: JsonObject | None = None

    @property
    def kinds(self) -> frozenset[str]:
        return self._seen.kinds

    @property
    def cards(self) -> int:
        return self._seen.cards

    def see(self, node: JsonObject) -> tuple[int, Announced] | str:
        self._maps = self._configurations() if self._maps is None else self._maps
        label = (node["metadata"].get("labels") or {}).get(contract.LABEL_CONFIG)
        found = announced(node, configuration_of(self._maps, label))
        if found is None:
            return "it announces no device"
        return free(node, self._client.unfinished_pods(nodes.name_of(node)), found.resource), found

    def default_image(self) -> str:
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
        return {self._seen.resource if key == CARD else key: value for key, value in case.limits.items()}
