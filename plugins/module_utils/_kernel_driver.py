# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Take NVIDIA's kernel modules out and load those that are installed. Pure.

What has been seen (``_kernel_driver_apply.observe``) is plain JSON: ``container``, ``loaded`` {version, srcversion} or
None, ``installed`` the same of the file on the disk, ``library`` (version of libnvidia-ml, or empty), ``modules``
(loaded ones, dependents first), ``services`` {name: active}, ``users`` (see ``_open_devices``), ``unfinished`` (the
record of a run that was killed, or None).
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

ARGUMENTS: Json = {
    "state": {"type": "str", "choices": ["reloaded", "unloaded"], "default": "reloaded"},
    "services": {"type": "list", "elements": "str", "default": []},
    "end_pods": {"type": "bool", "default": False},
}

MODULE = "nvidia"
# Units that hold the cards open; what isn't active isn't touched.
SERVICES = (
    "dcgm-exporter",
    "nvidia-dcgm",
    "dcgm",
    "nvidia-mig-manager",
    "nvidia-imex",
    "nvidia-fabricmanager",
    "nvidia-powerd",
    "nvidia-persistenced",
)
# Whichever of them runs would start a container again that was ended.
KUBELETS = ("kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the module was asked for."""

    unloaded: bool
    services: tuple[str, ...]
    end_pods: bool


@dataclasses.dataclass(frozen=True)
class Swap:
    """In this order: services stop, processes end, modules go, modules come, services start."""

    stop: tuple[str, ...]
    end: tuple[int, ...]
    remove: tuple[str, ...]
    load: tuple[str, ...]
    start: tuple[str, ...]


def wish(params: Json) -> Wish:
    """From the module's arguments."""
    names = tuple(
        dict.fromkeys(name[: -len(".service")] if name.endswith(".service") else name for name in params["services"])
    )
    return Wish(params["state"] == "unloaded", names, bool(params["end_pods"]))


def plan(want: Wish, seen: Json) -> Plan:
    """What has to be done; where something holds the modules (see ``in_use``), services of a killed run only."""
    unfinished = seen["unfinished"] or {"services": [], "modules": []}
    left = [name for name in unfinished["services"] if not seen["services"].get(name)]
    if in_use(want, seen):
        # It may take long until the cards are free: the node mustn't be without its kubelet until then.
        return Plan() if seen.get("refused") or not left else Plan((_resumed(left, unfinished),))
    swap = _needed(want, seen)
    if want.unloaded:
        # An unloaded driver's services wait for the reload.
        left = []
    if not swap and not left and (want.unloaded or seen["unfinished"] is None):
        return Plan()
    stop = stopped(want, seen) if swap else ()
    changes = []
    ended = pods_to_end(want, seen) if swap else []
    if ended:
        changes.append(Change("processes of pods", "".join(f"{_words(one)}\n" for one in ended), "restarted\n"))
    before, after = _version(seen["loaded"]), "" if want.unloaded else _target(seen)
    step = Swap(
        stop=stop,
        end=tuple(one["pid"] for one in ended),
        remove=tuple(seen["modules"]) if swap and not seen["container"] else (),
        load=_load(want, seen, unfinished["modules"]),
        start=() if want.unloaded else tuple(dict.fromkeys([*reversed(unfinished["services"]), *reversed(stop)])),
    )
    if swap:
        changes.append(Change(f"module {MODULE}", before, after, step))
    else:
        changes.append(_services_left(left, step))
    return Plan(tuple(changes))


def _resumed(left: t.Sequence[str], unfinished: Json) -> Change:
    """Nothing but the start of what an unfinished run stopped."""
    start = tuple(dict.fromkeys(reversed(unfinished["services"])))
    return _services_left(left, Swap(stop=(), end=(), remove=(), load=(), start=start))


def _services_left(left: t.Iterable[str], step: Swap) -> Change:
    names = "".join(f"{name}\n" for name in left)
    return Change("services that an unfinished run stopped", "", names or "none left to start\n", step)


def _load(want: Wish, seen: Json, before: t.Sequence[str]) -> tuple[str, ...]:
    """The module, and all that stood on it before, in the order in which they find each other."""
    if want.unloaded or seen["container"] or seen["installed"] is None:
        return ()
    names = reversed(tuple(dict.fromkeys([*seen["modules"], *before])))
    return tuple(dict.fromkeys([MODULE, *names]))


def _needed(want: Wish, seen: Json) -> bool:
    """Whether what runs isn't what is installed (or, unloaded, whether anything runs)."""
    if seen["container"]:
        # Its host's modules are no concern of a container; what plays their part is named by the user.
        if want.unloaded:
            return any(seen["services"].get(name) for name in want.services)
        known = want.services and seen["loaded"] and seen["library"]
        return bool(known and seen["loaded"]["version"] != seen["library"])
    if want.unloaded:
        return seen["loaded"] is not None
    return seen["installed"] is not None and not _same(seen["loaded"], seen["installed"])


def _same(loaded: Json | None, installed: Json) -> bool:
    """Open and proprietary modules of one version differ in srcversion, which not every kernel tells."""
    if loaded is None or loaded["version"] != installed["version"]:
        return False
    return not (loaded["srcversion"] and installed["srcversion"]) or loaded["srcversion"] == installed["srcversion"]


def stopped(want: Wish, seen: Json) -> tuple[str, ...]:
    """Active services that have to stop, kubelet first so that it starts nothing anew meanwhile."""
    kubelets = KUBELETS if pods_to_end(want, seen) else ()
    return tuple(name for name in dict.fromkeys([*kubelets, *SERVICES, *want.services]) if seen["services"].get(name))


def pods_to_end(want: Wish, seen: Json) -> list[Json]:
    """Processes of pods that hold cards or an older library: those of DaemonSets, which draining leaves."""
    return [one for one in seen["users"] if one["pod"]] if want.end_pods else []


def blockers(want: Wish, seen: Json) -> list[Json]:
    """Processes that hold a card and that nobody has allowed to be ended."""
    services = {*SERVICES, *want.services}
    return [
        one
        for one in seen["users"]
        if one["devices"] and one["unit"] not in services and not (one["pod"] and want.end_pods)
    ]


def in_use(want: Wish, seen: Json) -> str:
    """Why the modules can't be taken out, or nothing where they can or needn't be."""
    if not _needed(want, seen) or seen["loaded"] is None or seen["container"]:
        return ""
    if seen.get("refused"):
        return str(seen["refused"])
    found = blockers(want, seen)
    return f"the cards are held by {', '.join(_words(one) for one in found)}" if found else ""


def _words(user: Json) -> str:
    of = f" of pod {user['pod']}" if user["pod"] else (f" of {user['unit']}.service" if user["unit"] else "")
    return f"{user['command']} (process {user['pid']}{of})"


def _version(module: Json | None) -> str:
    return f"{module['version']}\n" if module else ""


def _target(seen: Json) -> str:
    return f"{seen['library']}\n" if seen["container"] else _version(seen["installed"])
