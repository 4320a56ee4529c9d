# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The allocation of a cluster as a table for people, and the question to the cluster that both are made from."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._allocation import allocation, percent
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_info import UNFINISHED
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube

NO_NODES = (
    "No node announces shared GPU memory (aliyun.com/gpu-mem): nothing is set up yet, or no device plugin is running.\n"
)


def look(kube: Kube) -> Json:
    """Ask the cluster: the allocation as data and as a table."""
    found = allocation(kube.list_all("v1", "Node"), kube.list_all("v1", "Pod", field_selector=UNFINISHED))
    return {**found, "table": table(found), "requests": dict(kube.requests)}


def table(found: Json) -> str:
    """One block per node: its pods and what each holds of each card; then what waits, then the whole cluster."""
    if not found["nodes"]:
        return NO_NODES + _waiting(found["waiting"])
    blocks = [_node(node) for node in found["nodes"]]
    rule = "-" * max(len(line) for block in blocks for line in block.splitlines())
    used, total = found["used"], found["total"]
    share = f"{used}/{total} ({percent(used, total)}%)"
    cluster = f"Allocated/Total GPU memory of the cluster{_of(found['unit'])}: {share}\n"
    return f"{rule}\n".join([*blocks, _waiting(found["waiting"]) + cluster])


def _node(node: Json) -> str:
    cards, pending = node["cards"], node["pending"]
    header = ["NAMESPACE", "POD", "STATUS", *(f"GPU{card['index']}(Allocated)" for card in cards)]
    header += ["PENDING(Allocated)"] if pending else []
    rows = [header]
    # A pod of several cards is one row, where its first card is.
    lines: dict[tuple[str, str], list[str]] = {}
    for place, pods in enumerate([*(card["pods"] for card in cards), pending]):
        for pod in pods:
            line = lines.setdefault((pod["namespace"], pod["name"]), _pod(pod, len(header)))
            line[3 + place] = str(pod["units"])
    rows += lines.values()
    rows.append(["Allocated/Total", "", "", *(f"{card['used']}/{card['total']}" for card in cards)])
    if pending:
        rows[-1].append(str(sum(pod["units"] for pod in pending)))
    head = f"NAME:       {node['name']}\nIPADDRESS:  {node['address'] or '-'}\n"
    head += f"LIMIT:      {node['memory_limit']}\n" if node["memory_limit"] else ""
    for card in cards:
        size = f"{card['memory_mib']} MiB" if card["memory_mib"] else ""
        bad = "" if card["healthy"] else f"UNHEALTHY: {card['reason']}" if card["reason"] else "UNHEALTHY"
        about = [text for text in (card["model"], size, card["uuid"], bad) if text]
        head += f"GPU{card['index']}:       {', '.join(about)}\n" if about else ""
    share = f"{node['used']}/{node['total']} ({percent(node['used'], node['total'])}%)"
    return f"{head}\n{_columns(rows)}\nAllocated/Total of the node{_of(node['unit'])}: {share}\n"


def _pod(pod: Json, columns: int) -> list[str]:
    words = [pod["namespace"], pod["name"], "Terminating" if pod["terminating"] else pod["phase"]]
    return [*words, *["0"] * (columns - len(words))]


def _waiting(pods: t.Sequence[Json]) -> str:
    if not pods:
        return ""
    lines = [
        f"  {pod['namespace']}/{pod['name']} asks for {pod['units']}: {pod['reason'] or 'not scheduled yet'}\n"
        for pod in pods
    ]
    return "Waiting for a card:\n" + "".join(lines)


def _of(unit: str | None) -> str:
    return f" ({unit})" if unit else ""


def _columns(rows: t.Sequence[t.Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)
