# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks K1 to K3 of pods of Kata. No I/O."""

from __future__ import annotations

import collections

from .model import Kata, Node, Snapshot
from .parse import join, shorten
from .result import CheckResult

VENDOR = "nvidia.com/"
# Cards are announced by a device plugin of containers, too, whose resources have no such specification.
OF_CONTAINERS = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-")


def _of(node: Node, result: CheckResult) -> Kata | None:
    """Return what the node has for pods of Kata; None, with a finding, where that is unknown."""
    kata = node.kata
    if kata is None or kata.problem:
        why = kata.problem if kata else "nothing was observed"
        result.unknown("unreadable", why=shorten(why, 200), proc=shorten(why, 300))
        return None
    return kata


def runtime_is_loaded(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check K1: the running containerd has the handler, and doesn't run all pods by NVIDIA's runtime."""
    if (kata := _of(node, result)) is None:
        return
    result.count()
    shown = f"runtimes {join(kata.handlers) or 'none'}, default {kata.default_runtime or 'none'}"
    if kata.handler not in kata.handlers:
        result.fail("no_handler", proc=shown, handler=shorten(kata.handler), known=join(kata.handlers) or "none")
    elif not kata.handler_loaded:
        result.fail("not_loaded", proc=shown, handler=shorten(kata.handler))
    if kata.default_runtime == "nvidia":
        result.fail("default_nvidia", key="default", proc=shown)


def devices_are_announced(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check K2: the CDI devices are those that the node announces, and those that VFIO has."""
    if (kata := _of(node, result)) is None:
        return
    by_kind: dict[str, list[str]] = collections.defaultdict(list)
    for device in kata.devices:
        kind, _sign, name = device.partition("=")
        by_kind[kind].append(name)
    announced = {
        name: number
        for name, number in node.allocatable.items()
        if name.startswith(VENDOR) and not name.startswith(OF_CONTAINERS) and number
    }
    for kind in sorted({*by_kind, *announced}):
        result.count()
        names, number = by_kind.get(kind, []), announced.get(kind, 0)
        for name, times in sorted(collections.Counter(names).items()):
            if times > 1:
                device = shorten(f"{kind}={name}")
                result.fail("twice", key=device, device=device, proc=f"{device}: {times} times")
        if len(names) != number:
            planes = {"api": f"{kind}: {number} allocatable", "proc": f"CDI devices {join(names) or 'none'}"}
            numbers = {"allocatable": number, "devices": len(names)}
            result.fail("count_differs", key=kind, resource=shorten(kind), **numbers, **planes)
        if not kata.iommufd:
            _are_bound(node, kind, names, result)


def _are_bound(node: Node, kind: str, names: list[str], result: CheckResult) -> None:
    functions = node.virtual.functions if node.virtual else []
    groups = {function.group for function in functions if "vfio" in function.driver}
    # Where the GPU Operator binds the cards, nothing is recorded.
    for name in sorted(set(names)) if groups else []:
        if name not in groups:
            device = shorten(f"{kind}={name}")
            result.fail(
                "not_bound", key=device, device=device, group=shorten(name), proc=f"groups {join(sorted(groups))}"
            )


def class_selects_node(node: Node, snapshot: Snapshot, result: CheckResult) -> None:
    """Check K3: the RuntimeClass has the node's handler, and selects the node."""
    if (kata := _of(node, result)) is None:
        return
    name = shorten(kata.runtime_class)
    if snapshot.classes is None:
        why = shorten(snapshot.classes_problem or "they weren't asked for", 200)
        result.unknown("not_read", why=why, api=f"RuntimeClasses: {why}")
        return
    result.count()
    there = snapshot.classes.get(kata.runtime_class)
    if there is None:
        result.fail("no_class", name=name, api=f"RuntimeClasses {join(sorted(snapshot.classes)) or 'none'}")
        return
    if there.handler != kata.handler:
        fields = {"found": shorten(there.handler), "handler": shorten(kata.handler)}
        result.fail("class_handler", key="handler", name=name, **fields, api=f"handler {shorten(there.handler)}")
    for label, wanted in sorted(there.selector.items()):
        value = node.labels.get(label)
        if value != wanted:
            shown = "no such label" if value is None else shorten(str(value))
            fields = {"label": shorten(label), "wanted": shorten(wanted), "found": shown}
            result.fail("not_selected", key=label, name=name, **fields, api=f"{shorten(label)}: {shown}")
