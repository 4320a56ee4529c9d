# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All checks over one moment of a cluster. No I/O."""

from __future__ import annotations

import dataclasses
import functools
import typing as t

from .._core.natural import natural
from . import claims, common, gpushare, gpushare_pods, hami, kata, nvidia, servers, servers_scheduler, virtual
from .catalog import CATALOG
from .invariant import BACKENDS, UNEXPECTED_ERROR, Invariant
from .model import DRA, HAMI, NVIDIA, Node, Snapshot
from .parse import shorten
from .result import CheckResult, Finding

ALL, SERVERS = "all", "servers"
SCOPES = (ALL, SERVERS)

NodeFunction = t.Callable[[Node, Snapshot, CheckResult], None]
ClusterFunction = t.Callable[[Snapshot, CheckResult], None]

# Run for each node of the check's backend.
NODE_CHECKS: dict[str, NodeFunction] = {
    "C1": common.one_stack,
    "C2": nvidia.process_has_owner,
    "C3": nvidia.processes_use_own_gpus,
    "C4": common.allocations_match_requests,
    "C5": common.allocated_gpus_exist,
    "C6": common.all_allocatable,
    "C7": nvidia.nvml_is_consistent,
    "C8": common.pods_see_own_gpus,
    "D1": claims.cards_match_nvml,
    "D2": claims.pool_is_complete,
    "D3": claims.claims_fit,
    "D4": claims.pods_have_claims,
    "D5": claims.claims_are_prepared,
    "D6": claims.kubelet_lists_claims,
    "D7": claims.claims_are_respected,
    "D9": claims.unhealthy_cards_are_tainted,
    "D11": claims.prepared_claims_are_allocated,
    "G1": gpushare.gpus_match_nvml,
    "G2": gpushare.capacity_matches_gpus,
    "G3": gpushare_pods.annotations_are_valid,
    "G4": gpushare_pods.running_pods_are_assigned,
    "G5": gpushare_pods.no_stale_assumptions,
    "G6": gpushare.gpus_are_not_overcommitted,
    "G7": gpushare_pods.allocation_matches_annotations,
    "G8": gpushare_pods.unit_counts_match,
    "G9": gpushare_pods.shares_are_respected,
    "H1": hami.register_matches_nvml,
    "H2": hami.capacity_matches_register,
    "H3": hami.annotations_are_valid,
    "H4": hami.bound_pods_get_gpus,
    "H5": hami.parts_fit,
    "H6": hami.allocation_matches_annotations,
    "H7": hami.lock_is_current,
    "H8": hami.library_is_loaded,
    "H9": hami.parts_are_respected,
    "H11": hami.mig_devices_exist,
    "K1": kata.runtime_is_loaded,
    "K2": kata.devices_are_announced,
    "K3": kata.class_selects_node,
    "N1": nvidia.capacity_matches_gpus,
    "N2": nvidia.slots_are_allocated_once,
    "N3": nvidia.access_matches_allocation,
    "N4": nvidia.one_slot_per_container,
    "N5": nvidia.shares_are_fair,
    "N6": nvidia.mps_is_used,
    "N7": nvidia.mig_matches_request,
    "V1": virtual.functions_are_bound,
    "V2": virtual.binding_survives_a_boot,
    "V3": virtual.nobody_shares_them,
    "V4": virtual.vgpus_are_as_recorded,
}
# Run once.
CLUSTER_CHECKS: dict[str, ClusterFunction] = {
    "C9": common.nodes_are_ready,
    "D8": claims.claims_have_pods,
    "D10": servers.objects_are_unchanged,
    "G10": gpushare.extender_cache_matches,
    "G11": gpushare.unhealthy_gpus_get_no_pods,
    "G12": gpushare.scheduler_calls_extender,
    "H10": hami.scheduler_is_hamis,
    "S1": servers.servers_are_ready,
    "S2": servers.schedulers_call_extender,
    "S3": servers_scheduler.admission_policy_exists,
    "S4": servers.gpu_nodes_announce_gpus,
    "S5": servers.shares_are_enforced,
}
# An UNKNOWN of these that has a key may come of two moments, so it needs two samples.
CONFIRMED = ("C7", "G6")
# Beside the servers' own checks, those of gpushare's nodes that need the API alone, or the GPUs' UUIDs.
SERVERS_CHECKS = ("C6", "D1", "D2", "D3", "D10", "G1", "G2", "G6")


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its documentation, and its function for each node or for the cluster."""

    id: str
    documentation: Invariant
    node: NodeFunction | None = None
    cluster: ClusterFunction | None = None

    @property
    def backend(self) -> str:
        """One of BACKENDS. A check covers the nodes of its backend only."""
        return BACKENDS[self.id[0]]

    @property
    def confirm(self) -> bool:
        """Whether an UNKNOWN that has a key counts in two samples only."""
        return self.id in CONFIRMED

    def covers(self, node: Node, scope: str) -> bool:
        """Return whether the check runs for a node."""
        if scope == SERVERS and self.backend == "common":
            return node.sharing
        return {
            "dra": DRA in node.backends,
            "common": common.has_gpus(node),
            "gpushare": node.sharing,
            "hami": HAMI in node.backends,
            "nvidia": NVIDIA in node.backends,
            "kata": node.kata is not None,
            "virtual": node.virtual is not None,
        }.get(self.backend, False)


CHECKS: tuple[Check, ...] = tuple(
    Check(name, CATALOG[name], NODE_CHECKS.get(name), CLUSTER_CHECKS.get(name)) for name in sorted(CATALOG, key=natural)
)


def _run_guarded(result: CheckResult, check: t.Callable[[CheckResult], None]) -> CheckResult:
    """Run a check; an unexpected exception makes it UNKNOWN, and the others still run."""
    try:
        check(result)
    except Exception as error:
        result.unknown(UNEXPECTED_ERROR, error=f"{type(error).__name__}: {shorten(str(error))}")
    return result


def run(snapshot: Snapshot, scope: str = ALL) -> list[tuple[Check, int, list[Finding]]]:
    """Run the checks.

    :returns: each check with the number of things that it compared, and its findings.
    """
    outcomes = []
    for check in CHECKS:
        if scope != ALL and check.backend != "servers" and check.id not in SERVERS_CHECKS:
            continue
        results = []
        if check.cluster is not None:
            results.append(_run_guarded(CheckResult(check.id), functools.partial(check.cluster, snapshot)))
        for node in snapshot.nodes:
            if check.node is not None and check.covers(node, scope):
                of_node = functools.partial(check.node, node, snapshot)
                results.append(_run_guarded(CheckResult(check.id, node.name), of_node))
        findings = [finding for result in results for finding in result.findings]
        outcomes.append((check, sum(result.checked for result in results), findings))
    return outcomes
