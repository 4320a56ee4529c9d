# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Observe NVIDIA's kernel modules and their users, and replace the loaded modules by the installed ones."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core import plan as core_plan
from .._core.errors import ShareError
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._host import open_devices
from .._host.facts import kernel
from .._host.system import System
from .library import MODULE, RECORD, library_version, loaded_version

ARGUMENTS: JsonObject = {
    "state": {"type": "str", "choices": ["reloaded", "unloaded"], "default": "reloaded"},
    "services": {"type": "list", "elements": "str", "default": []},
    "end_pods": {"type": "bool", "default": False},
}

MODULE_NAME = "nvidia"
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
    """The options of the module ``kernel_driver``; kubelet restarts the pods' processes that it ends."""

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


def options_of(params: JsonObject) -> Options:
    """Return the module's validated options."""
    names = tuple(
        dict.fromkeys(name[: -len(".service")] if name.endswith(".service") else name for name in params["services"])
    )
    return Options(params["state"] == "unloaded", names, bool(params["end_pods"]))


def make_plan(options: Options, state: State) -> Plan:
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
        changes.append(
            Change("processes of pods", "".join(f"{_described(process)}\n" for process in ended), "restarted\n")
        )
    step = Swap(
        stop=stop,
        end=tuple(process["pid"] for process in ended),
        remove=state.modules if swap and not state.container else (),
        load=_load(options, state, unfinished.modules),
        start=() if options.unloaded else tuple(dict.fromkeys([*reversed(unfinished.services), *reversed(stop)])),
    )
    if swap:
        target = f"{state.library}\n" if state.container else _version(state.installed)
        after = "" if options.unloaded else target
        changes.append(Change(f"module {MODULE_NAME}", _version(state.loaded), after, step))
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
    return tuple(dict.fromkeys([MODULE_NAME, *names]))


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
    return [user for user in state.users if user["pod"]] if options.end_pods else []


def blockers(options: Options, state: State) -> list[JsonObject]:
    """Return the processes that use a GPU and may not be ended."""
    services = {*SERVICES, *options.services}
    return [
        user
        for user in state.users
        if user["devices"] and user["unit"] not in services and not (user["pod"] and options.end_pods)
    ]


def in_use(options: Options, state: State) -> str:
    """Return why the modules can't be unloaded; empty where they can or needn't be."""
    if not _needed(options, state) or state.loaded is None or state.container:
        return ""
    if state.refused:
        return state.refused
    users = blockers(options, state)
    return f"the GPUs are in use by {', '.join(_described(user) for user in users)}" if users else ""


def _described(user: JsonObject) -> str:
    of = f" of {user['unit']}.service" if user["unit"] else ""
    if user["pod"]:
        of = f" of pod {user['pod']}"
    return f"{user['command']} (process {user['pid']}{of})"


def _version(module: Module | None) -> str:
    return f"{module.version}\n" if module else ""


# A process that has such a file in its memory uses the old driver's interface.
MAPPED = r"/lib(?:nvidia-ml|cuda)\.so"
GRACE_SECONDS = 10


def observe(system: System, options: Options) -> State:
    """Return all that the plan is made from."""
    version = loaded_version(system)
    loaded = Module(version, (system.read(f"{MODULE}/srcversion") or "").strip()) if version else None
    users = open_devices.users(system, lambda path: path.startswith("/dev/nvidia"), MAPPED) if loaded else []
    return State(
        container=not kernel(system)["installed"],
        loaded=loaded,
        installed=_installed(system),
        library=library_version(system),
        modules=tuple(_with_dependents(system, MODULE_NAME)) if system.exists(MODULE) else (),
        services=_services(system, options),
        users=tuple(users),
        unfinished=_record(system),
    )


def _installed(system: System) -> Module | None:
    """Return the module that the running kernel would load now."""
    done = system.run(["modinfo", MODULE_NAME], timeout=10)
    fields = dict(re.findall(r"^(version|srcversion):\s*(\S+)$", done.out, re.MULTILINE)) if done.rc == 0 else {}
    return Module(fields["version"], fields.get("srcversion", "")) if "version" in fields else None


def _with_dependents(system: System, name: str) -> list[str]:
    """Return a module after all that depend on it."""
    order: list[str] = []

    def visit(module: str) -> None:
        for holder in system.names(f"/sys/module/{module}/holders"):
            visit(holder)
        if module not in order:
            order.append(module)

    visit(name)
    return order


def _services(system: System, options: Options) -> dict[str, bool]:
    """Return which of the services exist, and whether they are active."""
    if not system.exists("/run/systemd/system"):
        return {}
    names = dict.fromkeys([*KUBELETS, *SERVICES, *options.services])
    units = [f"{name}.service" for name in names]
    done = system.run(["systemctl", "show", "-p", "Id,LoadState,ActiveState", *units], timeout=30)
    services = {}
    for block in done.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            services[fields["Id"].rpartition(".")[0]] = fields.get("ActiveState") in ("active", "activating")
    return services


def _record(system: System) -> Record | None:
    text = system.read(RECORD)
    if text is None:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        # Only a record that was never complete is unreadable, and then nothing had been stopped.
        return Record()
    return Record(tuple(record["services"]), tuple(record["modules"]))


class KernelModulesReconciler:
    """NVIDIA's kernel modules on the machine that the module runs on."""

    def __init__(self, options: Options, system: System) -> None:
        self._options = options
        self._system = system
        self._refused = ""

    def observe(self) -> State:
        return dataclasses.replace(observe(self._system, self._options), refused=self._refused)

    def plan(self, state: State) -> core_plan.Plan:
        return make_plan(self._options, state)

    def apply(self, state: State, plan: core_plan.Plan) -> None:
        swap: Swap = next(change.step for change in plan.changes if change.step is not None)
        earlier = state.unfinished or Record()
        self._write_record(earlier, state, swap)
        # The services that an interrupted run stopped too: its record is removed.
        start = swap.start or tuple(dict.fromkeys([*reversed(earlier.services), *reversed(swap.stop)]))
        self._stop(swap.stop, start)
        self._end(swap.end)
        if swap.remove:
            done = self._system.run(["modprobe", "-r", *swap.remove], timeout=120)
            # A user that is no process: a console, another kernel module, or a process that has just started.
            self._refused = f"the kernel refused to unload them: {_last(done.err)}" if done.rc != 0 else ""
        if self._options.unloaded and not self._refused and (swap.remove or state.container):
            return
        failed = self._load(swap.load) if swap.load else ""
        # Also where the module can't be loaded: a node without its kubelet would be worse.
        for name in start:
            failed = self._start(name) or failed
        self._remove_record()
        if failed:
            raise ShareError(failed)

    def _stop(self, names: t.Sequence[str], start: t.Sequence[str]) -> None:
        """Stop services; where one doesn't stop, start all of them again."""
        try:
            for name in names:
                self._service("stop", name)
        except ShareError:
            failures = [self._start(name) for name in start]  # a service that fails doesn't prevent the others
            # The record stays for a service that doesn't start: the next run tries again.
            if not any(failures):
                self._remove_record()
            raise

    def _remove_record(self) -> None:
        self._system.remove(RECORD)
        self._system.run(["rmdir", RECORD.rpartition("/")[0]])

    def _write_record(self, earlier: Record, state: State, swap: Swap) -> None:
        record = {
            "services": list(dict.fromkeys([*earlier.services, *swap.stop])),
            "modules": list(dict.fromkeys([*earlier.modules, *state.modules])),
        }
        folder = RECORD.rpartition("/")[0]
        done = self._system.run(["mkdir", "-p", "-m", "0700", folder])
        if done.rc != 0:
            raise ShareError(f"{folder} can't be created: {_last(done.err)}")
        self._system.write(RECORD, json.dumps(record), 0o600)

    def _service(self, verb: str, name: str) -> None:
        done = self._system.run(["systemctl", verb, f"{name}.service"], timeout=300)
        if done.rc != 0:
            raise ShareError(f"systemctl {verb} {name} failed: {_last(done.err)}")

    def _start(self, name: str) -> str:
        """Start a service; return why it failed, or nothing."""
        try:
            self._service("start", name)
        except ShareError as error:
            return str(error)
        return ""

    def _end(self, pids: t.Sequence[int]) -> None:
        """End processes as kubelet ends a container: SIGTERM first, then SIGKILL."""
        left = [str(pid) for pid in pids]
        for signal, seconds in (("TERM", GRACE_SECONDS), ("KILL", GRACE_SECONDS)):
            if left:
                self._system.run(["kill", f"-{signal}", *left])
            for _second in range(seconds):
                left = [pid for pid in left if self._system.exists(f"/proc/{pid}")]
                if not left:
                    return
                self._system.run(["sleep", "1"])

    def _load(self, names: t.Sequence[str]) -> str:
        """Load modules; return why that failed, or nothing."""
        done = self._system.run(["modprobe", "-a", *names], timeout=120)
        return f"modprobe -a {' '.join(names)} failed: {_last(done.err)}" if done.rc != 0 else ""


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it gave no reason"])[-1]


def work(params: JsonObject, check: bool, system: System) -> JsonObject:
    """Reconcile, and report what only a reboot can do."""
    options = options_of(params)
    reconciler = KernelModulesReconciler(options, system)
    result = core_plan.run(reconciler, check)
    state = reconciler.observe()
    reason = in_use(options, state)
    return {
        **result,
        "reboot_required": bool(reason),
        "reason": reason,
        "users": blockers(options, state) if reason else [],
        "container": state.container,
    }
