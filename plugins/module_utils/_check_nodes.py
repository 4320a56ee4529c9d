# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariant of nodes themselves: they are there, ready, and were looked at. No I/O."""

from __future__ import annotations

from ansible_collections.kubegpu.share.plugins.module_utils._check_common import LOOK, concerns
from ansible_collections.kubegpu.share.plugins.module_utils._check_grant import asks_for_card
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import counted, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally


def node_answers(snapshot: Snapshot, tally: Tally) -> None:
    """C9: every node with cards is ready, in the API, and was looked at."""
    for name in snapshot.strangers:
        tally.seen()
        tally.unknown("it was looked at, and the API doesn't have it", "add it to the cluster again", node=name)
    for sentence in snapshot.damage:
        tally.unknown(f"what the API answered can't all be read: {sentence}", "see who answers there")
    for pod in snapshot.homeless:
        if asks_for_card(pod):
            tally.seen()
            tally.fail(
                f"it holds cards of node {shorten(pod.node)}, which the API doesn't have",
                "delete the pod, unless the node comes back",
                node=pod.node,
                pod=pod,
                api=f"spec.nodeName {shorten(pod.node)}, phase {shorten(pod.phase)}",
            )
    for node in snapshot.nodes:
        if not concerns(node):
            continue
        tally.seen()
        if node.ready != "True":
            tally.fail(
                f"the node isn't ready (condition Ready: {node.ready or 'missing'}), so its pods' cards are in use "
                "or not, and nobody knows",
                "see why kubelet doesn't answer there",
                node=node.name,
                key="Ready",
                api=f"Ready: {node.ready or 'missing'}; {counted(sum(asks_for_card(pod) for pod in node.pods), 'pod')}",
            )
        if not node.looked:
            tally.unknown("its machine wasn't looked at in this run", LOOK, node=node.name)
        elif node.nvml.problem and node.nvml.problem == node.kubelet.problem:
            tally.unknown(f"its machine couldn't be looked at: {node.nvml.problem}", LOOK, node=node.name)
        for sentence in (*node.damage, *([node.cards_problem] if node.cards_problem else [])):
            tally.unknown(f"what it says can't all be read: {sentence}", LOOK, node=node.name)


CHECKS = (
    Check(
        "C9",
        "common",
        "Every node with cards is ready and was looked at",
        "the API's nodes, their condition Ready, and the evidence of their machines",
        "FAIL not ready; UNKNOWN",
        cluster=node_answers,
    ),
)
