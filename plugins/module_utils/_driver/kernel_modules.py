# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the replacement of NVIDIA's loaded kernel modules by the installed ones."""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.plan import Change, Plan
from .._core.types import JsonObject

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["reloaded", "unloaded"], "default": "reloaded"},
    "services": {"type": "list", "elements": "str", "default": []},
    "end_pods": {"type": "bool", "default": False},
}

MODULE = "nvidia"
# Units that keep the GPUs open; an inactive one stays as it is.
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
# Whichever of them is active would restart a container that was ended.
KUBELETS = ("kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the module ``kernel_driver``."""

    unloaded: bool
    services: tuple[str, ...]
    end_pods: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A loaded or installed kernel module; not every kernel has ``srcversion``."""

    version: str
    srcversion: str

    def same(self, other: Module | None) -> bool:
        """Return whether both are one build: open and proprietary modules of one version differ in srcversion."""
        if other is None or self.version != other.version:
            return False
        return not (self.srcversion and other.srcversion) or self.srcversion == other.srcversion


@dataclasses.dataclass(frozen=True)
class Record:
    """What an interrupted run had stopped and unloaded."""

    services: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class State:
    """The observed machine.

    :param container: it has its host's modules.
    :param library: version of libnvidia-ml; empty where it isn't installed.
    :param modules: loaded modules of the driver, dependents first.
    :param services: whether each known service is active.
    :param users: processes that use a GPU or the library (``_host.open_devices``).
    :param unfinished: None where no run was interrupted.
    :param refused: the kernel's reason for keeping the modules.
    """

    container: bool
    loaded: Module | None
    installed: Module | None
    library: str
    modules: tuple[str, ...]
    services: t.Mapping[str, bool]
    users: tuple[JsonObject, ...]
    unfinished: Record | None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Swap:
    """In this order: services stop, processes end, modules are unloaded, modules are loaded, services start."""

    stop: tuple[str, ...] = ()
    end: tuple[int, ...] = ()
    remove: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


def options(params: JsonObject) -> Options:
    """Return the module's validated options."""
    names = tuple(
        dict.fromkeys(name[: -len(".service")] if name.endswith(".service") else name for name in params["services"])
    )
    return Options(params["state"] == "unloaded", names, bool(params["end_pods"]))


def plan(options: Options, state: State) -> Plan:
    """Return what has to be done; while the modules are in use only the restart of an interrupted run's services."""
    unfinished = state.unfinished or Record()
    left = [name for name in unfinished.services if not state.services.get(name)]
    if in_use(options, state):
        # The GPUs may stay in use for long: the node must have its kubelet meanwhile.
        if state.refused or not left:
            return Plan()
        return Plan((_services_left(left, Swap(start=tuple(dict.fromkeys(reversed(unfinished.services))))),))
    swap = _needed(options, state)
    if options.unloaded:
        # The services wait for the reload.
        left = []
    if not swap and not left and (options.unloaded or state.unfinished is None):
        return Plan()
    stop = stopped(options, state) if swap else ()
    changes = []
    ended = pods_to_end(options, state) if swap else []
    if ended:
        changes.append(Change("processes of pods", "".join(f"{_described(one)}\n" for one in ended), "restarted\n"))
    step = Swap(
        stop=stop,
        end=tuple(one["pid"] for one in ended),
        remove=state.modules if swap and not state.container else (),
        load=_load(options, state, unfinished.modules),
        start=() if options.unloaded else tuple(dict.fromkeys([*reversed(unfinished.services), *reversed(stop)])),
    )
    if swap:
        before, after = _version(state.loaded), "" if options.unloaded else _target(state)
        changes.append(Change(f"module {MODULE}", before, after, step))
    else:
        changes.append(_services_left(left, step))
    return Plan(tuple(changes))


def _services_left(left: t.Iterable[str], step: Swap) -> Change:
    names = "".join(f"{name}\n" for name in left)
    return Change("services that an interrupted run stopped", "", names or "none left to start\n", step)


def _load(options: Options, state: State, before: t.Sequence[str]) -> tuple[str, ...]:
    """Return the module and all that depended on it before, in the order of their dependencies."""
    if options.unloaded or state.container or state.installed is None:
        return ()
    names = reversed(tuple(dict.fromkeys([*state.modules, *before])))
    return tuple(dict.fromkeys([MODULE, *names]))


def _needed(options: Options, state: State) -> bool:
    """Return whether the loaded module isn't the installed one (or, unloaded, whether one is loaded)."""
    if state.container:
        # A container doesn't change its host's modules; the user names the services that use them.
        if options.unloaded:
            return any(state.services.get(name) for name in options.services)
        return bool(options.services and state.loaded and state.library and state.loaded.version != state.library)
    if options.unloaded:
        return state.loaded is not None
    return state.installed is not None and not state.installed.same(state.loaded)


def stopped(options: Options, state: State) -> tuple[str, ...]:
    """Return the active services that have to stop, kubelet first so that it restarts nothing meanwhile."""
    kubelets = KUBELETS if pods_to_end(options, state) else ()
    return tuple(name for name in dict.fromkeys([*kubelets, *SERVICES, *options.services]) if state.services.get(name))


def pods_to_end(options: Options, state: State) -> list[JsonObject]:
    """Return processes of pods that use a GPU or the old library: those of DaemonSets, which draining leaves."""
    return [one for one in state.users if one["pod"]] if options.end_pods else []


def blockers(options: Options, state: State) -> list[JsonObject]:
    """Return the processes that use a GPU and may not be ended."""
    services = {*SERVICES, *options.services}
    return [
        one
        for one in state.users
        if one["devices"] and one["unit"] not in services and not (one["pod"] and options.end_pods)
    ]


def in_use(options: Options, state: State) -> str:
    """Return why the modules can't be unloaded; empty where they can or needn't be."""
    if not _needed(options, state) or state.loaded is None or state.container:
        return ""
    if state.refused:
        return state.refused
    found = blockers(options, state)
    return f"the GPUs are in use by {', '.join(_described(one) for one in found)}" if found else ""


def _described(user: JsonObject) -> str:
    of = f" of pod {user['pod']}" if user["pod"] else (f" of {user['unit']}.service" if user["unit"] else "")
    return f"{user['command']} (process {user['pid']}{of})"


def _version(module: Module | None) -> str:
    return f"{module.version}\n" if module else ""


def _target(state: State) -> str:
    return f"{state.library}\n" if state.container else _version(state.installed)
