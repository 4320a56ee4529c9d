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
from .._core.types import JsonObject
from .._host import open_devices
from .._host.facts import kernel
from .._host.system import System
from . import kernel_modules as driver
from .library import MODULE, library_version, loaded_version
from .maintenance import RECORD

# A process that has such a file in its memory uses the old driver's interface.
MAPPED = r"/lib(?:nvidia-ml|cuda)\.so"
GRACE_SECONDS = 10


def observe(system: System, options: driver.Options) -> driver.State:
    """Return all that the plan is made from."""
    version = loaded_version(system)
    loaded = driver.Module(version, (system.read(f"{MODULE}/srcversion") or "").strip()) if version else None
    users = open_devices.users(system, lambda path: path.startswith("/dev/nvidia"), MAPPED) if loaded else []
    return driver.State(
        container=not kernel(system)["installed"],
        loaded=loaded,
        installed=_installed(system),
        library=library_version(system),
        modules=tuple(_with_dependents(system, driver.MODULE)) if system.exists(MODULE) else (),
        services=_services(system, options),
        users=tuple(users),
        unfinished=_record(system),
    )


def _installed(system: System) -> driver.Module | None:
    """Return the module that the running kernel would load now."""
    done = system.run(["modinfo", driver.MODULE], timeout=10)
    fields = dict(re.findall(r"^(version|srcversion):\s*(\S+)$", done.out, re.MULTILINE)) if done.rc == 0 else {}
    return driver.Module(fields["version"], fields.get("srcversion", "")) if "version" in fields else None


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


def _services(system: System, options: driver.Options) -> dict[str, bool]:
    """Return which of the services exist, and whether they are active."""
    if not system.exists("/run/systemd/system"):
        return {}
    names = dict.fromkeys([*driver.KUBELETS, *driver.SERVICES, *options.services])
    units = [f"{name}.service" for name in names]
    done = system.run(["systemctl", "show", "-p", "Id,LoadState,ActiveState", *units], timeout=30)
    found = {}
    for block in done.out.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("LoadState") == "loaded":
            found[fields["Id"].rpartition(".")[0]] = fields.get("ActiveState") in ("active", "activating")
    return found


def _record(system: System) -> driver.Record | None:
    text = system.read(RECORD)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        # Only a record that was never complete is unreadable, and then nothing had been stopped.
        return driver.Record()
    return driver.Record(tuple(found["services"]), tuple(found["modules"]))


class KernelModulesReconciler:
    """NVIDIA's kernel modules on the machine that the module runs on."""

    def __init__(self, options: driver.Options, system: System) -> None:
        self._options = options
        self._system = system
        self._refused = ""

    def observe(self) -> driver.State:
        return dataclasses.replace(observe(self._system, self._options), refused=self._refused)

    def plan(self, state: driver.State) -> core_plan.Plan:
        return driver.plan(self._options, state)

    def apply(self, state: driver.State, plan: core_plan.Plan) -> None:
        swap: driver.Swap = next(change.step for change in plan.changes if change.step is not None)
        earlier = state.unfinished or driver.Record()
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

    def _write_record(self, earlier: driver.Record, state: driver.State, swap: driver.Swap) -> None:
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
    options = driver.options(params)
    reconciler = KernelModulesReconciler(options, system)
    result = core_plan.run(reconciler, check)
    state = reconciler.observe()
    reason = driver.in_use(options, state)
    return {
        **result,
        "reboot_required": bool(reason),
        "reason": reason,
        "users": driver.blockers(options, state) if reason else [],
        "container": state.container,
    }
