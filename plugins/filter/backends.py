# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the charts of HAMi and NVIDIA get, how its GPU Operator is installed, and what helm has recorded."""

from __future__ import annotations

import typing as t

if t.TYPE_CHECKING:
    from ansible_collections.kubegpu.share.plugins.module_utils._backends.permitted import Permitted
    from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import Release, ReleasePlan
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import Cluster
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import Options as HamiOptions
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.classes import Options as KataOptions
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.classes import Result as KataResult
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.plugins import Options as SandboxOptions
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.plugins import Result as SandboxResult
    from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import Options as NvidiaOptions
    from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import Result
    from ansible_collections.kubegpu.share.plugins.module_utils._openshift.operator_plan import Found, Planned
    from ansible_collections.kubegpu.share.plugins.module_utils._openshift.operator_plan import (
        Options as OperatorOptions,
    )


def gpu_operator_plan(options: OperatorOptions, found: Found) -> Planned:
    from ansible_collections.kubegpu.share.plugins.module_utils._openshift.operator_plan import plan

    return plan(options, found)


def hami_plan(options: HamiOptions, cluster: Cluster) -> ReleasePlan:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.values import plan

    return plan(options, cluster)


def hami_release(rendered: str, planned: ReleasePlan) -> Release:
    from ansible_collections.kubegpu.share.plugins.module_utils._hami.chart import release

    return release(rendered, planned)


def helm_release(secrets: list[JsonObject]) -> JsonObject:
    from ansible_collections.kubegpu.share.plugins.module_utils._kube.helm import release

    return dict(release(secrets) or {})


def permitted_cards(
    hostvars: t.Mapping[str, t.Mapping[str, t.Any]],
    hosts: t.Sequence[str],
    nodes: t.Collection[str],
    allowed: t.Collection[str] = (),
    divided: t.Collection[str] = (),
    external: bool = False,
) -> Permitted:
    from ansible_collections.kubegpu.share.plugins.module_utils._backends.permitted import permitted
    from ansible_collections.kubegpu.share.plugins.module_utils._preflight.inventory import node_names

    named = zip(hosts, node_names(hosts, hostvars), strict=True)
    names = {host: node for host, node in named if node in nodes or node in divided}
    with_vgpus = [host for host, node in names.items() if node in divided]
    return permitted({host: hostvars[host] for host in names}, names, allowed, with_vgpus, external)


def kata_plan(options: KataOptions) -> KataResult:
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.classes import plan

    return plan(options)


def nvidia_plugin_plan(options: NvidiaOptions) -> Result:
    from ansible_collections.kubegpu.share.plugins.module_utils._nvidia.plan import plan

    return plan(options)


def sandbox_plugin_plan(options: SandboxOptions) -> SandboxResult:
    from ansible_collections.kubegpu.share.plugins.module_utils._kata.plugins import plan

    return plan(options)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {
            "gpu_operator_plan": gpu_operator_plan,
            "hami_plan": hami_plan,
            "hami_release": hami_release,
            "helm_release": helm_release,
            "kata_plan": kata_plan,
            "nvidia_plugin_plan": nvidia_plugin_plan,
            "permitted_cards": permitted_cards,
            "sandbox_plugin_plan": sandbox_plugin_plan,
        }
