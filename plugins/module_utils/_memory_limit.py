# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Whether NVIDIA's driver holds pods to their shares: judged of a machine before, told by its node after. No I/O."""

from __future__ import annotations

import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._node_info_toolkit import memory_limit

MODES = ("auto", "required", "off")


def mode(value: t.Any) -> str:
    """The variable's value; YAML reads a bare ``off`` as false."""
    text = str(value)
    return "off" if text.lower() in ("off", "false", "no") else text


def obstacles(seen: t.Mapping[str, t.Any], driver: str, toolkit: str) -> list[str]:
    """What will stand against limits on a machine, each without its full stop; none where nothing is known of it.

    :param seen: the observation of the machine.
    :param driver: version of the driver that will be there; empty where the one that is there stays.
    :param toolkit: the same of NVIDIA's container toolkit.
    """
    if not all(isinstance(seen.get(part), t.Mapping) for part in ("driver", "toolkit", "cgroup")):
        return []
    now: t.Mapping[str, t.Any] = seen["driver"]
    will_be = {
        "module_version": driver or now.get("module_version"),
        "version": now.get("version"),
        "cards": [{"index": card.get("index"), "mig": card.get("mig")} for card in now.get("cards") or []],
    }
    tools = {"version": toolkit or seen["toolkit"].get("version")}
    return [_clause(one) for one in memory_limit(will_be, tools, {"version": seen["cgroup"].get("version")})["why"]]


def told(node: Json) -> str:
    """What a node's device plugin says of its limits; empty where it says nothing, as upstream's."""
    text = ((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_LIMIT)
    return str(text) if text else ""


def notes(nodes: t.Iterable[Json]) -> list[str]:
    """One sentence for the nodes that can't hold pods to their shares, per reason."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        text = told(node)
        if text.startswith(contract.LIMIT_UNENFORCED):
            found.setdefault(text[len(contract.LIMIT_UNENFORCED) :], []).append(str(node["metadata"]["name"]))
    return [
        f"nobody holds the pods of node{'s' if len(names) > 1 else ''} {_names(names)} to their shares: {why}"
        for why, names in found.items()
    ]


def _names(names: t.Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _clause(sentence: str) -> str:
    text = sentence.rstrip(".").replace("; ", ", and ")
    return "the " + text[len("The ") :] if text.startswith("The ") else text
