# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The invariants of gpushare, ours and upstream's: unhealthy cards, and who schedules. No I/O."""

from __future__ import annotations

import re

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import listed, shorten, whole
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Card

CONFIGMAP = "unhealthy-gpu-"


def sick_cards_get_no_pods(snapshot: Snapshot, tally: Tally) -> None:
    """G11: what says that a card is unhealthy can be read, and is heeded."""
    for node in snapshot.nodes:
        if not node.sharing:
            continue
        for card in node.cards:
            if card.healthy:
                continue
            tally.seen()
            _on_sick(node, card, None, card.reason or "unhealthy", tally)
        if node.ours:
            continue
        if snapshot.configmaps is None:
            why = snapshot.configmaps_problem or "they weren't read"
            tally.unknown(
                f"which cards are unhealthy can't be told from kube-system's ConfigMaps: {why}", node=node.name
            )
        elif CONFIGMAP + node.name in snapshot.configmaps:
            tally.seen()
            _configmap(node, snapshot, tally)


def _configmap(node: Node, snapshot: Snapshot, tally: Tally) -> None:
    found = (snapshot.configmaps or {})[CONFIGMAP + node.name]
    text = found["data"].get("gpus")
    name = f"kube-system/{CONFIGMAP}{node.name}"
    known = {card.index: card for card in node.cards}
    indices = [whole(one) for one in text.split(",")] if text else []
    if not text or not re.fullmatch(r"[0-9]+(,[0-9]+)*", text) or not all(one in known for one in indices):
        tally.fail(
            f"ConfigMap {name} says gpus: {shorten(str(text))!r}, which isn't a list of the node's cards; upstream's "
            "extender takes what it can't read for card 0",
            "write the cards' numbers with commas and nothing else, or delete the ConfigMap",
            node=node.name,
            api=f"gpus: {shorten(str(text))!r}; cards: {listed(known)}",
        )
        return
    for index in indices:
        if index is not None:
            _on_sick(node, known[index], found["created"], f"ConfigMap {name}", tally)


def _on_sick(node: Node, card: Card, since: int | None, why: str, tally: Tally) -> None:
    for pod in node.pods:
        if not contract.counts(pod.json) or card.index not in contract.shares(pod.json):
            continue
        booked = contract.booking(pod.json)
        later = since is not None and booked is not None and booked.assume_time // 10**9 > since
        place = {"node": node.name, "card": card.index, "uuid": card.uuid, "pod": pod, "api": shorten(why, 200)}
        if later:
            tally.fail(
                f"it was given card {card.index} after that was said to be unhealthy ({shorten(why, 120)})",
                "restart the extender: it doesn't read the ConfigMap",
                **place,
            )
        else:
            tally.warn(
                f"it holds card {card.index}, which is unhealthy: {shorten(why, 120)}",
                "delete the pod, so that it comes to another card",
                **place,
            )


def scheduler_asks(snapshot: Snapshot, tally: Tally) -> None:
    """G12: pods with units are scheduled by somebody who asks the extender."""
    allowed = snapshot.options.schedulers
    for pod in [pod for node in snapshot.nodes for pod in node.pods] + list(snapshot.waiting):
        if pod.finished or pod.terminating or not pod.asks(contract.RESOURCE_MEMORY):
            continue
        tally.seen()
        if pod.scheduler not in allowed:
            tally.fail(
                f"its scheduler is {shorten(pod.scheduler) or 'not named'!r}, which isn't known to ask the extender "
                f"({listed(allowed)})",
                "set its schedulerName, or name the scheduler in schedulers if it asks the extender",
                node=pod.node,
                pod=pod,
                api=f"schedulerName: {shorten(pod.scheduler)!r}",
            )
        elif pod.node and pod.placed:
            tally.warn(
                "it went around the scheduler, since whoever made it set nodeName: no extender was asked whether a "
                "card has the room",
                "make it without nodeName, and with a nodeSelector if it needs this node",
                node=pod.node,
                pod=pod,
                api="managedFields: spec.nodeName was set with the pod, and not by a binding",
            )


CHECKS = (
    Check(
        "G11",
        "gpushare",
        "Unhealthy cards get no pods",
        "ConfigMap unhealthy-gpu-<node> and the annotation's unhealthy cards with the pods' cards",
        "FAIL unreadable, or given later; WARN still held",
        cluster=sick_cards_get_no_pods,
    ),
    Check(
        "G12",
        "gpushare",
        "Pods with units have a scheduler that asks the extender",
        "schedulerName with the option schedulers; who wrote nodeName",
        "FAIL; WARN around every scheduler",
        cluster=scheduler_asks,
    ),
)
