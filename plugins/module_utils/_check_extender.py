# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""G10: what the extender believes, pod by pod, with the pods' annotations. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._check_model import Node, Pod, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check_read import Reader, counted, listed, shorten
from ansible_collections.kubegpu.share.plugins.module_utils._check_tally import Check, Tally
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json

STALE = "restart the extender: what it remembers isn't what is so"
Cards = t.Dict[int, int]


def extender_knows(snapshot: Snapshot, tally: Tally) -> None:
    """Never sums of two moments: each pod that both have had the time to learn of."""
    sharing = [node for node in snapshot.nodes if node.sharing]
    if not sharing:
        return
    if not snapshot.options.extender:
        tally.unknown("no extender was asked what it believes", "give its /gpushare-scheduler/inspect as extender")
        return
    asked = Reader()
    for name, answer in sorted(asked.obj(snapshot.options.extender, "extender").items()):
        reader = Reader()
        if isinstance(answer, str) or not isinstance(answer, dict):
            why = shorten(answer, 200) if isinstance(answer, str) else "its answer is no JSON object"
            tally.unknown(f"extender {name} doesn't say what it believes: {why}", extender=name)
            continue
        error = answer.get("error")
        if error or not isinstance(answer.get("nodes"), list):
            why = shorten(error, 200) if isinstance(error, str) else "its answer has no list of nodes"
            tally.unknown(f"extender {name} doesn't say what it believes: {why}", extender=name)
            continue
        rows = {reader.text(one.get("name"), "node name"): one for one in reader.objs(answer.get("nodes"), "nodes")}
        for node in sharing:
            _node(name, node, rows.get(node.name), snapshot, reader, tally)
        for sentence in reader.damage:
            tally.unknown(f"what extender {name} says can't all be read: {sentence}", STALE, extender=name)
    for sentence in asked.damage:
        tally.unknown(f"what the extenders said can't be read: {sentence}")


def _node(name: str, node: Node, row: Json | None, snapshot: Snapshot, reader: Reader, tally: Tally) -> None:
    held = {pod.key: pod for pod in node.pods if contract.counts(pod.json)}
    if row is None:
        if node.ours and node.cards:
            tally.seen()
            words = f"extender {name} doesn't know the node"
            tally.fail(words, STALE, node=node.name, key=f"extender {name}", extender="no such node")
        elif held:
            tally.seen()
            tally.warn(
                f"extender {name} hasn't looked at the node yet, which has {counted(len(held), 'pod')}",
                "upstream's looks at a node when it is first asked about it",
                node=node.name,
                key=f"extender {name}",
                extender="no such node",
            )
        return
    believed: dict[str, Cards] = {}
    uids: dict[str, str] = {}
    units = {card.index: card for card in node.cards}
    for dev in reader.objs(row.get("devs"), "devs"):
        index, total = reader.number(dev.get("id"), "devs id"), reader.number(dev.get("totalGPU"), "devs totalGPU")
        if index is None:
            continue
        tally.seen()
        card = units.get(index)
        if total is not None and total != (card.units if card else 0):
            tally.fail(
                f"extender {name} takes card {index} for one of {total} units, the node says "
                f"{shorten(str(card.units)) if card else 'there is none'}",
                STALE,
                node=node.name,
                card=index,
                key=f"extender {name}: {total}",
                uuid=card.uuid if card else "",
                api=f"{shorten(str(card.units)) if card else 0} units",
                extender=f"{total} units",
            )
        for one in reader.objs(dev.get("pods"), "devs pods"):
            namespace, pod, uid = (
                reader.text(one.get(key), f"devs pods {key}") for key in ("namespace", "name", "uid")
            )
            key = f"{namespace}/{pod}"
            # Ours tells which pod of that name it means, upstream's doesn't.
            if uid and key in held and held[key].uid != uid:
                key = f"{key} ({uid})"
            uids[key] = uid
            believed.setdefault(key, {})[index] = reader.number(one.get("usedGPU"), "usedGPU") or 0
    _pods(name, node, held, believed, uids, snapshot, tally)


def _pods(
    name: str,
    node: Node,
    held: t.Mapping[str, Pod],
    believed: t.Mapping[str, Cards],
    uids: t.Mapping[str, str],
    snapshot: Snapshot,
    tally: Tally,
) -> None:
    known = set(units_index(node))
    # Ours shows what it has booked before the pod is bound.
    waiting = {pod.key for pod in snapshot.waiting} if node.ours else set()
    for key in sorted(set(held) | set(believed)):
        pod = held.get(key)
        # One that comes or goes is told to the two in different moments.
        if pod is not None and (pod.terminating or (pod.created or 0) > snapshot.now - snapshot.options.grace):
            continue
        if pod is None and key in waiting:
            continue
        tally.seen()
        truth = dict(contract.shares(pod.json)) if pod else {}
        said = believed.get(key, {})
        if truth == said or (pod is not None and not (set(truth) & known) and not said):
            continue
        place = next(iter({**truth, **said}), None)
        tally.fail(
            f"extender {name} believes that it holds {_words(said)}, and it holds {_words(truth)}"
            if pod is not None
            else f"extender {name} believes that it holds {_words(said)}, and no such pod holds anything here",
            STALE,
            node=node.name,
            pod=key if pod is None else pod,
            key=f"extender {name}",
            card=place if place in known else None,
            api=_words(truth),
            extender=_words(said),
            **({"pod_uid": uids.get(key, "")} if pod is None else {}),
        )


def units_index(node: Node) -> list[int]:
    return [card.index for card in node.cards]


def _words(cards: Cards) -> str:
    return listed(f"{shorten(str(units))} units of card {shorten(str(index))}" for index, units in cards.items()) or (
        "nothing"
    )


EXTENDER = Check(
    "G10",
    "gpushare",
    "The extender believes what is so",
    "its /inspect, pod by pod and card by card, with annotations and the node's cards; without pods that come or go",
    "FAIL; WARN where upstream's hasn't looked at a node; UNKNOWN where nobody asked it",
    cluster=extender_knows,
)
