# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How containers on HAMi's nodes get the cards, from what the nodes have. Pure.

With a driver's files by environment variable the runtime has to be NVIDIA's: as the default, or by a RuntimeClass,
which HAMi's webhook sets on the pods. With CDI any runtime does that supports it.
"""

from __future__ import annotations

import re
import typing as t

from ...module_utils._core.types import JsonObject
from ...module_utils._node.baseline import default_runtime
from ...module_utils._runtime.cdi import injects_cdi
from .tree import Finding, finding

HANDLER = "nvidia"
# NVIDIA's tools that write CDI specifications, in the order of preference.
HOOKS = ("nvidia-cdi-hook", "nvidia-ctk")
_TABLE = re.compile(r"""runtimes\.['"]?nvidia['"]?\]""")

Way = t.Literal["default", "class", "cdi"]


class NodeRuntime(t.NamedTuple):
    """A node's container runtime.

    :param default: the default runtime is NVIDIA's.
    :param handler: it has NVIDIA's runtime, for a RuntimeClass.
    :param cdi: it injects devices by CDI.
    :param hook: path of NVIDIA's program for CDI; empty without one.
    """

    name: str
    default: bool
    handler: bool
    cdi: bool
    hook: str


def node_runtime(name: str, gpu_node: JsonObject) -> NodeRuntime | None:
    """Read a node's runtime from its facts; None where the runtime that kubelet uses is unknown."""
    used = str((gpu_node.get("kubelet") or {}).get("runtime") or "")
    state = (gpu_node.get("runtimes") or {}).get(used)
    if not state:
        return None
    named = default_runtime(state)
    found = state.get("runtimes") or {}
    text = str(state.get("dump") or "")
    binaries = (gpu_node.get("toolkit") or {}).get("binaries") or []
    hooks = [path for wanted in HOOKS for path in binaries if str(path).rpartition("/")[2] == wanted]
    return NodeRuntime(
        name,
        default=named == HANDLER,
        # Docker has no RuntimeClass.
        handler=used != "docker" and (HANDLER in found or bool(_TABLE.search(text))),
        # CRI-O has CDI enabled; k3s and RKE2 run a containerd whose configuration isn't in the facts.
        cdi=used == "crio" or (used == "containerd" and injects_cdi(state)),
        hook=str(hooks[0]) if hooks else "",
    )


class Choice(t.NamedTuple):
    """The way for all nodes.

    :param runtime_class: of the device plugin and the pods; empty for none.
    :param hook: NVIDIA's program for CDI on the nodes.
    """

    way: Way
    runtime_class: str = ""
    hook: str = ""


def choose(
    nodes: t.Sequence[str],
    facts: t.Mapping[str, JsonObject],
    classes: t.Mapping[str, str],
    wanted: str,
    runtime_class: str,
    former: Way | None = None,
) -> Choice | Finding:
    """Return the way by which containers get the cards.

    :param nodes: HAMi's nodes.
    :param facts: ``gpu_node`` of those that were observed, by the node's name.
    :param classes: handler of each RuntimeClass in the cluster, by name.
    :param wanted: ``auto``, or the way that the user names.
    :param runtime_class: the RuntimeClass that the user names; empty for none.
    :param former: that of the release; kept while not all nodes are observed, as with ``--limit``.
    """
    named = runtime_class or next((name for name, handler in sorted(classes.items()) if handler == HANDLER), HANDLER)
    observed = [node_runtime(name, facts[name]) for name in nodes if name in facts]
    known = [one for one in observed if one]
    hook = next((one.hook for one in known if one.hook), "")
    if wanted == "class" or (wanted == "auto" and runtime_class):
        return Choice("class", named)
    if wanted == "default":
        return Choice("default")
    if wanted == "cdi":
        return Choice("cdi", "", hook)
    if len(known) < len(nodes):
        if former == "default" and all(one.default for one in known):
            return Choice("default")
        if former == "class" and all(one.handler for one in known):
            return Choice("class", named)
    if known and len(known) == len(nodes):
        if all(one.default for one in known):
            return Choice("default")
        if all(one.handler for one in known):
            return Choice("class", named)
        hooks = {one.hook for one in known}
        if all(one.cdi for one in known) and len(hooks) == 1 and hook:
            return Choice("cdi", "", hook)
        parts = [f"{one.name} ({_text(one)})" for one in known]
        message = f"the nodes have no way in common in which containers get the cards: {', '.join(parts)}"
        do = "run role runtime on them, or split them into groups and set hami_injection"
        return finding("runtimes_differ", "hami_injection", f"{message}; {do}")
    if named in classes:
        return Choice("class", named)
    unknown = sorted(set(nodes) - {one.name for one in known})
    message = f"how containers get the cards is unknown for {', '.join(unknown) or 'every node'}: it wasn't observed"
    do = f"and the cluster has no RuntimeClass with handler {HANDLER}; set hami_injection"
    return finding("runtime_unknown", "hami_injection", f"{message}, {do}")


def _text(one: NodeRuntime) -> str:
    parts = [("nvidia by default", one.default), ("runtime nvidia", one.handler), ("CDI", one.cdi and one.hook)]
    return ", ".join(text for text, there in parts if there) or "none of nvidia by default, runtime nvidia and CDI"
